"""CUDA text on the CPU, for tests and for machines without a GPU."""
