"""Calls of the ops with sizes and options drawn at random."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.random.draws import TOLERANCE, Arrays, Call, Draw

SCORE_MODS: dict[str, Callable[..., Any]] = {
    "distance": lambda s, b, h, q, k: s - 0.05 * (h + 1) * jnp.abs(q - k),
    "capped": lambda s, b, h, q, k: 8 * jnp.tanh(s / 8),
    "by_place": lambda s, b, h, q, k: jnp.where(k > q + 5, s * 0.5, s) + jnp.where(q % 2 == 0, 0.3, -0.2) * (b + 1),
}


def _sizes_of(axes: str, sizes: Mapping[str, int]) -> list[int]:
    return [size if axis in axes else 1 for axis, size in sizes.items()]


def attention(draw: Draw) -> Call:
    """A forward and the gradients of flash_attention."""
    batch, kv_heads, length = draw.integer(1, 4), draw.integer(1, 4), draw.size()
    heads, head_dim = kv_heads * draw.one(1, 1, 2, 4, 7), draw.one(64, 128, 32, 96, 256, 16, 40, 80, 192, 72)
    keys, v_head_dim = draw.one(length, draw.size()), draw.one(head_dim, head_dim, 64, 48)
    dtype = draw.one("bfloat16", "bfloat16", "float16", "float32")
    normal = lambda *shape: draw.normal(*shape, dtype=dtype)
    sizes = {"b": batch, "h": heads, "t": length, "s": keys}
    arrays = {
        "query": normal(batch, length, heads, head_dim),
        "key": normal(batch, keys, kv_heads, head_dim),
        "value": normal(batch, keys, kv_heads, v_head_dim),
    }
    moved = list(arrays)
    if draw.chance(0.2):
        arrays["bias"] = normal(*_sizes_of(draw.one("bhts", "hts", "ts", "bs", "h"), sizes))
        moved += ["bias"] * draw.chance(0.5)
    if draw.chance(0.2):
        arrays["sinks"] = draw.normal(heads)
        moved.append("sinks")
    if draw.chance(0.2):
        arrays["kv_lengths"] = draw.random.integers(0, keys + 1, batch).astype(np.int32)
    if draw.chance(0.2) and length == keys:
        arrays["segment_ids"] = np.sort(draw.random.integers(0, 4, (batch, length))).astype(np.int32)
    if draw.chance(0.2):
        arrays["q_offset"] = draw.random.integers(-20, keys + 20, batch).astype(np.int32)
    mask, mod = draw.one(None, None, "dense", "blocks", "function", "window"), draw.one(None, None, None, *SCORE_MODS)
    if mask == "dense":
        arrays["mask"] = draw.random.random(_sizes_of(draw.one("bhts", "ts", "bs"), sizes)) < 0.7
    if mask == "blocks":
        arrays["cells"] = draw.random.random((draw.one(1, batch), heads, -(-length // 64), -(-keys // 64))) < 0.6
    options = {
        "is_causal": draw.chance(0.5),
        "window": (draw.integer(-1, 300), draw.integer(-1, 200)) if draw.chance(0.2) else None,
        "softcap": draw.one(5.0, 30.0) if draw.chance(0.15) and mod is None else None,
        "scale": draw.one(None, None, 0.05, -0.1),
        "deterministic": draw.one(None, None, True),
    }

    def forward(ops: Any, arrays: Arrays, **how: Any) -> Mapping[str, Any]:
        given = dict(arrays)
        if mask == "blocks":
            given["mask"] = ops.masks.block_sparse(given.pop("cells"), 64)
        if mask == "function":
            given["mask"] = ops.masks.from_function(lambda b, h, q, k: ((q + k + h) % 3 != 0) | (q == k), heads=heads)
        if mask == "window":
            given["mask"] = ops.masks.sliding_window(50, 3) | ops.masks.global_tokens(8)
        out, lse = ops.flash_attention(**given, **options, score_mod=SCORE_MODS.get(mod), return_lse=True, **how)
        return {"out": out, "lse": lse}

    drawn = sizes | {"kv_heads": kv_heads, "head_dim": head_dim, "v_head_dim": v_head_dim, "dtype": dtype}
    return Call(
        forward=forward,
        arrays=arrays,
        moved=moved,
        dtype=dtype,
        keeps=frozenset({"sinks"}),
        options=drawn | options | {"mask": mask, "score_mod": mod, "arrays": sorted(arrays), "moved": moved},
    )


ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh", jnp.sin, jax.nn.softplus, jax.nn.mish)


def products(draw: Draw) -> Call:
    """A forward and the gradients of matmul, gated_matmul or mlp."""
    op, (m, n, k) = draw.one("matmul", "matmul", "gated", "mlp"), draw.sizes(3)
    dtype, transpose_w = draw.one("bfloat16", "bfloat16", "float16", "float32"), draw.chance(0.4)
    activation = draw.one(*ACTIVATIONS)
    normal = lambda *shape: draw.normal(*shape, dtype=dtype)

    def weight(inner: int, columns: int) -> np.ndarray:
        x = draw.normal(*((columns, inner) if transpose_w else (inner, columns))) / np.float32(inner**0.5)
        return np.asarray(jnp.asarray(x, dtype), np.float32)

    arrays = {"x": normal(*draw.one((), (), (2,)), m, k)}
    if op == "matmul":
        name, columns = "matmul", n
        arrays |= {"w": weight(k, n)} | ({"bias": normal(n)} if draw.chance(0.5) else {})
    elif op == "gated":
        name, columns = "gated_matmul", n
        arrays |= {"w_gate": weight(k, n), "w_up": weight(k, n)}
    else:
        name, columns = "mlp", k
        arrays |= {"w_up": weight(k, n), "w_down": weight(n, k)}
        arrays |= draw.one({}, {"w_gate": weight(k, n)}, {"bias_up": normal(n), "bias_down": normal(k)})
    if draw.chance(0.4):
        arrays["residual"] = normal(*arrays["x"].shape[:-1], columns)
    options = {"transpose_w": transpose_w, "activation": activation}
    return Call(
        forward=lambda ops, given, **how: {"out": getattr(ops, name)(**given, **options, **how)},
        arrays=arrays,
        moved=list(arrays),
        dtype=dtype,
        options=options | {"op": name, "m": m, "n": n, "k": k, "dtype": dtype, "arrays": sorted(arrays)},
    )


def grouped(draw: Draw) -> Call:
    """A forward and the gradients of grouped_matmul: some groups without rows, and rows past the last group."""
    groups, (n, k) = draw.integer(1, 9), draw.sizes(2)
    dtype, transpose_w = draw.one("bfloat16", "bfloat16", "float16", "float32"), draw.chance(0.4)
    sizes = [draw.one(0, 1, draw.size()) for _ in range(groups)]
    m = max(1, sum(sizes) + draw.one(0, draw.size()))
    weight = (groups, n, k) if transpose_w else (groups, k, n)
    arrays = {"x": draw.normal(m, k, dtype=dtype), "w": draw.normal(*weight) / np.float32(k**0.5)}
    arrays["w"] = np.asarray(jnp.asarray(arrays["w"], dtype), np.float32)
    arrays |= {"bias": draw.normal(groups, n, dtype=dtype)} if draw.chance(0.5) else {}
    options = {"transpose_w": transpose_w, "activation": draw.one(None, *ACTIVATIONS)}
    name = "grouped_matmul"
    if "bias" not in arrays and options["activation"] is not None and draw.chance(0.5):
        name, w = "grouped_gated_matmul", arrays.pop("w")
        arrays |= {"w_gate": w, "w_up": w[:, ::-1].copy()}
    return Call(
        forward=lambda ops, given, **how: {"out": getattr(ops, name)(**given, **options, **how)},
        arrays=arrays | {"group_sizes": np.asarray(sizes, np.int32)},
        moved=list(arrays),
        dtype=dtype,
        options=options
        | {"op": name, "sizes": sizes, "m": m, "n": n, "k": k, "dtype": dtype, "arrays": sorted(arrays)},
    )


def eight_bits(draw: Draw) -> Call:
    """A matmul of 8-bit operands, or a gated unit of them; by XLA on the dequantized operands."""
    scaling, is_gated = draw.one("tensor", "row", "block"), draw.chance(0.4)
    m, n, k = draw.size(), 16 * draw.integer(1, 60), 16 * draw.integer(1, 60)
    if draw.chance(0.5):  # as a Hopper kernel needs them
        m, n, k = draw.whole(8), draw.whole(64), draw.whole(128)
    dtype, activation = draw.one("bfloat16", "float16", "float32"), draw.one(*ACTIVATIONS)
    arrays = {"x": draw.normal(m, k), "w": draw.normal(n, k) / np.float32(k**0.5)}
    if is_gated:
        arrays["w_up"] = draw.normal(n, k) / np.float32(k**0.5)

    def forward(ops: Any, given: Arrays, **how: Any) -> Mapping[str, Any]:
        is_exact = how.get("precision") == "fp32"
        rounded = [ops.quantize(given[name], scaling=scaling) for name in ("x", "w", "w_up") if name in given]
        operands = [ops.dequantize(x) for x in rounded] if is_exact else rounded
        how = how | {"transpose_w": True, "out_dtype": "float32" if is_exact else dtype, "activation": activation}
        return {"out": (ops.gated_matmul if is_gated else ops.matmul)(*operands, **how)}

    return Call(
        forward=forward,
        arrays=arrays,
        keeps=frozenset(arrays),
        dtype=dtype,
        tolerance=TOLERANCE["float16" if dtype == "float32" else "bfloat16"],
        options={"scaling": scaling, "m": m, "n": n, "k": k, "is_gated": is_gated, "dtype": dtype, "f": activation},
    )


def norms(draw: Draw) -> Call:
    """A forward and the gradients of layer_norm or rms_norm."""
    rows = draw.one(draw.integer(1, 10), draw.integer(10, 600))
    columns = draw.one(draw.size(), 8 * draw.size(), draw.whole(128), 8 * draw.whole(128), 20000)
    dtype, is_centred = draw.one("bfloat16", "float16", "float32"), draw.chance(0.5)
    normal = lambda *shape: draw.normal(*shape, dtype=dtype)
    arrays = {"x": normal(rows, columns)}
    arrays |= {"scale": normal(columns)} if draw.chance(0.8) else {}
    arrays |= {"bias": normal(columns)} if is_centred and draw.chance(0.6) else {}
    arrays |= {"residual": normal(rows, columns)} if draw.chance(0.4) else {}
    options = {"eps": draw.one(1e-6, 1e-5), "scale_offset": draw.one(0.0, 1.0) if "scale" in arrays else 0.0}

    def forward(ops: Any, given: Arrays, **how: Any) -> Mapping[str, Any]:
        found = (ops.layer_norm if is_centred else ops.rms_norm)(**given, **options, **how)
        return {"out": found[0], "total": found[1]} if "residual" in given else {"out": found}

    drawn = {"rows": rows, "columns": columns, "dtype": dtype, "is_centred": is_centred, "arrays": sorted(arrays)}
    return Call(
        forward=forward,
        arrays=arrays,
        moved=list(arrays),
        dtype=dtype,
        has_precision=False,
        options=drawn | options,
    )


def decoding(draw: Draw) -> Call:
    """A forward of decode_attention."""
    batch, kv_heads, tokens = draw.integer(1, 5), draw.one(1, 2, 8), draw.one(1, 1, 2, 5, 16)
    heads, head_dim = kv_heads * draw.one(1, 3, 4, 8, 12), draw.one(64, 128, 96, 256)
    keys, dtype = tokens + draw.size(), draw.one("bfloat16", "float16")
    normal = lambda *shape: draw.normal(*shape, dtype=dtype)
    arrays = {"query": normal(batch, tokens, heads, head_dim)}
    arrays |= {name: normal(batch, keys, kv_heads, head_dim) for name in ("key", "value")}
    if draw.chance(0.6):
        arrays["kv_lengths"] = draw.random.integers(0, keys + 1, batch).astype(np.int32)
    if draw.chance(0.3):
        arrays["sinks"] = draw.normal(heads)
    if draw.chance(0.2):
        arrays["mask"] = draw.random.random((batch, 1, 1, keys)) < 0.8
    options = {"window": draw.one(None, None, draw.integer(1, 300)), "softcap": draw.one(None, None, 20.0)}
    if draw.chance(0.3):
        size = draw.one(16, 64, 128)
        pages = -(-keys // size)
        # The last pages belong to no sequence.
        arrays |= {name: normal(batch * pages + 3, size, kv_heads, head_dim) for name in ("key", "value")}
        arrays["block_tables"] = draw.random.permutation(batch * pages).reshape(batch, pages).astype(np.int32)
        arrays.setdefault("kv_lengths", np.full(batch, keys, np.int32))
        if "mask" in arrays:
            arrays["mask"] = draw.random.random((batch, 1, 1, pages * size)) < 0.8

    def forward(ops: Any, given: Arrays, **how: Any) -> Mapping[str, Any]:
        out, lse = ops.decode_attention(**given, **options, return_lse=True, **how)
        return {"out": out, "lse": lse}

    drawn = {"shape": arrays["query"].shape, "keys": keys, "kv_heads": kv_heads, "arrays": sorted(arrays)}
    return Call(
        forward=forward,
        arrays=arrays,
        dtype=dtype,
        keeps=frozenset({"sinks"}),
        has_precision=False,
        options=drawn | options,
    )


def dilated_pattern(draw: Draw, length: int, heads: int) -> dict[str, Any]:
    """The arguments of dilated_attention, without its arrays."""
    groups = draw.chance(0.3)
    count = draw.integer(1, (min(4, heads + 1) if groups else 4))
    lengths = [draw.one(draw.integer(1, 2 * length + 1), 64, 128, 256, length) for _ in range(count)]
    options: dict[str, Any] = {
        "segment_lengths": lengths,
        "dilation_rates": [min(draw.one(1, 1, 2, 3, 4, 8), size) for size in lengths],
        "is_causal": draw.chance(0.5),
        "order": draw.one(None, None, None, "hilbert"),
        "scale": draw.one(None, None, 0.05),
        "deterministic": draw.one(None, None, True),
    }
    if draw.chance(0.2):
        return options | {"layout": "partition", "segment_lengths": [max(size // count, 8) for size in lengths]}
    options |= {"heads": "groups" if groups else "all", "combine": draw.one("lse", "lse", "mean")}
    options["stop_gradient_weights"] = options["combine"] == "lse" and draw.chance(0.3)
    return options


def dilated(draw: Draw) -> Call:
    """A forward and the gradients of dilated_attention."""
    batch, kv_heads, length = draw.integer(1, 3), draw.integer(1, 4), draw.size()
    heads, head_dim = kv_heads * draw.one(1, 1, 2, 4), draw.one(64, 128, 32, 96, 256, 40)
    dtype, options = draw.one("bfloat16", "bfloat16", "float16", "float32"), dilated_pattern(draw, length, heads)
    arrays = draw.attention_arrays(batch, length, heads, kv_heads, head_dim, head_dim, head_dim, 64, dtype=dtype)
    moved = list(arrays)
    if draw.chance(0.2):
        arrays["segment_ids"] = np.sort(draw.random.integers(-1, 4, (batch, length))).astype(np.int32)

    def forward(ops: Any, given: Arrays, **how: Any) -> Mapping[str, Any]:
        out, lse = ops.dilated_attention(**given, **options, return_lse=True, **how)
        return {"out": out, "lse": lse}

    sizes = {name: x.shape for name, x in arrays.items()}
    return Call(forward=forward, arrays=arrays, moved=moved, dtype=dtype, options=sizes | options | {"dtype": dtype})


def dynamic(draw: Draw) -> Call:
    """A forward and the gradients of dynamic_mask_attention, with top_k of the bias or a mask of any heads."""
    batch, kv_heads, length, keys = draw.integer(1, 4), draw.integer(1, 4), draw.size(), draw.size()
    heads, head_dim = kv_heads * draw.one(1, 2, 4), draw.one(64, 128, 32, 96, 256)
    dtype = draw.one("bfloat16", "bfloat16", "float16", "float32")
    normal = lambda *shape: draw.normal(*shape, dtype=dtype)
    arrays = {
        "query": normal(batch, length, heads, head_dim),
        "key": normal(batch, keys, kv_heads, head_dim),
        "value": normal(batch, keys, kv_heads, head_dim),
        "bias": normal(batch, draw.one(1, kv_heads, heads), draw.one(1, length), keys),
    }
    moved, kept = list(arrays), draw.one(None, draw.integer(1, keys + 1))
    if kept is None:
        arrays["mask"] = draw.random.random((batch, draw.one(1, kv_heads, heads), length, keys)) < draw.one(0.05, 0.5)
    options = {"is_causal": draw.chance(0.4), "q_offset": draw.one(0, keys - length), "softcap": draw.one(None, 20.0)}

    def forward(ops: Any, given: Arrays, **how: Any) -> Mapping[str, Any]:
        # The bias has the same values in every dtype, so the same keys are kept.
        mask = given.get("mask", ops.masks.top_k(given["bias"], kept, q_length=length) if kept else None)
        out, lse = ops.dynamic_mask_attention(**given | {"mask": mask}, **options, return_lse=True, **how)
        return {"out": out, "lse": lse}

    sizes = {name: x.shape for name, x in arrays.items()}
    return Call(
        forward=forward,
        arrays=arrays,
        moved=moved,
        dtype=dtype,
        options=sizes | options | {"dtype": dtype, "kept": kept},
    )


def attention_of_eight_bits(draw: Draw) -> Call:
    """A forward of flash_attention_fp8."""
    batch, kv_heads, length, keys = draw.integer(1, 4), draw.integer(1, 4), draw.size(), draw.size()
    heads, head_dim = kv_heads * draw.one(1, 2, 4), draw.one(64, 128, 32, 96, 256, 16, 192)
    arrays = {
        "query": draw.normal(batch, length, heads, head_dim),
        "key": draw.normal(batch, keys, kv_heads, head_dim),
        "value": draw.normal(batch, keys, kv_heads, draw.one(head_dim, 64)),
    }
    if draw.chance(0.3):
        arrays["kv_lengths"] = draw.random.integers(0, keys + 1, batch).astype(np.int32)
    options = {"is_causal": draw.chance(0.5), "q_offset": draw.one(0, keys - length), "scale": draw.one(None, 0.05)}

    def forward(ops: Any, given: Arrays, **how: Any) -> Mapping[str, Any]:
        rest, scales = dict(given), {}
        for name in ("query", "key", "value"):
            rest[name], scales[f"{name[0]}_scale"] = ops.quantize_fp8(given[name], axis=(1, 3))
        out, lse = ops.flash_attention_fp8(**rest, **scales, **options, return_lse=True, **how)
        return {"out": out, "lse": lse}

    return Call(
        forward=forward,
        arrays=arrays,
        dtype="bfloat16",
        keeps=frozenset(arrays),
        has_precision=False,
        tolerance=0.05,
        options={name: x.shape for name, x in arrays.items()} | options,
    )


def few_bits(draw: Draw) -> Call:
    """A matmul with weights of 4 or 8 bits, and its gradient of x; by XLA on the dequantized weights."""
    format, transpose_w, is_gated = draw.one("int8", "int4", "mxfp8", "mxfp4"), draw.chance(0.5), draw.chance(0.3)
    m, n, k = draw.one(1, 16, draw.size()), draw.one(draw.size(), draw.whole(64)), 128 * draw.integer(1, 12)
    dtype, activation = draw.one("bfloat16", "float16"), draw.one(*ACTIVATIONS)
    layout: dict[str, Any] = {"axis": -1 if transpose_w else -2}
    if format in ("int8", "int4"):
        layout |= draw.one({}, {"group_size": 32}, {"group_size": 64}, {"scaling": "row"})
    shape = (n, k) if transpose_w else (k, n)
    arrays = {"x": draw.normal(m, k, dtype=dtype)}
    weights = ["w_gate", "w_up"] if is_gated else ["w"]
    # With many rows, kernels round the dequantized weights to `dtype`. At relu's kink, that can move a gradient from 0
    # to 1, so the weights of relu are exact.
    normal = lambda: draw.normal(*shape) / np.float32(k**0.5)
    weight = lambda: _exact_weights(draw, shape, format, -1 if transpose_w else 0) if activation == "relu" else normal()
    arrays |= {name: weight() for name in weights}

    def forward(ops: Any, given: Arrays, **how: Any) -> Mapping[str, Any]:
        is_exact = how.get("precision") == "fp32"
        rounded = [ops.quantize(given[name], format, **layout) for name in weights]
        operands = [ops.dequantize(w) for w in rounded] if is_exact else rounded
        options = {"transpose_w": transpose_w, "activation": activation}
        return {"out": (ops.gated_matmul if is_gated else ops.matmul)(given["x"], *operands, **options, **how)}

    return Call(
        forward=forward,
        arrays=arrays,
        moved=["x"],
        dtype=dtype,
        keeps=frozenset(weights),
        options={"m": m, "n": n, "k": k, "format": format, "is_gated": is_gated, "dtype": dtype, "f": activation}
        | layout
        | {"transpose_w": transpose_w},
    )


def _exact_weights(draw: Draw, shape: tuple[int, int], format: str, axis: int) -> np.ndarray:
    """Integers times a power of two, near 1 / k ** 0.5. After quantize and dequantize, float16 and bfloat16 hold them.

    32 values along `axis`, the smallest group of a format, have one of the largest size. So each scale is a power of
    two. The integers of MX formats have up to 7, which e4m3 has, and e2m1 rounds.
    """
    largest = 127 if format == "int8" else 7
    integers = np.moveaxis(draw.random.integers(-largest, largest + 1, shape), axis, -1)
    integers[..., ::32] = largest * draw.random.choice([-1, 1], integers[..., ::32].shape)
    unit = np.exp2(np.round(-np.log2(largest * shape[axis] ** 0.5)))
    return np.moveaxis(integers * unit, -1, axis).astype(np.float32)


def losses(draw: Draw) -> Call:
    """A forward and the gradients of linear_cross_entropy; some targets do not count."""
    tokens, (width, vocabulary) = draw.size(), draw.sizes(2)
    vocabulary = max(vocabulary, 2)
    dtype, transpose_w = draw.one("bfloat16", "bfloat16", "float16", "float32"), draw.chance(0.5)
    shape = (vocabulary, width) if transpose_w else (width, vocabulary)
    w = draw.normal(*shape) / np.float32(width**0.5)
    arrays = {"x": draw.normal(tokens, width, dtype=dtype), "w": np.asarray(jnp.asarray(w, dtype), np.float32)}
    arrays |= {"weights": np.abs(draw.normal(tokens, dtype=dtype)) + np.float32(0.5)} if draw.chance(0.3) else {}
    # The weighted mean over one token does not depend on its weight: the derivative is a rounding of the loss.
    moved = [name for name in arrays if name != "weights" or tokens > 1]
    arrays["targets"] = draw.random.integers(-2 if draw.chance(0.3) else 0, vocabulary, tokens).astype(np.int32)
    options = {
        "transpose_w": transpose_w,
        "reduction": draw.one("none", "mean", "sum"),
        "softcap": draw.one(None, None, 5.0),
        "label_smoothing": draw.one(0.0, 0.0, 0.1),
        "z_loss": draw.one(0.0, 0.0, 1e-3),
        "ignore_index": draw.one(-1, 0),
    }
    return Call(
        forward=lambda ops, given, **how: {"loss": ops.linear_cross_entropy(**given, **options, **how)},
        arrays=arrays,
        moved=moved,
        dtype=dtype,
        keeps=frozenset({"weights"}),
        has_precision=False,
        options=options | {"tokens": tokens, "width": width, "vocabulary": vocabulary, "dtype": dtype, "moved": moved},
    )


def block_sparse(draw: Draw) -> Call:
    """A forward and the gradients of block_sparse_attention, with a bool for each block of pairs."""
    batch, kv_heads, length, keys = draw.integer(1, 3), draw.integer(1, 3), draw.size(), draw.size()
    heads, head_dim, size = kv_heads * draw.one(1, 2), draw.one(64, 128, 32, 96), draw.one(16, 32, 64, 128)
    dtype = draw.one("bfloat16", "float16", "float32")
    arrays = {
        "query": draw.normal(batch, length, heads, head_dim, dtype=dtype),
        "key": draw.normal(batch, keys, kv_heads, head_dim, dtype=dtype),
        "value": draw.normal(batch, keys, kv_heads, head_dim, dtype=dtype),
    }
    moved = list(arrays)
    cells = (draw.one(1, batch), draw.one(1, heads), -(-length // size), -(-keys // size))
    arrays["block_mask"] = draw.random.random(cells) < draw.one(0.1, 0.5, 0.9)
    options = {"block_size": size, "is_causal": draw.chance(0.4), "softcap": draw.one(None, None, 20.0)}

    def forward(ops: Any, given: Arrays, **how: Any) -> Mapping[str, Any]:
        out, lse = ops.block_sparse_attention(**given, **options, return_lse=True, **how)
        return {"out": out, "lse": lse}

    sizes = {name: x.shape for name, x in arrays.items()}
    return Call(forward=forward, arrays=arrays, moved=moved, dtype=dtype, options=sizes | options | {"dtype": dtype})


KINDS: dict[str, Callable[[Draw], Call]] = {
    "attention": attention,
    "products": products,
    "eight_bits": eight_bits,
    "norms": norms,
    "decoding": decoding,
    "dilated": dilated,
    "dynamic": dynamic,
    "attention_of_eight_bits": attention_of_eight_bits,
    "few_bits": few_bits,
    "grouped": grouped,
    "losses": losses,
    "block_sparse": block_sparse,
}


def drawn(kind: str, seed: int) -> Call:
    """Draws call number `seed` of a kind."""
    return KINDS[kind](Draw(seed, list(KINDS).index(kind)))
