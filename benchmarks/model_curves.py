"""Loss curves of 300 training steps through ``torch.compile(backend="gradc")`` beside eager mode's:
``python -m benchmarks.model_curves``.

Each model is trained in f32 by gradc and by eager mode, and by eager mode in f64, on the same batches from the same
weights.  Rounding errors grow along a curve; how far torch's own f32 comes to lie from its f64 is what to compare with.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .models import THREADS, run, save

STEPS = 300
FACTOR = 4.0
LIMIT = 900.0


def _curves() -> dict[str, tuple[Callable[[], Any], Callable[[], tuple[Any, ...]], float]]:
    """Name -> the model, a random batch of it, the learning rate."""
    import torch

    from .model_list import CLASSES, DLRM, MODELS

    def images() -> tuple[Any, ...]:
        labels = torch.randint(0, CLASSES, (8,))
        return torch.randn(8, 3, 32, 32) + 0.3 * labels[:, None, None, None] - 1.5, labels

    def words() -> tuple[Any, ...]:
        start = torch.randint(0, 100, (4, 1))
        tokens = (start + 3 * torch.arange(32)) % 100
        return tokens, tokens

    def clicks() -> tuple[Any, ...]:
        dense, bags, _ = DLRM.batch()
        return dense, bags, (dense.sum(1) > 0).float()

    return {
        "resnet18": (lambda: MODELS["resnet18"].build()[0], images, 0.01),
        "gpt2": (lambda: MODELS["gpt2"].build()[0], words, 0.1),
        "dlrm": (DLRM, clicks, 0.001),
    }


def measure(name: str) -> None:
    """Print the three curves of one model as lines of JSON."""
    import torch

    import gradc.torch

    make, batch, rate = _curves()[name]
    torch.manual_seed(0)
    torch.set_num_threads(THREADS)
    model = make()
    batches = [batch() for _ in range(STEPS)]
    for title, dtype, compiled in (
        ("eager_f64", torch.float64, False),
        ("eager_f32", torch.float32, False),
        ("gradc_f32", torch.float32, True),
    ):
        twin = copy.deepcopy(model).to(dtype)
        call = torch.compile(twin, backend=gradc.torch.backend) if compiled else twin
        print(json.dumps({title: list(_trained(call, twin, batches, dtype, rate))}), flush=True)


def _trained(call: Any, model: Any, batches: Sequence[Any], dtype: Any, rate: float) -> Iterator[float]:
    """The loss of each step of SGD with momentum."""
    import torch

    from .model_list import cast

    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    for batch in batches:
        optimizer.zero_grad()
        loss = call(*cast(batch, dtype))
        loss.backward()
        optimizer.step()
        yield loss.item()


def distances(row: dict[str, Any]) -> dict[str, float]:
    """How far each f32 curve lies from f64's: the mean over the steps, of the loss's largest value."""
    exact = row["eager_f64"]
    return {
        title: sum(abs(a - b) for a, b in zip(row[title], exact, strict=True)) / len(exact) / max(map(abs, exact))
        for title in ("eager_f32", "gradc_f32")
    }


def table(names: Sequence[str], path: Path | None) -> None:
    """Measure, print and save."""
    print(
        f"{'model':<12}{'first loss':>12}{'last loss':>12}{'eager f32':>12}{'gradc f32':>12}  (mean distance from f64)"
    )
    for name in names or _curves():
        row = run(name, limit=LIMIT, module="benchmarks.model_curves")
        if "failed" in row:
            print(f"{name:<12}{row['failed']}")
            continue
        row |= {"distance": distances(row)}
        own, ours = row["distance"].values()
        verdict = "" if ours <= FACTOR * max(own, 2.0**-23) else "  WRONG"
        curve = row["gradc_f32"]
        print(f"{name:<12}{curve[0]:>12.4f}{curve[-1]:>12.4f}{own:>12.1e}{ours:>12.1e}{verdict}", flush=True)
        if path:
            save(path, "curves", row)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("names", nargs="*", help="models; all of them where none is named")
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)  # a process of its own asks for it
    given = parser.parse_args()
    if given.one:
        return measure(*given.names)
    table(given.names, given.json)


if __name__ == "__main__":
    main()
