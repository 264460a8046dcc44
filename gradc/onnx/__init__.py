"""ONNX models as graphs: ``gradc.from_onnx``; needs the package ``onnx``."""

from .importer import from_onnx

__all__ = ["from_onnx"]
