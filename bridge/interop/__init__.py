"""Memory, streams, dtypes and private symbols that PyTorch and JAX share; `arguments` reads the arguments of a call.

This room imports no other room of the bridge.
"""
