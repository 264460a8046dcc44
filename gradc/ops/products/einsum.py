"""Sums of products: einsum and what it says shorter, over the library's matrix product."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import TypeRuleError
from ...ir.dims import product, same
from ...ir.node import Node, call
from ...ir.op import BadSample, Function, Sample
from ..rules import canonical_axis, floating, of_rank, reshaped, spread
from ..shapes.diagonals import diagonal
from ..shapes.movement import transpose

# -- einsum ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Term:
    """A value and the letter of each of its axes; no letter stands twice."""

    value: Node
    letters: str

    def moved(self, letters: str) -> Node:
        """The value with its axes in another order."""
        return transpose(self.value, tuple(self.letters.index(c) for c in letters))

    def summed(self, kept: str) -> _Term:
        """Without the axes whose letters are not kept."""
        gone = tuple(a for a, c in enumerate(self.letters) if c not in kept)
        if not gone:
            return self
        return _Term(call("sum", self.value, axis=gone), "".join(c for c in self.letters if c in kept))


def _parsed(equation: str, operands: Sequence[Node]) -> tuple[list[str], str]:
    """The letters of each operand and of the result; those that an ellipsis stands for are upper case ones that the
    equation has not.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(operands):
        raise TypeRuleError(f"equation {equation!r} has {len(terms)} terms for {len(operands)} operands")
    for term in (*terms, right):
        plain = term.replace("...", "", 1)
        if not all(c in string.ascii_letters for c in plain):
            raise TypeRuleError(f"equation {equation!r}: {term!r} is not letters and at most one '...'")
    free = [c for c in string.ascii_uppercase + string.ascii_lowercase if c not in equation]
    rests = [x.rank - len(t.replace("...", "")) for t, x in zip(terms, operands, strict=True)]
    for term, x, rest in zip(terms, operands, rests, strict=True):
        if rest < 0 or (rest and "..." not in term):
            raise TypeRuleError(f"equation {equation!r}: {term!r} for an operand of rank {x.rank}")
    most = max((rest for term, rest in zip(terms, rests, strict=True) if "..." in term), default=0)
    ellipsis = "".join(free[:most])
    full = [t.replace("...", ellipsis[most - rest :] if rest else "") for t, rest in zip(terms, rests, strict=True)]
    if arrow:
        result = right.replace("...", ellipsis)
    else:
        letters = "".join(sorted(c for c in set("".join(full)) if c not in ellipsis))
        result = ellipsis + "".join(c for c in letters if "".join(full).count(c) == 1)
    for c in result:
        if result.count(c) > 1 or not any(c in t for t in full):
            raise TypeRuleError(f"equation {equation!r}: {c!r} stands twice in the result, or in no operand")
    return full, result


def _term(value: Node, letters: str) -> _Term:
    """An operand, of a letter that stands twice its diagonal."""
    for c in letters:
        while letters.count(c) > 1:
            first = letters.index(c)
            second = letters.index(c, first + 1)
            if not same(value.shape[first], value.shape[second]):
                raise TypeRuleError(f"axes of {c!r} have {value.shape[first]} and {value.shape[second]}")
            value = diagonal.plain(value, axis1=first, axis2=second)
            letters = "".join(d for a, d in enumerate(letters) if a not in (first, second)) + c
    return _Term(value, letters)


def _without_ones(terms: Sequence[_Term]) -> list[_Term]:
    """Axes of size 1 that broadcast against another size are taken away."""
    sizes: dict[str, object] = {}
    for term in terms:
        for c, n in zip(term.letters, term.value.shape, strict=True):
            known = sizes.get(c, 1)
            if known != 1 and n != 1 and not same(known, n):  # type: ignore[arg-type]
                raise TypeRuleError(f"axes of {c!r} have {known} and {n}")
            sizes[c] = known if n == 1 else n
    kept = []
    for term in terms:
        own = [a for a, c in enumerate(term.letters) if term.value.shape[a] != 1 or sizes[c] == 1]
        letters = "".join(term.letters[a] for a in own)
        kept.append(_Term(reshaped(term.value, tuple(term.value.shape[a] for a in own)), letters))
    return kept


def _contracted(a: _Term, b: _Term, kept: str) -> _Term:
    """Two terms as one: a matrix product over the letters that both have and nobody needs after, else elementwise."""
    a, b = a.summed(kept + b.letters), b.summed(kept + a.letters)
    shared = [c for c in a.letters if c in b.letters]
    batch = "".join(c for c in shared if c in kept)
    inner = "".join(c for c in shared if c not in kept)
    rows = "".join(c for c in a.letters if c not in shared)
    columns = "".join(c for c in b.letters if c not in shared)
    left, right = a.moved(batch + rows + inner), b.moved(batch + inner + columns)
    sizes = dict(zip(a.letters + b.letters, (*a.value.shape, *b.value.shape), strict=True))
    shape = tuple(sizes[c] for c in batch + rows + columns)
    if not inner:
        wide = tuple(sizes[c] for c in batch + rows) + tuple(1 for _ in columns)
        right = reshaped(right, (*(sizes[c] for c in batch), *(1 for _ in rows), *(sizes[c] for c in columns)))
        return _Term(spread(reshaped(left, wide), shape) * spread(right, shape), batch + rows + columns)
    lead = tuple(sizes[c] for c in batch)
    m, k, n = (product(sizes[c] for c in letters) for letters in (rows, inner, columns))
    y = call("matmul", reshaped(left, (*lead, m, k)), reshaped(right, (*lead, k, n)))
    return _Term(reshaped(y, shape), batch + rows + columns)


def _einsum(equation: str, *operands: Node) -> Node:
    if not operands:
        raise TypeRuleError("no operands")
    for x in operands:
        if floating(x.type).dtype is not operands[0].dtype:
            raise TypeRuleError(f"dtypes differ: {operands[0].dtype} and {x.dtype}; write a cast")
    letters, result = _parsed(equation, operands)
    terms = _without_ones([_term(x, own) for x, own in zip(operands, letters, strict=True)])
    total = terms[0]
    for k, term in enumerate(terms[1:], 1):
        total = _contracted(total, term, result + "".join(t.letters for t in terms[k + 1 :]))
    y = total.summed(result)
    have = "".join(c for c in result if c in y.letters)
    shape = iter(y.moved(have).shape)
    return reshaped(y.moved(have), tuple(next(shape) if c in have else 1 for c in result))


einsum = Function(
    "einsum",
    write=_einsum,
    samples=(
        Sample(("F[2,3,4]", "F[2,4,5]", "F[5]"), {"equation": "bij,bjk,k->ib"}),
        Sample(("F[2,3,3]",), {"equation": "bii->b"}),
        Sample(("F[3,1,2]", "F[4,2]"), {"equation": "...ij, kj"}),
        Sample(("F[2,3]", "F[4]"), {"equation": "ij,k->kji"}),
    ),
    bad=(
        BadSample(("f32[2,3]", "f32[4,2]"), {"equation": "ij,jk->ik"}, match="axes of 'j' have 3 and 4"),
        BadSample(("f32[2,3]",), {"equation": "ij,jk->ik"}, match="2 terms for 1 operands"),
        BadSample(("f32[2,3]",), {"equation": "ij->ijk"}, match="'k' stands twice in the result, or in no operand"),
        BadSample(("f32[2,3]",), {"equation": "i->i"}, match="'i' for an operand of rank 2"),
    ),
    doc="the sum of products that an equation says, letters that the result has not being summed; from left to right",
    source="torch.einsum; numpy.einsum",
)


def _tensordot(a: Node, b: Node, dims: int | tuple[tuple[int, ...], ...] = 2) -> Node:
    if isinstance(dims, int):
        if not 0 <= dims <= min(a.rank, b.rank):
            raise TypeRuleError(f"dims={dims} of operands of rank {a.rank} and {b.rank}")
        dims = (tuple(range(a.rank - dims, a.rank)), tuple(range(dims)))
    if len(dims) != 2 or len(dims[0]) != len(dims[1]):
        raise TypeRuleError(f"dims={dims}: two tuples of as many axes")
    letters = string.ascii_letters
    first = list(letters[: a.rank])
    second = list(letters[a.rank : a.rank + b.rank])
    for left, right in zip(*dims, strict=True):
        second[canonical_axis(right, b.rank, "dims")] = first[canonical_axis(left, a.rank, "dims")]
    result = [c for c in first if c not in second] + [c for c in second if c not in first]
    return _einsum(f"{''.join(first)},{''.join(second)}->{''.join(result)}", a, b)


tensordot = Function(
    "tensordot",
    write=_tensordot,
    samples=(Sample(("F[2,3,4]", "F[3,4,5]")), Sample(("F[2,3,4]", "F[4,2]"), {"dims": ((0, 2), (1, 0))})),
    bad=(
        BadSample(("f32[2,3]", "f32[4]"), {"dims": 2}, match="dims=2 of operands of rank 2 and 1"),
        BadSample(("f32[2,3]", "f32[4]"), {"dims": ((0,), (0, 0))}, match="as many axes"),
    ),
    doc="the sum of products over the last dims axes of a and the first of b, or over pairs of axes",
    source="torch.tensordot; numpy.tensordot",
)

# -- products of matrices and vectors ----------------------------------------------------------------------------------


def _bmm(input: Node, mat2: Node) -> Node:
    return call("matmul", of_rank("input", input, 3), of_rank("mat2", mat2, 3))


bmm = Function(
    "bmm",
    write=_bmm,
    samples=(Sample(("F[2,3,4]", "F[2,4,2]")),),
    bad=(BadSample(("f32[3,4]", "f32[4,2]"), match="input of rank 2, not 3"),),
    doc="matrix products of a batch",
    source="torch.bmm",
)


def _outer(input: Node, vec2: Node) -> Node:
    n, m = of_rank("input", input, 1).shape[0], of_rank("vec2", vec2, 1).shape[0]
    return spread(reshaped(input, (n, 1)), (n, m)) * spread(reshaped(vec2, (1, m)), (n, m))


outer = Function(
    "outer",
    write=_outer,
    samples=(Sample(("F[3]", "F[4]")),),
    bad=(BadSample(("f32[3,1]", "f32[4]"), match="input of rank 2, not 1"),),
    doc="the products of each element of one vector with each of another",
    source="torch.outer",
)


def _cross(input: Node, other: Node, axis: int = -1) -> Node:
    at = canonical_axis(axis, input.rank)
    if input.shape[at] != 3 or other.rank != input.rank or other.shape[at] != 3:
        raise TypeRuleError(f"axis {axis} does not have 3 elements in both")

    def turned(x: Node, by: int) -> Node:
        return call("roll", x, -by, at)

    return turned(input, 1) * turned(other, 2) - turned(input, 2) * turned(other, 1)


cross = Function(
    "cross",
    write=_cross,
    samples=(Sample(("F[2,3]", "F[2,3]")), Sample(("F[3,1]", "F[3,4]"), {"axis": 0})),
    bad=(BadSample(("f32[2,4]", "f32[2,4]"), match="does not have 3 elements"),),
    doc="the vector product along an axis of 3",
    source="torch.linalg.cross",
)


def _bilinear(input1: Node, input2: Node, weight: Node, bias: Node | None = None) -> Node:
    out, left, right = of_rank("weight", weight, 3).shape
    if not same(input1.shape[-1], left) or not same(input2.shape[-1], right):
        raise TypeRuleError(
            f"inputs of {input1.shape[-1]} and {input2.shape[-1]} features, and the weight takes {left} and {right}"
        )
    lead = input1.shape[:-1]
    flat = reshaped(transpose(weight, (1, 0, 2)), (left, out * right))
    parts = reshaped(call("matmul", reshaped(input1, (product(lead), left)), flat), (*lead, out, right))
    wide = spread(reshaped(input2, (*input2.shape[:-1], 1, right)), parts.shape)
    y = call("sum", parts * wide, axis=(parts.rank - 1,))
    return y if bias is None else y + bias


bilinear = Function(
    "bilinear",
    write=_bilinear,
    samples=(Sample(("F[2,3,4]", "F[2,3,2]", "F[5,4,2]", "F[5]")), Sample(("F[4]", "F[2]", "F[3,4,2]"))),
    bad=(BadSample(("f32[2,3]", "f32[2,2]", "f32[5,4,2]"), match="takes 4 and 2"),),
    doc="input1 @ weight[o] @ input2 for each output, plus bias",
    source="torch.nn.functional.bilinear",
)
