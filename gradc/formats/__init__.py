"""Formats of files and texts: HTML, JSON, NumPy's archives of arrays."""
