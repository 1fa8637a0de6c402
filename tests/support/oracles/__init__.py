"""Results in float64, in plain NumPy or jnp."""
