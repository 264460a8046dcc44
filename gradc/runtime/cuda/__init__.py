"""Running a Program on a GPU."""
