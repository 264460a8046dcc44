"""Column blocking: the columns of a loop over blocks of rows come in blocks, too, as a GPU's tiles need them.

Row blocking (:mod:`gradc.passes.row_blocking`) leaves blocks ``[rows, columns]`` that have all columns.  Here they
come 64 at a time, in a :class:`gradc.ir.kernel.Sweep`, and what is summed over them is carried from one block to the
next::

    loop over(at0: B, at1: H) rows(row: S) by(64) count(rows) {
      sweep cols(col: S) by(64) count(cols) {
        carry top: f32[rows] max
        carry total: f32[rows] sum by exp(top)                 times exp(old top - top) where the top rises
        carry y.sum: f32[rows,64] sum by exp(top)
        ...
      }
      kernel @softmax rows(i: rows) cols(d: 64) { ... y.sum / total ... }
    }

``docs/tiles.md`` derives attention so, with the IR after each pass.

    ===================  ==============================================================================================
    :mod:`.split_loops`  Program -> Program: sums over rows get a loop of their own, over blocks of columns
    :mod:`.carry_sums`   Program -> Program: loops over blocks of rows, and kernels alone, get sweeps
    :mod:`.tile_rows`    Program -> Program: what a GPU's tensor cores take becomes such loops, by the two above
    :mod:`.epilogue`     loop, kernel -> the loop with what goes on with its rows among its last steps
    :mod:`.prologue`     loop, kernel -> the loop with a sum over features of its rows as its first sweep
    :mod:`.row_loop`     kernel -> a loop over blocks of its rows
    :mod:`.body`         loop -> its steps as one straight line of statements, and these as steps again
    :mod:`.carried`      body -> which sums are carried along a maximum, and the sweep of each
    ===================  ==============================================================================================

``split_loops`` comes first: it reads loops without sweeps.  Neither of the two knows a machine, nor asks whether it
pays: the sizes of blocks are arguments.  ``tile_rows`` asks :mod:`gradc.analysis.tiles` and
:mod:`gradc.analysis.tile_time`.

Licence
    ``REAL`` for all.  What is not of their form stays as it is.
"""
