"""``python -m benchmarks.gpu_predictions [MODEL ...] [--device H200]``: what a model predicts for the regions of whole
models on a GPU, without one.

Models and sizes are those of :mod:`.gpu_model_list`.  Each is traced by ``torch.compile(backend="gradc")`` on the CPU,
where the backend is told that all values are on a GPU, so that it makes the regions and leaves to torch what it does
there; nothing is run.  Autocast is the CPU's, which casts the same products.  Gradients are those of all float inputs
of a region, of the batch, too.  For each model: regions, launches, calls of cuBLAS, predicted milliseconds of the
device forward and backward (> without launches that were not followed to their end), their share in products,
milliseconds of the host, the largest workspace, and how often what was left to torch.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

import gradc.torch
from gradc import compile as compiled
from gradc.inspect.static import Direction, directions
from gradc.torch import dynamo
from gradc.torch import function as functions

from .gpu_model_list import MODELS

ARCH = "sm_90"


class Traced(Exception):
    """The regions of a model are known."""


@dataclass
class Regions:
    """The backend, for which all values of a graph lie on a GPU.

    :ivar made: the functions of the regions.
    """

    made: list[functions.Function] = field(default_factory=list)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        given, call = (dynamo.normal_form, dynamo.Function), dynamo._Program.__call__
        dynamo.normal_form, dynamo.Function = self._normal_form(given[0]), self._function  # type: ignore[assignment,misc]
        dynamo._Program.__call__ = self._stopped  # type: ignore[method-assign,assignment]
        try:
            yield
        except Traced:
            pass
        finally:
            dynamo.normal_form, dynamo.Function = given  # type: ignore[misc]
            dynamo._Program.__call__ = call  # type: ignore[method-assign]

    @staticmethod
    def _normal_form(normal_form: Any) -> Any:
        def moved(*args: Any, **kwargs: Any) -> Any:
            form = normal_form(*args, **kwargs)
            nodes = [n for n in form.module.graph.nodes if "val" in n.meta]
            mode = next(v.fake_mode for n in nodes if isinstance(v := n.meta["val"], FakeTensor))

            def to_gpu(x: torch.Tensor) -> torch.Tensor:
                with mode:
                    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="cuda")

            for node in nodes:
                node.meta["val"] = tree_map_only(torch.Tensor, to_gpu, node.meta["val"])
            return form

        return moved

    def _function(self, *args: Any, **kwargs: Any) -> Any:
        made = functions.Function(*args, **kwargs)
        self.made.append(made)
        return made

    @staticmethod
    def _stopped(*_: Any) -> Any:
        raise Traced


def regions_of(name: str) -> list[functions.Function]:
    """The regions of a model's step."""
    model, regions = MODELS[name], Regions()
    torch._dynamo.reset()
    gradc.torch.report().clear()
    net, batch = model.build()
    call = torch.compile(net, backend=dynamo.backend, options={"target": "cpu"})
    with regions.collecting(), torch.autocast("cpu", torch.bfloat16, enabled=model.autocast):
        call(*batch)
    return regions.made


@dataclass(frozen=True)
class Predicted:
    """All regions of a model."""

    regions: int
    forward: list[Direction]
    backward: list[Direction]
    left: Counter[str]

    @property
    def line(self) -> str:
        every = [*self.forward, *self.backward]
        times = " | ".join(map(_milliseconds, (self.forward, self.backward)))
        products = sum(d.product_seconds for d in every) / max(_seconds(every)[0], 1e-12)
        left = ", ".join(f"{n} {op}" for op, n in self.left.items())
        host, space = 1e3 * sum(d.host_seconds for d in every), max(d.workspace for d in every) / 1e6
        return (
            f"{self.regions} | {sum(len(d.launches) for d in every)} | {sum(d.calls for d in every)} | {times} |"
            f" {products:.0%} | {host:.2f} | {space:.0f} | {left}"
        )


def _seconds(part: Sequence[Direction]) -> tuple[float, bool]:
    """Of some directions without launches that were not followed to their end; whether there are such."""
    lost = [p.seconds for d in part for _, p in d.launches if not p.finished]
    return sum(d.seconds for d in part) - sum(lost), bool(lost)


def _milliseconds(part: Sequence[Direction]) -> str:
    seconds, more = _seconds(part)
    return f"{'> ' if more else ''}{1e3 * seconds:.2f}"


def predicted(name: str, device: str) -> Predicted:
    """A model's prediction; equal regions are compiled once."""
    known: dict[str, dict[str, Direction]] = {}
    made = regions_of(name)
    left: Counter[str] = Counter()
    for row in gradc.torch.report().rows:  # of one op several, left for reasons of their own
        left[row.op] += row.count
    for function in made:
        if (text := str(function.graph)) not in known:
            wanted = tuple(
                n for n, t in zip(function.graph.input_names, function.graph.inputs, strict=True) if _is_float(t)
            )
            given = functions.Differentiated(function, wanted, "cuda", function.device)
            options = {"unused": "zeros", **function.options, "arch": ARCH, "device": device}
            known[text] = directions(compiled(given.graph, given.wrt, target="cuda", **options), {})
    every = [known[str(function.graph)] for function in made]
    parts = ([found[way] for found in every if way in found] for way in ("forward", "backward"))
    return Predicted(len(made), *parts, left)


def _is_float(node: Any) -> bool:
    return bool(node.type.dtype.is_float)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; all, if none is named")
    parser.add_argument("--device", default="H200")
    given = parser.parse_args(arguments)
    print("| model | regions | launches | calls | forward ms | backward ms | products | host ms | MB | left to torch |")
    print(f"|{'---|' * 10}")
    for name in given.models or MODELS:
        print(f"| {name} | {predicted(name, given.device).line} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
