"""Compilation of kernels: once for all processes, and anew when any kernel's source changes."""

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


_PACKAGE = Path(__file__).parents[1]


@functools.cache
def _sources(folder: Path) -> str:
    """Hash of all kernels of a folder and of what all folders share: numba looks at a function's own file only, and
    kernels use those of other files, `phase_share` of `values/plan.py` among them."""
    shared = [_PACKAGE / "values" / "plan.py", *sorted((_PACKAGE / "cost" / "kernels").glob("*.py"))]
    text = b"".join(path.read_bytes() for path in (*shared, *sorted(folder.glob("*.py"))))
    return hashlib.blake2b(text, digest_size=16).hexdigest()


class _FolderCache(FunctionCache):
    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        self._cache_file._source_stamp = _sources(Path(function.__code__.co_filename).parent)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The kept machine code; None if there is none that this version can read, e.g. after modules were renamed."""
        try:
            return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except (ImportError, AttributeError, EOFError, pickle.UnpicklingError):
            self.flush()  # type: ignore[no-untyped-call]
            return None


def is_kept(kernel: Callable[..., object]) -> bool:
    """Whether machine code of a kernel is kept for its present source, so that the first call does not compile."""
    cache = getattr(kernel, "_cache", None)
    try:
        return isinstance(cache, _FolderCache) and bool(cache._cache_file._load_index())  # type: ignore[no-untyped-call]
    except (ImportError, AttributeError, EOFError, pickle.UnpicklingError):
        return False


class _Inner:
    """A kernel for other kernels: compiled code finds it by its type; calls from Python are refused."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel  # the type refers to it weakly
        self._numba_type_ = kernel._numba_type_

    def __call__(self, *_: object) -> None:
        raise TypeError(f"{self._kernel.__name__} can be called by kernels only: it is compiled without an entry")


def compiled(function: F) -> F:
    """Compile `function`. The machine code is kept beside it, in the user's cache where that folder cannot be written
    to, or in this process only. Arithmetic is exact IEEE: a plan has the same bytes in any process."""
    return cast(F, _compiled(function, _nrt=True))


def inner(function: F) -> F:
    """As `compiled`, for functions that make no arrays and are called by kernels only: without reference counts, which
    take longer than their work, and without an entry from Python, a fifth of all compile time."""
    return cast(F, _Inner(_compiled(function, _nrt=False, no_cpython_wrapper=True)))


def inlined(function: F) -> F:
    """As `inner`, for small functions that are called often: passing all arrays takes longer than their work."""
    return cast(F, _Inner(_compiled(function, _nrt=False, no_cpython_wrapper=True, forceinline=True)))


def _compiled(function: Callable[..., object], **options: Any) -> Any:
    kernel: Any = numba.njit(error_model="numpy", **options)(function)
    template, unliteral = kernel.get_call_template, cast(Any, numba.types.unliteral)
    # numba would compile a kernel once more for each constant that a caller passes: take the constant's type instead
    kernel.get_call_template = lambda args, kws: template([unliteral(each) for each in args], kws)
    with contextlib.suppress(RuntimeError):  # no folder can be written to
        kernel._cache = _FolderCache(function)
    return kernel
