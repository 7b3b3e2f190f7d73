"""Compilation of kernels: once for all processes, and anew when any kernel's source changes.

Numba would compile each kernel to machine code by itself, with copies of all that it calls, pass each named tuple as
all fields of all its arrays, and keep each in a file of its own. Most kernels are called by kernels only: these
(`inner`) are optimized and compiled once, as part of the kernels that Python calls (`compiled`), and are given named
tuples of arrays by reference. That halves the time to compile, and the time to plan: calls are cheap.
"""

# mypy: disable-error-code="attr-defined, misc, no-untyped-call, untyped-decorator, override"

import contextlib
import functools
import gc
import hashlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba.core import cgutils, types
from numba.core.caching import FunctionCache
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.datamodel import models
from numba.core.imputils import impl_ret_borrowed
from numba.core.typeconv.castgraph import Conversion
from numba.core.typing.templates import AttributeTemplate
from numba.extending import infer_getattr, lower_cast, lower_getattr_generic, register_model

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
        super().__init__(function)
        self._cache_file._source_stamp = _sources(Path(function.__code__.co_filename).parent)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The kept machine code; None if there is none that this version can read, e.g. after modules were renamed."""
        try:
            return super().load_overload(sig, target_context)
        except (ImportError, AttributeError, EOFError, pickle.UnpicklingError):
            self.flush()
            return None


def is_kept(kernel: Callable[..., object]) -> bool:
    """Whether machine code of a kernel is kept for its present source, so that the first call does not compile."""
    cache = getattr(kernel, "_cache", None)
    try:
        return isinstance(cache, _FolderCache) and bool(cache._cache_file._load_index())
    except (ImportError, AttributeError, EOFError, pickle.UnpicklingError):
        return False


class _Reference(types.Type):
    """Pointer to a named tuple, which its fields are read through: tuples do not change."""

    def __init__(self, value: Any) -> None:
        self.value = value
        super().__init__(name=f"Reference({value})")

    def can_convert_from(self, typingctx: Any, other: Any) -> Any:  # noqa: ARG002
        return Conversion.safe if other == self.value else None

    def field(self, name: str) -> tuple[int, Any]:
        """Position and type of a field; of a tuple, that of a reference to it."""
        position = self.value.fields.index(name)
        return position, _by_reference(self.value.types[position])


def _by_reference(each: Any) -> Any:
    """The type by which a kernel is given an argument: no constants, which numba would compile it anew for."""
    has_arrays = isinstance(each, types.NamedTuple) and any(
        isinstance(field, types.Array | types.NamedTuple) for field in each.types
    )
    return _Reference(each) if has_arrays else cast(Any, types.unliteral)(each)


@register_model(_Reference)
class _ReferenceModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: _Reference) -> None:
        super().__init__(dmm, fe_type, dmm.lookup(fe_type.value).get_value_type().as_pointer())


@infer_getattr
class _ReferenceFields(AttributeTemplate):
    key = _Reference

    def generic_resolve(self, reference: _Reference, name: str) -> Any:
        return reference.field(name)[1]


@lower_getattr_generic(_Reference)
def _field(context: Any, builder: Any, reference: _Reference, pointer: Any, name: str) -> Any:
    position, kind = reference.field(name)
    field = cgutils.gep_inbounds(builder, pointer, 0, position)
    return field if isinstance(kind, _Reference) else impl_ret_borrowed(context, builder, kind, builder.load(field))


@lower_cast(types.NamedTuple, _Reference)
def _refer(context: Any, builder: Any, fromty: Any, toty: Any, value: Any) -> Any:  # noqa: ARG001
    return cgutils.alloca_once_value(builder, value)


class _NoCodegen:
    """The code generator of a `_Part`, which has no environment in memory that could be set."""

    def __init__(self, codegen: Any) -> None:
        self._codegen = codegen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codegen, name)

    def set_env(self, env_name: str, env: Any) -> None:
        """Nothing to set."""


class _Part(JITCodeLibrary):
    """Code of an inner kernel and of what it calls, for its callers to take in; no machine code of its own."""

    @property
    def codegen(self) -> Any:
        return _NoCodegen(self._codegen)

    def finalize(self) -> None:
        self._raise_if_finalized()
        for library in dict.fromkeys(self._linking_libraries):
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:  # noqa: ARG002
        self._ensure_finalized()
        return 0


class _Whole(JITCodeLibrary):
    """Code of a kernel that Python calls, optimized once with all its parts. Loops are too short for vectors; numba's
    two rounds of its highest level compile for a third longer, and plans take no less time by them."""

    def _optimize_final_module(self) -> None:
        manager, builder = self._codegen._module_pass_manager(opt=2, loop_vectorize=False, slp_vectorize=False)
        manager.run(self._final_module, builder)


class _WholeCompiler(Compiler):
    def compile_extra(self, func: Any) -> Any:
        """Without garbage collection, a sixth of all time: it finds next to nothing while numba's trees grow."""
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return super().compile_extra(func)
        finally:
            if was_enabled:
                gc.enable()

    def define_pipelines(self) -> Any:
        self.state.library = _Whole(self.state.targetctx.codegen(), self.state.func_id.func_qualname)
        self.state.library.enable_object_caching()
        return super().define_pipelines()


class _PartCompiler(Compiler):
    def define_pipelines(self) -> Any:
        self.state.library = _Part(self.state.targetctx.codegen(), self.state.func_id.func_qualname)
        return super().define_pipelines()


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
    if numba.config.DISABLE_JIT:  # plain Python, for debuggers and coverage
        return function
    kernel = _kernel(function, given=types.unliteral, no_cfunc_wrapper=True, pipeline_class=_WholeCompiler)
    with contextlib.suppress(RuntimeError):  # no folder can be written to
        kernel._cache = _FolderCache(function)
    return cast(F, kernel)


def inner(function: F) -> F:
    """As `compiled`, for functions that make no arrays and are called by kernels only, without reference counts, which
    take longer than their work."""
    return cast(F, _part(function, _nrt=False))


def inner_with_arrays(function: F) -> F:
    """As `inner`, for functions that make arrays."""
    return cast(F, _part(function, _nrt=True))


def inlined(function: F) -> F:
    """As `inner`, for small functions that are called often."""
    return cast(F, _part(function, _nrt=False, forceinline=True))


def _part(function: Callable[..., object], **options: Any) -> Any:
    if numba.config.DISABLE_JIT:
        return function
    options |= {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "pipeline_class": _PartCompiler}
    return _Inner(_kernel(function, given=_by_reference, **options))


def _kernel(function: Callable[..., object], *, given: Callable[[Any], Any], **options: Any) -> Any:
    kernel: Any = numba.njit(error_model="numpy", **options)(function)
    template = kernel.get_call_template
    kernel.get_call_template = lambda args, kws: template([given(each) for each in args], kws)
    return kernel
