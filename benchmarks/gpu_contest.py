"""One GPU case, run by gradc and by torch: the same inputs and cotangents for everybody, and how far each is from
float64.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

from .gpu_cases import GpuCase, normal, parsed

UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Half the distance from 1 to the next number."""
Results = dict[str, Any]


class Round:
    """A case at its sizes on a device: inputs, the cotangent, and who runs on them.

    :param device: of torch, ``cuda`` or ``cpu``.  :param target: of gradc.
    """

    def __init__(self, case: GpuCase, torch: Any, device: str, target: str, tiny: bool = False):
        self.case, self.torch, self.device, self.target, self.tiny = case, torch, device, target, tiny
        self.sizes = case.at(tiny)
        self.tensors = case.tensors(torch, tiny, device)
        self.graph = case.graph(tiny)
        self._dy: Any = None

    def cotangent(self, y: Any) -> Any:
        """Random, the same for everybody, in y's shape and dtype."""
        if self._dy is None:
            dtype = parsed(str(self.graph.outputs[0][1].type))[0]
            self._dy = normal(
                self.torch, self.torch.Generator(device=self.device).manual_seed(1), tuple(y.shape), dtype, self.device
            )
        return self._dy

    def own(self) -> dict[str, Any]:
        """The inputs, with a copy of the one that is written."""
        return {n: t.clone() if n == self.case.in_place else t for n, t in self.tensors.items()}

    # -- contestants ---------------------------------------------------------------------------------------------------

    def ours(self, **options: Any) -> tuple[Any, Callable[[], Results], Callable[[], Any]]:
        """(module, what gives every result, what is timed)."""
        import gradc

        module = gradc.compile(self.graph, wrt=self.case.wrt, target=self.target, **{**self.case.options, **options})
        if not self.case.wrt:
            name = self.graph.output_names[0]
            kept = self.own()
            out = None if self.case.in_place else {name: self.torch.empty_like(module(**kept))}
            return module, lambda: {name: module(**self.own())}, lambda: module(**kept, **({"out": out} if out else {}))
        y, residuals = module.forward(**self.tensors)
        dy = self.cotangent(y)
        first = module.backward(residuals, dy)
        out = {name: self.torch.empty_like(first[name]) for name in first}
        del first
        return (
            module,
            lambda: {**dict(module.backward(residuals, dy)), self.graph.output_names[0]: y},
            lambda: module.backward(residuals, dy, out=out),
        )

    def theirs(self, compiled: bool = False) -> tuple[Callable[[], Results], Callable[[], Any]]:
        """torch's (what gives every result, what is timed)."""
        torch, case = self.torch, self.case

        def forward(tensors: Mapping[str, Any]) -> Any:
            return case.theirs(torch, self.sizes, **tensors)

        run = torch.compile(forward, dynamic=False) if compiled else forward
        name = self.graph.output_names[0]
        if not case.wrt:
            kept = self.own()
            in_place = case.in_place and not compiled
            timed = (lambda: kept["x"].index_add_(0, kept["i"], kept["u"])) if in_place else lambda: run(kept)
            return lambda: {name: run(self.own())}, timed
        leaves = {n: t.detach().requires_grad_(n in case.wrt) for n, t in self.tensors.items()}
        y = run(leaves)
        dy, wanted = self.cotangent(y), [leaves[n] for n in case.wrt]

        def backward() -> Any:
            return torch.autograd.grad(y, wanted, dy, retain_graph=True)

        return lambda: {**dict(zip(case.wrt, backward(), strict=True)), name: y.detach()}, backward

    def exact(self) -> Results:
        """Every result in float64; where memory does not hold that, in float32."""
        for dtype in (self.torch.float64, self.torch.float32):
            try:
                return self._in(dtype)
            except self.torch.OutOfMemoryError:
                self.torch.cuda.empty_cache()
        raise MemoryError(f"{self.case.id}: not even float32 fits")

    def _in(self, dtype: Any) -> Results:
        torch, case = self.torch, self.case
        wide = {
            n: (t.to(dtype) if t.is_floating_point() else t).detach().requires_grad_(n in case.wrt)
            for n, t in self.tensors.items()
        }
        y = case.theirs(torch, self.sizes, **wide)
        results = {self.graph.output_names[0]: y.detach()}
        if case.wrt:
            dy = self.cotangent(y).to(dtype)
            results |= dict(zip(case.wrt, torch.autograd.grad(y, [wide[n] for n in case.wrt], dy), strict=True))
        return results


def distance(torch: Any, got: Any, exact: Any) -> float:
    """The largest difference over the largest exact value, a part at a time; inf where a NaN or a shape differs."""
    if tuple(got.shape) != tuple(exact.shape):
        return float("inf")
    mine, wanted = got.detach().reshape(-1), exact.reshape(-1)
    worst = largest = 0.0
    for start in range(0, wanted.numel(), 1 << 25):
        part = wanted[start : start + (1 << 25)].double()
        off = (mine[start : start + (1 << 25)].double() - part).abs().max().item()
        worst, largest = max(worst, off if off == off else float("inf")), max(largest, part.abs().max().item())
    return worst / (largest or 1.0)


def bits(torch: Any, result: Any) -> int:
    """A checksum of what a result's bytes are, the same for the same bits."""
    return zlib.crc32(result.detach().reshape(-1).contiguous().view(torch.uint8).cpu().numpy())


def judged(torch: Any, ours: Results, theirs: Results | None, exact: Results) -> dict[str, dict[str, Any]]:
    """Of each result our error, torch's own, and whether ours is at most the larger of 4 units and torch's."""
    verdicts: dict[str, dict[str, Any]] = {}
    for name, wanted in exact.items():
        unit = UNIT[str(ours[name].dtype).removeprefix("torch.")]
        mine = distance(torch, ours[name], wanted)
        other = distance(torch, theirs[name], wanted) if theirs is not None else None
        verdicts[name] = {
            "ours": mine,
            "torch": other,
            "units": mine / unit,
            "bits": bits(torch, ours[name]),
            "right": mine <= max(4 * unit, other or 0.0),
        }
    return verdicts


def widest_combine(module: Any, sizes: Mapping[str, int], device: Any) -> tuple[str, str, dict[str, float]]:
    """(buffer, the strategy that it has, what the model predicts of each in seconds) of the combine that moves most in
    a module's last part.
    """
    from gradc.passes.program.choose_reduction import decisions

    program = list(module.executables.values())[-1].program
    combines = [
        (buffer, pick, {e.strategy: e.seconds for e in table})
        for _, buffer, pick, table in decisions(program, {d: sizes[d] for d in program.dims}, device)
        if table
    ]
    return max(combines, key=lambda each: min(each[2].values()))
