"""Groups that were opened apart become one kernel where one can be written, and explain() says why where not."""

import gradc
from gradc import ops
from gradc.passes.schedule.schedule import missed_fusions


def compiled(function, types, wrt):
    return gradc.compile(gradc.trace(function, **types), wrt=wrt)


def test_values_that_meet_late_share_a_kernel():
    """dy * b and sigmoid(a) read nothing in common; what is made of both joins them, and dy * b needs no memory."""
    module = compiled(lambda a, b: ops.silu(a) * b, {"a": "f32[N,D]", "b": "f32[N,D]"}, ["a", "b"])
    program = module.backward.program
    assert len(program.kernels) == 1 and not program.of_kind("temp")
    assert module.backward.floor(N=8, D=8) == 5 * 8 * 8 * 4


def test_sums_of_one_row_share_a_kernel():
    module = compiled(
        lambda x, w, b: ops.layer_norm(x, (64,), w, b),
        {"x": "f32[N,64]", "w": "f32[64]", "b": "f32[64]"},
        ["x", "w", "b"],
    )
    assert len(module.backward.program.kernels) == 1


def test_kernels_on_both_sides_of_a_product_stay_two():
    """x is read before and after the product, so one kernel of both would wait for itself."""
    graph = gradc.trace(
        lambda x, w: ops.sum(ops.matmul(ops.exp(x) / ops.sum(x, axis=1, keepdims=True), w) + x),
        x="f32[512,512]",
        w="f32[512,512]",
    )
    module = gradc.compile(graph)
    assert len(module.forward.program.kernels) >= 2
    pair, *_ = missed_fusions(module.stages["forward.schedule"].result)
    assert pair.nbytes == 4 * 512 * 512 and "a third kernel needs" in pair.why
    (line,) = (line for line in module.explain().splitlines() if "are two kernels" in line)
    assert line.startswith("  {} and {} both move 1.0 MB".format(*(k.name for k in module.forward.program.kernels)))


def test_pairs_of_kernels_are_of_those_that_run():
    """A convolution's windows are read where they lie: the kernel that would write them is in no pair."""

    def function(x, w, v, a, b):
        image = ops.conv2d(ops.relu(ops.conv2d(x, w, padding=1)), v, padding=1)
        return ops.sum(ops.tanh(image)) + ops.sum(ops.matmul(ops.exp(a) / ops.sum(a, axis=1, keepdims=True), b) + a)

    image = {"x": "f32[2,8,16,16]", "w": "f32[8,8,3,3]", "v": "f32[8,8,3,3]"}
    graph = gradc.trace(function, **image, a="f32[512,512]", b="f32[512,512]")
    module = gradc.compile(graph, wrt=[*image], target="cpu")
    before = [p for d in ("forward", "backward") for p in missed_fusions(module.stages[f"{d}.schedule"].result)]
    pairs = [line.split(" both move ")[0].split() for line in module.explain().splitlines() if "two kernels" in line]
    names = {kernel.name for e in module.executables.values() for kernel in e.program.kernels}
    assert pairs and {name for first, _, second in pairs for name in (first, second)} <= names
    assert any({pair.first, pair.second} - names for pair in before) and len(pairs) < len(before)
