"""Inspection of modules: explanations, predicted memory, export of graphs to other tools."""
