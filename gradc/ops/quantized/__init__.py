"""Quantization: blocks, their scales, formats of less than a byte."""
