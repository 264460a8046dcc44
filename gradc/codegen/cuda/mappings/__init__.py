"""The mappings of a kernel to the threads of a GPU, one file each: when it fits, its parameters, what its template is
given.  :func:`gradc.codegen.cuda.choose_mapping.choose_mapping` takes one.
"""
