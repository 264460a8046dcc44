"""Row blocking: a product with wide rows is never in memory whole.

The logits of a language model are ``[N, V]``, the scores of attention ``[S, S]`` for each head: matrix products each
row of which has many times the elements of what it is a product of.  Written and read again, they are most of the bytes
and most of the memory of a training step.  But a softmax needs one row at a time, and so does a product with what comes
of it.  So the producers and the consumers of wide rows share a loop over blocks of rows (tile and fuse), in which a
block of the product is as large as a cache holds::

    loop over(b: B, h: H) rows(s: S) by(96) count(c) {        for each head, for 96 rows after 96 rows
      block scores: f32[c,S]
      call @matmul    scores[m, n] <- matmul q[(b), (h), m + (s), k], k[(b), (h), n, k]
      kernel @softmax rows(m: c) cols(n: S) { ... }
      call @matmul_2  y[(b), (h), m + (s), n] <- matmul scores[m, k], v[(b), (h), k, n]
    }

:class:`gradc.ir.kernel.Loop` says what such a loop means, and the interpreter and the verifier hold it to that.

What the backward needs of it
    cannot be saved, or it would be in memory after all.  A ``WideRowPolicy`` (:mod:`gradc.passes.schedule.residual`) is
    one of three ways: save it whole, recompute it in a loop of the backward (as FlashAttention does), or, before a
    scalar loss, compute its gradients in the forward's loop already (as fused linear cross entropies do).
    :mod:`.decision` ranks them by shapes, and takes the first for which the programs' loops come out; the partition
    (:mod:`gradc.passes.schedule.partition`) follows it when it cuts the joint graph.

From a graph to a loop, in the order in which it happens

    ============================  =====================================================================================
    :mod:`.wide_products`         which products have wide rows; all of the below ask it
    :mod:`.merge_rows`            Graph -> Graph: rows that a reshape splits, ``[B*S, V]`` into ``[B, S, V]``, stay one
                                  axis in what is computed from them (:mod:`gradc.passes.graph.push_slices` before it
                                  multiplies only the rows that a slice leaves)
    :mod:`.attention_scores`      Graph: which products a GPU's tensor cores take with what follows, in one loop
    :mod:`.decision`              joint Graph -> Partition: the policy; with :mod:`.sums_to_products` (products add up
                                  over rows block by block) and :mod:`.precompute_gradients`
    :mod:`.block_rows`            Program -> Program: the pass that makes the loops, by the four modules below
    :mod:`.fission`               Program -> Program: kernels in two, one of which has the rows
    :mod:`.fusion_group`          Program, product -> the largest group of steps that can share a loop around it
    :mod:`.tiling`                step, buffer -> how the step is tiled by the rows of the buffer, if it can be
    :mod:`.loop_writer`           group -> the Program with its loop: steps over the rows of a block, blocks, carries
    :mod:`.push_transposes`       joint Graph -> Graph, on a GPU: columns that are reduced are rows of another product
    :mod:`.resize_blocks`         Program -> Program, on a GPU: as many rows of a block as memory has room for
    :mod:`.column_bounds`         steps -> the columns that a row needs at all: those before a causal mask's diagonal
    ============================  =====================================================================================

Legality
    A step can be in a loop if each iteration can do its part (:func:`.tile`): a kernel that stores to the rows that it
    reads, a product with these rows, or one that sums over them.  A group of steps is legal if what each reads of
    another is in the rows of the same iteration, and if no step outside has to run between two of its own
    (:class:`.FusionGroup`).  Positions along the outer axes are then independent of each other, and so are blocks of
    rows, but for what is carried.

Licence
    ``REAL`` for all that reorders a sum: how many rows a product has decides how its terms are grouped.  It depends on
    shapes alone, never on threads, so that a module's bits are its own.  ``numerics="strict"`` makes no loops.

On a GPU
    the host goes over the blocks (:func:`gradc.codegen.cuda.launch.runs_of`): each is the launches and library calls of
    its steps, with the position as an argument, and blocks lie in the workspace.  So blocks are large
    (:func:`.rows_per_launch`), and of a product with many positions along its batch (heads) no rows are blocked
    (``MOST_POSITIONS``), but the batch: :mod:`.block_batch` makes the same loops over its first axis, and changes
    nothing of what is saved.

What a target needs to run such a loop as one kernel
    Here only :func:`.rows_per_block` (the caches of a CPU), :func:`.rows_per_launch`, the numbers of
    :mod:`.wide_products` and ``FLOPS_PER_BYTE`` of :mod:`.precompute_gradients` know a machine.  A GPU has to give

    - *tiles*: a ``block`` buffer ``[c, columns]`` is at most ``by`` rows; where a row does not fit either, the columns
      need a loop of their own, and a softmax over them an online maximum and sum that rescale what was accumulated:
      :mod:`gradc.passes.column_blocking` makes loops so;
    - *parallelism*: the positions along the axes ``loop.parallel`` are independent, and so are the blocks of rows where
      not ``loop.reduces_rows``;
    - *carries*, what one iteration hands to the next: a call with ``add`` sums over the rows into a result that all
      blocks share, the last block first; along ``sequential`` axes kernels read and write an f64 accumulator.  A CPU
      runs these iterations one after another; as partial results that are combined at the end (the strategies of
      :mod:`gradc.analysis.strategies`) they are parallel;
    - *bounds*: ``to`` is how many columns a block needs, as a size that rises with its first row.
"""
