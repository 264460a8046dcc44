"""Running a Program on the CPU."""
