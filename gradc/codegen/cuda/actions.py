"""What a call on a GPU is made of: starts of functions and matrix products, over parts of memory that are not bound to
addresses yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal, Protocol

import numpy as np

from ...ir.epilogue import PLAIN, Epilogue
from ...ir.kernel import Call
from ...ir.statement import Operand
from ...process.forks import cached_property
from ..text import enumerators

WORKSPACE, FLAG = ".workspace", ".flag"
"""Roots of memory that no buffer names."""
FLAG_NOTICE, FLAG_WORDS = (enumerators("cuda/program.h")[f"GRADC_FLAG_{name}"] for name in ("NOTICE", "WORDS"))
"""The flag's word with the address of the host's, and its words before the first check's: what went wrong, the value,
the bound, and that.
"""
ALIGN = enumerators("cuda/program.h")["GRADC_ALIGN"]
"""Bytes that the beginnings of a workspace's arrays are multiples of."""
U8, U32, U64 = (np.dtype(t) for t in (np.uint8, np.uint32, np.uint64))


def align(count: int) -> int:
    return -(-count // ALIGN) * ALIGN


def chunks(count: int, each: int) -> int:
    return -(-count // each)


@dataclass(frozen=True)
class Part:
    """A part of memory: ``count`` elements from byte ``start`` of a root on, which is a buffer's name, WORKSPACE or
    FLAG.
    """

    root: str
    start: int
    count: int
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize


@dataclass(frozen=True)
class Address(Part):
    """Where a part begins, as a number: a function is given it and does not access the part."""


@dataclass(frozen=True)
class Launch:
    """A function's start.

    :param args: in order; 64-bit integers beside parts.  :param written: places of the parts that may be written.
    :param wide: whether it needs offsets of 64 bits: the same function of the text compiled for them.
    :param shared: bytes of dynamic shared memory.
    :param batch: words of its first parameter, which holds so many of the arguments: those of the members of a batch.
    """

    function: str
    blocks: int
    threads: int
    args: tuple[Part | int, ...]
    written: tuple[int, ...]
    wide: bool = False
    shared: int = 0
    batch: int = 0


@dataclass(frozen=True)
class Strided:
    """A matrix product's operand: a part seen with a shape and strides in elements (0: repeated), from an element of it
    on.
    """

    part: Part
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int = 0

    @property
    def skipped(self) -> int:
        """Bytes before its first element."""
        return self.start * self.part.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of its elements, were they packed."""
        return prod(self.shape) * self.part.dtype.itemsize

    def between(self, axis: int, start: int, end: int) -> Strided:
        """Its elements from ``start`` to ``end`` along an axis."""
        shape = list(self.shape)
        shape[axis] = end - start
        return replace(self, shape=tuple(shape), start=self.start + start * self.strides[axis])

    @property
    def trimmed(self) -> Strided:
        """The same of a part that is from its first element to its last."""
        last = sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))
        count = 0 if 0 in self.shape else 1 + last
        part = replace(self.part, start=self.part.start + self.skipped, count=count)
        return Strided(part, self.shape, self.strides)


@dataclass(frozen=True)
class Product:
    """``out[..., m, n] = a[..., m, k] @ b[..., k, n]``; elements of a row of out are neighbours.

    :param site: how many checks come before it: a result is kept from outputs where one of them has found something.
    :param add: whether it is added to what is there.
    :param epilogue: what is done to it before it is rounded; its matrix lies as ``out`` does, without gaps.
    """

    a: Strided
    b: Strided
    out: Strided
    site: int
    add: bool = False
    epilogue: Epilogue[Part] = PLAIN

    @property
    def written(self) -> tuple[Part, ...]:
        """All that it writes."""
        return self.out.part, *self.epilogue.writes


@dataclass(frozen=True)
class Side:
    """An operand as column-major memory.

    :param transposed: rows lie together, not columns.
    :param leading: elements from one to the next.
    :param step: to the next of the batch.
    """

    transposed: bool
    leading: int
    step: int


BatchAxis = tuple[int, tuple[int, int, int]]
"""Of a batch: how many, and the strides in a, b and out."""


@dataclass(frozen=True)
class Library:
    """What a library (cuBLAS) is asked: ``batch`` products of m x k and k x n, all row-major for us, for each position
    along the axes ``outer`` a call.

    :param product: the same as one product.
    :param pointers: where the addresses of all ``matrices`` of a, of b and of out are, for one call in place of these.
    :param otherwise: the same by a plain product and launches after it, where the library has no kernel with its
        epilogue.
    """

    product: Product
    m: int
    n: int
    k: int
    batch: int
    a: Side
    b: Side
    out: Side
    outer: tuple[BatchAxis, ...] = ()
    pointers: Part | None = None
    otherwise: tuple[Launch | Library, ...] = ()

    @property
    def matrices(self) -> int:
        """How many products there are in all."""
        return self.batch * prod(count for count, _ in self.outer)

    @cached_property
    def calls(self) -> list[tuple[int, int, int]]:
        """For each call, the elements of a, b and out before its first ones."""
        counts, steps = [count for count, _ in self.outer], [strides for _, strides in self.outer]
        return [
            (sum(i * s[0] for i, s in at), sum(i * s[1] for i, s in at), sum(i * s[2] for i, s in at))
            for at in (list(zip(place, steps, strict=True)) for place in np.ndindex(*counts))
        ]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The result's."""
        return self.product.out.part.dtype

    @property
    def read(self) -> np.dtype[Any]:
        """The operands', the result's or a narrower one."""
        return self.product.a.part.dtype


@dataclass(frozen=True)
class Convolution:
    """What a library of convolutions (cuDNN) is asked: one of the three maps between an image ``[N, G*B, *image]``, a
    filter ``[G*A, B, *filter]`` and a response ``[N, G*A, *response]``, each of which lies packed, channels first or
    last.

    :param op: the library op that the call names, :param computes: and which of the three it gives.
    :param after: the padding behind the last element, with which the response has the size that it has.
    :param site: as :class:`Product` has it.
    """

    op: str
    computes: Literal["image", "filter", "response"]
    image: Strided
    filter: Strided
    response: Strided
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    groups: int
    site: int

    @property
    def out(self) -> Strided:
        parts: dict[str, Strided] = {"image": self.image, "filter": self.filter, "response": self.response}
        return parts[self.computes]

    @property
    def operands(self) -> tuple[Strided, Strided]:
        """What it reads, in the op's order."""
        if self.computes == "response":
            return self.image, self.filter
        return self.response, self.filter if self.computes == "image" else self.image

    @property
    def written(self) -> tuple[Part, ...]:
        return (self.out.part,)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.out.part.dtype

    @property
    def products(self) -> int:
        """Multiplications of one element by another, with those by padding."""
        return prod(self.response.shape) * prod(self.filter.shape[1:])

    @property
    def workspace(self) -> int:
        """Bytes that the library may work in: each of the three once more, in the order of axes that its kernels have,
        and partial sums.
        """
        copies = sum(align(x.nbytes) for x in (self.image, self.filter, self.response))
        return copies + CONVOLUTION_WORKSPACE

    @property
    def attrs(self) -> dict[str, Any]:
        """The op's attributes."""
        pairs = tuple(zip(self.before, self.after, strict=True))
        how = {"stride": self.stride, "padding": pairs, "dilation": self.dilation, "groups": self.groups}
        return {"size": self.out.shape[2:], **how}


CONVOLUTION_WORKSPACE = 32 << 20
"""Bytes for the partial sums of a convolution: what cuBLAS asks for from sm_90 on."""
Action = Launch | Library | Convolution


class Plan(Protocol):
    """What a library call knows of the launch plan that it is part of."""

    @property
    def flag(self) -> Part: ...

    @property
    def scratch_start(self) -> int: ...

    @property
    def own_products(self) -> bool: ...

    def part(self, name: str) -> Part: ...

    def space(self, start: int, count: int, dtype: np.dtype[Any]) -> Part: ...

    def site(self, number: int) -> int: ...

    def view(self, item: Call, operand: Operand, axes: Sequence[str]) -> Strided: ...

    def result(self, item: Call) -> Strided: ...
