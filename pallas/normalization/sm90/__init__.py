"""Normalisation on Hopper, in Pallas Mosaic."""
