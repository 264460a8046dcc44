"""The process around us as an input: its floating-point environment, its forks, the memory it may have."""
