"""The lines of the table by family."""
