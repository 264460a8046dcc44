"""A typed user of gradc, whom mypy --strict and pyright accept: the public names have types.

``python -m tests.release`` gives it to both where only the wheel is installed, and runs it.
"""

from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

import gradc
from gradc import ops

F32 = NDArray[np.float32]


def loss(x: gradc.Node, w: gradc.Node, b: gradc.Node) -> gradc.Node:
    """The mean of softmax squared."""
    soft = ops.softmax(x @ w + b)
    return (soft * soft).sum()


@gradc.graph
def scaled(x: Annotated[gradc.Node, "f32[N,4]"], scale: Annotated[gradc.Node, "f32[4]"]) -> gradc.Node:
    """Types in annotations that a type checker accepts."""
    return x * scale


def module() -> gradc.Module:
    graph: gradc.Graph = gradc.trace(loss, x="f32[N,4]", w="f32[4,3]", b="f32[3]")
    return gradc.compile(graph, wrt=["w", "b"], target="cpu", numerics="strict", dims={})


def descend(trained: gradc.Module, x: F32, w: F32, b: F32, rate: float = 0.1) -> float:
    """One step of gradient descent, in place."""
    value, residuals = trained.forward(x=x, w=w, b=b)
    gradients: gradc.Gradients = trained.backward(residuals, np.ones((), np.float32))
    for name, parameter in (("w", w), ("b", b)):
        parameter -= rate * np.asarray(gradients[name])
    return float(value)


def main() -> None:
    trained = module()
    random = np.random.default_rng(0)
    x, w = (random.standard_normal(shape).astype(np.float32) for shape in ((16, 4), (4, 3)))
    b = np.zeros(3, np.float32)
    losses: list[float] = [descend(trained, x, w, b) for _ in range(20)]
    assert losses[-1] < losses[0]
    text: str = trained.explain(N=16)
    assert trained.memory(N=16).peak > 0 and "loss" in text
    try:
        trained.forward(x=x)
    except gradc.errors.InvalidProblem as error:
        said: str = str(error)
        assert "needs the input" in said
    file = Path("loss.gradc")
    trained.save(file)
    again: gradc.Module = gradc.load_module(file)
    assert again.wrt == ("w", "b")
    file.unlink()
    print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
