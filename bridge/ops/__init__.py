"""The operations of this library on tensors.

This room imports `jax_functions` and all rooms below it, and the public module `masks`.
"""
