"""Small memory-bound Triton kernels that run before and after attention."""
