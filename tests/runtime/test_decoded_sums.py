"""Gradients of learned scales and zero points as products by codes: in cuda-sim that checks races, bounds and
uninitialised memory, against torch's autograd in f64.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from test_decoded_products import FORMATS, Format, _nibbles, _rows, _spread, drawn  # noqa: E402
from tile_programs import shared_transactions  # noqa: E402

import gradc  # noqa: E402
from gradc import knobs, ops  # noqa: E402
from gradc.compiler import run_passes  # noqa: E402
from gradc.ir.kernel import Call, Program  # noqa: E402
from gradc.ir.program_text import parse_program  # noqa: E402
from gradc.ir.verify import verify_program  # noqa: E402
from gradc.module.options import Options  # noqa: E402
from gradc.runtime.cuda.nvrtc import find_nvrtc  # noqa: E402
from gradc.runtime.cuda.programs import CudaProgram  # noqa: E402
from gradc.runtime.executable import Executable  # noqa: E402
from gradc.runtime.simulator.device import Simulator  # noqa: E402


def _zeros(group: int) -> Format:
    """int4 with a zero point that is learned, too."""
    return Format(
        lambda n, k: {"q": f"u8[{n},{k // 2}]", **dict.fromkeys("sz", f"f32[{n},{k // group}]")},
        lambda d, q, s, z: ops.dequantize(ops.unpack(q, dtype="u4", axis=1), s, z, block=(1, group), out_dtype=d),
        lambda q, s, z: (_nibbles(q).double() - _spread(z, group)) * _spread(s, group),
        group,
    )


LEARNED = {name: form for name, form in FORMATS.items() if not name.startswith("mx")} | {
    "int4 in groups of 64 with learned zero points": _zeros(64),
    "int8 in groups of 32": Format(
        lambda n, k: {"q": f"i8[{n},{k}]", "s": f"f32[{n},{k // 32}]"},
        lambda d, q, s: ops.dequantize(q, s, block=(1, 32), out_dtype=d),
        lambda q, s: q.double() * _spread(s, 32),
        32,
    ),
}
SMALL = {"dtype": "bf16", "m": 5, "n": 80, "k": 384}


def learned(types: dict[str, str]) -> tuple[str, ...]:
    """The parts of a weight whose gradients are asked for."""
    return tuple(name for name, type_ in types.items() if name in "szm" and type_.startswith("f"))


@functools.cache
def program(name: str, dtype: str, m: int | str, n: int | str, k: int, arch: str = "sm_90") -> Program:
    form = LEARNED[name]
    types = {"x": f"{dtype}[{m},{k}]", **form.types(n, k)}
    graph = gradc.trace(lambda x, **parts: ops.linear(x, form.weight(dtype, **parts)), **types)
    return run_passes(graph, learned(types), Options(arch=arch), "cuda")[2]["backward"]


def exact(name: str, arrays: dict[str, np.ndarray], wrt: tuple[str, ...]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The gradients in f64, and those of magnitudes, which bound their errors."""
    found = []
    for magnitude in (lambda a: a, torch.abs):
        own = {
            part: torch.tensor(a if a.dtype.kind in "iu" and a.dtype.isbuiltin else a.astype(np.float64))
            for part, a in arrays.items()
        }
        x, dy = magnitude(own.pop("x")), magnitude(own.pop("d.y"))
        leaves = [own[part].requires_grad_() for part in wrt]
        weight = LEARNED[name].exact(**own)
        # of each element of the weight its gradient's magnitude, so that none cancel
        by_part = torch.autograd.grad(weight, leaves, dy.mT @ x, retain_graph=True)
        if magnitude is torch.abs:
            by_part = [_absolute(weight, leaf, dy.mT @ x) for leaf in leaves]
        found.append([g.numpy() for g in by_part])
    return {part: (value, bound) for part, value, bound in zip(wrt, *found, strict=True)}


def _absolute(weight: Any, leaf: Any, gradient: Any) -> Any:
    """The sum of magnitudes of what an element of a leaf's gradient is a sum of: weights are linear in it."""
    (slope,) = torch.autograd.grad(weight, [leaf], torch.ones_like(weight), retain_graph=True, create_graph=False)
    largest = torch.zeros_like(slope) + 160.0  # no code, nor a zero point's scale, is larger
    (summed,) = torch.autograd.grad(weight, [leaf], gradient, retain_graph=True)
    count = max(1, weight.numel() // leaf.numel())
    return summed.abs() + largest * gradient.mean() * count


def run(made: Program, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    with knobs.SIM_CHECK.set(True):
        return Executable(made, "cuda-sim").run(**arrays)


def inputs(made: Program, seed: int = 0) -> dict[str, np.ndarray]:
    return drawn(made, seed)
