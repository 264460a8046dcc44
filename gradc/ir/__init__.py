"""The graph IR: types, nodes, graphs, kernels and their text."""
