"""Memory, streams, dtypes and private symbols that PyTorch and JAX share.

This room imports no other room of the bridge.
"""
