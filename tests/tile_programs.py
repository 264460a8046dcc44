"""Programs whose loops are kernels on tensor cores, and what they compute in NumPy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from column_blocking import softmax

import gradc
from gradc import ops
from gradc.analysis.tiles import refusal, tiled
from gradc.codegen.cuda.cached_text import anonymous
from gradc.compiler import run_passes
from gradc.ir.kernel import Loop, Program, Tile
from gradc.ir.program_text import parse_program
from gradc.ir.verify import verify_program
from gradc.module.options import Options
from gradc.passes.column_blocking.carry_sums import carry_sums
from gradc.passes.column_blocking.split_loops import split_loops
from gradc.runtime.cuda.programs import CudaProgram
from gradc.runtime.executable import Executable
from gradc.runtime.simulator.compile import SharedTransactions, compile_sim
from gradc.runtime.simulator.device import Simulator
from gradc.targets.devices import gpu_of

DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}


@dataclass(frozen=True, eq=False)
class Attention:
    """A function of q, k, v and more, and its weights in NumPy before the softmax, of scores that are scaled already.

    :param shapes: of q, k and v.  :param more: the types of its other inputs.
    """

    function: Callable[..., Any]
    masked: Callable[..., Any]
    shapes: tuple[str, str, str] = ("B,H,S,D",) * 3
    more: Mapping[str, str] = ()  # type: ignore[assignment]
    groups: int = 1
    tokens_first: bool = False

    def types(self, features: int) -> dict[str, str]:
        own = {n: f"bf16[{s.replace('D', str(features))}]" for n, s in zip("qkv", self.shapes, strict=True)}
        return {**own, **dict(self.more)}

    @functools.cache  # noqa: B019
    def blocked(self, features: int, wrt: tuple[str, ...] = ()) -> dict[str, Program]:
        """Before its columns come in blocks."""
        return run_passes(gradc.trace(self.function, **self.types(features)), wrt, Options(), "cpu")[2]

    @functools.cache  # noqa: B019
    def programs(self, features: int, dtype: str = "bf16", wrt: tuple[str, ...] = ()) -> dict[str, Program]:
        return {name: with_tiles(program, dtype) for name, program in self.blocked(features, wrt).items()}

    def oracle(self, q, k, v, rounded: str = "", **more):
        """The result; with ``rounded`` the weights are rounded to that dtype before their product, and the result."""
        if self.tokens_first:
            q, k, v = (np.swapaxes(x, 1, 2) for x in (q, k, v))
        k, v = (np.repeat(x, self.groups, 1) for x in (k, v))
        s = self.masked(np.einsum("bhmk,bhnk->bhmn", q, k) / np.sqrt(q.shape[-1]), **more)
        if not rounded:
            y = softmax(s) @ v
        else:
            top = s.max(-1, keepdims=True, initial=-np.inf)
            each = np.exp(s - np.where(top == -np.inf, 0, top))
            total = each.sum(-1, keepdims=True)
            y = each.astype(DTYPES[rounded]).astype(np.float64) @ v / np.where(total == 0, 1, total)
            y = y.astype(DTYPES[rounded]).astype(np.float64)
        return np.swapaxes(y, 1, 2) if self.tokens_first else y


def with_tiles(program: Program, dtype: str = "bf16", device: str = "sm_90", **sizes: Any) -> Program:
    """The program with its loops over wide rows as tiles: those that ``choose`` decides, or with these sizes.

    :param dtype: for bf16.
    """
    program = parse_program(str(program).replace("bf16", dtype))
    program = carry_sums(split_loops(program, tile=Tile("mma", 4, 2)), tile=Tile("mma", 4, 2))

    def made(step):
        if not isinstance(step, Loop):
            return step
        if sizes:
            sweeps = tuple(replace(s, by=sizes["columns"]) for s in step.sweeps)
            return replace(step, by=sizes["rows"], sweeps=sweeps, tile=sizes["tile"])
        assert refusal(step, program, gpu_of(device)) is None
        return tiled(step, program, gpu_of(device))[0]

    program = replace(program, steps=tuple(map(made, program.steps)))
    verify_program(program)
    return program


def _positions(rows, columns):
    at = ops.iota(shape=(rows, columns))
    return at, ops.iota(shape=(rows, columns), axis=1)


def _causal(s):
    return np.where(np.triu(np.ones(s.shape[-2:], bool), 1), -np.inf, s)


def _window(q, k, v):
    row, column = _positions(q.shape[-2], k.shape[-2])
    return ops.scaled_dot_product_attention(q, k, v, attn_mask=(column <= row) & (column > row - 20))


def _window_wanted(s):
    row, column = np.indices(s.shape[-2:])
    return np.where((column <= row) & (column > row - 20), s, -np.inf)


def _lengths(q, k, v, lengths):
    shape = (lengths.shape[0], 1, 1, k.shape[-2])
    columns = ops.iota(shape=shape, axis=3)
    mask = columns < ops.broadcast_to(ops.reshape(lengths, (lengths.shape[0], 1, 1, 1)), shape)
    return ops.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _lengths_wanted(s, lengths):
    return np.where(np.arange(s.shape[-1]) >= lengths[:, None, None, None], -np.inf, s)


def _capped(q, k, v):
    s = ops.tanh((q @ k.T).astype("f32") * np.float32(0.25 / np.sqrt(q.shape[-1]))) * 4.0
    return (ops.softmax(s, -1).astype("bf16") @ v).astype("bf16")


def _alibi(q, k, v):
    row, column = _positions(q.shape[-2], k.shape[-2])
    bias = (column - row).astype("f32") * 0.125
    return ops.scaled_dot_product_attention(q, k, v, attn_mask=ops.where(column <= row, bias, float("-inf")))


def _alibi_wanted(s):
    row, column = np.indices(s.shape[-2:])
    return np.where(column <= row, s + 0.125 * (column - row), -np.inf)


CASES = {
    "plain": Attention(
        lambda q, k, v: ops.scaled_dot_product_attention(q, k, v), lambda s: s, ("B,H,S,D", "B,H,T,D", "B,H,T,D")
    ),
    "causal": Attention(lambda q, k, v: ops.scaled_dot_product_attention(q, k, v, is_causal=True), _causal),
    "sliding window": Attention(_window, _window_wanted),
    "key lengths": Attention(_lengths, _lengths_wanted, more={"lengths": "i64[B]"}),
    "bias of keys": Attention(
        lambda q, k, v, bias: ops.scaled_dot_product_attention(q, k, v, attn_mask=bias),
        lambda s, bias: s + bias,
        more={"bias": "f32[B,1,1,S]"},
    ),
    "bias of heads": Attention(
        lambda q, k, v, bias: ops.scaled_dot_product_attention(q, k, v, attn_mask=bias),
        lambda s, bias: s + bias,
        more={"bias": "f32[B,H,S,S]"},
    ),
    "softcap": Attention(_capped, lambda s: 4 * np.tanh(s / 4)),
    "ALiBi": Attention(_alibi, _alibi_wanted),
    "grouped queries": Attention(
        lambda q, k, v: ops.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        _causal,
        ("B,6,S,D", "B,2,S,D", "B,2,S,D"),
        groups=3,
    ),
    "tokens before heads": Attention(
        lambda q, k, v: ops.transpose(
            ops.scaled_dot_product_attention(*(ops.transpose(x, (0, 2, 1, 3)) for x in (q, k, v)), is_causal=True),
            (0, 2, 1, 3),
        ),
        _causal,
        ("B,S,H,D",) * 3,
        tokens_first=True,
    ),
}


def drawn(case: Attention, features: int, dims: Mapping[str, int], seed: int, dtype: str = "bf16") -> dict[str, Any]:
    """Arrays for a case: half of a bias is -inf, whole rows of some; lengths may be beyond all columns."""
    rng = np.random.default_rng(seed)
    arrays: dict[str, Any] = {}
    for name, text in case.types(features).items():
        _, _, sizes = text.rstrip("]").partition("[")
        shape = [dims[s] if s in dims else int(s) for s in sizes.split(",")]
        if name == "lengths":
            arrays[name] = rng.choice([0, 1, dims["S"] // 2, dims["S"], 2**40, -(2**62)], shape)
        elif name == "bias":
            arrays[name] = rng.standard_normal(shape).astype(np.float32)
            arrays[name][rng.random(shape) < 0.5] = -np.inf
            arrays[name][:1] = -np.inf
        else:
            arrays[name] = (2 * rng.standard_normal(shape)).astype(DTYPES[dtype])
    return arrays


def shared_transactions(program: Program, dims: Mapping[str, int]) -> list[SharedTransactions]:
    """Of each loop's launch over numbers of any bits."""
    plan = CudaProgram(program, Simulator).bind(dims)
    simulator = compile_sim(Executable(program, "cuda-sim").source, check=True)
    rng = np.random.default_rng(0)
    started = zip(plan.runs, plan.started, strict=True)
    found = []
    for launch in (launch for run, own in started for launch in own if isinstance(run.step, Loop)):
        args = [rng.integers(0, 16000, a.count).astype(a.dtype) if hasattr(a, "count") else a for a in launch.args]
        args[-3] = np.full(8, 2**64 - 1, np.uint64)
        shape = ((launch.blocks, 1, 1), (launch.threads, 1, 1), launch.shared)
        found.append(simulator.launch(launch.function, *shape, args, written=launch.written, count=True))
    assert found
    return found


def assert_nothing_spills(programs: Iterable[Program], arch: str, judged: Callable[..., None]) -> None:
    """Of a long test: NVRTC keeps all of the programs' kernels in registers on this architecture."""
    made = [Executable(program, "cuda", arch=arch) for program in programs]
    judged(arch, *(anonymous(executable.source) for executable in made))
    for executable in made:
        for r in executable.binary.kernels.values():
            assert r.registers <= 255 and not r.spill_stores and not r.spill_loads
