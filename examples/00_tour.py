"""A model of six lines on its whole way: graph, gradient, every pass, kernels, C, numbers.

python examples/00_tour.py
"""

import difflib

import numpy as np

import gradc
from gradc import ops


@gradc.graph
def model(x: "f32[N,8]", w: "f32[8,3]", b: "f32[3]", label: "i64[N]"):
    scores = ops.tanh(x @ w + b)
    return ops.cross_entropy(scores, label)


def title(text):
    print(f"\n{'=' * 20} {text} {'=' * 20}\n")


title("the graph: one op a line, a type on every result")
print(model.graph)

module = model.compile(wrt=["w", "b"], target="cpu")

last = None
for stage in module.stages:
    if last is not None and stage.result != last:
        is_graph = isinstance(stage.result, gradc.Graph)
        title(f"after {stage.name}: {stage.size} {'nodes' if is_graph else 'kernels and library calls'}")
        if is_graph or stage.name.endswith("schedule"):
            print(stage)
        else:  # from one program to the next little changes
            print(
                "\n".join(
                    line
                    for line in difflib.unified_diff(str(last).splitlines(), str(stage).splitlines(), n=0, lineterm="")
                    if line[:2] not in ("--", "++", "@@")
                )
            )
    last = stage.result

title("each stage up to here runs in NumPy: all give the same")
rng = np.random.default_rng(0)
inputs = {
    "x": rng.standard_normal((1000, 8)).astype("f4"),
    "w": rng.standard_normal((8, 3)).astype("f4"),
    "b": np.zeros(3, "f4"),
    "label": rng.integers(0, 3, 1000),
}
for stage in module.stages:
    if isinstance(stage.result, gradc.Graph) and "." not in stage.name:  # forward.* and backward.* are halves
        cotangent = {"d.y": np.float32(1)} if "d.y" in stage.result.input_names else {}
        outputs = gradc.interp.run(stage.result, {**inputs, **cotangent})
        print(f"  {stage.name:<14}", "  ".join(f"{name} {np.sum(value):+.6f}" for name, value in outputs.items()))

title("the C of one kernel, its statements on its forehead")
name, kernel = next((n, k) for n, k in module.kernels.items() if "accum" in k.ir)
print(kernel.source)

title("what was chosen, and why")
print(module.explain(N=1000))

title("numbers")
loss, residuals = module.forward(**inputs)
grads = module.backward(residuals, np.float32(1))
print(f"  loss {loss:.6f}, residuals {residuals}, {residuals.nbytes} bytes beyond the inputs")
for name, gradient in grads.items():
    print(f"  d.{name}: {gradient.dtype}{list(gradient.shape)}, sum {gradient.sum():+.6f}")

title("checked against differences that no derivative rule made")
report = gradc.check(module, dims={"N": 6})
print(report)
assert report.ok
