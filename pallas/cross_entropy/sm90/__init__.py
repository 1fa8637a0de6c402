"""Hopper kernels of linear_cross_entropy."""
