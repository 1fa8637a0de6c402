"""Parts for all Pallas-Triton kernels: sizes of tensors and of grids."""
