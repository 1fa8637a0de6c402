"""Whether JAX's interpreter of Mosaic can run the kernels."""

# Whether JAX's interpreter can run these kernels. As it comes it cannot; tests that complete it say so here.
INTERPRETED = False
