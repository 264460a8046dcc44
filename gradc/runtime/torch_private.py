"""The releases of torch that gradc was run with, and every private name of torch that it uses, with the releases that
have each.

torch is never imported at import of this file: what asks for a name has torch already, or imports it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import Unsupported, UntestedVersion

__all__ = [
    "DYNAMO_RULES",
    "NEWEST",
    "OLDEST",
    "SHARES_TIES",
    "SINCE",
    "check_release",
    "composite_kernel",
    "count_changes",
    "current_stream",
    "data_pointer",
    "empty_strided",
    "forward_level",
    "has_kernel",
    "is_tracing",
    "mutated_parameters",
    "overload_schema",
    "present",
    "private",
    "release",
    "says_what_is_written",
    "tensor_guards",
    "version_count",
    "with_context",
]

Release = tuple[int, ...]

OLDEST: Release = (2, 6)
"""The oldest release that gradc.torch takes: older ones lack names below."""

NEWEST: Release = (2, 15, 0)
"""The newest release that the tests were run with; docs/torch.md has the table."""

SHARES_TIES: Release = (2, 14)
"""From this release on, clamp, fmax and fmin have other gradients where an operand equals another, or a bound."""

_C, _FUNCTORCH = "torch._C", "torch._C._functorch"
_AOT, _EXPORTED = "torch._functorch.aot_autograd", "torch.export.exported_program"
_DISPATCH, _PYTREE, _PREDISPATCH = "torch.utils._python_dispatch", "torch.utils._pytree", "torch._functorch.predispatch"

SINCE: dict[str, tuple[tuple[Release, str], ...]] = {
    "aot_export_module": ((OLDEST, _AOT),),
    "_ignore_backend_decomps": ((OLDEST, "torch.export._trace"),),
    "_override_composite_implicit_decomp": ((OLDEST, _EXPORTED),),
    "_split_decomp_table_to_cia_and_python_decomp": ((OLDEST, _EXPORTED),),
    "op_implementations_dict": ((OLDEST, "torch._subclasses.fake_impls"),),
    "preserve_node_meta": ((OLDEST, "torch.fx.traceback"),),
    "TorchDispatchMode": ((OLDEST, _DISPATCH),),
    "_disable_current_modes": ((OLDEST, _DISPATCH),),
    "FakeTensorMode": ((OLDEST, "torch._subclasses.fake_tensor"),),
    "is_traceable_wrapper_subclass": ((OLDEST, _DISPATCH),),
    "is_traceable_wrapper_subclass_type": ((OLDEST, _DISPATCH),),
    "tree_flatten_with_path": ((OLDEST, _PYTREE),),
    "tree_leaves": ((OLDEST, _PYTREE),),
    "tree_map_only": ((OLDEST, _PYTREE),),
    "tree_unflatten": ((OLDEST, _PYTREE),),
    "_set_grad_enabled": ((OLDEST, _C),),
    "_DisableAutocast": ((OLDEST, _C),),
    "DispatchKey": ((OLDEST, _C),),
    "is_functorch_wrapped_tensor": ((OLDEST, _FUNCTORCH),),
    "is_legacy_batchedtensor": ((OLDEST, _FUNCTORCH),),
    "maybe_current_level": ((OLDEST, _FUNCTORCH),),
    # What Dynamo writes into a graph for torch.vmap.
    "lazy_load_decompositions": ((OLDEST, "torch._functorch.vmap"), ((2, 9), _PREDISPATCH)),
    "_vmap_increment_nesting": ((OLDEST, _FUNCTORCH), ((2, 9), _PREDISPATCH)),
    "_add_batch_dim": ((OLDEST, _FUNCTORCH), ((2, 9), _PREDISPATCH)),
    "_remove_batch_dim": ((OLDEST, _FUNCTORCH), ((2, 9), _PREDISPATCH)),
    "_vmap_decrement_nesting": ((OLDEST, _FUNCTORCH), ((2, 9), _PREDISPATCH)),
}
"""The module of each private name, from a release on; the last that is not newer than the torch at hand comes first."""

DYNAMO_RULES = "torch._dynamo.trace_rules"
"""The module whose ``add`` extends what Dynamo does not trace; in every release from :data:`OLDEST` on."""


def release(version: str | None = None) -> Release:
    """The numbers of a version of torch, of the one at hand where none is given: ``2.13.0+cpu`` is (2, 13, 0).  One
    without numbers (a build of somebody's own) counts as newer than all.
    """
    text = str(sys.modules["torch"].__version__) if version is None else version
    numbers = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, numbers[0].split("."))) if numbers else (sys.maxsize,)


@functools.cache
def check_release() -> None:
    """Warns, once in a process, where the torch at hand is newer than :data:`NEWEST`.

    :raises Unsupported: it is older than :data:`OLDEST`.
    """
    found, version = release(), sys.modules["torch"].__version__
    if found < OLDEST:
        raise Unsupported(
            f"torch {version} is older than {_dotted(OLDEST)}, the oldest release that gradc.torch works with:"
            f" pip install 'torch>={_dotted(OLDEST)}'"
        )
    if found > NEWEST:
        warnings.warn(
            f"torch {version} is newer than {_dotted(NEWEST)}, the newest release that gradc was tested with; where"
            f" something differs, pip install 'torch<={_dotted(NEWEST)}'",
            UntestedVersion,
            stacklevel=3,
        )


@functools.cache
def private(name: str) -> Any:
    """What torch at hand has under a name of :data:`SINCE`.

    :raises Unsupported: a release newer than :data:`NEWEST` has moved it.
    """
    homes = [home for since, home in SINCE[name] if since <= release() or since == OLDEST]
    for module in reversed(homes):
        with contextlib.suppress(ImportError, AttributeError):
            return getattr(importlib.import_module(module), name)
    raise Unsupported(
        f"torch {sys.modules['torch'].__version__} has no {homes[-1]}.{name}, which gradc.torch uses; it was tested"
        f" with {_dotted(OLDEST)} to {_dotted(NEWEST)}: pip install 'torch<={_dotted(NEWEST)}'"
    )


@functools.cache
def present(names: tuple[str, ...]) -> tuple[Any, ...]:
    """Those of the names that torch at hand has: of what gradc recognises, and can do without."""
    found = []
    for name in names:
        with contextlib.suppress(Unsupported):
            found.append(private(name))
    return tuple(found)


def _dotted(numbers: Release) -> str:
    return ".".join(map(str, numbers))


# -- private attributes ------------------------------------------------------------------------------------------------


def forward_level() -> int:
    """The level of forward-mode autograd that is entered, -1 outside of it."""
    return int(sys.modules["torch"].autograd.forward_ad._current_level)


def put_kernels(overload: Any, kernels: dict[Any, Any]) -> None:
    """Gives an overload these kernels in Python for those that it has."""
    overload.py_kernels.clear()
    overload.py_kernels.update(kernels)
    overload._dispatch_cache.clear()


def version_count(tensor: Any) -> int:
    """How often a tensor was changed in place.

    :raises RuntimeError: an inference tensor counts nothing.
    """
    return int(tensor._version)


def count_changes(tensors: Sequence[Any]) -> None:
    """Counts a change of each but inference tensors, which count none."""
    increment = sys.modules["torch"].autograd.graph.increment_version
    try:
        increment(tensors)
    except (RuntimeError, TypeError):  # one is an inference tensor, or an old release takes one tensor at a time
        for x in tensors:
            if not x.is_inference():
                increment(x)


def tensor_guards(tensors: Sequence[Any]) -> Any:
    """A function of that many tensors: whether each has the type, dtype, device, shape, strides and dispatch keys of
    the one here, and requires grad as that did; Dynamo's own, which takes a quarter of the time of a look at each.
    None in a release without it.
    """
    torch: Any = sys.modules["torch"]
    try:
        guards = torch._C._dynamo.guards.TensorGuards(
            *tensors,
            dynamic_dims_sizes=[list(x.shape) for x in tensors],
            dynamic_dims_strides=[list(x.stride()) for x in tensors],
        )
        return guards.check if guards.check(*tensors) else None
    except (AttributeError, TypeError):  # a newer release
        return None


@functools.cache
def data_pointer() -> int:
    """The address of a C function of an ``at::Tensor`` that tells where its memory is, of torch's stable interface; 0
    in a release without it, or whose objects have the ``at::Tensor`` elsewhere than behind their heads.
    """
    torch: Any = sys.modules["torch"]
    head, word = object.__basicsize__, ctypes.sizeof(ctypes.c_void_p)
    try:
        for like in (torch.empty(2), torch.nn.Parameter(torch.empty(()))):
            if head != 2 * word or ctypes.c_void_p.from_address(id(like) + head).value != like._cdata:
                return 0
        found = ctypes.CDLL(torch._C.__file__).aoti_torch_get_data_ptr
    except (AttributeError, OSError):
        return 0
    return ctypes.cast(found, ctypes.c_void_p).value or 0


def empty_strided() -> Any:
    """(shape, strides, dtype) -> a tensor on the CPU; the private function takes a third of the public one's time."""
    torch: Any = sys.modules["torch"]
    try:
        return torch._C._dynamo.guards._empty_strided_cpu
    except AttributeError:  # a newer release
        return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device="cpu")


def is_tracing() -> bool:
    """Whether torch.jit.trace records; the private function takes a fifth of the public one's time."""
    torch: Any = sys.modules["torch"]
    try:
        return bool(torch._C._is_tracing())
    except AttributeError:  # a newer release
        return bool(torch.jit.is_tracing())


def composite_kernel(overload: Any, *args: Any, **kwargs: Any) -> Any:
    """What the kernel gives by which torch decomposes an overload; in every release from :data:`OLDEST` on."""
    return overload._op_dk(private("DispatchKey").CompositeImplicitAutograd, *args, **kwargs)


def has_kernel(overload: Any, key: str) -> bool:
    """Whether an overload is registered under a dispatch key itself; one of Python's under none."""
    try:
        return bool(sys.modules["torch"]._C._dispatch_has_kernel_for_dispatch_key(overload.name(), key))
    except RuntimeError:
        return False


def overload_schema(overload: Any) -> Any:
    """The schema of an ATen overload: its arguments and results, and which of them alias or are written."""
    return overload._schema


def mutated_parameters(signature: Any) -> dict[str, str]:
    """Which outputs of a graph of ``aot_export_module`` are new values of parameters: from 2.9 on; before it, a
    parameter that is written has no such graph at all.
    """
    found: dict[str, str] = getattr(signature, "parameters_to_mutate", {})
    return found


def says_what_is_written(options: Mapping[str, Any]) -> bool:
    """Whether the options of an ``autograd_function_apply`` name the inputs that it writes to (``dirty_idx``, where it
    does): those of old releases do not.
    """
    return "args_tensor_mask" not in options


def with_context(body: Any, operands: Sequence[Any]) -> list[Any]:
    """What the forward of an ``autograd_function_apply`` takes: in old releases a context first, which is not read."""
    count = sum(node.op == "placeholder" for node in body.graph.nodes)
    return [*[None] * (count - len(operands)), *operands]


def current_stream(device: int) -> int:
    """The address of torch's current stream on a GPU; the private function takes a tenth of the public one's time."""
    torch: Any = sys.modules["torch"]
    try:
        return int(torch._C._cuda_getCurrentRawStream(device))
    except AttributeError:  # a build without CUDA, or a newer release
        return int(torch.cuda.current_stream(device).cuda_stream)
