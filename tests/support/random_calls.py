"""Calls of the ops with sizes and options drawn at random, each with the same call by XLA in float32.

The sizes are those that kernels get wrong: one past a block, a multiple of a part of a block, a single row.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kernels import (
    decode_attention,
    dequantize,
    flash_attention,
    gated_matmul,
    layer_norm,
    masks,
    matmul,
    mlp,
    quantize,
    rms_norm,
)

Arrays = Mapping[str, Any]
# Root mean square of an error, of that of the right numbers; gradients have twice as much.
TOLERANCE = {"bfloat16": 0.015, "float16": 0.004, "float32": 1e-4}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """A call of an op.

    run(arrays, **how) gives results by name; how: implementation, and precision where the op has one. arrays: float32
    numbers that `dtype` holds exactly, and integers and bools. keeps: the names of float arrays that are float32 in any
    call. options: what the call was drawn as, for messages.
    """

    run: Callable[..., Mapping[str, jax.Array]]
    arrays: Arrays
    dtype: str
    options: Arrays
    keeps: frozenset[str] = frozenset()
    has_precision: bool = True
    tolerance: float | None = None

    def given(self, dtype: str) -> dict[str, jax.Array]:
        """The arrays in a dtype."""
        is_cast = lambda name, x: x.dtype == np.float32 and name not in self.keeps
        return {name: jnp.asarray(x, dtype if is_cast(name, x) else x.dtype) for name, x in self.arrays.items()}

    def results(self) -> Mapping[str, jax.Array]:
        """Those of the implementation that dispatch takes."""
        return jax.jit(self.run)(self.given(self.dtype))

    def wanted(self) -> Mapping[str, jax.Array]:
        """Those of XLA in float32."""
        how = {"implementation": "xla"} | ({"precision": "fp32"} if self.has_precision else {})
        with jax.default_matmul_precision("highest"):
            return jax.jit(lambda arrays: self.run(arrays, **how))(self.given("float32"))


def check(call: Call) -> None:
    """Asserts that the call's results are those of XLA in float32, to the roundings of its dtype."""
    got, want = call.results(), call.wanted()
    for name, right in want.items():
        x, right = (np.asarray(y).astype(np.float64) for y in (got[name], right))
        assert x.shape == right.shape, (name, call.options)
        assert (np.isfinite(x) == np.isfinite(right)).all(), (name, call.options)
        where = np.isfinite(right)
        if not where.any():
            continue
        size = np.sqrt(np.square(right[where]).mean())
        error = np.sqrt(np.square(x[where] - right[where]).mean()) / max(size, 1.0 if name == "lse" else 1e-3)
        allowed = (call.tolerance or TOLERANCE[call.dtype]) * (2 if name.startswith("d_") else 1)
        assert error <= allowed, (name, error, allowed, call.options)


class Draw:
    """Random choices. The same seed draws the same call."""

    def __init__(self, *seed: int):
        self.random = np.random.default_rng(seed)

    def one(self, *choices: Any) -> Any:
        return choices[self.random.integers(len(choices))]

    def chance(self, probability: float) -> bool:
        return bool(self.random.random() < probability)

    def integer(self, low: int, high: int) -> int:
        return int(self.random.integers(low, high))

    def size(self) -> int:
        """The length of an axis, 1 to 1279."""
        blocks = 64 * self.integer(1, 20)
        return self.one(
            self.integer(1, 40), self.integer(40, 300), 8 * self.integer(1, 130), blocks, blocks + 1, 128, 256
        )

    def normal(self, *shape: int, dtype: str = "float32") -> np.ndarray:
        """Normal numbers that a dtype holds, in float32."""
        x = self.random.standard_normal(shape, np.float32)
        return np.asarray(jnp.asarray(x, dtype), np.float32)


def differentiated(function: Callable[..., Any], names: list[str]) -> Callable[..., Mapping[str, jax.Array]]:
    """run for Call: the results of function(arrays, **how), and as d_name gradients of the arrays of these names."""

    def run(arrays: Arrays, **how: Any) -> Mapping[str, jax.Array]:
        rest = {name: x for name, x in arrays.items() if name not in names}
        results, vjp = jax.vjp(lambda moved: function(rest | moved, **how), {name: arrays[name] for name in names})
        # -0.75 to 1.25, which every dtype holds. They do not cancel in a sum over rows.
        cotangent = lambda x: ((jnp.arange(x.size) * 7 % 17 - 6) / 8).reshape(x.shape).astype(x.dtype)
        cotangents = jax.tree.map(cotangent, results)
        return results | {f"d_{name}": x for name, x in vjp(cotangents)[0].items()}

    return run


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

    def forward(arrays: Arrays, **how: Any) -> Mapping[str, jax.Array]:
        given = dict(arrays)
        if mask == "blocks":
            given["mask"] = masks.block_sparse(given.pop("cells"), 64)
        if mask == "function":
            given["mask"] = masks.from_function(lambda b, h, q, k: ((q + k + h) % 3 != 0) | (q == k), heads=heads)
        if mask == "window":
            given["mask"] = masks.sliding_window(50, 3) | masks.global_tokens(8)
        out, lse = flash_attention(**given, **options, score_mod=SCORE_MODS.get(mod), return_lse=True, **how)
        return {"out": out, "lse": lse}

    drawn = sizes | {"kv_heads": kv_heads, "head_dim": head_dim, "v_head_dim": v_head_dim, "dtype": dtype}
    return Call(
        run=differentiated(forward, moved),
        arrays=arrays,
        dtype=dtype,
        keeps=frozenset({"sinks"}),
        options=drawn | options | {"mask": mask, "score_mod": mod, "arrays": sorted(arrays), "moved": moved},
    )


ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh", jnp.sin, jax.nn.softplus, jax.nn.mish)


def products(draw: Draw) -> Call:
    """A forward and the gradients of matmul, gated_matmul or mlp."""
    op, m, n, k = draw.one("matmul", "matmul", "gated", "mlp"), draw.size(), draw.size(), draw.size()
    dtype, transpose_w, activation = (
        draw.one("bfloat16", "float16", "float32"),
        draw.chance(0.4),
        draw.one(*ACTIVATIONS),
    )
    normal = lambda *shape: draw.normal(*shape, dtype=dtype)

    def weight(inner: int, columns: int) -> np.ndarray:
        x = draw.normal(*((columns, inner) if transpose_w else (inner, columns))) / np.float32(inner**0.5)
        return np.asarray(jnp.asarray(x, dtype), np.float32)

    arrays = {"x": normal(*draw.one((), (), (2,)), m, k)}
    if op == "matmul":
        function, columns = matmul, n
        arrays |= {"w": weight(k, n)} | ({"bias": normal(n)} if draw.chance(0.5) else {})
    elif op == "gated":
        function, columns = gated_matmul, n
        arrays |= {"w_gate": weight(k, n), "w_up": weight(k, n)}
    else:
        function, columns = mlp, k
        arrays |= {"w_up": weight(k, n), "w_down": weight(n, k)}
        arrays |= draw.one({}, {"w_gate": weight(k, n)}, {"bias_up": normal(n), "bias_down": normal(k)})
    if draw.chance(0.4):
        arrays["residual"] = normal(*arrays["x"].shape[:-1], columns)
    options = {"transpose_w": transpose_w, "activation": activation}
    return Call(
        run=differentiated(lambda given, **how: {"out": function(**given, **options, **how)}, list(arrays)),
        arrays=arrays,
        dtype=dtype,
        options=options | {"op": op, "m": m, "n": n, "k": k, "dtype": dtype, "arrays": sorted(arrays)},
    )


def eight_bits(draw: Draw) -> Call:
    """A product of operands in 8 bits, or a gated unit of such; by XLA of what they stand for."""
    scaling, is_gated = draw.one("tensor", "row", "block"), draw.chance(0.4)
    m, n, k = draw.size(), 16 * draw.integer(1, 60), 16 * draw.integer(1, 60)
    dtype, activation = draw.one("bfloat16", "float16", "float32"), draw.one(*ACTIVATIONS)
    arrays = {"x": draw.normal(m, k), "w": draw.normal(n, k) / np.float32(k**0.5)}
    if is_gated:
        arrays["w_up"] = draw.normal(n, k) / np.float32(k**0.5)

    def run(given: Arrays, **how: Any) -> Mapping[str, jax.Array]:
        rounded = [quantize(given[name], scaling=scaling) for name in ("x", "w", "w_up") if name in given]
        operands = [dequantize(x) for x in rounded] if how else rounded
        how = how | {"transpose_w": True, "out_dtype": "float32" if how else dtype, "activation": activation}
        return {"out": (gated_matmul if is_gated else matmul)(*operands, **how)}

    return Call(
        run=run,
        arrays=arrays,
        keeps=frozenset(arrays),
        dtype=dtype,
        tolerance=TOLERANCE["float16" if dtype == "float32" else "bfloat16"],
        options={"scaling": scaling, "m": m, "n": n, "k": k, "is_gated": is_gated, "dtype": dtype, "f": activation},
    )


def norms(draw: Draw) -> Call:
    """A forward and the gradients of layer_norm or rms_norm."""
    rows, columns = draw.one(draw.integer(1, 10), draw.integer(10, 600)), draw.one(draw.size(), 8 * draw.size(), 20000)
    dtype, is_centred = draw.one("bfloat16", "float16", "float32"), draw.chance(0.5)
    normal = lambda *shape: draw.normal(*shape, dtype=dtype)
    arrays = {"x": normal(rows, columns)}
    arrays |= {"scale": normal(columns)} if draw.chance(0.8) else {}
    arrays |= {"bias": normal(columns)} if is_centred and draw.chance(0.6) else {}
    arrays |= {"residual": normal(rows, columns)} if draw.chance(0.4) else {}
    options = {"eps": draw.one(1e-6, 1e-5), "scale_offset": draw.one(0.0, 1.0) if "scale" in arrays else 0.0}

    def forward(given: Arrays, **how: Any) -> Mapping[str, jax.Array]:
        found = (layer_norm if is_centred else rms_norm)(**given, **options, **how)
        return {"out": found[0], "total": found[1]} if "residual" in given else {"out": found}

    drawn = {"rows": rows, "columns": columns, "dtype": dtype, "is_centred": is_centred, "arrays": sorted(arrays)}
    run = differentiated(forward, list(arrays))
    return Call(run=run, arrays=arrays, dtype=dtype, has_precision=False, options=drawn | options)


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

    def run(given: Arrays, **how: Any) -> Mapping[str, jax.Array]:
        out, lse = decode_attention(**given, **options, return_lse=True, **how)
        return {"out": out, "lse": lse}

    drawn = {"shape": arrays["query"].shape, "keys": keys, "kv_heads": kv_heads, "arrays": sorted(arrays)}
    return Call(
        run=run,
        arrays=arrays,
        dtype=dtype,
        keeps=frozenset({"sinks"}),
        has_precision=False,
        options=drawn | options,
    )


KINDS: dict[str, Callable[[Draw], Call]] = {
    "attention": attention,
    "products": products,
    "eight_bits": eight_bits,
    "norms": norms,
    "decoding": decoding,
}


def drawn(kind: str, seed: int) -> Call:
    """Call number `seed` of a kind."""
    return KINDS[kind](Draw(seed, list(KINDS).index(kind)))
