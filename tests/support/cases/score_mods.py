"""flash_attention under score_mods that kernels inline: cases, and their errors against the definition in float64."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kernels import flash_attention, masks
from jax_kernels.testing import rms_error


def alibi(score, b, h, q, k, slopes):
    return score + slopes[h] * (k - q)


def alibi_of_heads(score, b, h, q, k):
    return score - jnp.exp2(-(h + 1.0)) * jnp.abs(q - k)


def tanh(score, b, h, q, k):
    return 2.0 * jnp.tanh(score / 2.0)


def softcap(score, b, h, q, k):
    """Scores are far from the cap."""
    return 20.0 * jnp.tanh(score / 20.0)


def of_key(score, b, h, q, k, columns):
    return score + columns[b, k]


def of_query(score, b, h, q, k, rows, temperature):
    return score * temperature[h] * jnp.exp(rows[b, q] / 4)


def packed(score, b, h, q, k, columns):
    """Masks keys, and also whole rows, by arithmetic on indices."""
    score = jnp.where(q // 50 == k // 50, score * (1 + columns[0, k] ** 2), -jnp.inf)
    return jnp.where((q % 7 == 3) | ((k > 160) & (h == 1)), -jnp.inf, jnp.where(k % 9 == 1, -1e30, score))


def many(score, b, h, q, k, columns):
    """A score_mod with every operation that kernels support."""
    x = jax.nn.sigmoid(score) + jnp.log1p(score**2) - jnp.expm1(-jnp.abs(score)) + jnp.sqrt(score**2 + 1.0)
    x = x + jnp.exp2(jnp.minimum(score, 1.0)) * jnp.exp(-jnp.square(score)) + jax.lax.rsqrt(2.0 + score**4)
    x = (jnp.maximum(x, 0.5) + jnp.log(columns[b, k] ** 2 + jnp.square(score))) / (2.0 + jnp.sign(score))
    x = jnp.where(jnp.logical_xor(score > 0.5, (q + 1 <= k) | ~(k != 5)), x, -x * h)
    x = jax.lax.rem((q - k) * (b + 1), 3).astype(jnp.float32) / 4 + x + jnp.maximum(q, 3 * k).astype(jnp.float32) / 64
    return x + jax.lax.stop_gradient(score) ** -2 / 100 * (score < -1).astype(jnp.float32)


def relative(score, b, h, q, k, table):
    """Adds a table's entry for the clipped difference q - k, with a table for each head."""
    return score + table[h, jnp.clip(q - k + 40, 0, 80)]


def buckets(score, b, h, q, k, embedding):
    """T5's buckets: one for each distance below 8, then logarithmic up to 128, separate by sign."""
    behind = jnp.abs(k - q)
    far = 8 + (jnp.log(jnp.maximum(behind, 1) / 8) / math.log(128 / 8) * 8).astype(jnp.int32)
    bucket = jnp.where(behind < 8, behind, jnp.minimum(far, 15))
    return score + embedding[bucket + jnp.where(k > q, 16, 0), h]


def times_relative(score, b, h, q, k, diagonals):
    """Has a derivative by the score, by a look-up by k - q that reads each value once, and by a function of k - q."""
    near = jnp.exp(-jnp.square((q - k) / 30.0) * (h + 1))
    return score * diagonals[b, (k + 5) - q + diagonals.shape[1] // 2] + near


def singular(score, b, h, q, k):
    """Has the derivative NaN at score 0, which is the score of keys past the end."""
    return score + jnp.exp(score) / 16 + jnp.sqrt(jnp.abs(score)) / 16


def over(score, b, h, q, k, rows, columns):
    """Divides by values of queries and of keys, which do not exist past the ends."""
    return score / rows[b, q] - 1 / columns[b, k]


def lowest(score, b, h, q, k):
    """Masks all keys of some rows, with finfo.min and with -1e9."""
    return jnp.where(q % 5 == 1, -3.4028235e38, jnp.where((q % 5 == 2) | (k > q + 20), -1e9, score))


def lowest_of_key(score, b, h, q, k, padding):
    return jnp.minimum(score, 0.0) + padding[b, k]


def lowest_tables(score, b, h, q, k, table):
    """Masks rows with -1e9, with a table of differences, which Triton does not support."""
    return jnp.where(q % 3 == 1, -1e9, score * table[h, jnp.clip(q - k + 40, 0, 80)])


_ALL = (
    alibi,
    alibi_of_heads,
    tanh,
    softcap,
    of_key,
    of_query,
    packed,
    many,
    relative,
    buckets,
    times_relative,
    singular,
    over,
    lowest,
    lowest_of_key,
    lowest_tables,
)
MODS = {x.__name__: x for x in _ALL}
SMALL = {"batch": 1, "q_length": 128, "kv_length": 128, "heads": 1, "kv_heads": 1, "head_dim": 64}
ODD = SMALL | {"q_length": 77, "kv_length": 203, "heads": 4, "kv_heads": 2, "is_causal": True, "q_offset": 80}
# For mods that close over nothing. With so few heads, the gradient of a closed-over array would nearly cancel, and its
# relative error could exceed the bound.
PAIR = ODD | {"heads": 2, "kv_heads": 1}
CASES: dict[str, dict[str, Any]] = {
    "alibi_64": ODD | {"mod": "alibi"},
    "alibi_128": ODD | {"mod": "alibi", "head_dim": 128},
    "alibi_deterministic": ODD | {"mod": "alibi", "head_dim": 128, "deterministic": True},
    "tanh_deterministic": PAIR | {"mod": "tanh", "deterministic": True},
    "alibi_256": SMALL | {"mod": "alibi_of_heads", "head_dim": 256, "heads": 2},
    "tanh_64": SMALL | {"mod": "tanh", "q_length": 200, "kv_length": 300},
    "tanh_128": PAIR | {"mod": "tanh", "head_dim": 128},
    "softcap": PAIR | {"mod": "softcap", "head_dim": 128},
    "of_key": SMALL | {"mod": "of_key", "batch": 2, "kv_length": 300, "kv_lengths": [290, 0], "q_length": 100},
    "of_query": SMALL | {"mod": "of_query", "head_dim": 128, "heads": 2, "kv_heads": 1, "window": 40, "sinks": True},
    "packed": SMALL | {"mod": "packed", "q_length": 170, "kv_length": 170, "heads": 2, "head_dim": 128},
    "many": SMALL | {"mod": "many", "heads": 2, "segments": True, "q_length": 100},
    "lists": ODD | {"mod": "alibi", "pattern": True, "q_length": 300, "kv_length": 300, "q_offset": 0},
    # P is rounded before dP.
    "tanh_160": PAIR | {"mod": "tanh", "head_dim": 160},
    "alibi_160": ODD | {"mod": "alibi", "head_dim": 160},
    "lowest_160": PAIR | {"mod": "lowest", "head_dim": 160},
    "relative_64": ODD | {"mod": "relative"},
    "relative_128": ODD | {"mod": "relative", "head_dim": 128, "q_offset": 0, "q_length": 230},
    "relative_lists": ODD | {"mod": "relative", "pattern": True, "q_length": 300, "kv_length": 300, "q_offset": 0},
    "relative_deterministic": ODD | {"mod": "relative", "head_dim": 128, "deterministic": True, "kv_length": 330},
    "relative_256": SMALL | {"mod": "relative", "head_dim": 256, "heads": 2, "q_length": 70, "kv_length": 130},
    "buckets": SMALL | {"mod": "buckets", "heads": 2, "q_length": 300, "kv_length": 90, "segments": True},
    "times_relative": SMALL | {"mod": "times_relative", "batch": 2, "q_length": 77, "kv_length": 300, "window": 90},
    "times_relative_deterministic": SMALL | {"mod": "times_relative", "kv_length": 203, "deterministic": True},
    "alibi_aligned": SMALL
    | {"mod": "alibi", "head_dim": 128, "heads": 2, "is_causal": True, "q_length": 330, "kv_length": 330},
    "over": ODD | {"mod": "over"},
    "singular": PAIR | {"mod": "singular", "head_dim": 128},
    "softcap_window": SMALL | {"mod": "softcap", "q_length": 200, "kv_length": 300, "window": 70, "kv_lengths": [140]},
    "lowest_64": SMALL | {"mod": "lowest", "q_length": 77, "kv_length": 203},
    "lowest_128": PAIR | {"mod": "lowest", "head_dim": 128, "deterministic": True},
    "lowest_of_key": SMALL | {"mod": "lowest_of_key", "batch": 2, "kv_length": 203, "window": 90, "heads": 2},
    "lowest_tables": SMALL | {"mod": "lowest_tables", "heads": 2, "kv_length": 203},
    "dense_mask": SMALL | {"mod": "tanh", "dense": True, "q_length": 150, "kv_length": 270, "heads": 2},
}


def dense(case: dict[str, Any]) -> np.ndarray:
    """A bool mask [T, S] with dead, full and partial blocks."""
    q, k = np.arange(case["q_length"])[:, None], np.arange(case["kv_length"])
    return ((7 * q + 3 * k) % 5 > 1) & (k < 128 + q) | (k >= 200)


def arguments_of(case: dict[str, Any]) -> dict[str, Any]:
    """The arguments of flash_attention, without the arrays that have gradients."""
    given = {name: case[name] for name in ("is_causal", "window", "q_offset", "deterministic") if name in case}
    lengths = case["q_length"], case["kv_length"]
    if "kv_lengths" in case:
        given["kv_lengths"] = jnp.asarray(case["kv_lengths"], jnp.int32)
    if case.get("segments"):
        given["segment_ids"] = tuple(jnp.arange(n, dtype=jnp.int32)[None] // 30 for n in lengths)
    if case.get("pattern"):
        blocks = [np.arange(-(-n // 64)) for n in lengths]
        given["mask"] = masks.block_sparse(jnp.asarray((blocks[0][:, None] + blocks[1]) % 2 == 0), 64)
    if case.get("dense"):
        given["mask"] = jnp.asarray(dense(case))
    return given


def kept(case: dict[str, Any]) -> np.ndarray:
    """The pairs that the case's masks keep, bool [B, 1, T, S]."""
    q, k = np.arange(case["q_length"])[:, None], np.arange(case["kv_length"])
    keep, distance = np.ones((case["batch"], 1, len(q), len(k)), bool), k - q - case.get("q_offset", 0)
    if case.get("is_causal"):
        keep &= distance <= 0
    if "window" in case:
        keep &= abs(distance) <= case["window"]
    if "kv_lengths" in case:
        keep &= k < np.asarray(case["kv_lengths"])[:, None, None, None]
    if case.get("segments"):
        keep &= q // 30 == k // 30
    if case.get("pattern"):
        keep &= (q // 64 + k // 64) % 2 == 0
    if case.get("dense"):
        keep &= dense(case)
    return keep


def closed_over(case: dict[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays that the case's mod closes over."""
    sizes = dict.fromkeys(("slopes", "temperature"), (case["heads"],))
    sizes |= {"columns": (case["batch"], case["kv_length"]), "rows": (case["batch"], case["q_length"])}
    sizes |= {"table": (case["heads"], 81), "embedding": (32, case["heads"])}
    sizes |= {"diagonals": (case["batch"], 2 * max(case["q_length"], case["kv_length"]) + 11)}
    sizes["padding"] = sizes["columns"]
    code = MODS[case["mod"]].__code__
    return {name: jax.ShapeDtypeStruct(sizes[name], jnp.float32) for name in code.co_varnames[5 : code.co_argcount]}


def inputs_of(case: dict[str, Any], dtype: Any):
    """(query, key, value, the mod's closed-over arrays, sinks), (dout, dlse)."""
    random = np.random.default_rng(0)
    normal = lambda *shape: random.standard_normal(shape).astype(np.float32)
    batch, q_length, kv_length, heads, kv_heads, d = (
        case[name] for name in ("batch", "q_length", "kv_length", "heads", "kv_heads", "head_dim")
    )
    shapes = [(batch, q_length, heads, d), *[(batch, kv_length, kv_heads, d)] * 2, (batch, q_length, heads, d)]
    query, key, value, dout = (jnp.asarray(normal(*shape), dtype) for shape in shapes)
    closed = jax.tree.map(lambda x: jnp.asarray(normal(*x.shape)) / 4 + 1, closed_over(case))
    if "padding" in closed:  # masks all keys that the first queries of entry 0 see
        closed["padding"] = closed["padding"].at[0, : 2 * kv_length // 3].set(jnp.finfo(jnp.float32).min)
    sinks = jnp.asarray(normal(heads)) if case.get("sinks") else None
    return (query, key, value, closed, sinks), (dout, jnp.asarray(normal(batch, heads, q_length)))


def float64(case: dict[str, Any], primals, cotangents):
    """(out, lse), gradients in float64, with all pairs at once."""
    mod, keep, group = MODS[case["mod"]], kept(case), case["heads"] // case["kv_heads"]

    def run(query, key, value, closed, sinks):
        key, value = (jnp.repeat(x, group, axis=2) for x in (key, value))
        scores = jnp.einsum("bthd,bshd->bhts", query, key, precision="highest") / math.sqrt(case["head_dim"])
        indices = (jnp.asarray(x) for x in np.ix_(*map(np.arange, scores.shape)))
        scores = jnp.where(keep, mod(jnp.where(keep, scores, 0), *indices, **closed), -jnp.inf)
        if sinks is not None:
            column = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
            scores = jnp.concatenate([scores, column], axis=3)
        dead = jnp.isneginf(scores).all(axis=-1, keepdims=True)
        weights = jax.nn.softmax(jnp.where(dead, 0, scores), axis=-1) * ~dead
        lse = jnp.where(dead, -jnp.inf, jax.nn.logsumexp(jnp.where(dead, 0, scores), axis=-1, keepdims=True))[..., 0]
        weights = weights[..., : key.shape[1]]
        return jnp.einsum("bhts,bshd->bthd", weights, value, precision="highest"), lse

    with jax.enable_x64(True):
        primals, cotangents = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (primals, cotangents))
        results, vjp = jax.vjp(run, *primals)
        return jax.tree.map(np.asarray, (results, vjp(cotangents)))


def by(implementation: str, case: dict[str, Any], primals, cotangents):
    """(out, lse), gradients by flash_attention."""

    @jax.jit
    def run(primals, cotangents):
        def attend(query, key, value, closed, sinks):
            mod = functools.partial(MODS[case["mod"]], **closed)
            given = arguments_of(case) | ({} if sinks is None else {"sinks": sinks})
            return flash_attention(
                query, key, value, score_mod=mod, return_lse=True, implementation=implementation, **given
            )

        results, vjp = jax.vjp(attend, *primals)
        return results, vjp(cotangents)

    return run(primals, cotangents)


def errors_by(case: dict[str, Any], implementation: str, dtype: Any = jnp.bfloat16) -> dict[str, tuple[float, float]]:
    """(error, bound) by result."""
    given = inputs_of(case, dtype)
    want, got = map(jax.tree_util.tree_leaves_with_path, (float64(case, *given), by(implementation, case, *given)))
    # Rounding P, dS and a result costs 2e-3 of each in the mean. A closed-over array's gradient sums over many pairs
    # that partly cancel, to about a tenth: its relative error is ten times larger.
    bound = lambda x: 4e-3 if x.ndim == 4 else 1e-5 if x.ndim == 3 else 2e-2
    return {
        jax.tree_util.keystr(path): (rms_error(g, w), bound(w)) for (path, w), (_, g) in zip(want, got, strict=True)
    }
