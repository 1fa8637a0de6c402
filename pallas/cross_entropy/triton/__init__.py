"""The Triton kernels of linear_cross_entropy."""
