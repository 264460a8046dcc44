"""Convolutions with windows of 3 by 3 by Winograd's minimal filtering F(2x2, 3x3): 16 multiplications for 36.

A tile of 4 by 4 elements of an image and a filter are each transformed, multiplied element by element, and added up
over the channels, a matrix product for each of the 16 elements; transformed back, a tile of 2 by 2 elements of the
response results.  The numbers of the transforms are 0, 1, -1 and 1/2: they add and subtract.

An error is near that of the sum as a share of the largest elements of the tile and the filter: unlike the sum's, it
does not become less where large elements meet weights of 0.  Where an element of an image, or of a filter, is not
finite, so is the response of every window that holds it, and no other, and the whole gradient of a filter of its
channel; it may be NaN where the sum is infinite, and so may be what has elements of more than a quarter of the largest
number.

Source: Winograd, Arithmetic Complexity of Computations, 1980; Lavin and Gray, Fast Algorithms for Convolutional Neural
Networks, 2016.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ...ir.dims import Size, ceildiv, evaluate, known_nonnegative, product, symbols
from ...ir.node import Node, call
from ...targets.cpu import OF_A_FILTER, OF_AN_ELEMENT
from ..rules import leading, reshaped
from ..shapes.movement import pad
from ..shapes.windows import windows
from .contract import Matrix, mode_product

TAPS, TILE, STEP = 3, 4, 2
"""Elements along an axis of a filter, of a tile of the image, and from a tile to the next."""
OF_IMAGE: Matrix = ((1.0, 0.0, -1.0, 0.0), (0.0, 1.0, 1.0, 0.0), (0.0, -1.0, 1.0, 0.0), (0.0, 1.0, 0.0, -1.0))
OF_FILTER: Matrix = ((1.0, 0.0, 0.0), (0.5, 0.5, 0.5), (0.5, -0.5, 0.5), (0.0, 0.0, 1.0))
TO_RESPONSE: Matrix = ((1.0, 1.0, 1.0, 0.0), (0.0, 1.0, -1.0, -1.0))
TURNED = (3, 1, 2, 0)
"""Where the elements of a transformed filter are found in the transform of the filter in the opposite order."""
IMAGES, ACROSS = 4, 16
"""Images of a batch, and responses along an axis, that a symbol counts as where no size is told for it: where there are
fewer it may take more time than the sum, and where there are more, leave some to be saved.
"""


def pays(channels: tuple[Size, Size], images: Size, response: tuple[Size, ...], dims: Mapping[str, int]) -> bool:
    """Whether a convolution with windows of 3 by 3 takes less time so.

    :param channels: of the image and of the response.  :param dims: sizes of symbols, as far as they are told.
    """

    def known(size: Size, otherwise: int) -> int:
        return evaluate(size, {name: dims.get(name, otherwise) for name in symbols(size)})

    a, b = (known(size, ACROSS) for size in channels)
    n, sizes = known(images, IMAGES), [known(size, ACROSS) for size in response]
    tiles = n * math.prod(ceildiv(size, STEP) for size in sizes)
    saved = (TAPS**2 * n * math.prod(sizes) - TILE**2 * tiles) * a * b
    return saved > OF_A_FILTER * a * b + OF_AN_ELEMENT * TILE**2 * tiles * (a + b)


def response_of(image: Node, weight: Node, response: tuple[Size, ...], before: tuple[Size, ...]) -> Node:
    """image [N, B, H, W], weight [A, B, 3, 3] -> [N, A, *response].  :param before: the padding before each axis."""
    return _filtered(image, _filters(weight), response, before, OF_IMAGE, TO_RESPONSE)


def image_of(response: Node, weight: Node, image: tuple[Size, ...], before: tuple[Size, ...]) -> Node:
    """response [N, A, H, W], weight [A, B, 3, 3] -> [N, B, *image], the adjoint: the response to the filters in the
    opposite order, of which the transforms are those of the filters.

    :param before: the padding of the response before each axis.
    """
    to_response = tuple(tuple(row[k] for k in TURNED) for row in TO_RESPONSE)
    filters = call("transpose", _filters(weight), (0, 2, 1))
    return _filtered(response, filters, image, before, tuple(OF_IMAGE[k] for k in TURNED), to_response)


def filter_of(response: Node, image: Node, before: tuple[Size, ...]) -> Node:
    """response [N, A, *response], image [N, B, H, W] -> [A, B, 3, 3], the gradient of response_of."""
    count = _count(response.shape[2:])
    left = _tiles(response, STEP, count, (0, 0), _transposed(TO_RESPONSE))
    products = call("matmul", left, _tiles(image, TILE, count, before, OF_IMAGE).T)
    outer, inner = response.shape[1], image.shape[1]
    each = _along(reshaped(products, (TILE, TILE, outer, inner)), _transposed(OF_FILTER), 0, 1)
    return call("transpose", each, (2, 3, 0, 1))


def _filtered(
    image: Node,
    filters: Node,
    response: tuple[Size, ...],
    before: tuple[Size, ...],
    of_image: Matrix,
    to_response: Matrix,
) -> Node:
    """image [N, B, H, W], filters [16, A, B] -> [N, A, *response]"""
    count, n, outer = _count(response), image.shape[0], filters.shape[1]
    products = call("matmul", filters, _tiles(image, TILE, count, before, of_image))
    each = reshaped(call("transpose", products, (1, 0, 2)), (outer, TILE, TILE, n, *count))
    parts = call("transpose", _along(each, to_response, 1, 2), (3, 0, 4, 1, 5, 2))
    return leading(reshaped(parts, (n, outer, *(STEP * c for c in count))), (n, outer, *response))


def _count(response: tuple[Size, ...]) -> tuple[Size, ...]:
    return tuple(ceildiv(n, STEP) for n in response)


def _tiles(x: Node, size: int, count: tuple[Size, ...], before: tuple[Size, ...], matrix: Matrix) -> Node:
    """[N, C, H, W] -> [16, C, N*tiles], each tile of ``size`` by ``size`` elements transformed.  In memory the 16
    elements of a channel lie beside one another: what is written side by side is seldom a multiple of a page apart.
    """
    covered = (STEP * (c - 1) + size for c in count)
    width = [(low, n - low - own) for n, low, own in zip(covered, before, x.shape[2:], strict=True)]
    if all(known_nonnegative(n) for ends in width for n in ends):  # a copy between zeros is read without masks
        x, before = _between_zeros(x, width), (0, 0)
    steps = {"step": (STEP, STEP), "dilation": (1, 1), "padding": before}
    cut = windows.plain(x, axis=(2, 3), size=(size, size), count=count, value=0, **steps)
    each = _along(call("transpose", cut, (1, 4, 5, 0, 2, 3)), matrix, 1, 2)
    return call("transpose", reshaped(each, (x.shape[1], TILE * TILE, x.shape[0] * product(count))), (1, 0, 2))


def _between_zeros(x: Node, width: list[tuple[Size, Size]]) -> Node:
    none = all(isinstance(n, int) and n == 0 for ends in width for n in ends)
    return x if none else pad.plain(x, pad_width=((0, 0), (0, 0), *width), value=0)


def _filters(weight: Node) -> Node:
    """[A, B, 3, 3] -> [16, A, B], transformed."""
    each = _along(call("transpose", weight, (0, 2, 3, 1)), OF_FILTER, 1, 2)
    return call("transpose", reshaped(each, (weight.shape[0], TILE * TILE, weight.shape[1])), (1, 0, 2))


def _along(x: Node, matrix: Matrix, *axes: int) -> Node:
    for axis in axes:
        x = mode_product.plain(x, matrix=matrix, axis=axis)
    return x


def _transposed(matrix: Matrix) -> Matrix:
    return tuple(zip(*matrix, strict=True))
