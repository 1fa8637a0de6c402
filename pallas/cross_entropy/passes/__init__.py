"""Small kernels of linear_cross_entropy that run between matmuls."""
