"""Operators of torch.library that run a program of JAX, and the cache of calls that passed every check.

This room imports `direct`, `translate` and `interop`.
"""
