"""Graphs for other eyes: DOT, plain data (JSON), Model Explorer."""

from .export import from_json, model_explorer, to_dot, to_json

__all__ = ["from_json", "model_explorer", "to_dot", "to_json"]
