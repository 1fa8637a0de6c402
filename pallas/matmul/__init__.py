"""Kernels of matmul. jax_kernels/inputs/matmul.py describes their arrays and options.

A kernel is called as `matmul(inputs, options, config=..., core_count=..., interpret=...)` and returns a MatmulResult.
`config` is a block spec, `core_count` the GPU's number of SMs, `interpret` runs the kernel in JAX's interpreter.
"""
