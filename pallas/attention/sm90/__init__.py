"""Attention on Hopper: the Mosaic kernels, and the work of XLA before and after them."""
