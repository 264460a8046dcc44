"""Entries of torch's op_db."""

TAKEN = """
abs acos gather softmax matmul nn.functional.conv2d nn.functional.batch_norm
"""
