"""Loss curves of 300 training steps through ``torch.compile(backend="gradc")`` beside eager mode's:
``python -m benchmarks.model_curves``.

Each model is trained in f32 by gradc and by eager mode, and by eager mode in f64, on the same batches from the same
weights.  Rounding errors grow along a curve; how far torch's own f32 comes to lie from its f64 is what to compare with.

``--seeded`` trains others for 20 steps, with dropout and batch norm, f32 by gradc and by eager mode from one seed: what
dropout draws in f64 is something else.  How far eager mode comes to lie from itself, from weights that differ by about
one rounding, stands beside it: a curve that is chaotic at its learning rate says nothing.
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
SEEDED_STEPS, SEEDED_ERROR = 20, 1e-4
"""How far a loss may be from eager mode's, relative to the largest one."""
LIMIT = 900.0


Curve = tuple[Callable[[], Any], Callable[[], tuple[Any, ...]], float]
"""A model, a random batch of it, the learning rate."""


def _images() -> tuple[Any, ...]:
    import torch

    from .model_list import CLASSES

    labels = torch.randint(0, CLASSES, (8,))
    return torch.randn(8, 3, 32, 32) + 0.3 * labels[:, None, None, None] - 1.5, labels


def _clicks() -> tuple[Any, ...]:
    from .model_list import DLRM

    dense, bags, _ = DLRM.batch()
    return dense, bags, (dense.sum(1) > 0).float()


def _curves() -> dict[str, Curve]:
    """The models of 300 steps by name; without dropout."""
    import torch

    from .model_list import DLRM, MODELS

    def words() -> tuple[Any, ...]:
        start = torch.randint(0, 100, (4, 1))
        tokens = (start + 3 * torch.arange(32)) % 100
        return tokens, tokens

    return {
        "resnet18": (lambda: MODELS["resnet18"].build()[0], _images, 0.01),
        "gpt2": (lambda: MODELS["gpt2"].build()[0], words, 0.1),
        "dlrm": (DLRM, _clicks, 0.001),
    }


def _seeded_curves() -> dict[str, Curve]:
    """The models of 20 steps by name; with dropout where they have it."""
    from torch import nn

    from .model_list import DLRM, MODELS, STN, MiniLM

    def resnet() -> Any:
        model = MODELS["resnet18"].build()[0]
        model.net.drop_rate = 0.1
        return model

    def stn() -> Any:
        model = STN()
        model.read.insert(len(model.read) - 1, nn.Dropout(0.2))
        return model

    return {
        "minilm": (lambda: MiniLM(dropout=0.1), MiniLM.batch, 0.01),
        "resnet18": (resnet, _images, 0.001),
        "dlrm": (DLRM, _clicks, 0.001),
        "stn": (stn, STN.batch, 0.001),
        "qat": (_quantized, _images, 0.01),
    }


def _quantized() -> Any:
    """A small network of images as PT2E prepares it for quantization-aware training."""
    import torch
    from torch import nn
    from torchao.quantization.pt2e import move_exported_model_to_train
    from torchao.quantization.pt2e.quantize_pt2e import prepare_qat_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    from .model_list import CLASSES, Classifier

    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Flatten(), nn.Dropout(0.1), nn.Linear(16 * 64, CLASSES),
    )  # fmt: skip
    quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config(is_qat=True))
    exported = torch.export.export(net, (_images()[0],), strict=True).module()
    return Classifier(move_exported_model_to_train(prepare_qat_pt2e(exported, quantizer)))


def measure(name: str, seeded: bool) -> None:
    """Print the curves of one model as lines of JSON."""
    import torch

    import gradc.torch

    make, batch, rate = (_seeded_curves() if seeded else _curves())[name]
    torch.manual_seed(0)
    torch.set_num_threads(THREADS)
    model = make()
    batches = [batch() for _ in range(SEEDED_STEPS if seeded else STEPS)]
    engines = [("eager_f32", torch.float32, False), ("gradc_f32", torch.float32, True)]
    first = ("eager_rounded", torch.float32, False) if seeded else ("eager_f64", torch.float64, False)
    for title, dtype, compiled in (first, *engines):
        twin = copy.deepcopy(model).to(dtype)
        if title == "eager_rounded":
            with torch.no_grad():
                for p in twin.parameters():
                    p.mul_(1 + 2.0**-23 * torch.randn(p.shape))
        torch.manual_seed(1)
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


def seeded_table(names: Sequence[str], path: Path | None) -> None:
    """Measure, print and save the curves with dropout."""
    print(
        f"{'model':<12}{'first loss':>12}{'last loss':>12}{'rounded':>12}{'gradc':>12}  (the largest distance from"
        " eager's curve, relative to its largest loss)"
    )
    for name in names or _seeded_curves():
        row = run(name, ("--seeded", "--one"), LIMIT, "benchmarks.model_curves")
        if "failed" in row:
            print(f"{name:<12}{row['failed']}")
            continue
        ours, theirs = row["gradc_f32"], row["eager_f32"]
        distance = {
            title: max(abs(a - b) for a, b in zip(row[title], theirs, strict=True)) / max(map(abs, theirs))
            for title in ("eager_rounded", "gradc_f32")
        }
        own, found = distance.values()
        verdict = "" if found <= SEEDED_ERROR else "  chaotic" if own > SEEDED_ERROR else "  WRONG"
        print(f"{name:<12}{ours[0]:>12.4f}{ours[-1]:>12.4f}{own:>12.1e}{found:>12.1e}{verdict}", flush=True)
        if path:
            save(path, "seeded_curves", row | {"distance": distance})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("names", nargs="*", help="models; all of them where none is named")
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--seeded", action="store_true", help="20 steps with dropout")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)  # a process of its own asks for it
    given = parser.parse_args()
    if given.one:
        return measure(*given.names, given.seeded)
    (seeded_table if given.seeded else table)(given.names, given.json)


if __name__ == "__main__":
    main()
