"""Data movement that shapes alone decide: views, windows, other orders of axes."""
