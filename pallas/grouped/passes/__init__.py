"""Passes over the rows of grouped matmuls."""
