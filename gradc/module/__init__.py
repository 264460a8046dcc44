"""Module, and the arguments and results of its calls."""
