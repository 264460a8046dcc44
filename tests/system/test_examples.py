"""Each script in examples/ runs from start to end, as a reader would run it, and prints what it promises."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LINES = {
    "00_tour": [
        r"graph @model<N>\(%x: f32\[N,8\]",
        r"=+ after joint: \d+ nodes =+",
        r"return y=%\d+, d\.w=%\d+, d\.b=%\d+",
        r"=+ after forward\.schedule: \d+ kernels and library calls =+",
        r"#pragma omp simd",
        r"  loss \d\.\d+, residuals Residuals\(",
        r"7 of 7 hold",
    ],
    "01_quantized_embedding": [
        r"dense f32\[V,D\] buffers, strict numerics: \w+: f32\[V,D\]",
        r"dense f32\[V,D\] buffers, by default:      none",
        r"worst relative error of d\.scale against the formula in NumPy \(f64\): \d\.\de-0[78]",
        r"backward: gradc [\d.]+ ms",
    ],
    "02_custom_op": [
        r"%1: f32\[N,D\] = shift %0 \{axis=1, by=1\}",
        r"the scale is applied to: f32\[N,D\] before, f32\[N\] after",
        r"\w+_rows\(const void \*args, i64 task\)",
        r"d\.scale  worst relative error against NumPy: \d\.\de-0[78]",
        r"7 of 7 hold",
        r"%2: i8\[N,8\] = gather %q, %places",
        r"4 of 4 hold",
    ],
    "03_one_kernel": [
        r"kernel @\w+ rows\(i0: N\) cols\(i1: 256\)",
        r"run twice: the same bits",
        r"timed: \d+ us for [\d.]+ MB, [\d.]+ GB/s",
    ],
    "04_torch_compile": [
        r"loss in gradc: 2\d\.\d{4} ",
        r"largest relative difference of 30 losses: \d\.\de[-+]\d\d\n.* next larger floats: \d\.\de-\d\d",
        r"2 graphs, 56 ops: 96% in 2 regions of gradc",
        r"aten\.bernoulli\.p +2 +4% +torch draws the random numbers of eager mode",
    ],
    "05_qat_loop": [
        r"the gradient of the scales, aot_eager: +None",
        r"the gradient of the scales, gradc: +219\.\d+ \(its norm\)",
        r"the scales grew by 0\.50 ",
    ],
    "06_ddp": [
        r"1 graphs, 4 ops: 100% in 1 regions of gradc",
        r"the same losses, the same parameters",
    ],
    "07_sharded_embedding": [
        r"process 1: 500 of 1000 rows",
        r"2 graphs, 11 ops: 100% in 2 regions of gradc",
        r"the same losses, the same table",
    ],
    "08_onnx_finetune": [
        r"18 convolutions in four bits, 182 scales",
        r"epoch 0: mean squared distance from the float model 1\.[45]\d+e-04",
        r"epoch 5: mean squared distance from the float model 5\.[345]\d+e-05",
    ],
    "09_jax_training": [
        r"step   0  loss 3\.0688\d+ with gradc, 3\.0688\d+ in JAX alone",
        r"step 299  loss 1\.880\d+ with gradc, 1\.880\d+ in JAX alone",
    ],
    "10_export_c": [
        r"frozen_codes: CMakeLists\.txt, Makefile, .*, frozen_codes\.h, frozen_codes_main, host\.h, main\.c, sample",
        r"step 10: loss 3\.646\d+",
        r"in Python: loss 4\.351\d+ at step 1, 3\.646\d+ at step 10",
        r"all 7 parameters have the same bits",
    ],
    "11_training_step": [
        r"rows alone: loss 0\.69\d at step 1, 0\.00\d at step 60; [\d.]+ ms",
        r"200 of 1000000 rows changed",
        r"the same losses",
        r"embedding: index 1000000 at position 0 of 'items' is out of range \[0, 1000000\)",
        r"nothing changed: True",
    ],
    "12_qlora": [
        r"a Llama with 393,216 weights in linear layers",
        r"f32 +1573  (\d\.\d{3} +){3}\d+\.\d \| +67\.1 +\d\.\d",
        r"nf4 +203  (\d\.\d{3} +){3}\d+\.\d \| +8\.7 +\d\.\d",
        r"int4 +295  (\d\.\d{3} +){3}\d+\.\d \| +12\.6 +\d\.\d",
        r"read again, it has the same bits",
        r"and as C: CMakeLists\.txt, Makefile,",
    ],
    "13_dlrm": [
        r"26 tables of 20 to 200,000 rows of 16, 512 bags of 1 to 4 indices",
        r"gradc: the same +83\.1 MB   loss 0\.625 -> 0\.317 +[\d.]+ ms a step",
        r"50,398 of 648,938 rows changed, all of them named by an index",
        r"307 steps in 30 launches",
        r"gradc: f16, stochastic, rowwise Adagrad +23\.4 MB   loss 0\.630 -> 0\.321 +[\d.]+ ms a step",
        r"tables and states in files, closed and opened in the middle, give the same losses",
    ],
    "14_qlora_torch": [
        r"int4: 5\.\d{3} as it is",
        r"with adapters: 5\.\d{3}; 1 graphs, \d+ ops: 100% in 1 regions of gradc",
        r"largest relative difference of 30 losses: \d\.\de[-+]\d\d\n.* next larger floats: \d\.\de-\d\d",
        r"with adapters and scales: 5\.\d{3}; the scales moved by up to \d\.\d %",
    ],
    "15_sharded_dlrm": [
        r"process 1: 3,300 of 6,600 rows of small tables, 10,000 of 20,000 of the large one",
        r"step   0   2 processes 0\.7026\d   one process 0\.7026\d",
        r"step  24   2 processes 0\.569\d+   one process 0\.569\d+",
        r"the same losses, the same tables",
    ],
}
NEEDS = dict.fromkeys(
    ("04_torch_compile", "05_qat_loop", "06_ddp", "07_sharded_embedding", "15_sharded_dlrm"), "torch"
) | {
    "08_onnx_finetune": "swift_f0",
    "09_jax_training": "jax",
    "14_qlora_torch": "torchao",
}
"""What an example asks for beside gradc."""


TESTED = dict.fromkeys(
    ("06_ddp", "07_sharded_embedding", "15_sharded_dlrm"),
    ("gradc/torch", "gradc/module", "gradc/runtime", "gradc/passes", "gradc/analysis"),
) | {
    "12_qlora": ("gradc/ops/quantized", "gradc/optim", "gradc/module", "gradc/passes", "gradc/codegen/cpu"),
    "13_dlrm": ("gradc/ops/indexing", "gradc/optim", "gradc/module", "gradc/passes", "gradc/codegen/cpu"),
}
TESTED["14_qlora_torch"] = ("gradc/torch", *TESTED["12_qlora"])
"""What those that start processes, or take a minute, test; the others are the compiler's."""


def _example(path: Path) -> Any:
    tested = TESTED.get(path.stem)
    marks = [pytest.mark.long(f"examples/{path.name}", *tested)] if tested else []
    return pytest.param(path, marks=marks, id=path.stem)


@pytest.mark.parametrize("path", [*map(_example, EXAMPLES)])
def test_example_runs(path: Path, tmp_path: Path):
    if path.stem in NEEDS and importlib.util.find_spec(NEEDS[path.stem]) is None:
        pytest.skip(f"the example needs {NEEDS[path.stem]}")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    done = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    for line in LINES[path.stem]:
        assert re.search(line, done.stdout), f"no line like {line!r} in\n{done.stdout}"
    assert not list(tmp_path.iterdir()), "an example leaves nothing behind"


def test_every_example_has_its_lines():
    assert {path.stem for path in EXAMPLES} == LINES.keys()
