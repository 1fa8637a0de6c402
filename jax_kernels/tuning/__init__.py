"""Tuning: times the implementations and block specs of calls, and keeps the fastest in the user's cache folder.

`jax_kernels.tuned` keeps the winners, and dispatch reads them there. `session` has jax_kernels.tune, `measure` times a
call's candidates, and `benchmark` has jax_kernels.benchmark_implementations.
"""
