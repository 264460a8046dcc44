"""A GPU's constants: which file of them a compilation reads, and how they are measured."""
