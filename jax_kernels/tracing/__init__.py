"""JAX types and transforms this library's code: derivatives, dtype promotion, and the axes of meshes."""
