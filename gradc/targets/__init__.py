"""What a CPU and a GPU are: caches, lanes, registers, units of access, and what things cost there."""
