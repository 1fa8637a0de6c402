"""Ops on meshes: each device computes its own shards of the results."""
