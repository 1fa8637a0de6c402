"""Pallas-Triton, if this JAX has it. No other module imports it.

JAX has deprecated this backend, and a later version may lack it. Every module of the library imports without it. Then
dispatch passes over "triton" (jax_kernels/ops/unsupported.py), and the passes of "mosaic_gpu" are plain JAX.
"""

try:
    from jax.experimental.pallas import triton as plgpu
except ImportError:
    plgpu = None  # type: ignore[assignment]  # no kernel that reads it is traced

__all__ = ["AVAILABLE", "plgpu"]

AVAILABLE = plgpu is not None
