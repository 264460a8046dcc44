"""Module: a forward and a backward Executable, connected by residuals."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ..autodiff import joint_names
from ..errors import GradcError, InvalidProblem, NotDifferentiable, Unsupported
from ..formats.html_text import Sections
from ..inspect.memory import Memory, predicted
from ..interp import by_name, refuse_inputs_as_options, sizes_given
from ..ir.dims import symbols
from ..ir.graph import Graph
from ..ir.kernel import Program
from ..ir.types import Type
from ..passes.manager import Pipeline, Stage
from ..passes.schedule.residual import Residual
from ..process.forks import cached_property, held_off
from ..runtime.cuda.pending import AsyncErrors
from ..runtime.executable import Executable, Precision
from ..runtime.host.arrays import AnyArray, Arguments, Kind, Results
from ..runtime.host.tensors import detached, is_tensor
from ..runtime.kernel import Kernels
from ..runtime.located import all_ordered
from ..runtime.shared import Shared
from .gradients import Gradients
from .options import Options
from .residuals import Residuals
from .sparse import assembled
from .variants import MOST, Orders, Targets, apply_layout, orders_of, undo_layout

if TYPE_CHECKING:
    from ..runtime.cuda.capture import Capture, Step

E = TypeVar("E", bound=Executable)

CAPTURED = ("forward", "backward", "both", "value_and_grad")
"""The calls that can be captured as a CUDA graph."""


class Forward(Executable):
    """``module.forward(**inputs)`` -> (value, residuals); the value is an array, or a dict of several by name."""

    module: Module

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.module, "forward")

    def __call__(
        self,
        inputs: Arguments | None = None,
        /,
        *extra: Any,
        out: Arguments | None = None,
        workspace: Any = None,
        stream: Any = None,
        dims: Mapping[str, int] | None = None,
        **more: Any,
    ) -> Any:  # type: ignore[override]
        inputs = self.module.flat(inputs, more, extra, out=out, workspace=workspace, stream=stream, dims=dims)
        inputs = self.module.with_rates(inputs)
        variant, orders = self.module.variant(inputs, dims) if workspace is None else (None, {})
        if variant is not None:
            value, residuals = variant.forward(apply_layout(inputs, orders), out=out, stream=stream, dims=dims)
            return value, residuals.of(orders, inputs)
        results, bound = self.run_bound(inputs, out, False, stream, workspace, self.module.sizes(dims))
        return _single({name: results[name] for name in self.module.graph.output_names}), self.kept(
            inputs, results, bound
        )

    def kept(self, inputs: Arguments, results: Arguments, dims: Mapping[str, int]) -> Residuals:
        """The residuals of a call, from its inputs and results."""
        given = {**self.defaults, **inputs}
        kept = {
            r.name: given[r.name] if r.why == "input" else results[r.output or r.name] for r in self.module.residuals
        }
        return Residuals(self.module, kept, given, dims, self.cotangent_types, self.donated.values())

    @cached_property
    def cotangent_types(self) -> dict[str, Type]:
        """The types of the float outputs."""
        return {name: node.type for name, node in self.module.graph.outputs if node.dtype.is_float}


class Backward(Executable):
    """``module.backward(residuals, *cotangents)`` -> Gradients; None for a cotangent means zero."""

    module: Module

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.module, "backward")

    def __call__(  # type: ignore[override]
        self,
        residuals: Residuals | None = None,
        /,
        *cotangents: Any,
        out: Arguments | None = None,
        accumulate: bool | Collection[str] = False,
        stream: Any = None,
        workspace: Any = None,
        dims: Mapping[str, int] | None = None,
        **named: Any,
    ) -> Gradients:
        if not isinstance(residuals, Residuals):
            raise InvalidProblem(
                "backward begins with the residuals that forward gave, backward(residuals, cotangent), not with"
                f" {'nothing' if residuals is None else f'a {type(residuals).__name__}'}"
            )
        variant = self.module.variant_of(residuals)
        if variant is not None:
            return self._by_variant(variant, residuals, cotangents, named, out, accumulate, stream, workspace, dims)
        inputs = self.inputs_of(residuals, cotangents, named, stream)
        gradient_names = self.module.joint_names[1]
        if isinstance(out, Mapping):
            out = self._by_output(out)
        adding = {accumulate} if isinstance(accumulate, str) else accumulate
        if isinstance(adding, Collection):
            adding = {gradient_names.get(n, n) for n in adding}
        sizes = self.module.sizes(dims)
        for name, size in sizes.items():
            if residuals.dims.get(name, size) != size:
                raise InvalidProblem(
                    f"dims= says {name}={size}, and these residuals are of a call with {name}={residuals.dims[name]}"
                )
        own = {d: v for d, v in {**residuals.dims, **sizes}.items() if d in self.program.dims}
        try:
            results, _ = self.run_bound(inputs, out, adding, stream, workspace, own)
        except InvalidProblem:
            self._check_cotangents(residuals, inputs)
            raise
        shapes = self.module.shapes_of_sparse({**residuals.dims, **own})
        return Gradients(assembled(results, gradient_names, shapes, shapes), self.module.structure)

    def _by_variant(
        self,
        variant: Module,
        residuals: Residuals,
        cotangents: Sequence[AnyArray],
        named: Arguments,
        out: Arguments | None,
        accumulate: bool | Collection[str],
        stream: Any,
        workspace: Any,
        dims: Mapping[str, int] | None,
    ) -> Gradients:
        """The gradients computed by a variant, with the axes in the order of this module's graph."""
        read = {
            **residuals.arrays,
            **{f"cotangent {i}": v for i, v in enumerate(cotangents) if v is not None},
            **{n: v for n, v in named.items() if v is not None},
        }
        targets = Targets(self, read, residuals, out, accumulate, self.module.joint_names[1])
        gradients = variant.backward(
            residuals,
            *cotangents,
            out=targets.given,
            accumulate=targets.accumulate,
            stream=stream,
            workspace=workspace,
            dims=dims,
            **named,
        )
        in_order = undo_layout(gradients, residuals.orders)
        return Gradients(targets.finish(in_order, self.backend, stream), self.module.structure)

    def _by_output(self, out: Arguments) -> Arguments:
        """``out=``, keyed by the program's names of the gradients.

        :raises InvalidProblem: a name is not that of a gradient.
        :raises Unsupported: a gradient is sparse.
        """
        gradient_names = self.module.joint_names[1]
        unknown = out.keys() - gradient_names.keys()
        if unknown:
            raise InvalidProblem(
                f"out= names {min(map(str, unknown))!r}; there are gradients of {', '.join(gradient_names)}"
            )
        rows = out.keys() & set(self.module.options.sparse)
        if rows:
            raise Unsupported(
                f"out= for the sparse gradient of {min(rows)!r}: it has as many rows as the call hits;"
                " SparseRows.add_to adds them to yours"
            )
        return {gradient_names[n]: a for n, a in out.items()}

    def _check_cotangents(self, residuals: Residuals, inputs: Arguments) -> None:
        """InvalidProblem if a cotangent has not the shape of its output; the message names forward's output."""
        for name, type_ in residuals.cotangent_types.items():
            value = inputs.get(self.module.joint_names[0].get(name, ""))
            wanted = type_.concrete(residuals.dims)
            if value is not None and hasattr(value, "shape") and tuple(value.shape) != wanted:
                bound = ", ".join(
                    f"{d}={residuals.dims[d]}"
                    for d in dict.fromkeys(d for size in type_.shape for d in sorted(symbols(size)))
                )
                raise InvalidProblem(
                    f"the cotangent of {name} has the shape {tuple(value.shape)}, and forward gave {name}: {type_} of"
                    f" the shape {wanted}{f' ({bound} in that call)' if bound else ''}"
                ) from None

    def inputs_of(
        self, residuals: Residuals, cotangents: Sequence[Any], named: Arguments, stream: Any = None
    ) -> Results:
        """The program's inputs: residuals, and cotangents in order or by name."""
        if residuals.module is not self.module and not residuals.module.equals(self.module):
            theirs, mine = residuals.module.options.given(), self.module.options.given()
            options = ", ".join(
                f"{name}={theirs[name]!r} there and {mine[name]!r} here" for name in mine if theirs[name] != mine[name]
            )
            raise InvalidProblem(
                f"these residuals are of another module: {residuals.module.described} kept them, and this is the"
                f" backward of {self.module.described}{f' ({options})' if options else ''}"
            )
        residuals.unchanged()
        cotangent_names = self.module.joint_names[0]
        names = list(residuals.cotangent_types)
        if len(cotangents) > len(names):
            raise InvalidProblem(f"{len(cotangents)} cotangents for {len(names)} float outputs: {', '.join(names)}")
        given = dict(zip(names, cotangents, strict=False))
        if named:
            if given.keys() & named.keys() or named.keys() - set(names):
                raise InvalidProblem(f"cotangents are given in order or by name, once each: {', '.join(names)}")
            given |= named
        inputs = {n: a for n, a in residuals.arrays.items() if n in self.inputs}
        for name, type_ in residuals.cotangent_types.items():
            if cotangent_names.get(name) not in self.inputs:
                continue
            value = given.get(name)
            if value is None:
                if name not in given and len(names) == 1:
                    raise InvalidProblem(f"backward needs the cotangent of {name}: {type_}")
                arrays = [*residuals.arrays.values(), *given.values()]
                value = self.backend.zeros(
                    type_.concrete(residuals.dims),
                    type_.dtype.np,
                    self.backend.stream(stream, arrays),
                    Kind.TORCH if any(is_tensor(array) for array in arrays) else None,
                )
            inputs[cotangent_names[name]] = value
        return inputs


@dataclass(frozen=True)
class Code:
    """A program of a module.

    :param payload: its machine code, if it is compiled already.
    :param sites: the checks in the machine code: number -> (op, source).
    :param undecided: the names of what is checked for the sizes of a call, as :class:`.Executable` takes them.
    """

    program: Program
    payload: bytes | None = None
    sites: Mapping[int, tuple[str, str]] | None = None
    undecided: Collection[str] | None = None


@dataclass(frozen=True)
class Recipe:
    """Functions that a module calls on demand.

    :param stages: runs every pass again, for a module from the cache.
    :param joint: gives the program that computes value and gradients together.
    :param save: writes the module to a file.
    :param export: writes the module as a folder of sources.
    :param variant: gives the module for inputs whose axes have another memory order.
    :param value: gives the module of the graph without gradients.
    """

    stages: Callable[[], Pipeline]
    joint: Callable[[], Program]
    save: Callable[[Module, Any], None]
    export: Callable[..., Path]
    variant: Callable[[Orders], Module]
    value: Callable[[], Module]


class Module(Shared):
    """A compiled graph.

    :ivar graph: the graph that was compiled.
    :ivar wrt: the inputs with a gradient.
    :ivar stages: the result of each pass, by name or in order.
    :ivar residuals: the values kept for backward: name, node, reason.
    :ivar variants: memory orders of inputs -> the module compiled for them, or None if it cannot be compiled.
    """

    def __init__(
        self,
        graph: Graph,
        wrt: Sequence[str],
        target: str,
        programs: Mapping[str, Code],
        residuals: Sequence[Residual],
        options: Options,
        recipe: Recipe,
        pipeline: Pipeline | None = None,
    ):
        self.graph, self.wrt, self.target = graph, tuple(wrt), target
        self.residuals, self.options = tuple(residuals), options
        self.structure: Any = None
        self.recipe = recipe
        self.variants: dict[Any, Module | None] = {}
        self._pipeline = pipeline
        self._grad: Executable | None = None
        borrowed = {r.name for r in residuals if r.why == "input"}  # backward reads these inputs unchanged
        donate = [name for name in options.donate if name not in borrowed]
        self.pending = AsyncErrors()
        self.forward = self._executable(Forward, programs["forward"], donate)
        self.forward.module = self
        self._backward: Backward | None = None
        if "backward" in programs:
            self._backward = self._executable(Backward, programs["backward"])
            self._backward.module = self
        self.share(self.pending)

    def _executable(self, kind: type[E], code: Code, donate: Collection[str] = ()) -> E:
        """The Executable of one program of this module."""
        return kind(
            code.program,
            self.target,
            arch=self.options.arch or "",
            errors=self.options.errors or "sync",
            defaults=self.graph.defaults,
            dims=self.options.dims,
            donate=donate,
            payload=code.payload,
            sites=code.sites,
            undecided=code.undecided,
        )

    def share(self, pending: AsyncErrors) -> None:
        """Lets forward, backward and variants share a list of pending errors."""
        self.pending = pending
        for executable in (*self.executables.values(), *([self._grad] if self._grad is not None else [])):
            executable.pending = pending

    @property
    def backward(self) -> Backward:
        if self._backward is None:
            raise NotDifferentiable(f"{self.graph.name} was compiled without wrt=[...]: it has no backward")
        return self._backward

    @property
    def executables(self) -> dict[str, Executable]:
        executables: dict[str, Executable] = {"forward": self.forward}
        if self._backward is not None:
            executables["backward"] = self._backward
        return executables

    @property
    def stages(self) -> Pipeline:
        """Every stage of the compilation; recomputed on first access if the module came from the cache."""
        if self._pipeline is None:
            self._pipeline = self.recipe.stages()
        return self._pipeline

    def equals(self, other: Module) -> bool:
        """Whether both were compiled from the same graph to the same programs (a copy, or a module loaded twice), so
        that each accepts the other's residuals.
        """
        if self is other:
            return True
        mine, theirs = self.executables, other.executables
        return (
            self.graph == other.graph
            and mine.keys() == theirs.keys()
            and all(mine[k].program == theirs[k].program for k in mine)
        )

    @property
    def described(self) -> str:
        """Its name, inputs and outputs, for errors."""
        types = lambda named: ", ".join(f"{name}: {type_}" for name, type_ in named)
        return (
            f"{self.graph.name}({types(self.forward.inputs.items())}) ->"
            f" {types((name, node.type) for name, node in self.graph.outputs)}, wrt {', '.join(self.wrt)}"
        )

    def stage(self, name: str) -> Stage:
        return self.stages[name]

    def sizes(self, dims: Mapping[str, int] | None) -> dict[str, int]:
        """``dims=`` of a call, checked; InvalidProblem if the graph has no such dim."""
        if dims is None:
            return {}
        given = sizes_given(dims)
        unknown = given.keys() - set(self.graph.dims)
        if unknown:
            raise InvalidProblem(
                f"{self.graph.name} has no dim {min(map(str, unknown))!r}; it has"
                f" {', '.join(self.graph.dims) or 'none'}"
            )
        return given

    def variant(self, inputs: Arguments, dims: Any) -> tuple[Module | None, Orders]:
        """The module for inputs whose axes have another memory order (channels last), which reads them without a copy;
        compiled when that order is first seen.

        None if all inputs are in row-major order, the call is invalid, there are too many variants, or the module
        cannot be compiled for this order.
        """
        if all_ordered(inputs.values()):
            return None, {}
        sizes = dims if isinstance(dims, Mapping) else {}
        orders = orders_of(
            {**self.forward.defaults, **inputs}, self.forward.inputs, {**self.forward.fixed_dims, **sizes}
        )
        orders = {name: order for name, order in orders.items() if name in inputs and name not in self.options.donate}
        return (self._ordered(orders) if orders else None), orders

    def _ordered(self, orders: Orders) -> Module | None:
        """The variant for these orders; None if it cannot be compiled."""
        key = tuple(sorted(orders.items()))
        if key not in self.variants and len(self.variants) < MOST:
            made: Module | None = None
            # a forced reduction or sparse gradient may not be possible with this order; the inputs are copied instead
            with contextlib.suppress(GradcError):
                made = self.recipe.variant(orders)
            if made is not None:
                made.structure = self.structure
                made.share(self.pending)
            self.variants[key] = made
        return self.variants.get(key)

    def variant_of(self, residuals: Residuals) -> Module | None:
        """The variant to which residuals belong, or a copy of it; None if they are this module's own or another's."""
        theirs = residuals.module
        for variant in self.variants.values():
            if variant is theirs:
                return variant
        if theirs is self or not residuals.orders or theirs.equals(self):
            return None
        variant = self._ordered(residuals.orders)
        return variant if variant is not None and theirs.equals(variant) else None

    @cached_property
    def _value(self) -> Module | None:
        """The module of the value alone; None if this one's forward makes nothing else, or it cannot be compiled (there
        is no compiler where the module was loaded).
        """
        made: Module | None = None
        if any(r.precomputed for r in self.residuals):
            with contextlib.suppress(GradcError):
                made = self.recipe.value()
        if made is not None:
            made.structure = self.structure
            made.share(self.pending)
        return made

    @cached_property
    def joint_names(self) -> tuple[dict[str, str], dict[str, str]]:
        """:func:`gradc.autodiff.joint_names` of this graph: cotangents by output, gradients by input."""
        return joint_names(self.graph, self.wrt)

    @cached_property
    def _input_names(self) -> frozenset[str]:
        return frozenset(self.graph.input_names)

    @cached_property
    def _needed_names(self) -> frozenset[str]:
        return self._input_names - self.graph.defaults.keys()

    def flat(
        self, inputs: Arguments | None, more: Arguments | None = None, extra: Sequence[Any] = (), **options: Any
    ) -> Results:
        """The inputs with nested parameters flattened to dotted names.

        :param options: of the call, none of which may be meant as an input.
        """
        inputs = by_name(self.graph.name, self.graph.input_names, inputs, extra, more or {})
        refuse_inputs_as_options(self.graph.name, self._needed_names, inputs, **options)
        known = self._input_names
        if inputs.keys() <= known:
            return inputs
        from ..trace import flatten

        out: Results = {}
        for name, value in inputs.items():
            out |= {name: value} if name in known else flatten(value, name)
        return out

    @cached_property
    def _rates(self) -> tuple[str, ...]:
        """The learning rates among the inputs of a training step, which ``update=`` made: it donates their state."""
        names = self.graph.input_names if "state.step" in self.options.donate else ()
        return tuple(name for name in names if name.split(".")[0] == "lr")

    def with_rates(self, inputs: Arguments) -> Arguments:
        """The inputs with the learning rates of a training step as f64[]: they may be numbers, or arrays or tensors of
        one without axes.

        :raises InvalidProblem: one is no finite number from 0; one in a GPU's memory, which the host does not read, is
            not looked at.
        """
        rates = {name: inputs[name] for name in self._rates if name in inputs}
        if not rates:
            return inputs
        with held_off:
            from ..optim.optimizer import checked
        for name, rate in rates.items():
            if is_tensor(rate) and rate.is_cuda:
                rates[name] = rate.detach().double()
            elif is_tensor(rate) or not hasattr(rate, "__cuda_array_interface__"):
                rates[name] = np.array(checked(name, rate))
            elif np.dtype(rate.__cuda_array_interface__["typestr"]) != np.float64:
                rates[name] = rate.astype(np.float64)
        return {**inputs, **rates}

    def __call__(
        self,
        inputs: Arguments | None = None,
        /,
        *extra: Any,
        out: Arguments | None = None,
        stream: Any = None,
        dims: Mapping[str, int] | None = None,
        **more: Any,
    ) -> Any:
        """The value, without residuals.

        :param inputs: arrays by name, for inputs that are not given as keywords (one may be called ``out``).

        Where :attr:`forward` precomputes gradients, it is computed without them, by a module that is compiled at the
        first such call.
        """
        flat = self.with_rates(self.flat(inputs, more, extra, out=out, stream=stream, dims=dims))
        if self._value is not None:
            return self._value(flat, out=out, stream=stream, dims=dims)
        sizes = self.sizes(dims)
        described = self.forward.described(flat, out, sizes, stream)
        done = self.forward.repeated(described, flat, out)
        if done is None:
            variant, orders = self.variant(flat, dims)
            if variant is not None:
                return variant(apply_layout(flat, orders), out=out, stream=stream, dims=dims)
            done = self.forward.run_bound(flat, out, False, stream, None, sizes, described)
        results, _ = done
        return _single({name: results[name] for name in self.graph.output_names})

    def value_and_grad(
        self,
        inputs: Arguments | None = None,
        /,
        *extra: Any,
        out: Arguments | None = None,
        stream: Any = None,
        workspace: Any = None,
        dims: Mapping[str, int] | None = None,
        **more: Any,
    ) -> tuple[Any, Gradients]:
        """The value of a scalar output and its gradients, in one program (compiled on first use).

        :param out: arrays to write into, by the names of outputs and, for gradients, of inputs.
        """
        given = self.flat(inputs, more, extra, out=out, workspace=workspace, stream=stream, dims=dims)
        given |= {
            name: detached(given[name]) for name in self.wrt if name in given
        }  # these tensors may require grad: their gradients are returned
        variant, orders = self.variant(given, dims) if out is None and workspace is None else (None, {})
        if variant is not None:
            value, gradients = variant.value_and_grad(apply_layout(given, orders), stream=stream, dims=dims)
            return value, Gradients(undo_layout(gradients, orders), self.structure)
        gradient_names = self.joint_names[1]
        targets = {gradient_names.get(n, n): a for n, a in out.items()} if isinstance(out, Mapping) else out
        results, bound = self.joint.run_bound(
            self.joint_inputs(given, stream), targets, False, stream, workspace, self.sizes(dims)
        )
        shapes = self.shapes_of_sparse(bound)
        return _single({n: results[n] for n in self.graph.output_names}), Gradients(
            assembled(results, gradient_names, shapes, shapes), self.structure
        )

    @property
    def joint(self) -> Executable:
        """The program of value and gradients together; compiled at its first use."""
        if self._grad is None:
            outputs = [(n, v) for n, v in self.graph.outputs if v.dtype.is_float]
            if len(outputs) != 1 or outputs[0][1].type.count != 1:
                raise InvalidProblem(
                    f"value_and_grad needs one scalar float output; {self.graph.name} has"
                    f" {', '.join(f'{n}: {v.type}' for n, v in self.graph.outputs)}"
                )
            self._grad = self._executable(Executable, Code(self.recipe.joint()))
            self.share(self.pending)
        return self._grad

    def joint_inputs(self, given: Arguments, stream: Any = None) -> Results:
        """The inputs of :attr:`joint`: those given, and 1 as the cotangent."""
        name, node = next((n, v) for n, v in self.graph.outputs if v.dtype.is_float)
        backend = self.joint.backend
        one = backend.to_device(np.ones([1] * node.rank, node.dtype.np), backend.stream(stream, given.values()))
        return {**given, self.joint_names[0][name]: one}

    def capture(
        self,
        what: str = "forward",
        inputs: Arguments | None = None,
        /,
        *,
        residuals: Residuals | None = None,
        cotangents: Any = None,
        stream: Any = None,
        dims: Mapping[str, int] | None = None,
        **more: Any,
    ) -> Capture:
        """Captures calls as a CUDA graph over the given arrays; each ``replay()`` reads their current contents and
        writes ``outputs``.

        :param what: ``"forward"``, ``"backward"`` (of ``residuals``, or of those of a forward run now), ``"both"`` (one
            after the other), ``"value_and_grad"``.
        :param cotangents: for backward: one array, several in order, or by output name.
        :param stream: the stream to capture; None: a new one.
        :return: a Capture whose ``outputs`` have the names of the call's results; gradients next to values are
            ``d.NAME``.
        :raises CaptureError: the stream cannot be captured, or a replay would have to allocate memory.
        :raises DeviceError: an array is in host memory.
        """
        with held_off:
            from ..runtime.cuda.capture import capture, stream_for

        given = self.flat(inputs, more)
        if what not in CAPTURED:
            raise InvalidProblem(f"capture({what!r}); there are {', '.join(CAPTURED)}")
        if what != "forward" and self.options.sparse:
            raise Unsupported("a CUDA graph of sparse gradients: they have as many rows as a call hits")
        kept = residuals.arrays.values() if residuals is not None else ()
        at = stream_for(self.forward.backend, stream, [*given.values(), *kept])
        sizes = self.sizes(dims)
        if what == "value_and_grad":
            joint = self.joint.capture_step(self.joint_inputs(given, at), at, dims=sizes)
            return capture([joint], at, joint.results)
        steps: list[Step] = []
        outputs: Results = {}
        if residuals is None:
            first = self.forward.capture_step(given, at, dims=sizes)
            outputs = {name: first.results[name] for name in self.graph.output_names}
            steps, residuals = [first], self.forward.kept(given, first.results, first.call.dims)
        elif given or what != "backward":
            raise InvalidProblem("capture takes residuals= for what='backward' alone, and then no inputs")
        if what == "forward":
            return capture(steps, at, outputs)
        second = self._capture_backward(residuals, cotangents, at, sizes)
        gradients = self.joint_names[1]
        if what == "backward":
            return capture([second], at, {name: second.results[key] for name, key in gradients.items()})
        return capture([*steps, second], at, {**outputs, **{key: second.results[key] for key in gradients.values()}})

    def _capture_backward(self, residuals: Residuals, cotangents: Any, stream: int, sizes: Mapping[str, int]) -> Step:
        """Backward as a step of a CUDA graph; cotangents as :meth:`capture` takes them."""
        named = cotangents if isinstance(cotangents, Mapping) else {}
        ordered = (
            () if cotangents is None or named else cotangents if isinstance(cotangents, tuple | list) else (cotangents,)
        )
        own = {d: v for d, v in {**residuals.dims, **sizes}.items() if d in self.backward.program.dims}
        inputs = self.backward.inputs_of(residuals, ordered, named, stream)
        return self.backward.capture_step(inputs, stream, dims=own)

    def shapes_of_sparse(self, dims: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """The shapes of the tables with sparse gradients."""
        return {name: self.graph.input(name).type.concrete(dims) for name in self.options.sparse}

    # -- looking -------------------------------------------------------------------------------------------------------

    @property
    def kernels(self) -> Kernels:
        """Every kernel by name; if forward and backward both have one, the latter is ``backward.NAME``."""
        kernels = Kernels(call for executable in self.executables.values() for call in executable.kernels.calls)
        for direction, executable in self.executables.items():
            for name, kernel in executable.kernels.items():
                kernels[f"{direction}.{name}" if name in kernels else name] = kernel
        return kernels

    def source(self) -> str:
        """The generated C or CUDA source of forward and backward."""
        return "\n".join(f"/* ---- {name} ---- */\n{e.source}" for name, e in self.executables.items())

    @property
    def precision(self) -> Precision:
        each = [e.precision for e in self.executables.values()]
        return Precision(
            tuple(sorted({m for p in each for m in p.math})),
            tuple(sorted({a for p in each for a in p.accumulator})),
            all(p.deterministic for p in each),
            all(p.bit_stable for p in each),
        )

    def workspace_size(self, **dims: int) -> int:
        """The larger of the workspace sizes of forward and backward, in bytes."""
        sizes = self.sizes(dims)
        return max(
            e.workspace_size(**{k: v for k, v in sizes.items() if k in e.program.dims})
            for e in self.executables.values()
        )

    def memory(self, **dims: int) -> Memory:
        """The predicted memory for these dims, in bytes: outputs, residuals, gradients, workspace, and the peak."""
        return predicted(
            self.executables, frozenset(r.name for r in self.residuals if not r.borrowed), self.sizes(dims)
        )

    def can_implement(self, inputs: Arguments | None = None, /, **more: Any) -> Exception | None:
        """None if ``forward`` takes these inputs, else the error it would raise."""
        return self.forward.can_implement(self.flat(inputs, more))

    def sku(self, **dims: int) -> str:
        return self.forward.sku(**dims)

    def synchronize(self) -> None:
        """Wait until all submitted calls have finished, and raise their first error (``errors="async"``); on the CPU
        every call has finished when it returns.
        """
        for executable in (*self.executables.values(), *([self._grad] if self._grad is not None else [])):
            executable.synchronize()

    def explain(self, *, timed: int = 0, **dims: int) -> str:
        """A text: kernels with their bytes, the lower bound of bytes, each choice of reduction with its estimates,
        residuals and passes.

        :param timed: run each kernel, and each reduction strategy, this many times on random data, and show the median
            next to the prediction.
        """
        with held_off:
            from ..inspect.explain import explain

        _check_timed(timed)
        return Sections(explain(self, dims, timed=timed))

    def explain_static(self, **dims: int) -> str:
        """A text: what the machine code of a module for ``cuda`` says without a GPU; needs ``gradc[nvrtc,nvdisasm]``.

        Instructions by class, loops, widths of accesses, registers, resident blocks: see
        :func:`gradc.inspect.static.static_table`, which has the errors, too.
        """
        with held_off:
            from ..inspect.static import static_table

        return static_table(self, dims)

    def report(self, path: Any, *, timed: int = 0, **dims: int) -> None:
        """Writes one HTML file to explore offline: the graph of every stage and what each pass changed, kernels beside
        their generated text and the lines they are for, choices of reduction, memory.

        :param timed: run each kernel this many times on random data, and show the median.
        :param dims: sizes; 1024 stands for what is not given.
        :raises FileError: it cannot be written; an old file is unchanged.
        """
        with held_off:
            from ..inspect.report import write_report

        _check_timed(timed)
        write_report(self, path, dims, timed)

    def export(self, folder: Any, *, lang: str = "c", dims: Mapping[str, int] | None = None, seed: int = 0) -> Path:
        """Writes a new folder of C sources that need neither Python nor gradc: ``NAME.h`` with the interface, the
        kernels, the runtime, a Makefile and CMakeLists.txt, and ``main.c``, which checks the bits of every result on
        the arrays in ``sample/``.

        :param folder: does not exist, or is empty; it is written whole or not at all.
        A module for ``cuda`` becomes PTX and a launcher that needs the driver alone, for the sizes ``dims``.

        :param dims: sizes of the sample arrays; on the CPU small ones stand for what is not given.
        :param seed: of the sample arrays.
        :return: its path.
        :raises Unsupported: the target is neither ``cpu`` nor ``cuda``, or a program can only be checked by gradc.
        :raises InvalidProblem: for ``cuda``, a size is not given.
        :raises FileError: it cannot be written, or there is something.
        """
        return self.recipe.export(self, folder, lang=lang, dims=dims, seed=seed)

    def show(self, *, timed: int = 0, **dims: int) -> Path:
        """Writes :meth:`report` to a temporary file and opens it in a browser.

        :return: the file, which stays.
        """
        with held_off:
            import tempfile
            import webbrowser

        path = Path(tempfile.mkdtemp(prefix="gradc-")) / f"{self.graph.name}.html"
        self.report(path, timed=timed, **dims)
        webbrowser.open(path.as_uri())
        return path

    def _repr_html_(self) -> str:
        with held_off:
            from ..inspect.notebook import module_html

        return module_html(self)

    def save(self, path: Any) -> None:
        """Writes one file with everything needed to run without compiling: graph, arrays, programs, machine code.

        If ``path`` is a directory, the file is ``module.gradc`` in it.  It is replaced atomically.

        :raises FileError: it cannot be written; the old file is unchanged.
        """
        self.recipe.save(self, path)

    def __str__(self) -> str:
        with held_off:
            from ..inspect.explain import summary

        return summary(self)


def _check_timed(timed: Any) -> None:
    if not isinstance(timed, int) or timed < 0:
        raise InvalidProblem(f"timed={timed!r}: how often each kernel is run, an integer from 0")


def _single(values: Results) -> Any:
    return next(iter(values.values())) if len(values) == 1 else values
