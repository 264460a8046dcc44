"""Data movement that indices decide: gathers, scatters, tables, bags."""
