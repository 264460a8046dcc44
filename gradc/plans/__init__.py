"""Ready-made plans: the gradients of one op as an Executable, for callers without a graph.

>>> plan = gradc.plans.embedding_backward(D=64, dtype="bf16", padding_idx=0)
>>> plan.run(indices=tokens, dy=dy, dims={"V": 32000})["weight"]

A plan computes the op's vjp from the op's inputs, without residuals of a forward: the one-op graph is differentiated,
and the requested gradients are compiled.  Arguments have the names of the op's operands, the cotangent is ``dy``; only
what the gradients need is an argument (``plan.arguments``).  Results have the names of the operands that they are the
gradients of (``weight``, not ``d.weight``; ``plan.results``).

Sizes are symbolic unless they are given; one plan serves all of them.  A size that no argument determines (V, for an
embedding's indices and dy) is given to the plan, or to the call by ``dims={"V": 32000}`` or by ``out=``.  Dtypes and
the op's options are keywords, with the op's names and defaults, with one exception: ``oob`` defaults to ``"skip"`` (an
index out of range adds nothing), in the op to ``"error"``.

Plans are cached: calls with the same arguments return the same plan.  It is compiled at its first use.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .. import ops
from ..analysis.precision import Precision
from ..api import compile
from ..autodiff import differentiate, joint_names
from ..errors import GradcError, InvalidProblem
from ..ir.dims import Size, substitute
from ..ir.graph import Graph, input_node, rebuild
from ..ir.node import Node
from ..ir.size_text import parse_size
from ..ir.types import Type
from ..ir.types import dtype as dtype_of
from ..ir.walk import topological
from ..ops.quantized.blocks import Blocks, canonical_block
from ..process.forks import lock
from ..runtime.host.arrays import Arguments, Results
from ..runtime.shared import Shared
from ..trace import trace

if TYPE_CHECKING:
    from ..module.module import Module
    from ..runtime.executable import Executable
    from ..runtime.kernel import Kernels

Shape = tuple[Size, ...]
Settings = Mapping[str, Any]
"""The keyword arguments of a plan other than sizes: dtypes, and the op's options."""
OperandTypes = dict[str, tuple[str, Sequence[Size | str]]]
"""Operand name -> (dtype, shape)."""
Block = tuple[int | str | None, ...]


class Plan(Shared):
    """The gradients of one op, ready to run.

    :ivar arguments: name -> type of each argument of ``run``.
    :ivar results: name -> type of each result.
    :ivar graph: the graph that is compiled.
    """

    def __init__(self, name: str, graph: Graph, chosen: Sequence[str], target: str | None):
        self.name, self.graph, self.target = name, graph, target
        self.arguments: dict[str, Type] = {graph.input_name(n): n.type for n in graph.inputs}
        self.results: dict[str, Type] = {output: n.type for output, n in graph.outputs}
        self._chosen = tuple(chosen)
        self._module: Module | None = None
        self._lock = lock(reentrant=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return Plan, (self.name, self.graph, self._chosen, self.target)

    @property
    def module(self) -> Module:
        """The compiled module; compiled at its first use."""
        if self._module is None:
            with self._lock:
                if self._module is None:
                    self._module = compile(self.graph, target=self.target)
        return self._module

    @property
    def executable(self) -> Executable:
        """The Executable that ``run`` calls."""
        return self.module.forward

    def run(
        self,
        arguments: Arguments | None = None,
        /,
        *,
        out: Arguments | None = None,
        accumulate: bool | Collection[str] = False,
        stream: Any = None,
        workspace: Any = None,
        dims: Mapping[str, int] | None = None,
        **more: Any,
    ) -> Results:
        """The gradients by name, as arrays of the arguments' library; like :meth:`gradc.Executable.run`.

        :param out: arrays to write gradients into.
        :param accumulate: True, or the names of those in ``out`` to add to instead of overwriting them.
        :param workspace: memory of at least ``workspace_size(**dims)`` bytes.
        :param dims: sizes that no argument determines.
        """
        return self.executable.run(
            arguments, out=out, accumulate=accumulate, stream=stream, workspace=workspace, dims=dims, **more
        )

    __call__ = run

    def can_implement(self, arguments: Arguments | None = None, /, **more: Any) -> GradcError | None:
        """None if ``run`` accepts these arguments, else the error it would raise, including failures to compile for the
        target; nothing is run.
        """
        try:
            executable = self.executable
        except GradcError as error:
            return error
        return executable.can_implement(arguments, **more)

    def workspace_size(self, **dims: int) -> int:
        """The size of the workspace for these dims, in bytes."""
        return self.executable.workspace_size(**dims)

    @property
    def precision(self) -> Precision:
        """The dtypes it computes and accumulates in, derived from its kernels."""
        return self.executable.precision

    def sku(self, **dims: int) -> str:
        """An identifier: plan, target, dtypes, options that differ from the defaults, sizes."""
        dtypes = "_".join(dict.fromkeys(str(t.dtype) for t in (*self.arguments.values(), *self.results.values())))
        return ".".join(
            (self.name, self.executable.target, dtypes, *self._chosen, *(f"{k}{v}" for k, v in dims.items()))
        )

    @property
    def kernels(self) -> Kernels:
        """Its kernels by name."""
        return self.executable.kernels

    @property
    def source(self) -> str:
        """Its generated source."""
        return self.executable.source

    def explain(self, **dims: int) -> str:
        """The explanation of its kernels: bytes moved, strategies and the reasons for them."""
        return self.module.explain(**dims)

    def __repr__(self) -> str:
        takes = ", ".join(f"{n}: {t}" for n, t in self.arguments.items())
        return f"<plan {self.name}({takes}) -> {', '.join(f'{n}: {t}' for n, t in self.results.items())}>"


# -- granularities of a quantization: the block, None standing for a whole axis ----------------------------------------


def per_tensor(rank: int = 2) -> Block:
    """The block shape of one block; its scale is ``[1, ..., 1]``.  ``block=None`` is the same with a scalar scale."""
    return (None,) * rank


def per_channel(axis: int = 0, rank: int = 2) -> Block:
    """The block shape with one scale per index of ``axis``."""
    return tuple(1 if a == axis % rank else None for a in range(rank))


def per_token(rank: int = 2) -> Block:
    """The block shape with one scale per row along the last axis."""
    return (*(1,) * (rank - 1), None)


def per_group(size: int, rank: int = 2) -> Block:
    """The block shape with one scale per ``size`` consecutive elements of the last axis."""
    return (*(1,) * (rank - 1), size)


# -- the table ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One entry of the table of plans.

    :param types: ``(settings) -> {operand: (dtype, shape)}``; a size is an int or a symbol.
    :param settings: the keywords that the types depend on, with defaults: dtypes, ranks, optional operands.
    :param sizes: the names of the sizes that are the positional parameters.
    :param options: defaults that differ from the op's.
    :param wrt: the operands (those present) whose gradients are computed by default; none for a forward plan.
    """

    op: str
    types: Callable[[Settings], OperandTypes]
    settings: Settings
    doc: str
    sizes: tuple[str, ...] = ()
    options: Settings = field(default_factory=lambda: {"oob": "skip"})
    wrt: tuple[str, ...] = ()


def _numbered(letter: str, rank: int) -> tuple[str, ...]:
    return (letter,) if rank == 1 else tuple(f"{letter}{a}" for a in range(rank))


def _bag(s: Settings) -> OperandTypes:
    if s["rank"] not in (1, 2):
        raise InvalidProblem(f"rank={s['rank']!r}: 1 (with offsets) or 2 (a bag is a row)")
    members = ("N",) if s["rank"] == 1 else ("B", "L")
    types: OperandTypes = {"indices": (s["index_dtype"], members), "weight": (s["dtype"], ("V", "D"))}
    if s["rank"] == 1:
        types["offsets"] = (s["index_dtype"], ("B",))
    return types | ({"per_sample_weights": (s["dtype"], members)} if s["per_sample_weights"] else {})


def _quantized(operand: str) -> Callable[[Settings], OperandTypes]:
    def types(s: Settings) -> OperandTypes:
        shape = _shape(s)
        counts = () if s["block"] is None else Blocks(shape, canonical_block(shape, _block(s, shape))).counts
        operands: OperandTypes = {operand: (s[f"{operand}_dtype"], shape), "scale": (s["scale_dtype"], counts)}
        if s["zero_point_dtype"] is not None:
            operands["zero_point"] = (s["zero_point_dtype"], counts)
        return operands

    return types


def _shape(s: Settings) -> Shape:
    rank = 2 if s["block"] is None else len(s["block"])
    return tuple(_size(n) for n in s["shape"] or (("N", "D") if rank == 2 else _numbered("N", rank)))


def _block(s: Settings, shape: Shape) -> Shape | None:
    if s["block"] is None:
        return None
    if len(s["block"]) != len(shape):
        raise InvalidProblem(f"block={s['block']!r} has {len(s['block'])} sizes and shape={s['shape']!r} {len(shape)}")
    return tuple(n if b is None else _size(b) for n, b in zip(shape, s["block"], strict=True))


def _size(value: Any) -> Size:
    return parse_size(value) if isinstance(value, str) else value


def _image(s: Settings) -> OperandTypes:
    if s["rank"] not in (4, 5):
        raise InvalidProblem(f"rank={s['rank']!r}: 4 (images) or 5 (volumes)")
    spatial, out = ("D", "H", "W")[5 - s["rank"] :], ("OD", "OH", "OW")[5 - s["rank"] :]
    return {"input": (s["dtype"], ("N", "C", *spatial)), "grid": (s["dtype"], ("N", *out, len(out)))}


def _indexed(s: Settings) -> OperandTypes:
    if not -s["rank"] <= s["dim"] < s["rank"]:
        raise InvalidProblem(f"dim={s['dim']} of rank={s['rank']}")
    others = ("D",) if s["rank"] == 2 else tuple(f"D{a}" for a in range(s["rank"] - 1))
    at = s["dim"] % s["rank"]
    around = lambda n: (*others[:at], n, *others[at:])
    return {
        "input": (s["dtype"], around("V")),
        "index": (s["index_dtype"], ("N",)),
        "source": (s["dtype"], around("N")),
    }


_INDEX = {"rank": 2, "dtype": "f32", "index_dtype": "i64"}
_SKIPS = 'oob defaults to "skip" here and to "error" in the op.'
_BLOCK = (
    "block: as in the op, with None for a whole axis: per_tensor(), per_channel(), per_token(), per_group(); block=None"
    " is per tensor with a scalar scale.  shape: sizes or symbols, by default [N, D].  zero_point_dtype: None for no"
    " zero point."
)
_QUANTIZE = {"block": None, "shape": None, "x_dtype": "f32", "scale_dtype": "f32", "zero_point_dtype": None}

TABLE: dict[str, Row] = {
    "embedding_backward": Row(
        "embedding",
        lambda s: {"indices": (s["index_dtype"], _numbered("N", s["rank"])), "weight": (s["dtype"], ("V", "D"))},
        {"dtype": "f32", "index_dtype": "i64", "rank": 1},
        f"weight [V, D] from indices (of any rank) and dy [..., D]: each row of dy added at its index.  {_SKIPS}",
        sizes=("V", "D"),
        wrt=("weight",),
    ),
    "embedding_bag_backward": Row(
        "embedding_bag",
        _bag,
        {"dtype": "f32", "index_dtype": "i64", "rank": 1, "per_sample_weights": False},
        "weight [V, D], and per_sample_weights if there are any, from dy [B, D]; indices [N] with offsets [B], or"
        f" 2-D indices [B, L].  {_SKIPS}",
        sizes=("V", "D"),
        wrt=("weight", "per_sample_weights"),
    ),
    "dequantize_backward": Row(
        "dequantize",
        _quantized("q"),
        {"block": None, "shape": None, "q_dtype": "i8", "scale_dtype": "f32", "zero_point_dtype": None},
        f"q (straight through, a float), scale and zero_point.  {_BLOCK}",
        wrt=("q", "scale", "zero_point"),
    ),
    "quantize_backward": Row(
        "quantize",
        _quantized("x"),
        _QUANTIZE,
        f"x, scale and zero_point; dy is a float, f32 unless dy_dtype is given.  {_BLOCK}",
        wrt=("x", "scale", "zero_point"),
    ),
    "fake_quantize_backward": Row(
        "fake_quantize",
        _quantized("x"),
        _QUANTIZE,
        f"x, scale and zero_point (LSQ with grad_factor).  {_BLOCK}",
        wrt=("x", "scale", "zero_point"),
    ),
    "grid_sample_backward": Row(
        "grid_sample",
        _image,
        {"dtype": "f32", "rank": 4},
        "input [N, C, H, W] and grid [N, OH, OW, 2], or with rank=5 [N, C, D, H, W] and [N, OD, OH, OW, 3];"
        ' wrt=("grid",) computes only one.',
        wrt=("input", "grid"),
    ),
    "index_add": Row(
        "index_add",
        _indexed,
        _INDEX,
        f"The op itself: y, input with alpha * source added at index along dim.  {_SKIPS}",
        options={"oob": "skip", "dim": 0},
    ),
    "index_add_backward": Row(
        "index_add",
        _indexed,
        _INDEX,
        f"input (dy itself) and source.  {_SKIPS}",
        options={"oob": "skip", "dim": 0},
        wrt=("input", "source"),
    ),
}


# -- from a row and settings to a plan ---------------------------------------------------------------------------------

_PLANS: dict[str, Plan] = {}
_MOST = 1024


def _defaults(row: Row) -> Settings:
    """Every keyword of a plan except the sizes, with its default."""
    record = ops.REGISTRY[row.op]
    options = {name: row.options.get(name, parameter.default) for name, parameter in record.parameters.items()}
    return {**row.settings, **options, **({"dy_dtype": None, "wrt": None} if row.wrt else {})}


def _make(name: str, given: Settings, target: str | None) -> Plan:
    row, defaults = TABLE[name], _defaults(TABLE[name])
    settings = {**defaults, **{k: _plain(k, v) for k, v in given.items() if k in defaults}}
    sizes = {k: v for k, v in given.items() if k not in defaults and not (k in row.sizes and v is None)}
    key = f"{name} {sorted(settings.items())} {sorted(sizes.items())} {target}"
    plan = _PLANS.get(key)
    if plan is None:
        chosen = [f"{k}_{_short(v)}" for k, v in settings.items() if v != defaults[k]] + [
            f"{k}{v}" for k, v in sizes.items()
        ]
        plan = Plan(name, _graph(name, row, settings, sizes), chosen, target)
        if len(_PLANS) >= _MOST:
            _PLANS.clear()
        plan = _PLANS.setdefault(key, plan)
    return plan


def _plain(name: str, value: Any) -> Any:
    """A setting in canonical form."""
    if name.endswith("dtype"):
        return None if value is None else dtype_of(value).name
    if name == "rank" and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise InvalidProblem(f"rank={value!r}: an int from 0")
    if name == "wrt" and isinstance(value, str):
        return (value,)
    if name in ("wrt", "block", "shape") and value is not None:
        if not isinstance(value, tuple | list) or not all(
            isinstance(v, str | type(None)) or (name != "wrt" and isinstance(v, int)) for v in value
        ):
            raise InvalidProblem(f"{name}={value!r}: a tuple of {'names' if name == 'wrt' else 'sizes'}")
        return tuple(value)
    return value


def _short(value: Any) -> str:
    return "x".join("all" if v is None else str(v) for v in value) if isinstance(value, tuple) else str(value)


def _graph(name: str, row: Row, settings: Settings, sizes: Mapping[str, int]) -> Graph:
    """The graph that computes only the gradients of the op."""
    record = ops.REGISTRY[row.op]
    symbolic = {
        operand: Type(dtype_of(kind), tuple(_size(n) for n in shape))
        for operand, (kind, shape) in row.types(settings).items()
    }
    symbols = sorted(frozenset().union(*(t.symbols for t in symbolic.values())))
    for size, value in sizes.items():
        if size not in symbols:
            raise InvalidProblem(
                f"{name} has no {size!r}; it has the sizes {', '.join(symbols) or 'none'} and"
                f" {', '.join(_defaults(row))}, target"
            )
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InvalidProblem(f"{name}: {size}={value!r} is no size (an integer from 0)")
    types: dict[str, Any] = {operand: type_.substitute(sizes) for operand, type_ in symbolic.items()}
    options = {k: settings[k] for k in record.parameters if k != "block" or settings[k] is not None}
    if "block" in options:
        options["block"] = tuple(substitute(n, sizes) for n in _block(settings, _shape(settings)) or ())

    def call(**operands: Node) -> Node:
        y = record(**operands, **options)
        wanted = settings.get("dy_dtype") or (None if y.dtype.is_float or not row.wrt else "f32")
        return y if wanted is None else y.astype(wanted)

    forward = trace(call, name=name, **types)
    if not row.wrt:
        return forward
    wrt = tuple(operand for operand in row.wrt if operand in types) if settings["wrt"] is None else settings["wrt"]
    unknown = [operand for operand in wrt if operand not in types]
    if unknown or not wrt:
        raise InvalidProblem(
            f"{name}: wrt names {unknown[0] if unknown else 'nothing'!r}; there are gradients of"
            f" {', '.join(o for o in row.wrt if o in types)}"
        )
    joint = differentiate(forward, wrt)
    (cotangent,), gradients = joint_names(forward, wrt)[0].values(), joint_names(forward, wrt)[1]
    dy = input_node("dy", forward.output("y").type)
    new = rebuild((joint.output(d) for d in gradients.values()), {joint.input(cotangent): dy})
    outputs = tuple((operand, new[joint.output(d)]) for operand, d in gradients.items())
    reached = set(topological(node for _, node in outputs))
    return Graph(name, (*(n for n in forward.inputs if n in reached), dy), outputs, forward.assumptions)


def _plan(name: str) -> Callable[..., Plan]:
    """The function of a table entry, with its signature and docstring."""
    row = TABLE[name]
    sizes = row.sizes

    def plan(*positional: Any, target: str | None = None, **given: Any) -> Plan:
        if len(positional) > len(sizes) or set(sizes[: len(positional)]) & given.keys():
            raise InvalidProblem(
                f"{name} takes {', '.join(sizes) or 'nothing'} by position, once, and the rest by name"
            )
        return _make(name, {**dict(zip(sizes, positional, strict=False)), **given}, target)

    kinds = inspect.Parameter
    parameters = [kinds(n, kinds.POSITIONAL_OR_KEYWORD, default=None) for n in sizes]
    parameters += [kinds(n, kinds.KEYWORD_ONLY, default=default) for n, default in _defaults(row).items()]
    plan.__name__ = plan.__qualname__ = name
    parameters += [kinds("target", kinds.KEYWORD_ONLY, default=None), kinds("sizes", kinds.VAR_KEYWORD)]
    plan.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    subject = "The gradients of" if row.wrt else "A plan of"
    more = (
        "\n\n    wrt: the operands to differentiate by.  dy_dtype: the dtype of dy, by default that of the op's result."
        if row.wrt
        else ""
    )
    plan.__doc__ = (
        f"{subject} :data:`gradc.ops.{row.op}`: {row.doc}{more}\n\n    Any size of the operands may be given by its"
        " name; the others are symbolic.\n    "
    )
    return plan


embedding_backward = _plan("embedding_backward")
embedding_bag_backward = _plan("embedding_bag_backward")
dequantize_backward = _plan("dequantize_backward")
quantize_backward = _plan("quantize_backward")
fake_quantize_backward = _plan("fake_quantize_backward")
grid_sample_backward = _plan("grid_sample_backward")
index_add = _plan("index_add")
index_add_backward = _plan("index_add_backward")

__all__ = [*TABLE, "TABLE", "Plan", "per_channel", "per_group", "per_tensor", "per_token"]
