"""gradc beside JAX: a module as a function that jit, grad and vmap take; docs/jax.md.

Imported on its own: ``import gradc`` does without jax.
"""

from __future__ import annotations

from .function import call

__all__ = ["call"]
