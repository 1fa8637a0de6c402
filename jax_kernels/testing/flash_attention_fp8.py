"""The cases of flash_attention_fp8 for tests and `jax-kernels check`, its definition in NumPy, and error bounds."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kernels.ops.attention.flash_attention_fp8 import flash_attention_fp8
from jax_kernels.quantization import quantize_fp8
from jax_kernels.testing.attention import rms_error
from jax_kernels.testing.refusals import refusal
from jax_kernels.testing.typical_call import TypicalCall

__all__ = [
    "CASES",
    "LONG",
    "QUICK",
    "TYPICAL",
    "Fp8Case",
    "arrays_of",
    "definition",
    "errors",
    "errors_by",
    "run",
    "why_not",
]

E4M3 = jnp.float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class Fp8Case:
    """One call of flash_attention_fp8, without its arrays.

    rising: the factor of the first keys' magnitude; it falls to 1 for the last keys. A kernel visits the last keys
    first.
    """

    name: str
    batch: int = 1
    q_length: int = 200
    kv_length: int = 300
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 128
    v_head_dim: int = 128
    is_causal: bool = False
    q_offset: int | tuple[int, ...] = 0
    kv_lengths: tuple[int, ...] | None = None
    scale: float | None = None
    rising: float = 1.0

    def __str__(self) -> str:
        return self.name


CASES = {
    case.name: case
    for case in (
        Fp8Case("full"),
        Fp8Case("causal", q_length=256, kv_length=256, kv_heads=2, is_causal=True),
        Fp8Case("lengths", batch=3, q_length=70, kv_lengths=(400, 17, -2), scale=0.2),
        Fp8Case("offsets", 2, 70, 200, heads=1, is_causal=True, q_offset=(100, -30), kv_lengths=(150, 270)),
        # Scores exceed the scores of the first block by hundreds; and by 11 in base 2, beyond the range of e4m3.
        Fp8Case("rising", q_length=64, kv_length=500, rising=160),
        Fp8Case("rising_some", q_length=64, kv_length=500, heads=1, rising=4),
        # An offset of half a block: one of a tile's two warpgroups visits a block less.
        Fp8Case("head_dim_256", q_length=130, head_dim=256, v_head_dim=192, heads=1, is_causal=True, q_offset=-64),
        Fp8Case("head_dim_64", head_dim=64, v_head_dim=64, is_causal=True, q_offset=100),
        Fp8Case("odd", heads=1, head_dim=72, v_head_dim=40, q_length=67, kv_length=133, scale=-0.1),
    )
}
# For a GPU: many tiles.
LONG = {
    case.name: case
    for case in (
        Fp8Case("long", batch=2, q_length=1000, kv_length=2001, heads=4, kv_heads=2, is_causal=True, q_offset=1001),
        Fp8Case("long_256", q_length=700, kv_length=1500, heads=2, head_dim=256, v_head_dim=256),
        Fp8Case("many_tiles", batch=8, q_length=512, kv_length=256, heads=16, kv_heads=16, is_causal=True),
        Fp8Case("many_tiles_256", batch=8, q_length=512, kv_length=256, heads=8, head_dim=256, is_causal=True),
        Fp8Case("causal_rising", q_length=900, kv_length=900, is_causal=True, rising=30),
    )
}
# `jax-kernels check` runs these cases without --full.
QUICK = ("causal", "lengths", "odd", "head_dim_64")
TYPICAL = {
    "flash_attention_fp8": TypicalCall(
        flash_attention_fp8, implementations=("mosaic_gpu", "xla"), dtype="float8_e4m3fn"
    ),
}


def arrays_of(case: Fp8Case, seed: int = 0) -> dict[str, Any]:
    """The arrays of a call by argument. Keys and values past a length are NaN."""
    random = np.random.default_rng(seed)
    arrays: dict[str, Any] = {}
    for name, length, heads, columns in (
        ("query", case.q_length, case.heads, case.head_dim),
        ("key", case.kv_length, case.kv_heads, case.head_dim),
        ("value", case.kv_length, case.kv_heads, case.v_head_dim),
    ):
        x: Any = random.standard_normal((case.batch, length, heads, columns), np.float32)
        x = x * (1 + np.arange(heads)[:, None])
        if name == "key":
            x *= np.linspace(case.rising, 1, length, dtype=np.float32)[:, None, None]
        x, scales = quantize_fp8(x, axis=(1, 3))
        if case.kv_lengths is not None and name != "query":
            past = np.arange(length) >= np.array(case.kv_lengths)[:, None]
            x = jnp.where(past[..., None, None], jnp.nan, x.astype(jnp.float32)).astype(E4M3)
        arrays |= {name: x, f"{name[0]}_scale": scales}
    if case.kv_lengths is not None:
        arrays["kv_lengths"] = jnp.asarray(case.kv_lengths, jnp.int32)
    if isinstance(case.q_offset, tuple):
        arrays["q_offset"] = jnp.asarray(case.q_offset, jnp.int32)
    return arrays


def run(case: Fp8Case, arrays: dict[str, Any], implementation: str | None):
    """(out [B, T, H, Dv], lse [B, H, T]) of flash_attention_fp8, jitted. arrays: from arrays_of."""
    options: Any = {"is_causal": case.is_causal, "scale": case.scale, "return_lse": True}
    options["implementation"] = implementation
    if isinstance(case.q_offset, int):
        options["q_offset"] = case.q_offset
    # Compiling dominates a small case. Unoptimised code compiles in half the time.
    on_cpu = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return jax.jit(functools.partial(flash_attention_fp8, **options), compiler_options=on_cpu)(**arrays)


def why_not(case: Fp8Case, implementation: str) -> str | None:
    """The reason why this implementation cannot run a case on this machine; None if it can."""
    of = lambda length, heads, columns: jax.ShapeDtypeStruct((case.batch, length, heads, columns), E4M3)
    query = of(case.q_length, case.heads, case.head_dim)
    key = of(case.kv_length, case.kv_heads, case.head_dim)
    value = of(case.kv_length, case.kv_heads, case.v_head_dim)
    return refusal(flash_attention_fp8, query, key, value, is_causal=case.is_causal, implementation=implementation)


def definition(case: Fp8Case, arrays: dict[str, Any], rounded: bool = False, score_bits: int | None = None):
    """(out [B, T, H, Dv], lse [B, H, T]), computed in NumPy float64 from the 8-bit arrays. arrays: from arrays_of.

    rounded: round P, with 256 at the row's maximum, to e4m3, as plain 8-bit code does. score_bits: cut scores to this
    number of bits, relative to the largest score of their row; None does not.
    """
    names = ("query", "key", "value", "q_scale", "k_scale", "v_scale")
    query, key, value, q_scale, k_scale, v_scale = (np.asarray(arrays[name]).astype(np.float64) for name in names)
    group = case.heads // case.kv_heads
    key, value = (x.repeat(group, axis=2) for x in (key, value))
    k_scale, v_scale = (x.repeat(group, axis=1) for x in (k_scale, v_scale))
    keys = np.arange(case.kv_length)
    lengths = np.broadcast_to(case.kv_length if case.kv_lengths is None else case.kv_lengths, (case.batch,))
    exists = keys < lengths[:, None]
    live = np.broadcast_to(exists[:, None, None], (case.batch, 1, case.q_length, case.kv_length))
    if case.is_causal:
        offset = np.broadcast_to(case.q_offset, (case.batch,))
        live = live & (offset[:, None, None] + np.arange(case.q_length)[:, None] >= keys)[:, None]
    value = np.where(exists[..., None, None], value, 0)
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    with np.errstate(invalid="ignore"):
        scores = np.einsum("bthd,bshd->bhts", query, key) * (q_scale * k_scale)[..., None, None] * scale
    if score_bits is not None:
        unit = np.abs(np.where(live, scores, 0)).max(axis=-1, keepdims=True) * 2.0 ** (1 - score_bits)
        scores = np.trunc(scores / np.where(unit == 0, 1, unit)) * unit
    scores = np.where(live, scores, -np.inf)
    highest = scores.max(axis=-1, keepdims=True)
    highest = np.where(np.isneginf(highest), 0, highest)
    p = np.exp(scores - highest)
    total = p.sum(axis=-1, keepdims=True)
    if rounded:
        p = np.asarray(jnp.asarray(p * 256, jnp.float32).astype(E4M3)).astype(np.float64) / 256
    out = np.einsum("bhts,bshd->bthd", p / np.where(total == 0, 1, total), value) * v_scale[:, None, :, None]
    with np.errstate(divide="ignore"):
        return out, (np.log(total) + highest)[..., 0]


def errors(case: Fp8Case, arrays: dict[str, Any], got, implementation: str) -> dict[str, tuple[float, float]]:
    """(error, bound) of out and lse by name. got: (out, lse). The error is rms_error against float64.

    Bound of out by "xla": the rounding to bfloat16, at most 2**-9. Bound of out by a kernel: this rounding plus 1.2
    times the error of a plain 8-bit evaluation, which rounds P relative to other maxima. Bound of lse: 2e-6.

    For a kernel on a GPU, the bounds are larger, because tensor cores add 8-bit products with about 14 bits. There the
    factor is 1.5 and the plain evaluation has 14-bit scores. Each 32 keys add 2**-14, for the sums of P V. The bound of
    lse is 2**-12.
    """
    on_gpu = implementation != "xla" and jax.default_backend() == "gpu"
    want = definition(case, arrays)
    plain = definition(case, arrays, rounded=True, score_bits=14 if on_gpu else None)
    bound, lse_bound = 2.0**-9, 2e-6
    if implementation != "xla":
        bound += (1.5 if on_gpu else 1.2) * rms_error(plain[0], want[0])
        bound += case.kv_length / 32 * 2.0**-14 if on_gpu else 0
        lse_bound = 2.0**-12 if on_gpu else lse_bound
    found = {name: rms_error(x, y) for name, x, y in zip(("out", "lse"), got, want, strict=True)}
    return {"out": (found["out"], bound), "lse": (found["lse"], lse_bound)}


def errors_by(case: Fp8Case, implementation: str) -> dict[str, tuple[float, float]]:
    """(error, bound) of out and lse by name, for a call by this implementation."""
    arrays = arrays_of(case)
    return errors(case, arrays, run(case, arrays, implementation), implementation)
