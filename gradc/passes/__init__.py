"""Graph -> Graph, Graph -> Program and Program -> Program rewrites, each a pure function under its own name."""
