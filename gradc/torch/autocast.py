"""What autocast casts inside of an op that a normal form keeps whole.

Autocast is a matter of dispatch: an overload that it has a rule for gets its operands cast.  A composite without a rule
of its own (``cross_entropy_loss`` on CUDA, ``einsum`` on the CPU) is decomposed by eager mode, and its parts are cast.
Kept whole it would be computed in another dtype than eager mode computes it in.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..runtime.torch_private import composite_kernel, has_kernel, private
from .sizes import typical

FakeTensorMode: Any = private("FakeTensorMode")
TorchDispatchMode: Any = private("TorchDispatchMode")
disable_current_modes = private("_disable_current_modes")
tree_leaves, tree_map_only = private("tree_leaves"), private("tree_map_only")

Dtypes = Mapping[str, torch.dtype]
"""The types of devices on which autocast is enabled, and what it casts to."""

Casts = dict[int, torch.dtype]
"""What some operands of a call are cast to, by their places among its tensors."""

_found: dict[Any, Casts | None] = {}


def enabled() -> Dtypes:
    """What the caller has enabled."""
    return {device: torch.get_autocast_dtype(device) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)}


@contextlib.contextmanager
def enabling(dtypes: Dtypes) -> Iterator[None]:
    """Enabled again where a dispatch mode finds it switched off, on devices that torch was not built for, too."""
    before = {device: (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in dtypes}
    try:
        for device, dtype in dtypes.items():
            torch.set_autocast_enabled(device, True)
            torch.set_autocast_dtype(device, dtype)
        yield
    finally:
        for device, (on, dtype) in before.items():
            torch.set_autocast_enabled(device, on)
            torch.set_autocast_dtype(device, dtype)


def casts_within(dtypes: Dtypes, function: Any, args: Any, kwargs: Any) -> Casts | None:
    """The operands to cast so that a call of a kept composite gives what eager mode gives under autocast; None where
    only its parts, called in its place, do.

    Where eager mode casts values that the composite makes of its operands, its operands are cast if the results then
    have the same dtypes: it is computed in the wider dtype throughout.
    """
    if not _decomposed(dtypes, function, args, kwargs):
        return {}
    leaves = [_described(x) for x in tree_leaves((args, kwargs))]
    key = (function, *sorted(dtypes.items(), key=str), len(args), *kwargs, *leaves)
    if key not in _found:
        _found[key] = _traced(dtypes, function, args, kwargs)
    return _found[key]


def cast(casts: Casts, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The operands, cast."""
    places = iter(range(len(tree_leaves((args, kwargs)))))

    def one(x: torch.Tensor) -> torch.Tensor:
        place = next(places)
        return torch.ops.aten._to_copy.default(x, dtype=casts[place]) if place in casts else x

    made: tuple[Any, Any] = tree_map_only(torch.Tensor, one, (args, kwargs))
    return made


def _decomposed(dtypes: Dtypes, function: Any, args: Any, kwargs: Any) -> bool:
    """Whether eager mode decomposes a call where it looks for autocast's rules: it has none for the call itself."""
    if not dtypes or not has_kernel(function, "CompositeImplicitAutograd"):
        return False
    active = {x.device.type for x in _tensors(args, kwargs)} & dtypes.keys()
    return bool(active) and not any(has_kernel(function, f"Autocast{device.upper()}") for device in active)


def _tensors(*values: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]


def _float_dtypes(*values: Any) -> list[torch.dtype]:
    return [x.dtype for x in _tensors(*values) if x.is_floating_point()]


def _described(x: Any) -> Any:
    """An argument as far as it decides what a composite is made of."""
    if isinstance(x, torch.Tensor):
        return x.dtype, x.device.type, tuple(typical(n) for n in x.shape)
    return type(x), str(x)


class _Decomposing(TorchDispatchMode):  # type: ignore[misc]
    """Makes composites their parts, as eager mode does, and notes the casts of floats that happen.

    :ivar casts: (what is cast, to what); a cast is a call of whose float results one has a dtype of its own.
    """

    def __init__(self, dtypes: Dtypes):
        super().__init__()
        self.dtypes = dtypes
        self.casts: list[tuple[torch.Tensor, torch.dtype]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _decomposed(self.dtypes, function, args, kwargs):
            with enabling(self.dtypes), self:
                return composite_kernel(function, *args, **kwargs)
        made = function(*args, **kwargs)
        for dtype in set(_float_dtypes(made)) - set(_float_dtypes(args, kwargs)):
            self.casts += [(x, dtype) for x in _tensors(args, kwargs) if x.is_floating_point()]
        return made


def _traced(dtypes: Dtypes, function: Any, args: Any, kwargs: Any) -> Casts | None:
    """:func:`casts_within`, of a call on tensors without values."""
    with disable_current_modes(), FakeTensorMode(), torch.no_grad():

        def fake(x: torch.Tensor) -> torch.Tensor:
            sizes, steps = ([typical(n) for n in each] for each in (x.shape, x.stride()))
            return torch.empty_strided(sizes, steps, dtype=x.dtype, device=x.device)

        args, kwargs = tree_map_only(torch.SymInt, typical, tree_map_only(torch.Tensor, fake, (args, kwargs)))
        with enabling(dtypes), _Decomposing(dtypes) as decomposing:
            wanted = _float_dtypes(composite_kernel(function, *args, **kwargs))
        if not decomposing.casts:
            return {}
        operands = _tensors(args, kwargs)
        place_of = {id(x): place for place, x in enumerate(operands)}
        candidates: list[Casts] = [{}]
        if all(id(x) in place_of for x, _ in decomposing.casts):
            candidates.insert(0, {place_of[id(x)]: dtype for x, dtype in decomposing.casts})
        if len(set(wanted)) == 1:
            candidates.append({i: wanted[0] for i, x in enumerate(operands) if x.is_floating_point()})
        for each in candidates:
            operands_cast, named = cast(each, args, kwargs)
            if _float_dtypes(function(*operands_cast, **named)) == wanted:
                return each
    return None
