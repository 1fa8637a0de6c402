"""Grouped matmul on Hopper, in Pallas-Mosaic."""
