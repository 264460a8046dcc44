"""The table's lines, by family; :mod:`gradc.torch.table` says how to read one."""
