"""The operations of this library on tensors.

This package may import `jax_functions`, `operators`, `direct`, `translate` and `interop`, and the public `masks`.
"""
