"""Small kernels that prepare the operands of matmuls."""
