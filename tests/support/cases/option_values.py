"""Two values of each option of the bridge's functions, and the tensors of their calls."""

import inspect

import jax
import torch
import torch.nn.functional as F

from jax_kernels import bridge, masks
from jax_kernels.cli.ops import OPS
from tests.support.cases.cached_calls import BLOCKS, IDS, LENGTHS, random

T, H, D = 24, 4, 16
QUERY, KEY, VALUE = (random(2, T, H, D, seed=seed) for seed in range(3))
CACHE = [random(2, T, 2, D, seed=seed).detach() for seed in range(2)]
FEW = random(2, 1, H, D).detach()
PAGES = [x.detach().reshape(4, 16, 2, D) for x in (random(4, 16, 2, D), random(4, 16, 2, D, seed=1))]
BIAS, SINKS = random(1, H, T, T), random(H)
MASKS = IDS[:, None, None] < 2, IDS[:, None, :, None] >= IDS[:, None, None]
X, W, W_UP, W_DOWN, SQUARE = random(5, 8), random(8, 6), random(8, 6, seed=1), random(6, 8), random(8, 8)
OF_TOKENS = torch.tensor([3, -1, 0, 5, 2], dtype=torch.int32)
GATHERED = torch.tensor([4, 0, 0, 7, 2], dtype=torch.int32)  # one of them outside of X
OF_GROUPS = torch.tensor([2, 1], dtype=torch.int32), torch.tensor([0, 5], dtype=torch.int32)
FP8 = random(16, 16).detach().to(torch.float8_e4m3fn), random(16, 16, seed=1).detach().to(torch.float8_e4m3fn)
GATED_FP8 = {"x": FP8[0], "w_gate": FP8[1], "w_up": FP8[0].T.contiguous(), "w_gate_scale": 1.5, "w_up_scale": 2.5}
GROUPS_FP8 = [random(2, 16, 16, seed=seed).detach().to(torch.float8_e4m3fn) for seed in range(2)]
ROW_SCALES, COLUMN_SCALES = (
    [random(*shape, seed=seed).detach().abs() + 0.5 for seed in range(2)] for shape in ((16,), (2, 16))
)
GROUPED_FP8 = {"x": FP8[0], "w": GROUPS_FP8[0], "x_scale": ROW_SCALES[0], "w_scale": COLUMN_SCALES[0]}
GROUPED_FP8 |= {"out_dtype": torch.float32}
GROUPED_GATED_FP8 = {
    "x": FP8[0],
    **dict(zip(("w_gate", "w_up"), GROUPS_FP8, strict=True)),
    "x_scale": ROW_SCALES[0],
    "out_dtype": torch.float32,
    **dict(zip(("w_gate_scale", "w_up_scale"), COLUMN_SCALES, strict=True)),
}
OUTLIERS, OF_8 = random(16, 16).detach() * torch.logspace(-3, 3, 16)[:, None], random(16, 16, seed=1).detach()
OF_8_BITS = [x.detach().to(torch.float8_e4m3fn) for x in (QUERY, KEY, VALUE)]
CU = torch.tensor([0, 20, 48], dtype=torch.int32), torch.tensor([0, 24, 48], dtype=torch.int32)
PACKED = [x.detach().reshape(2 * T, H, D) for x in (QUERY, KEY, VALUE)]


def near(score, b, h, q, k):
    return score - 0.1 * (q - k) ** 2


def far(score, b, h, q, k):
    return score + 0.05 * (q - k)


# The successive values of an option, and the tensors and options that its calls have in addition.
ATTENTION = {
    "bias": (None, BIAS),
    "mask": (None, *MASKS, masks.prefix(9)),
    "is_causal": (False, True),
    "window": (None, 3, (5, 1)),
    "segment_ids": (None, IDS, (IDS, IDS.flip(1).contiguous())),
    "kv_lengths": (None, LENGTHS),
    "q_offset": ((0, 2, torch.tensor(7, dtype=torch.int32)), {"is_causal": True}),
    "score_mod": (None, near, far),
    "sinks": (None, SINKS),
    "scale": (None, 0.5, -0.1),
    "softcap": (None, 0.5, 50.0),
    "return_lse": (False, True),
}
# For ops that pass these options on.
OF_ATTENTION = {name: x if isinstance(x[-1], dict) else x[-2:] for name, x in ATTENTION.items()}
# These change no value on a CPU, or none that a test can rely on: the test counts their calls.
COUNTED = {
    "deterministic": (False, True),
    "stop_gradient_weights": (False, True),
    "precision": ("fp32", "tf32"),
    "implementation": (None, "xla"),
}
DILATED = {
    "segment_lengths": ((8, 24), [12, 24], (8, 16)),
    "dilation_rates": ((1, 2), [2, 1]),
    "is_causal": (False, True),
    "heads": ("all", "groups"),
    "combine": ("lse", "mean"),
    "layout": ("overlap", "partition"),
    "order": (None, "hilbert"),
    "return_lse": (False, True),
    "segment_ids": (None, IDS),
    "scale": (None, 0.5),
}
FLASH_ATTN = {
    "softmax_scale": (None, 0.5),
    "causal": (False, True),
    "window_size": ((-1, -1), (3, 2), (3, -1)),
    "softcap": (0.0, 0.5, 50.0),
    "alibi_slopes": (None, torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.full((2, H), 0.2)),
    "return_attn_probs": (False, True),
}
EIGHT_BITS = {
    "x_scale": ((None, 2.0, torch.tensor(3.0)), {"x": FP8[0], "w": FP8[1]}),
    "w_scale": ((None, 2.0, torch.tensor(3.0)), {"x": FP8[0], "w": FP8[1]}),
    "out_dtype": (None, torch.bfloat16, torch.float16),
    "precision": (None, "bf16", "fp16"),
    "scaling": (("tensor", "row"), {"x": OUTLIERS, "w": OF_8, "precision": "fp8"}),
    "transpose_w": ((False, True), {"w": SQUARE}),
}
MATMUL = {
    "bias": (None, random(6), random(6, seed=1)),
    "activation": (None, "relu", "gelu", F.silu, torch.nn.LeakyReLU(0.2)),
    "residual": (None, random(5, 6)),
    **EIGHT_BITS,
}
NORM = {
    "scale": (None, random(8), random(8, seed=1)),
    "residual": (None, random(5, 8, seed=1)),
    "eps": (1e-5, 0.5, 2.0),
    "scale_offset": ((0.0, 1.0), {"scale": random(8)}),
    "quantize": ((None, "e4m3"), {"x": random(16, 16).detach()}),
}
DECODE = {
    "kv_lengths": (None, LENGTHS),
    "mask": (None, MASKS[0], masks.prefix(9)),
    "bias": (None, BIAS[:, :, :1].detach()),
    "window": (None, 3, (5, 0)),
    "softcap": (None, 0.5, 50.0),
    "sinks": (None, SINKS.detach()),
    "scale": (None, 0.5),
    "return_lse": (False, True),
    "block_tables": (
        (torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), torch.tensor([[3, 1], [2, 0]], dtype=torch.int32)),
        {"key": PAGES[0], "value": PAGES[1], "kv_lengths": torch.tensor([20, 31], dtype=torch.int32)},
    ),
}
QUANTIZE = {
    "format": ("e4m3", "e5m2", "int8", "int4", "mxfp4"),
    "scaling": (None, "row", "block"),
    "axis": ((-1, -2), {"scaling": "row"}),
    "scale": (None, torch.tensor(0.5), torch.tensor(2.0)),
    "group_size": ((32, 64), {"format": "int8"}),
    "scale_dtype": ((None, torch.bfloat16), {"format": "int8"}),
}
CASES = {
    "flash_attention": ({"query": QUERY, "key": KEY, "value": VALUE}, ATTENTION),
    # A Mask or a score_mod takes another way.
    "flash_attention beside a Mask": (
        {"query": QUERY, "key": KEY, "value": VALUE, "mask": masks.prefix(20)},
        {name: x for name, x in OF_ATTENTION.items() if name not in ("mask", "score_mod")},
    ),
    "block_sparse_attention": (
        {"query": QUERY, "key": KEY, "value": VALUE, "block_mask": BLOCKS, "block_size": 8},
        {
            "block_mask": (BLOCKS, BLOCKS.flip(0).contiguous()),
            "block_size": (8, 9, (8, 11)),
        }
        | {name: x for name, x in OF_ATTENTION.items() if name != "mask"},
    ),
    "dynamic_mask_attention": (
        {"query": QUERY, "key": KEY, "value": VALUE, "mask": MASKS[0]},
        OF_ATTENTION | {"mask": (*MASKS, masks.prefix(9))},
    ),
    "dilated_attention": (
        {"query": QUERY, "key": KEY, "value": VALUE, "segment_lengths": (8, 24), "dilation_rates": (1, 2)},
        DILATED,
    ),
    "decode_attention": ({"query": FEW, "key": CACHE[0], "value": CACHE[1]}, DECODE),
    "flash_attention_fp8": (
        dict(zip(("query", "key", "value"), OF_8_BITS, strict=True)),
        {name: (None, 0.5, torch.tensor(2.0)) for name in ("q_scale", "k_scale", "v_scale")}
        | {name: ATTENTION[name] for name in ("is_causal", "q_offset", "kv_lengths", "return_lse")}
        | {"scale": (None, 0.5)},
    ),
    "matmul": ({"x": X, "w": W}, MATMUL),
    "gated_matmul": (
        {"x": X, "w_gate": W, "w_up": W_UP},
        {
            "activation": ("silu", "relu", F.mish),
            "residual": (None, random(5, 6)),
            **{name: ((2.0, torch.tensor(3.0)), GATED_FP8) for name in ("x_scale", "w_gate_scale", "w_up_scale")},
            "out_dtype": EIGHT_BITS["out_dtype"],
            "precision": EIGHT_BITS["precision"],
            "scaling": (("tensor", "row"), {"x": OUTLIERS, "w_gate": OF_8, "w_up": OF_8 + 1, "precision": "fp8"}),
            "transpose_w": ((False, True), {"w_gate": SQUARE, "w_up": SQUARE + 1}),
        },
    ),
    "mlp": (
        {"x": X, "w_up": W, "w_down": W_DOWN},
        {
            "w_gate": (None, W_UP),
            "bias_up": (None, random(6)),
            "bias_down": (None, random(8)),
            "activation": ("silu", "relu", F.mish),
            "residual": (None, random(5, 8, seed=1)),
            "transpose_w": ((False, True), {"w_up": SQUARE, "w_down": random(8, 8, seed=1)}),
        },
    ),
    "grouped_gated_matmul": (
        {"x": X, "w_gate": torch.stack([W, W_UP]), "w_up": torch.stack([W_UP, W]), "group_sizes": OF_GROUPS[0]},
        {
            "group_sizes": OF_GROUPS,
            "gather_indices": (None, GATHERED, GATHERED.flip(0)),
            "activation": ("silu", "relu", F.mish),
            "x_scale": (ROW_SCALES, GROUPED_GATED_FP8),
            **dict.fromkeys(("w_gate_scale", "w_up_scale"), (COLUMN_SCALES, GROUPED_GATED_FP8)),
            "transpose_w": ((False, True), {"w_gate": random(2, 8, 8), "w_up": random(2, 8, 8, seed=1)}),
            "out_dtype": EIGHT_BITS["out_dtype"],
            "precision": EIGHT_BITS["precision"],
        },
    ),
    "grouped_matmul": (
        {"x": X, "w": torch.stack([W, W_UP]), "group_sizes": OF_GROUPS[0]},
        {
            "group_sizes": OF_GROUPS,
            "gather_indices": (None, GATHERED, GATHERED.flip(0)),
            "bias": (None, random(2, 6), random(2, 6, seed=1)),
            "activation": (None, "relu", F.mish),
            "x_scale": (ROW_SCALES, GROUPED_FP8),
            "w_scale": (COLUMN_SCALES, GROUPED_FP8),
            "transpose_w": ((False, True), {"w": random(2, 8, 8)}),
            "out_dtype": EIGHT_BITS["out_dtype"],
            "precision": EIGHT_BITS["precision"],
        },
    ),
    "linear_cross_entropy": (
        {"x": X, "w": W, "targets": OF_TOKENS},
        {
            "targets": (OF_TOKENS, OF_TOKENS.flip(0)),
            "weights": (None, random(5), random(5, seed=1)),
            "reduction": ("none", "mean", "sum"),
            "transpose_w": ((False, True), {"w": SQUARE}),
            "softcap": (None, 0.5, 50.0),
            "label_smoothing": (0.0, 0.1),
            "z_loss": (0.0, 0.1),
            "ignore_index": (-1, 3),
            "precision": (None, "fp8"),
        },
    ),
    "layer_norm": ({"x": X}, NORM | {"bias": (None, random(8), random(8, seed=1))}),
    "rms_norm": ({"x": X}, NORM),
    "quantize": ({"x": random(256, 128).detach()}, QUANTIZE),
    "quantize_fp8": ({"x": random(16, 16).detach()}, {"axis": (None, 0, 1)}),
    "scaled_dot_product_attention": (
        {"query": random(2, H, T, D), "key": random(2, H, 12, D), "value": random(2, H, 12, D, seed=1)},
        {
            "attn_mask": (None, random(T, 12), random(H, 1, 12) > 0),
            "is_causal": (False, True),
            "scale": (None, 0.5),
            "enable_gqa": ((True,), {"key": random(2, 2, 12, D), "value": random(2, 2, 12, D, seed=1)}),
        },
    ),
    "flash_attn_func": ({"q": QUERY, "k": KEY, "v": VALUE}, FLASH_ATTN),
    "flash_attn_varlen_func": (
        dict(zip("qkv", PACKED, strict=True))
        | {"cu_seqlens_q": CU[0], "cu_seqlens_k": CU[1], "max_seqlen_q": 28, "max_seqlen_k": 28},
        FLASH_ATTN | {"cu_seqlens_q": CU, "cu_seqlens_k": CU[::-1], "max_seqlen_q": (28, 30), "max_seqlen_k": (28, 29)},
    ),
    "flash_dmattn_func": (
        {"query": QUERY, "key": KEY, "value": VALUE},
        {
            "attn_mask": (None, *MASKS),
            "attn_bias": (None, BIAS),
            "mask": (None, *MASKS),
            "bias": (None, BIAS),
            "scale": (None, 0.5),
            "is_causal": (None, True),
            "softcap": (None, 0.5, 50.0),
        },
    ),
    "flex_attention": (
        {"query": random(2, H, T, D), "key": random(2, H, 12, D), "value": random(2, H, 12, D, seed=1)},
        {
            "score_mod": (None, near, far),
            "block_mask": (None, masks.prefix(9), masks.causal()),
            "scale": (None, 0.5),
            "enable_gqa": ((True,), {"key": random(2, 2, 12, D), "value": random(2, 2, 12, D, seed=1)}),
            "return_lse": (False, True),
        },
    ),
}
# Functions without options whose values a cached call could confuse; test_flash_attn_kvcache.py has the cache's.
LEFT_OUT = {
    "QuantizedTensor", "analyze", "benchmark_implementations", "cache_info", "clear_cache", "compile_attention",
    "dequantize",
    "device_info", "explain", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func",
    "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache", "from_jax",
    "initialize_distributed", "linear", "memory_report", "prepare_mask", "quantize_weights",
    "ring_attention", "sequence_parallel_dilated_attention", "shard_sequence", "unshard_sequence", "validate",
}  # fmt: skip


def typical_case(op: str):
    """A case from the typical call of an op: its arrays with few values, and each of its numbers and half of it."""
    call = OPS[op]
    given = {
        name: random(*(min(size, 8) for size in shape))
        for name, shape in zip(inspect.signature(call.function).parameters, call.shapes, strict=False)
    }
    return given, {name: (x, x / 2) for name, x in call.arguments.items() if isinstance(x, float)}


CASES |= {op: typical_case(op) for op in OPS if hasattr(bridge, op) and op not in {*CASES, *LEFT_OUT}}
# Arguments that raise for every value except one, or change no value.
RAISING = {
    "dropout_p", "block_table", "kernel_options", "return_attn_probs of flash_dmattn_func",
    "return_aux of flex_attention",
}  # fmt: skip
ACTIVATIONS = {F.silu: jax.nn.silu, F.mish: jax.nn.mish}
