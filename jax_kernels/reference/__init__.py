"""Plain jnp forms of every op: the tests' oracle and the "xla" implementation."""
