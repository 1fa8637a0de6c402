"""Kernels of linear_cross_entropy.

`statistics` takes LossInputs with x [M, D] and returns Statistics; `gradients` also takes the log-sum-exp and the
cotangents of the losses. Their equations are in jax_kernels/reference/linear_cross_entropy.py.
"""
