"""Masks made from scores of keys, or from scores of blocks."""
