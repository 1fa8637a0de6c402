"""Attention through Triton, for Ampere and later."""
