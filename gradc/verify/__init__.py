"""Validation: gradients against finite differences, graphs against exact algebra, and sample data."""
