"""Runtime of the target cuda."""
