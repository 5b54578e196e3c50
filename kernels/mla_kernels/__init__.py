"""The kernel core of mla-decode: formats, validation, planning and Triton kernels, free of any tensor framework."""
