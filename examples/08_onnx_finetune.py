"""A real ONNX model in four bits, its scales learned against the float model.

swift-f0's model hears the pitch of a voice: a spectrum, then eighteen small convolutions.  Their weights become codes
of four bits with one scale per output channel, in the file itself, by DequantizeLinear; gradc reads that file, and what
learns are the scales alone: no trainer of ONNX models takes them.

    pip install 'gradc[onnx-models]'
    python examples/08_onnx_finetune.py
"""

import importlib.util
import pathlib

import ml_dtypes
import numpy as np
import onnx
from onnx import helper, numpy_helper

import gradc

folder = importlib.util.find_spec("swift_f0").submodule_search_locations[0]
model = onnx.load(pathlib.Path(folder) / "model.onnx")

# Numbers that choose what the model looks for, and a length of the sound: known when the model is read.
known = {"fmin": np.float32(60), "fmax": np.float32(1000)}
SAMPLES, SECOND = 4096, 16000


def in_four_bits(model):
    """A copy whose convolutions read their weights through DequantizeLinear, and the names of the scales."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    weights = {t.name: t for t in made.graph.initializer}
    scales = []
    for node in [n for n in made.graph.node if n.op_type == "Conv"]:
        name = node.input[1]
        weight = numpy_helper.to_array(weights[name])
        scale = np.abs(weight).reshape(len(weight), -1).max(1) / 7
        each = scale.reshape(-1, *(1,) * (weight.ndim - 1))
        codes = np.rint(weight / each).clip(-7, 7).astype(ml_dtypes.int4)
        made.graph.initializer.remove(weights[name])
        made.graph.initializer.extend(
            [
                numpy_helper.from_array(codes, f"{name}.codes"),
                numpy_helper.from_array(scale.astype(np.float32), f"{name}.scale"),
            ]
        )
        reads = helper.make_node("DequantizeLinear", [f"{name}.codes", f"{name}.scale"], [name], axis=0)
        made.graph.node.insert(list(made.graph.node).index(node), reads)
        scales.append(f"{name}.scale")
    made.opset_import[0].version = max(made.opset_import[0].version, 21)  # the first with four bits
    return made, scales


def voice(pitch, random):
    """A tone with overtones, and some noise."""
    time = np.arange(SAMPLES) / SECOND
    tones = sum(np.sin(2 * np.pi * pitch * k * time + random.uniform(0, 6)) / k for k in range(1, 6))
    return (0.2 * tones + 0.02 * random.standard_normal(SAMPLES)).astype(np.float32)[None]


quantized, scales = in_four_bits(model)
options = {"constants": known, "dims": {"samples": SAMPLES}}
teacher = gradc.compile(gradc.from_onnx(model, **options))
student = gradc.compile(gradc.from_onnx(quantized, **options), wrt=scales, unused="zeros")
print(f"{len(scales)} convolutions in four bits, {sum(student.graph.defaults[s].size for s in scales)} scales")

random = np.random.default_rng(0)
sounds = [voice(pitch, random) for pitch in random.uniform(80, 600, 12)]
wanted = [teacher.forward(audio=sound)[0]["confidence"] for sound in sounds]
values = {name: student.graph.defaults[name].copy() for name in scales}
moments = {name: [np.zeros_like(value), np.zeros_like(value)] for name, value in values.items()}
first, step = None, 0
for epoch in range(6):
    losses = []
    for sound, target in zip(sounds, wanted, strict=True):
        y, residuals = student.forward(audio=sound, **values)
        difference = y["confidence"] - target
        losses.append(float(np.square(difference).mean()))
        cotangent = {"confidence": (2 * difference / difference.size).astype(np.float32)}
        gradients = student.backward(residuals, **cotangent)
        step += 1
        for name, (mean, square) in moments.items():  # Adam, in steps of a scale's size
            g = np.asarray(gradients[name]) * values[name]
            mean += 0.1 * (g - mean)
            square += 0.01 * (g * g - square)
            move = mean / (1 - 0.9**step) / (np.sqrt(square / (1 - 0.99**step)) + 1e-12)
            values[name] = (values[name] * np.exp(-0.003 * move)).astype(np.float32)
    first = first if first is not None else np.mean(losses)
    print(f"epoch {epoch}: mean squared distance from the float model {np.mean(losses):.3e}")
assert np.mean(losses) < first / 2
