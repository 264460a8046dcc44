"""A module as a JAX function with a gradient of its own (``jax.custom_vjp``), computed on the host
(``jax.pure_callback``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..api import Module
from ..errors import InvalidProblem, TypeRuleError, Unsupported
from ..interp import bind_dims
from ..ir.types import Type


def call(module: Module, dims: Mapping[str, int] | None = None) -> Callable[..., Any]:
    """The function that the module computes, of arrays by name: ``f(x=x, w=w)``, or of pytrees of dicts where the
    module's parameters are nested.  It gives an array, or a dict of several.

    ``jax.jit``, ``jax.grad``, ``jax.vjp`` and ``jax.vmap`` (one element after the other) take it.  Every new shape is
    traced by JAX; the module is the same.

    :param dims: sizes that no input binds.
    :raises Unsupported: the module is for a GPU, or has gradients that JAX has no form for: sparse ones, ones of
        integers.
    :raises InvalidProblem: when it is traced: inputs that do not fit, or are differentiated by and are not in ``wrt``.
    """
    if module.target == "cuda":
        raise Unsupported("gradc.jax.call runs on the host: compile the module for target='cpu'")
    if module.options.sparse:
        raise Unsupported(f"JAX has no sparse gradients: compile without sparse={module.options.sparse!r}")
    discrete = [name for name in module.wrt if not module.graph.input(name).dtype.is_float]
    if discrete:
        raise Unsupported(f"JAX has no gradient of integers, and wrt names {discrete[0]!r}")
    return _Function(module, dict(dims or {}))


class _Function:
    """What :func:`call` gives."""

    def __init__(self, module: Module, dims: dict[str, int]):
        self.module, self.dims = module, dims
        self.__name__ = self.__qualname__ = module.graph.name
        self.__doc__ = f"The gradc module {module.graph.name}({', '.join(module.graph.input_names)})."
        # JAX compares functions by identity: one for all calls
        self._call = jax.custom_vjp(self._value)
        self._call.defvjp(self._forward, self._backward, symbolic_zeros=True)

    def __call__(self, inputs: Mapping[str, Any] | None = None, /, **more: Any) -> Any:
        flat = {name: jnp.asarray(value) for name, value in self.module.flat(inputs, more).items()}
        given = {name: jnp.asarray(array) for name, array in self.module.graph.bound_arrays.items() if name not in flat}
        self._sizes({**given, **flat})
        outputs = self._call({**given, **flat})
        return next(iter(outputs.values())) if len(outputs) == 1 else outputs

    # -- types ---------------------------------------------------------------------------------------------------------

    def _sizes(self, inputs: Mapping[str, Any]) -> dict[str, int]:
        """The values of the dims; errors name the input before anything is run."""
        types = self.module.forward.inputs
        missing = [name for name in types if name not in inputs]
        unknown = [name for name in inputs if name not in self.module.graph.input_names]
        if missing or unknown:
            what = f"needs the input {missing[0]!r}" if missing else f"has no input {unknown[0]!r}"
            raise InvalidProblem(f"{self.__name__} {what}; it has {', '.join(self.module.graph.input_names)}")
        for name, type_ in types.items():
            if not _fits(inputs[name].dtype, type_):
                raise TypeRuleError(f"{name} is {type_}, got an array of {inputs[name].dtype}")
        bound = bind_dims(types, {n: inputs[n].shape for n in types}, {**self.module.forward.fixed_dims, **self.dims})
        unbound = [d for d in self.module.forward.program.dims if d not in bound]
        if unbound:
            raise InvalidProblem(f"{self.__name__}: nothing binds the dim {unbound[0]}; give call(module, dims=...)")
        return bound

    def _shapes(
        self, types: Mapping[str, Type], sizes: Mapping[str, int], what: str
    ) -> dict[str, jax.ShapeDtypeStruct]:
        for name, type_ in types.items():
            if type_.dtype.np.itemsize > 4 and not jax.config.jax_enable_x64:
                raise Unsupported(
                    f"the {what} {name} is {type_.dtype}, and JAX has 32 bits at most unless"
                    " jax.config.update('jax_enable_x64', True) is called first"
                )
        return {name: jax.ShapeDtypeStruct(type_.concrete(sizes), type_.dtype.np) for name, type_ in types.items()}

    # -- the three functions of custom_vjp -----------------------------------------------------------------------------

    def _value(self, inputs: dict[str, Any]) -> dict[str, Any]:
        shapes = self._shapes(self._outputs(), self._sizes(inputs), "output")

        def run(given: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
            results, _ = self.module.forward.run_bound(self._host(given), None, False, None, None, self.dims)
            return {name: np.asarray(results[name]) for name in shapes}

        return self._callback(run, shapes, inputs)

    def _forward(self, inputs: dict[str, Any]) -> tuple[dict[str, Any], tuple[Any, ...]]:
        wrong = [n for n, primal in inputs.items() if primal.perturbed and n not in self.module.wrt and _real(primal)]
        if wrong:
            raise InvalidProblem(
                f"{self.__name__} is differentiated by {wrong[0]!r}, and was compiled with"
                f" wrt={list(self.module.wrt)}: add it there, or jax.lax.stop_gradient around it"
            )
        values = {name: primal.value for name, primal in inputs.items()}
        sizes = self._sizes(values)
        outputs = self._shapes(self._outputs(), sizes, "output")
        kept = {name: type_ for name, type_ in self.module.forward.outputs.items() if name not in outputs}
        shapes = {**outputs, **{name: _bytes(type_, sizes) for name, type_ in kept.items()}}

        def run(given: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
            results, _ = self.module.forward.run_bound(self._host(given), None, False, None, None, self.dims)
            plain = {name: np.asarray(array) for name, array in results.items()}
            return {n: plain[n] if n in outputs else _as_bytes(plain[n]) for n in shapes}

        results = self._callback(run, shapes, values)
        borrowed = {r.output for r in self.module.residuals if r.output}
        residuals = {name: results[name] for name in shapes if name in kept or name in borrowed}
        return {name: results[name] for name in outputs}, (values, residuals)

    def _backward(self, kept: tuple[Any, ...], cotangents: dict[str, Any]) -> tuple[dict[str, Any]]:
        inputs, residuals = kept
        sizes = self._sizes(inputs)
        gradients = {name: self.module.graph.input(name).type for name in self.module.wrt}
        shapes = self._shapes(gradients, sizes, "gradient of")
        moving = {
            name: cotangent
            for name, cotangent in cotangents.items()
            if not isinstance(cotangent, jax.custom_derivatives.SymbolicZero) and cotangent.dtype != jax.dtypes.float0
        }
        if not moving:
            return (dict.fromkeys(inputs),)
        types = self.module.forward.outputs

        def run(
            given: Mapping[str, Any], residual: Mapping[str, Any], along: Mapping[str, Any]
        ) -> dict[str, np.ndarray[Any, Any]]:
            results = {
                name: np.asarray(array)
                if name in self._outputs()
                else _from_bytes(np.asarray(array), types[name].dtype.np, types[name].concrete(sizes))
                for name, array in residual.items()
            }
            own = self.module.forward.kept(self._host(given), results, sizes)
            floats = [n for n, node in self.module.graph.outputs if node.dtype.is_float]
            given_along: dict[str, Any] = {n: np.asarray(along[n]) if n in along else None for n in floats}
            found = self.module.backward(own, **given_along)
            return {name: np.asarray(found[name]) for name in shapes}

        found = self._callback(run, shapes, inputs, residuals, moving)
        return ({name: found.get(name) for name in inputs},)

    def _outputs(self) -> dict[str, Type]:
        return {name: node.type for name, node in self.module.graph.outputs}

    def _host(self, inputs: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
        """The arrays of a callback, integers of 32 bits widened where JAX has no wider ones."""
        types = self.module.forward.inputs
        return {name: np.asarray(array, types[name].dtype.np) for name, array in inputs.items() if name in types}

    @staticmethod
    def _callback(run: Callable[..., Any], shapes: Any, *args: Any) -> Any:
        return jax.pure_callback(run, shapes, *args, vmap_method="sequential")


def _fits(given: Any, type_: Type) -> bool:
    """Whether an array of JAX's is of this dtype, or holds its values in 32 bits because JAX was told to."""
    wanted = type_.dtype.np
    narrow = not jax.config.jax_enable_x64 and type_.dtype.is_integer and np.dtype(wanted).itemsize == 8
    return given == wanted or (narrow and np.dtype(given) == np.dtype(f"{np.dtype(wanted).kind}4"))


def _real(primal: Any) -> bool:
    return jnp.issubdtype(primal.value.dtype, jnp.floating)


def _bytes(type_: Type, sizes: Mapping[str, int]) -> jax.ShapeDtypeStruct:
    """A residual as JAX keeps it: its bytes, whatever its dtype, which JAX may not have."""
    return jax.ShapeDtypeStruct((int(np.prod(type_.concrete(sizes))) * type_.dtype.np.itemsize,), np.dtype(np.uint8))


def _as_bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _from_bytes(data: np.ndarray[Any, Any], dtype: Any, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(data).view(dtype).reshape(shape)
