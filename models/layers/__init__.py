"""Flax modules for the parts of a layer."""
