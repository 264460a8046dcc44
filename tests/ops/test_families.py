"""One module of each op family: three sizes through one compilation, its graph in the viewers' formats."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import gradc
from gradc import interp, ops
from gradc.autodiff import differentiate
from gradc.inspect.export import from_json, model_explorer, to_json

FAMILIES: dict[str, tuple[Any, dict[str, str], list[str], list[dict[str, int]]]] = {
    "embedding": (
        lambda i, w: ops.embedding(i, w, padding_idx=-1, scale_grad_by_freq=True),
        {"i": "i64[N,3]", "w": "f32[V,8]"},
        ["w"],
        [{"N": 4, "V": 9}, {"N": 300, "V": 20}, {"N": 0, "V": 1000}],
    ),
    "quantize": (
        lambda q, s, x, t: ops.dequantize(q, s, block=(1, 4)) + ops.fake_quantize(x, t, block=(1, 8)),
        {"q": "i8[N,8]", "s": "f32[N,2]", "x": "f32[N,8]", "t": "f32[N,1]"},
        ["s", "x", "t"],
        [{"N": 1}, {"N": 7}, {"N": 500}],
    ),
    "grid_sample": (
        lambda x, g: ops.grid_sample(x, g, padding_mode="reflection"),
        {"x": "f32[B,2,H,W]", "g": "f32[B,P,3,2]"},
        ["x", "g"],
        [{"B": 1, "H": 4, "W": 5, "P": 2}, {"B": 3, "H": 17, "W": 9, "P": 30}, {"B": 2, "H": 1, "W": 1, "P": 0}],
    ),
}


def arrays(graph: gradc.Graph, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    draw = {
        "i": lambda s: rng.integers(0, sizes["V"], s),
        "q": lambda s: rng.integers(-128, 128, s),
        "g": lambda s: rng.uniform(-1.3, 1.3, s),
    }
    draw |= {name: lambda s: rng.uniform(0.01, 0.1, s) for name in "st"}
    return {
        n: np.asarray(draw.get(n, rng.standard_normal)(node.type.concrete(sizes))).astype(node.dtype.np)
        for n, node in zip(graph.input_names, graph.inputs, strict=True)
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_one_module_serves_three_sizes(family: str) -> None:
    fn, types, wrt, bindings = FAMILIES[family]
    graph = gradc.trace(fn, **types)
    module, joint = gradc.compile(graph, wrt=wrt), differentiate(graph, wrt)
    libraries = {module.forward.native.library, module.backward.native.library}
    for sizes in bindings:
        given = arrays(graph, sizes)
        y, residuals = module.forward(**given)
        dy = np.random.default_rng(1).standard_normal(y.shape).astype(np.float32)
        gradients = module.backward(residuals, dy)
        exact = interp.run(joint, {**given, "d.y": dy}, precision="f64")
        plain = interp.run(joint, {**given, "d.y": dy})
        for name in wrt:
            want = exact[f"d.{name}"]
            bound = max(
                16 * 2.0**-24 * np.abs(want).max(initial=0.0), 4 * np.abs(plain[f"d.{name}"] - want).max(initial=0.0)
            )
            assert np.abs(gradients[name] - want).max(initial=0.0) <= bound, (sizes, name)
    assert {module.forward.native.library, module.backward.native.library} == libraries


STRING = str
PAIRS = [{"key": STRING, "value": STRING}]
SCHEMA = {
    "graphs": [
        {
            "id": STRING,
            "nodes": [
                {
                    "id": STRING,
                    "label": STRING,
                    "namespace": STRING,
                    "attrs": PAIRS,
                    "incomingEdges": [
                        {"sourceNodeId": STRING, "sourceNodeOutputId": STRING, "targetNodeInputId": STRING}
                    ],
                    "outputsMetadata?": [{"id": STRING, "attrs": PAIRS}],
                }
            ],
            "groupNodeAttributes?": {STRING: {STRING: STRING}},
        }
    ]
}
"""What Model Explorer reads: GraphCollection, Graph, GraphNode, IncomingEdge, MetadataItem and KeyValuePair of its
visualizer's input_graph types; ? is optional.
"""


def fits(value: Any, schema: Any, at: str = "$") -> None:
    if isinstance(schema, list):
        assert isinstance(value, list), at
        for k, item in enumerate(value):
            fits(item, schema[0], f"{at}[{k}]")
    elif isinstance(schema, dict) and STRING in schema:
        assert isinstance(value, dict) and all(isinstance(k, str) for k in value), at
        for key, item in value.items():
            fits(item, schema[STRING], f"{at}.{key}")
    elif isinstance(schema, dict):
        known = {key.rstrip("?"): (inner, key.endswith("?")) for key, inner in schema.items()}
        assert isinstance(value, dict) and value.keys() <= known.keys(), f"{at}: {value.keys() - known.keys()}"
        for key, (inner, optional) in known.items():
            assert optional or key in value, f"{at}.{key} is missing"
            if key in value:
                fits(value[key], inner, f"{at}.{key}")
    else:
        assert isinstance(value, schema), f"{at}: {value!r}"


@pytest.mark.parametrize("stage", ["forward", "joint", "tidy.fold"])
@pytest.mark.parametrize("family", FAMILIES)
def test_its_graphs_open_in_the_viewers(family: str, stage: str) -> None:
    fn, types, wrt, _ = FAMILIES[family]
    graph = gradc.compile(gradc.trace(fn, **types), wrt=wrt, target="numpy").stages[stage].result
    assert from_json(json.loads(json.dumps(to_json(graph)))) == graph
    collection = json.loads(json.dumps(model_explorer(graph)))
    fits(collection, SCHEMA)
    (whole,) = collection["graphs"]
    ids = [node["id"] for node in whole["nodes"]]
    assert len(set(ids)) == len(ids)
    for node in whole["nodes"]:
        for k, edge in enumerate(node["incomingEdges"]):
            assert edge["sourceNodeId"] in ids and edge["targetNodeInputId"] == str(k)
