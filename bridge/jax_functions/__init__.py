"""Any JAX function as a differentiable function on tensors: `from_jax` and the programs that it compiles.

This room imports `operators`, `direct`, `translate` and `interop`.
"""
