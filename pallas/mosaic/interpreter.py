"""Whether JAX's interpreter of Mosaic can run the kernels."""

# JAX's interpreter cannot run these kernels unchanged. Tests that extend it set this to True.
INTERPRETED = False
