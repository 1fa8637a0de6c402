"""Kernels of grouped_matmul. jax_kernels/inputs/grouped_matmul.py describes their arrays and options.

A kernel is called as `grouped_matmul(inputs, options, config=..., core_count=..., interpret=...)` and returns a
GroupedResult, or as `weight_gradient(inputs, options, ...)`, which returns an array. `config` is a block spec.
"""
