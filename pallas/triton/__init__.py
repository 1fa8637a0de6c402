"""Parts that any Pallas-Triton kernel needs: sizes of tensors and of grids."""
