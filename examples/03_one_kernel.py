"""One kernel, taken out of a compiled model: read it, run it alone, compare it, time it.

python examples/03_one_kernel.py
"""

import numpy as np

import gradc
from gradc import ops


@gradc.graph
def model(x: "f32[N,256]", weight: "f32[256]", bias: "f32[256]"):
    return ops.layer_norm(x, weight=weight, bias=bias, normalized_shape=(256,))


module = model.compile(wrt=["x", "weight", "bias"], target="cpu")
print(module)

name, kernel = max(module.backward.kernels.items(), key=lambda item: item[1].bytes(N=4096))
print(f"\nthe kernel of the backward that moves most bytes is {name}; its buffers:")
for buffer, type_ in kernel.types.items():
    print(f"  {buffer}: {type_}")

print("\nits statements (a phase is one walk over the columns):\n")
print(kernel.ir)
print("\nits C:\n")
print(kernel.source)

N = 4096
buffers = kernel.sample(seed=1, N=N)
outputs = kernel.run(**buffers)
print(f"run alone at N={N}:")
by_meaning = gradc.interp.run(kernel.executable.program, buffers)
for buffer, got in outputs.items():
    want = by_meaning[buffer].astype("f8")
    error = np.max(np.abs(got - want)) / np.max(np.abs(want))
    print(f"  {buffer}: {got.dtype}{list(got.shape)}, worst relative error against the interpreter {error:.1e}")
    assert error < 1e-4

again = kernel.run(**buffers)
assert all(np.array_equal(again[b], outputs[b]) for b in outputs)
print("run twice: the same bits")

seconds, size = kernel.time(repeat=20, N=N), kernel.bytes(N=N)
print(f"timed: {seconds * 1e6:.0f} us for {size / 1e6:.1f} MB, {size / seconds / 1e9:.1f} GB/s")
