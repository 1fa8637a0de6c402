"""Shared cases of attention, the float64 oracle, and the error that a result may have.

Tests, benchmarks and `jax-kernels check` read the same ones.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_kernels.dispatch import explain
from jax_kernels.ops.attention import flash_attention
from jax_kernels.reference import attention as reference

__all__ = [
    "ATTENTION_CASES",
    "GPU_ATTENTION_CASES",
    "AttentionCase",
    "AttentionResults",
    "attention_float64",
    "attention_inputs",
    "plain_attention",
    "rms_error",
    "run_attention",
    "tolerance",
    "why_not",
]


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """One attention call, without its arrays.

    q_offset: an int, or one per batch entry. kv_lengths: None, or one per batch entry. precision: "fp32" or
    "tf32" for float32, else None. magnitude: the standard deviation of the query; key and value have 1.
    """

    name: str
    batch: int = 2
    q_length: int = 128
    kv_length: int = 128
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 64
    v_head_dim: int = 64
    dtype: str = "bfloat16"
    is_causal: bool = False
    q_offset: int | tuple[int, ...] = 0
    kv_lengths: tuple[int, ...] | None = None
    precision: str | None = None
    magnitude: float = 1.0

    def __str__(self) -> str:
        return self.name

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of flash_attention for this case."""
        return {
            "is_causal": self.is_causal,
            "q_offset": self.q_offset if isinstance(self.q_offset, int) else np.asarray(self.q_offset, np.int32),
            "kv_lengths": None if self.kv_lengths is None else np.asarray(self.kv_lengths, np.int32),
            "precision": self.precision,
        }


class AttentionResults(NamedTuple):
    """out [B, T, H, Dv], lse [B, H, T] and the gradients dq, dk, dv, shaped like query, key, value."""

    out: Any
    lse: Any
    dq: Any
    dk: Any
    dv: Any


def _heads(name: str, head_dim: int, v_head_dim: int | None = None, **fields: Any) -> AttentionCase:
    fields = {"batch": 1, "q_length": 100, "kv_length": 100, "is_causal": True} | fields
    return AttentionCase(name, head_dim=head_dim, v_head_dim=v_head_dim or head_dim, **fields)


# Small: each takes milliseconds jitted on a CPU, and in interpret mode.
ATTENTION_CASES = (
    AttentionCase("full"),
    AttentionCase("causal", is_causal=True),
    AttentionCase("odd", q_length=131, kv_length=77),
    AttentionCase("odd_causal", q_length=201, kv_length=201, is_causal=True),
    AttentionCase("one_query", q_length=1, kv_length=130),
    AttentionCase("one_query_last", q_length=1, kv_length=130, is_causal=True, q_offset=129),
    AttentionCase("one_key", q_length=66, kv_length=1),
    AttentionCase("more_keys_causal", q_length=72, kv_length=200, is_causal=True),
    AttentionCase("gqa", heads=4, is_causal=True, q_length=100, kv_length=100),
    AttentionCase("mqa", heads=4, kv_heads=1, q_length=100, kv_length=67),
    _heads("head_dim_16", 16),
    _heads("head_dim_40", 40),
    _heads("head_dim_96", 96),
    _heads("head_dim_128", 128),
    _heads("head_dim_192", 192),
    _heads("head_dim_256", 256, is_causal=False),
    _heads("value_wider", 64, 128),
    _heads("value_narrower", 128, 40, is_causal=False),
    AttentionCase("offset_positive", q_length=72, kv_length=200, is_causal=True, q_offset=128),
    # Queries 0 to 49 have no key.
    AttentionCase("offset_negative", q_length=150, kv_length=100, is_causal=True, q_offset=-50),
    AttentionCase("offset_per_batch", q_length=90, kv_length=140, is_causal=True, q_offset=(50, -30)),
    AttentionCase("kv_lengths", batch=3, q_length=70, kv_length=140, kv_lengths=(0, 140, 65)),
    AttentionCase("kv_lengths_causal", q_length=140, kv_length=140, is_causal=True, kv_lengths=(1, 77)),
    AttentionCase("all_dead", batch=1, q_length=40, kv_length=60, is_causal=True, q_offset=-40),
    AttentionCase("fp16", dtype="float16"),
    AttentionCase("fp16_causal_gqa", dtype="float16", heads=4, is_causal=True, q_length=99, kv_length=131),
    AttentionCase("fp32", dtype="float32", precision="fp32", q_length=99, kv_length=131),
    AttentionCase("fp32_causal", dtype="float32", is_causal=True, heads=4, q_length=99, kv_length=99),
    _heads("fp32_head_dim_128", 128, dtype="float32", q_offset=-10),
    _heads("fp32_head_dim_256", 256, dtype="float32", q_length=50, kv_length=70),
    AttentionCase("tf32", dtype="float32", precision="tf32", is_causal=True, kv_lengths=(100, 128)),
    AttentionCase(
        "everything",
        q_length=45,
        kv_length=38,
        heads=4,
        head_dim=16,
        v_head_dim=24,
        dtype="float32",
        is_causal=True,
        q_offset=(-3, 5),
        kv_lengths=(30, 38),
    ),
    # |query . key| reaches 10,000: the softmax must take its maximum out before it exponentiates.
    AttentionCase("large", magnitude=300.0),
    AttentionCase("large_fp16", dtype="float16", magnitude=300.0, is_causal=True),
    AttentionCase("large_fp32", dtype="float32", magnitude=300.0),
)


def _long(name: str, head_dim: int, **fields: Any) -> AttentionCase:
    fields = {"batch": 1, "q_length": 2048, "kv_length": 2048, "heads": 4, "kv_heads": 4} | fields
    return AttentionCase(name, head_dim=head_dim, v_head_dim=head_dim, **fields)


# For a GPU: many tiles in both directions, still within reach of the float64 oracle on the host.
GPU_ATTENTION_CASES = (
    *(
        _long(f"long_{head_dim}{suffix}", head_dim, is_causal=is_causal)
        for head_dim in (64, 96, 128, 192, 256)
        for suffix, is_causal in (("", False), ("_causal", True))
    ),
    _long("long_odd_64", 64, q_length=2047, kv_length=2049),
    _long("long_odd_128_causal", 128, q_length=2049, kv_length=2047, is_causal=True),
    _long("long_odd_128_causal_last", 128, q_length=2047, kv_length=2049, is_causal=True, q_offset=2),
    _long("long_odd_256_causal", 256, q_length=1025, kv_length=1025, is_causal=True),
    _long("long_gqa_64", 64, heads=8, kv_heads=2, is_causal=True),
    _long("long_gqa_128", 128, heads=8, kv_heads=2),
    _long("long_gqa_128_fp16", 128, heads=8, kv_heads=2, is_causal=True, dtype="float16"),
    _long("long_kv_lengths", 128, batch=4, q_length=513, kv_lengths=(0, 2048, 1, 1023)),
    _long("long_offset_per_batch", 64, batch=2, q_length=513, is_causal=True, q_offset=(1535, -100)),
    _long("long_fp32", 128, dtype="float32", precision="fp32", is_causal=True),
    _long("long_tf32", 64, dtype="float32", precision="tf32"),
)


def _shapes(case: AttentionCase) -> tuple[tuple[int, ...], ...]:
    """Of query, key, value, dout and dlse."""
    return (
        (case.batch, case.q_length, case.heads, case.head_dim),
        (case.batch, case.kv_length, case.kv_heads, case.head_dim),
        (case.batch, case.kv_length, case.kv_heads, case.v_head_dim),
        (case.batch, case.q_length, case.heads, case.v_head_dim),
        (case.batch, case.heads, case.q_length),
    )


def attention_inputs(case: AttentionCase, seed: int = 0) -> tuple[jax.Array, ...]:
    """query, key, value and dout in the case's dtype, and dlse float32: normal random numbers."""
    random = np.random.default_rng(seed)
    query, key, value, dout, dlse = (random.standard_normal(shape, np.float32) for shape in _shapes(case))
    arrays = (jnp.asarray(x, case.dtype) for x in (query * case.magnitude, key, value, dout))
    return *arrays, jnp.asarray(dlse)


def why_not(case: AttentionCase, implementation: str) -> str | None:
    """Why run_attention cannot run this case by this implementation here; None where it can."""
    query, key, value = (jax.ShapeDtypeStruct(shape, jnp.dtype(case.dtype)) for shape in _shapes(case)[:3])
    arguments = case.arguments | {"return_lse": _gives_lse(implementation), "implementation": implementation}
    try:
        explain(flash_attention, query, key, value, **arguments)
    except NotImplementedError as error:
        return str(error)
    return None


def _gives_lse(implementation: str | None) -> bool:
    return implementation != "cudnn"


@functools.partial(jax.jit, static_argnames="is_causal")
def _float64(query, key, value, dout, dlse, kv_lengths, q_offset, *, is_causal):
    forward = lambda q, k, v: reference.attention(q, k, v, None, kv_lengths, q_offset, is_causal=is_causal)
    results, vjp = jax.vjp(forward, query, key, value)
    return (*results, *vjp((dout, dlse)))


def attention_float64(case: AttentionCase, query, key, value, dout, dlse=None) -> AttentionResults:
    """The right answer, in numpy float64: the reference on the CPU. dlse None stands for zeros."""
    arrays = [np.asarray(x).astype(np.float64) for x in (query, key, value, dout)]
    arrays.append(np.zeros(_shapes(case)[-1]) if dlse is None else np.asarray(dlse).astype(np.float64))
    arguments = case.arguments
    del arguments["precision"]
    arguments["q_offset"] = np.asarray(arguments["q_offset"], np.int32)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        return AttentionResults(*(np.asarray(x) for x in _float64(*arrays, **arguments)))


def _rounded(x, dtype):
    """x, and its cotangent, rounded to dtype. Without the barrier, XLA may leave out a pair of casts."""
    return jax.lax.optimization_barrier(x.astype(dtype)).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _rounded_gradient(x, dtype):
    return x


_rounded_gradient.defvjp(lambda x, dtype: (x, None), lambda dtype, _, dx: (_rounded(dx, dtype),))


@functools.partial(jax.jit, static_argnames=("is_causal", "precision"))
def _plain(query, key, value, dout, dlse, kv_lengths, q_offset, *, is_causal, precision):
    dtype = query.dtype
    group = query.shape[2] // key.shape[2]
    precision = jax.lax.Precision.DEFAULT if precision == "tf32" else jax.lax.Precision.HIGHEST
    keep = reference.live(
        reference.positions(query.shape[1], q_offset),
        jnp.arange(key.shape[1]),
        mask=None,
        kv_lengths=kv_lengths,
        is_causal=is_causal,
    )

    def forward(*qkv):
        query, key, value = (x.astype(jnp.float32) for x in qkv)
        key, value = (jnp.repeat(x, group, axis=2) for x in (key, value))
        scores = jnp.einsum("bthd,bshd->bhts", query, key, precision=precision)
        scores = _rounded_gradient(scores, dtype) / math.sqrt(query.shape[-1])
        live = jnp.broadcast_to(keep, scores.shape)
        dead = ~live.any(axis=-1)
        scores = jnp.where(dead[..., None], 0, jnp.where(live, scores, -jnp.inf))
        lse = jax.nn.logsumexp(scores, axis=-1)
        weights = jnp.where(live, jnp.exp(scores - lse[..., None]), 0)
        out = jnp.einsum("bhts,bshd->bthd", _rounded(weights, dtype), value, precision=precision).astype(dtype)
        return out, jnp.where(dead, -jnp.inf, lse)

    results, vjp = jax.vjp(forward, query, key, value)
    return (*results, *vjp((dout, dlse)))


def plain_attention(case: AttentionCase, query, key, value, dout, dlse=None) -> AttentionResults:
    """The plain evaluation in the inputs' dtype, the yardstick of error: whole score matrices, JAX's gradient.

    Products accumulate in float32 and softmax is in float32; what goes into a product, and what the gradient of
    the probabilities comes out as, is rounded to the inputs' dtype, as by PyTorch's own attention.
    """
    dlse = jnp.zeros(_shapes(case)[-1]) if dlse is None else dlse
    return AttentionResults(*_plain(query, key, value, dout, dlse, **case.arguments))


def run_attention(case: AttentionCase, arrays, implementation: str | None = None, **kwargs: Any) -> dict[str, Any]:
    """flash_attention and its gradients in one jit: out, lse, dq, dk, dv.

    arrays: those of attention_inputs. kwargs go to flash_attention. "cudnn" gives no lse: there, lse is left
    out and dlse counts as zero.
    """
    with_lse = _gives_lse(implementation)

    @jax.jit
    def run(query, key, value, dout, dlse):
        arguments = case.arguments | {"return_lse": with_lse, "implementation": implementation} | kwargs
        results, vjp = jax.vjp(lambda *qkv: flash_attention(*qkv, **arguments), query, key, value)
        out, lse = results if with_lse else (results, None)
        gradients = vjp((dout, dlse) if with_lse else dout)
        return AttentionResults(out, lse, *gradients)

    return {name: x for name, x in run(*arrays)._asdict().items() if x is not None}


def rms_error(got: Any, want: Any) -> float:
    """||got - want|| / ||want|| in float64; where want is all zeros, the root mean square of got.

    Infinities must stand at the same places, and count for nothing; otherwise, and with a NaN, it is inf.
    """
    got, want = (np.asarray(x).astype(np.float64) for x in (got, want))
    if got.shape != want.shape:
        raise ValueError(f"got: shape {got.shape}, want {want.shape}")
    finite = np.isfinite(want)
    if not np.array_equal(got[~finite], want[~finite]) or not np.isfinite(got[finite]).all():
        return math.inf
    difference = np.linalg.norm(got[finite] - want[finite])
    return float(difference / (np.linalg.norm(want[finite]) or math.sqrt(want.size)))


@functools.cache
def tolerance(case: AttentionCase, seed: int = 0) -> dict[str, float]:
    """The largest rms_error that each of out, lse, dq, dk, dv may have on attention_inputs(case, seed).

    16-bit: 1.1 times the error of plain_attention. lse and exact float32: 2e-6, some ten roundings of
    float32, or twice the plain error, as tiles add in another order. tf32 rounds every operand to 11 bits,
    2.8e-4 root mean square each, which gives up to 1e-3 over the backward's chain of products: 2e-3.
    """
    arrays = attention_inputs(case, seed)
    want = attention_float64(case, *arrays)
    plain = plain_attention(case, *arrays)
    bounds = {}
    for name in AttentionResults._fields:
        error = rms_error(getattr(plain, name), getattr(want, name))
        if case.precision == "tf32":
            bounds[name] = 2e-3
        elif name == "lse":
            bounds[name] = max(2 * error, 2e-6)
        elif case.dtype == "float32":
            # P is exp(score - lse), both rounded where they are largest, at four times the magnitude.
            rounding = 0 if case.magnitude == 1 else 4 * case.magnitude * float(jnp.finfo(jnp.float32).eps)
            bounds[name] = max(2 * error, 2e-6, rounding)
        elif case.magnitude > 1 and name in ("dq", "dk"):
            # Where the softmax is all but one-hot, dP and its row sum delta all but cancel. A tiled backward
            # takes delta from the rounded out, the plain one from its weights: measured 1.6 times the error
            # by float32 products, 1.9 times by 16-bit ones.
            bounds[name] = 2.2 * error
        else:
            bounds[name] = max(1.1 * error, float(jnp.finfo(case.dtype).eps) / 8)
    return bounds
