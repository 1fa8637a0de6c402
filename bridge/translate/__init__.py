"""Functions written in torch operations become functions of jnp arrays: score_mods, mask functions, activations.

This room imports `interop` only.
"""
