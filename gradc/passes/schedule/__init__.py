"""Graph -> Program: which nodes share a kernel, what is kept for backward."""
