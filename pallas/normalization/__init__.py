"""Kernels of layer_norm and rms_norm. jax_kernels/inputs/normalization.py describes their arrays and options.

A forward is called as `norm_forward(inputs, options, config=..., core_count=..., interpret=...)` and returns a
NormResult. A backward is called as `norm_backward(inputs, options, result, dout, dtotal, config=..., core_count=...,
interpret=...)` and returns NormGradients. `config` is a block spec, `core_count` the GPU's number of SMs, `interpret`
runs the kernel in JAX's interpreter.
"""
