"""block_rows: steps that hand wide rows to one another run for one block of rows at a time.

What lies between a product with wide rows and the steps that read them, [rows, wide], is then never more than a block:
the logits of a linear layer before a cross entropy, the scores of attention, and their gradients.  On a CPU so are
weights that a kernel decodes for a product, and gradients of weights that are summed to those of their scales.  A sum
over the rows is added up block by block.  How rows are blocked depends on shapes alone.
"""

from __future__ import annotations

from ...ir.dims import assuming
from ...ir.kernel import Program
from ...targets.devices import CPU, Cpu, Device
from ..manager import program_pass
from .fission import fuse_unused, split_sums
from .fusion_group import FusionGroup
from .loop_writer import fuse
from .narrow_neighbours import BLOCK_ROWS, narrow_neighbours, with_matrices
from .tiling import with_unit_axes, without_unit_axes
from .wide_products import BLOCKED, Sizes, rows_of_few_terms, wide_products


@program_pass("REAL")
def block_rows(program: Program, *, dims: Sizes = None, device: Device = CPU) -> Program:
    """matmul, softmax, matmul over rows(n: N)  ->  loop rows(n: N) by(144) { matmul, softmax, matmul }

    Licence REAL: the order in which a product is added up may depend on the number of its rows.

    :param dims: sizes at which elements are counted; 1024 stands for the others.
    :param device: whose blocks they are.
    """
    given, program = program, without_unit_axes(program)
    program, fissions = split_sums(program, wide_products(program, BLOCKED, dims, device))
    with assuming(program.assumptions):
        tried: set[str] = set()
        while seeds := [b for b in wide_products(program, BLOCKED, dims, device) if b not in tried]:
            tried.add(seeds[0])
            narrow = isinstance(device, Cpu) and seeds[0] in narrow_neighbours(program, dims)
            most = rows_of_few_terms(program, seeds[0], dims) if narrow else None
            group = FusionGroup.grow_from(program, seeds[0], dims, most=most)
            if group is not None:
                program = fuse(group, device)
        if isinstance(device, Cpu):
            program = with_matrices(program, dims)
            while seeds := [b for b in narrow_neighbours(program, dims) if b not in tried]:
                tried.add(seeds[0])
                most = rows_of_few_terms(program, seeds[0], dims)
                group = FusionGroup.grow_from(program, seeds[0], dims, most=most or BLOCK_ROWS)
                if group is not None:
                    program = fuse(group, device)
    return with_unit_axes(fuse_unused(program, fissions), given)
