"""Kernels of linear_cross_entropy: sm90/ and triton/, and passes/ between matmuls.

`statistics` takes LossInputs with x [M, D] and returns Statistics; `gradients` also takes the log-sum-exp and the
cotangents of the losses. Their equations are in jax_kernels/reference/linear_cross_entropy.py. On Hopper
`losses_and_gradients` returns the results of both, from one computation of the logits.
"""
