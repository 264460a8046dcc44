"""A module's calls as a CUDA graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..autodiff import joint_names
from ..errors import InvalidProblem, Unsupported
from ..runtime.cuda.capture import Capture, Step, capture, step, stream_for

if TYPE_CHECKING:
    from .module import Module

WHAT = ("forward", "backward", "both", "value_and_grad")


def captured(
    module: Module,
    what: str,
    inputs: Mapping[str, Any],
    residuals: Any,
    cotangents: Any,
    stream: Any,
    dims: Mapping[str, int] | None,
) -> Capture:
    """See :meth:`gradc.Module.capture`."""
    if what not in WHAT:
        raise InvalidProblem(f"capture({what!r}); there are {', '.join(WHAT)}")
    if what != "forward" and module.options.get("sparse"):
        raise Unsupported("a CUDA graph of sparse gradients: they have as many rows as a call hits")
    at = stream_for(
        module.forward, stream, [*inputs.values(), *(residuals.arrays.values() if residuals is not None else ())]
    )
    sizes = module.sizes(dims)
    if what == "value_and_grad":
        only = step(module.joint, module.joint_inputs(inputs, at), at, dims=sizes)
        return capture([only], at, only.results)
    steps: list[Step] = []
    outputs: dict[str, Any] = {}
    if residuals is None:
        first = step(module.forward, inputs, at, dims=sizes)
        outputs = {name: first.results[name] for name in module.graph.output_names}
        steps, residuals = [first], module.forward.kept(inputs, first.results, first.prepared.dims)
    elif inputs or what != "backward":
        raise InvalidProblem("capture takes residuals= for what='backward' alone, and then no inputs")
    if what == "forward":
        return capture(steps, at, outputs)
    named = cotangents if isinstance(cotangents, Mapping) else {}
    ordered = (
        () if cotangents is None or named else cotangents if isinstance(cotangents, tuple | list) else (cotangents,)
    )
    own = {d: v for d, v in {**residuals.dims, **sizes}.items() if d in module.backward.program.dims}
    second = step(module.backward, module.backward.inputs_of(residuals, ordered, named, at), at, dims=own)
    names = joint_names(module.graph, module.wrt)[1]
    if what == "backward":
        return capture([second], at, {name: second.results[key] for name, key in names.items()})
    return capture([*steps, second], at, {**outputs, **{key: second.results[key] for key in names.values()}})
