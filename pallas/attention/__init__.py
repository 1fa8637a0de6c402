"""Attention kernels.

Each file implements the forward or the backward, as a function of the types in jax_kernels.inputs.attention:

    attention_forward(inputs, options, *, out_dtype, config, core_count, interpret) -> (out, lse) or (out, lse, lse_lo)
    attention_backward(inputs, options, lse, delta, dout, lse_lo=None, *, config, core_count, interpret)
        -> AttentionGradients

inputs: AttentionInputs; the fields that the implementation does not serve are None. options: AttentionOptions with a
positive scale. config: the block spec row. core_count: the number of SMs. interpret: whether Pallas interprets the
kernel, as on a CPU.

Forward. out: [B, T, H, Dv] in out_dtype. lse: [B, H, T] float32, natural log, over the scores and the sink. lse_lo:
like lse, only with a bias or under a score_mod that may mask: the exact log-sum-exp minus lse. Float32 loses the log of
the sum next to scores of -1e9. A query that may attend to no key has out = 0 and lse = -inf (with sinks: its head's
sink), and passes no gradient.

Backward. lse, delta: [B, H, T] float32. lse is the forward's, but +inf for queries without keys; delta is the sum of
out * dout over Dv, minus the cotangent of lse. dout: like out. lse_lo: the forward's. The gradients have the shapes and
dtypes of their inputs. bias has a gradient only with options.bias_gradient. The gradient of sinks is None: the op
computes it from lse.

T, S, D and Dv are arbitrary: the kernels pad. decode_contract.py describes the decoding kernels, and
sm90/forward/fp8.py the 8-bit forward.
"""
