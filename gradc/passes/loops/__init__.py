"""Loop transformations: pure functions ``Kernel -> Kernel`` (or ``Program -> Program``) that keep what is computed.

==================================  ================================================================================
:func:`~.reorder.reorder`           rows(n, k: 3) cols(w)  ->  rows(n, w) cols(k: 3)
:func:`~.split.split`               cols(w: 12)  ->  cols(w: 4, wr: 3), where w was w*3 + wr
:func:`~.unroll.unroll`             cols(k: 3) { f(k) }  ->  { f(0), f(1), f(2) }, folded: loop unswitching, too
:func:`~.accums.promote_accums`     accum y[c] <- v  ->  accum y[c] <- sum_cols v
:func:`~.accums.demote_reductions`  accum y[c] <- sum_cols v  ->  accum y[c] <- v
:func:`~.accums.store_sums`         of one row, accum y[] <- sum_cols v  ->  store y[] <- sum_cols v
:func:`~.hoist.hoist_loads`         load x[n] where %k  ->  %1 = load x[n], where %k, %1, 0
:func:`~.fuse.fuse`                 two kernels  ->  one; what the first stores for the second stays in registers
:func:`~.fuse.fuse_siblings`        two kernels of the same axes  ->  one, which loads once what both do
:func:`~.fission.fission`           a kernel  ->  one that stores a value of each row, and one of the rest
:func:`~.views.pad`                 a masked copy of elements  ->  a copy of those of an array between zeros
:func:`~.views.inline_view`         a copy of elements, and products of them  ->  products that read the array
:func:`~.relayout.relayout`         t: f32[N,C,H] of t[n, c, h]  ->  t: f32[N,H,C] of t[n, h, c]
:func:`~.copies.write_through`      a step, and a store that copies its result  ->  the step, which writes the copy
==================================  ================================================================================

A transformation checks all that makes it legal, whoever asks, and raises :class:`~.legality.IllegalMove` with the
reason; a pass says when it pays.  :func:`~.legality.attempt` is for passes that leave a kernel as it is where it is not
legal.  What holds for all of them: a kernel whose strategies are chosen has rows that others count on, and is left.
"""
