"""What type checkers must see: each line that says so is wrong.  Read by ``python -m tests.release``, never run."""

import gradc
from gradc import ops


def mean(x: gradc.Node) -> gradc.Node:
    return ops.mean(x)


graph = gradc.trace(mean, x="f32[N]")
module = gradc.compile(graph, wrt=["x"])
module.forwrd(x=1)  # wrong
gradc.compiled(graph)  # wrong
size: int = module.explain(N=3)  # wrong
text: str = module.memory(N=3).peak  # wrong
