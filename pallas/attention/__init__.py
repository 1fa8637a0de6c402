"""Attention kernels.

Every file gives one direction of one implementation, as a function of arrays:

    attention_forward(query, key, value, kv_lengths, q_offset, *, is_causal, scale, precision, out_dtype,
                      config, core_count, interpret) -> (out, lse)
    attention_backward(query, key, value, kv_lengths, q_offset, out, lse, dout, dlse, *, is_causal, scale,
                       precision, config, core_count, interpret) -> (dquery, dkey, dvalue)

query, out, dout: [B, T, H, D]; key: [B, S, Hkv, D]; value: [B, S, Hkv, Dv] with Hkv dividing H.
kv_lengths: None, or [B] int32, the number of keys that count. q_offset: a Python int, or [B] int32: the
position of query 0; causal keeps key j for query i where q_offset + i >= j. scale: a positive float.
precision: "fp32" or "tf32" for float32 inputs, None for 16-bit ones. lse: [B, H, T] float32, natural
log. dlse: None or like lse, the cotangent of lse. Gradients have their inputs' dtypes.
A query that may attend to no key has out = 0 and lse = -inf and passes no gradient.
Any T, S, D and Dv: padding is done in here.
"""
