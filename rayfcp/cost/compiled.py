"""How kernels are compiled: once for all processes, and anew when any kernel's source changes."""

import contextlib
import functools
import hashlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba.core.caching import FunctionCache

F = TypeVar("F", bound=Callable[..., object])


@functools.cache
def _sources(folder: Path) -> str:
    """Of all kernels of a folder: numba looks at a function's own file only, and kernels use those of other files."""
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return hashlib.blake2b(text, digest_size=16).hexdigest()


class _FolderCache(FunctionCache):
    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        self._cache_file._source_stamp = _sources(Path(function.__code__.co_filename).parent)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """None where nothing is kept, or nothing that this version can read: its modules may have other names."""
        try:
            return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except (ImportError, AttributeError, EOFError, pickle.UnpicklingError):
            self.flush()  # type: ignore[no-untyped-call]
            return None


def is_kept(kernel: Callable[..., object]) -> bool:
    """Whether machine code of a kernel is kept for its source as it is, so that nobody waits for a compiler."""
    cache = getattr(kernel, "_cache", None)
    try:
        return isinstance(cache, _FolderCache) and bool(cache._cache_file._load_index())  # type: ignore[no-untyped-call]
    except (ImportError, AttributeError, EOFError, pickle.UnpicklingError):
        return False


class _Inner:
    """A kernel for other kernels: compiled code finds it by its type, and called from Python it says so."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel  # which the type refers to weakly
        self._numba_type_ = kernel._numba_type_

    def __call__(self, *_: object) -> None:
        raise TypeError(f"{self._kernel.__name__} can be called by kernels only: it is compiled without an entry")


def compiled(function: F) -> F:
    """Machine code of `function`, kept beside it, in the user's cache where that folder cannot be written to,
    or in this process only. Arithmetic is exact IEEE: a plan has the same bytes in any process."""
    return cast(F, _compiled(function, _nrt=True))


def inner(function: F) -> F:
    """As `compiled`, for what makes no arrays and is called by kernels only: it does not count references, which takes
    longer than its work, and has no entry from Python, which would take a fifth of all the time to compile."""
    return cast(F, _Inner(_compiled(function, _nrt=False, no_cpython_wrapper=True)))


def inlined(function: F) -> F:
    """As `inner`, for what is small and called often: handing over all arrays takes longer than its work."""
    return cast(F, _Inner(_compiled(function, _nrt=False, no_cpython_wrapper=True, forceinline=True)))


def _compiled(function: Callable[..., object], **options: Any) -> Any:
    kernel: Any = numba.njit(error_model="numpy", **options)(function)
    with contextlib.suppress(RuntimeError):  # no folder can be written to
        kernel._cache = _FolderCache(function)
    return kernel
