"""The mappings of a kernel to tasks and vector lanes: one file each, and one template of its name in
``templates/cpu/kernel``.
"""
