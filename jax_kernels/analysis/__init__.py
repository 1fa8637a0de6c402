"""Analysis: which ops a function runs, their work, their share of the time, and advice.

`marks` has the primitive that counts the calls in a trace, `record` the calls, `costs` the FLOPs and bytes of a call,
`advice` the advice, `timing` the measured times, and `analyze` the function jax_kernels.analyze.
"""
