"""Translation validation: evaluates graphs in exact algebra, so that graphs can be required to be *equal* before and
after a pass.

Floats are residues modulo the prime p = 2^61 - 1: sums and products are exact, in any order.

- Dyadic rationals are represented exactly. ``a / b`` is ``a * b^-1``; 1/0 and non-finite constants are *tagged*; no
  operation removes a tag, so that ``x * 0 -> 0`` is detected as wrong.
- Residues are compared as signed numbers after a shift by 40 bits, which preserves the order of small dyadic rationals
  (inputs, f32 constants, their sums and products).
- Transcendental functions, floor, round and float -> int casts are hashes of their operands.
- Under ``BITS``, results of f16, bf16 and f8 nodes, and casts to a type that is not known to hold the value, are hashes
  too; every value carries the types known to hold it, so that rounding twice equals rounding once. Under ``REAL``,
  rounding is the identity.
- Ints and bools are concrete and wrap. If an int computed from floats is used as an index, its backward slice is
  evaluated in f64 on the same inputs.
- A composite is evaluated by its decomposition, an op unknown here is a hash of its operands.
- Pointwise ops on constants are first folded (rounded); graphs that differ then may still be equal without folding.
"""

from __future__ import annotations

from .compare import bindings, draw, equal, require_declared
from .evaluate import evaluate
from .values import ExactArray

__all__ = ["ExactArray", "bindings", "draw", "equal", "evaluate", "require_declared"]
