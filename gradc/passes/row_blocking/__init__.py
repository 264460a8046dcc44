"""Products with wide rows are computed for one block of rows at a time, and are in memory never whole."""
