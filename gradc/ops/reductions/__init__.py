"""Reductions over axes, scans along them, sorts."""
