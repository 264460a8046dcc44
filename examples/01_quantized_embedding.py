"""An int8 embedding table with a learnable scale per row: the gradient of the scale, with no dense [V,D] array
anywhere.

The table is V x D int8 numbers q and V scales s; row v means q[v] * s[v].  By hand the gradient of the scale is

    ds[v] = sum over positions n with token[n] = v of  sum over d of  dy[n,d] * q[v,d]

which reads only the N rows that were looked up.  Differentiated op by op it would be a dense f32[V,D] gradient of the
table first.

    python examples/01_quantized_embedding.py
"""

import time

import numpy as np

import gradc
from gradc import ops


@gradc.graph
def lookup(tokens: "i64[N]", q: "i8[V,D]", scale: "f32[V,1]"):
    table = ops.dequantize(q, scale, block=(1, q.shape[1]))
    return ops.embedding(tokens, table)


def dense(program):
    """The float buffers of the size of the table that a program holds."""
    return [
        f"{b.name}: {b.type}"
        for b in program.buffers
        if b.type.dtype.is_float and list(map(str, b.type.shape)) == ["V", "D"]
    ]


module = lookup.compile(wrt=["scale"], target="cpu")
plain = lookup.compile(wrt=["scale"], target="cpu", numerics="strict")

print("the gradient as differentiation writes it, with strict numerics:\n")
print(plain.stages["joint"])
print("\nafter sink_dequant:\n")
print(module.stages["sink_dequant"])
print("\nthe backward program that runs:\n")
print(module.backward.program)
print()
print(f"dense f32[V,D] buffers, strict numerics: {', '.join(dense(plain.backward.program)) or 'none'}")
print(f"dense f32[V,D] buffers, by default:      {', '.join(dense(module.backward.program)) or 'none'}")
assert not dense(module.backward.program) and not dense(module.forward.program)

V, D, N = 50_000, 128, 4096
rng = np.random.default_rng(0)
tokens = (rng.zipf(1.3, N) % V).astype(np.int64)
q = rng.integers(-127, 128, (V, D)).astype(np.int8)
scale = rng.uniform(0.01, 0.02, (V, 1)).astype(np.float32)
dy = rng.standard_normal((N, D)).astype(np.float32)

y, residuals = module.forward(tokens=tokens, q=q, scale=scale)
ds = module.backward(residuals, dy)["scale"]

want = np.zeros((V, 1))
np.add.at(want, tokens, np.sum(dy.astype(np.float64) * q[tokens], axis=1, keepdims=True))
error = np.max(np.abs(ds - want)) / np.max(np.abs(want))
print(f"\nV={V}, D={D}, N={N}: worst relative error of d.scale against the formula in NumPy (f64): {error:.1e}")
assert np.array_equal(y, q[tokens] * scale[tokens]) and error < 1e-5


def seconds(run, times=20):
    spent = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        spent.append(time.perf_counter() - began)
    return min(spent)


def numpy_backward():
    table = np.zeros((V, D), np.float32)
    np.add.at(table, tokens, dy)
    return np.sum(table * q, axis=1, keepdims=True)


_, own = plain.forward(tokens=tokens, q=q, scale=scale)  # residuals belong to the module that kept them
print(
    f"backward: gradc {seconds(lambda: module.backward(residuals, dy)) * 1e3:.2f} ms, "
    f"gradc with strict numerics {seconds(lambda: plain.backward(own, dy)) * 1e3:.2f} ms, "
    f"NumPy through the dense table {seconds(numpy_backward, 3) * 1e3:.1f} ms"
)
