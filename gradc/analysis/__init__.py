"""What is known of kernels and programs, below what changes or writes them: how values of many rows are combined, in
what precision, at what cost.
"""
