"""Loops with sweeps as kernels on tensor cores (docs/tiles.md).

    =====================  ==========================================================================================
    :mod:`.canonical`      loop -> the same loop over names that no user gave, and the words for these
    :mod:`.fragments`      kernel of the loop -> lines over fragments: a lane's two rows, and its columns of each
    :mod:`.folded`         statements of elements -> fewer: constant factors and what a row adds meet in one FMA
    :mod:`.decoding`       codes of a few bits -> f32 by their bits
    :mod:`.lanes`          which elements a lane has, what several share, what lies in shared memory for them
    :mod:`.kernel`         form -> the kernel's text by ``cuda/kernel/tile.cu.j2``, and what a launch must know
    =====================  ==========================================================================================

What a loop must be like, and its block sizes: :mod:`gradc.analysis.tiles`.
"""
