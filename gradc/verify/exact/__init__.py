"""Translation validation: what a graph means in exact algebra, so that a pass can be required to leave it *equal*.

Floats are residues modulo the prime p = 2^61 - 1, so that sums and products have no rounding and any order will do.

- A dyadic rational is itself. ``a / b`` is ``a * b^-1``; 1/0 and constants that are not finite are *tagged*: no
  operation removes the tag, so ``x * 0 -> 0`` is caught.
- Residues are ordered as signed numbers after a shift by 40 bits: small dyadic rationals (inputs, f32 constants,
  their sums and products) stand in their own order.
- Transcendental functions, floor, round and float -> int casts are hashes of their operands.
- Under ``BITS`` the results of f16, bf16 and f8 nodes, and casts to a type that is not known to hold the value, are
  hashes too; every value carries the types known to hold it, so rounding twice is rounding once. Under ``REAL``
  rounding changes nothing.
- Ints and bools are concrete and wrap. Where an int that was made from floats is an index, the slice of the graph
  behind it is evaluated in f64 on the same inputs.
- A composite means its decomposition, an op unknown here a hash of its operands.
- Pointwise ops on constants are folded (rounded) first; two graphs that differ so may still be equal without.
"""

from __future__ import annotations

from .compare import bindings, draw, equal
from .evaluate import evaluate
from .values import ExactArray

__all__ = ["ExactArray", "bindings", "draw", "equal", "evaluate"]
