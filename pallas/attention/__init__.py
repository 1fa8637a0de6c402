"""Attention kernels.

Every file gives one direction of one implementation, as a function of jax_kernels.inputs.attention' types:

    attention_forward(inputs, options, *, out_dtype, config, core_count, interpret) -> (out, lse) or (out, lse, excess)
    attention_backward(inputs, options, lse, delta, dout, excess=None, *, config, core_count, interpret)
        -> AttentionGradients

inputs: AttentionInputs, of which a kernel is only given what its implementation serves. options: AttentionOptions,
with a positive scale. config: the blocks of its direction. out [B, T, H, Dv] in out_dtype; lse [B, H, T] float32,
natural log, of the scores and of the sink. With a bias, and under a score_mod that may mask, comes excess, like lse,
what the exact log-sum-exp is more than lse: beside scores of -1e9 the log of the sum is lost in float32. A backward is
given, beside dout, which is like out, what reference.attention.row_terms makes of the results and their cotangents, and
excess. The gradients have their inputs' shapes and dtypes; bias has one only with options.bias_gradient, and sinks has
None: the op computes it, from lse alone. A query that may attend to no key has out = 0 and lse = -inf (with sinks, its
head's), and passes no gradient. Any T, S, D and Dv: padding is done in here. What the decoding kernels take and give
stands in decode.py, what the 8-bit forward does in forward_fp8.py.
"""
