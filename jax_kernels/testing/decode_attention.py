"""The cases of decode_attention that tests and `jax-kernels check` share, its definition in NumPy, and error bounds."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kernels.ops.attention.decode_attention import decode_attention
from jax_kernels.testing.attention import rms_error
from jax_kernels.testing.refusals import refusal
from jax_kernels.testing.typical_call import TypicalCall

__all__ = [
    "CASES",
    "LONG",
    "QUICK",
    "TYPICAL",
    "DecodeCase",
    "arrays_of",
    "definition",
    "errors",
    "errors_by",
    "run",
    "why_not",
]


@dataclasses.dataclass(frozen=True)
class DecodeCase:
    """One call of decode_attention, without its arrays.

    kv_length: the cache's capacity for a sequence. kv_lengths: the number of keys in it, for each sequence; None fills
    the cache. page_size: None for a contiguous cache. mask, bias: their axes of [B, H, T, S] that are not of size 1, as
    in "BS"; "" for none. A mask removes all keys of query 0, head 0 of sequence 0. name: of the case. Other fields: the
    sizes and the arguments of decode_attention.
    """

    name: str
    batch: int = 2
    q_length: int = 1
    kv_length: int = 200
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    v_head_dim: int = 64
    dtype: str = "bfloat16"
    kv_lengths: tuple[int, ...] | None = (200, 77)
    page_size: int | None = None
    window: int | tuple[int, int] | None = None
    softcap: float | None = None
    sinks: bool = False
    scale: float | None = None
    mask: str = ""
    bias: str = ""

    def __str__(self) -> str:
        return self.name

    def shape_of(self, axes: str) -> tuple[int, ...]:
        """The shape of a mask or bias with these axes, from "BHTS"; other axes have length 1."""
        sizes = {"B": self.batch, "H": self.heads, "T": self.q_length, "S": self.kv_length}
        return tuple(size if axis in axes else 1 for axis, size in sizes.items())

    @property
    def lengths(self) -> list[int]:
        """The number of keys of each sequence, from 0 to kv_length."""
        lengths = (self.kv_length,) * self.batch if self.kv_lengths is None else self.kv_lengths
        return [min(max(length, 0), self.kv_length) for length in lengths]


_CASES = (
    DecodeCase("plain", kv_lengths=(300, 77)),
    DecodeCase("no_lengths", kv_lengths=None, dtype="float16"),
    DecodeCase("multi_head_some_queries", q_length=4, kv_heads=4),
    DecodeCase("short", batch=5, q_length=3, kv_length=72, kv_lengths=(2, 0, 72, -5, 300), sinks=True),
    DecodeCase("dead", batch=3, q_length=3, kv_length=72, kv_lengths=(2, -4, 1)),
    DecodeCase("multi_query_two_tiles", q_length=16, heads=8, kv_heads=1, kv_length=136, kv_lengths=(136, 70)),
    DecodeCase("everything", q_length=3, window=40, softcap=2.0, sinks=True, kv_lengths=(2, 150), v_head_dim=128),
    # Both ends of the range without a predicate, next to the ends of blocks of 64: query 0 ends at 190, query 1 starts
    # at 65.
    DecodeCase(
        "head_dim_128", head_dim=128, v_head_dim=128, window=(90, 5), scale=0.2, q_length=2, kv_lengths=(192, 156)
    ),
    DecodeCase("head_dim_256", batch=1, head_dim=256, v_head_dim=192, heads=2, kv_heads=1, kv_lengths=(190,)),
    DecodeCase("pages_16", q_length=2, kv_length=320, kv_lengths=(300, 10), page_size=16, head_dim=128, sinks=True),
    DecodeCase("pages_128", q_length=2, kv_length=384, kv_lengths=(300, 0), page_size=128, window=100),
    # A page has several blocks of keys, for every block size of the kernel.
    DecodeCase("long_pages", kv_length=1024, kv_lengths=(900, 600), page_size=512),
    DecodeCase("long_pages_128", q_length=2, kv_length=512, kv_lengths=(500, 300), page_size=256, head_dim=128,
               v_head_dim=128),
    DecodeCase("pages_32_everything", kv_length=96, kv_lengths=(96, 33), page_size=32, softcap=3.0, window=50),
    DecodeCase("odd", head_dim=40, v_head_dim=24, kv_length=83, kv_lengths=(83, 17), scale=-0.3),
    DecodeCase("padding", batch=3, kv_lengths=(200, 77, 3), mask="BS"),
    DecodeCase("alibi", bias="HS", softcap=2.0, kv_lengths=None),
    DecodeCase("pairs", q_length=3, mask="BHTS", bias="BHTS", sinks=True, kv_lengths=(200, 2), window=150, scale=-0.3),
    DecodeCase("masked_pages", q_length=2, kv_length=96, page_size=32, kv_lengths=(96, 33), mask="TS", bias="B"),
    DecodeCase("masked_odd", head_dim=40, v_head_dim=24, heads=8, kv_heads=1, kv_length=83, q_length=9,
               kv_lengths=(83, 17), mask="HS", bias="BTS"),
    DecodeCase("odd_pages", head_dim=40, v_head_dim=72, kv_length=80, kv_lengths=(99, 13), page_size=16, q_length=5),
)  # fmt: skip
CASES = {case.name: case for case in _CASES}
# For a GPU: enough keys that a kernel splits them.
_LONG = (
    DecodeCase("long", batch=3, q_length=1, kv_length=8192, heads=32, kv_heads=8, head_dim=128, v_head_dim=128,
               kv_lengths=(8192, 4000, 1)),
    DecodeCase("long_64_pages", batch=2, q_length=4, kv_length=4096, heads=16, kv_heads=2, kv_lengths=(4001, 900),
               page_size=16, dtype="float16"),
    # The merged rows are 192 columns of views of 256: a store without a mask would reach the next row.
    DecodeCase("long_192", batch=8, q_length=4, kv_length=2048, heads=16, kv_heads=4, head_dim=192, v_head_dim=192,
               kv_lengths=(2048, 1999, 77, 1024, 5, 1500, 1700, 2000)),
    DecodeCase("many", batch=40, kv_length=1024, heads=16, kv_heads=8, head_dim=128, v_head_dim=128,
               kv_lengths=tuple(range(5, 1005, 25)), page_size=64, q_length=2),
)  # fmt: skip
LONG = {case.name: case for case in _LONG}
# `jax-kernels check` runs these cases without --full.
QUICK = ("plain", "everything", "pages_32_everything", "alibi", "masked_odd")
TYPICAL = {
    "decode_attention": TypicalCall(decode_attention, implementations=("mosaic_gpu", "triton", "xla"), q_length=1),
}


def arrays_of(case: DecodeCase, seed: int = 0) -> dict[str, Any]:
    """The arrays of a call by argument, with "q", "k" and "v" for query, key and value.

    Cache entries past a length are NaN; block_tables entries past a length point at no page.
    """
    random = np.random.default_rng(seed)
    normal: Any = lambda *shape: random.standard_normal(shape, np.float32)
    query = normal(case.batch, case.q_length, case.heads, case.head_dim)
    cache = (case.batch, case.kv_length, case.kv_heads)
    key, value = normal(*cache, case.head_dim), normal(*cache, case.v_head_dim)
    for x in (key, value):
        for b, length in enumerate(case.lengths):
            x[b, length:] = np.nan
    arrays: dict[str, Any] = {}
    if case.kv_lengths is not None:
        arrays["kv_lengths"] = jnp.asarray(case.kv_lengths, jnp.int32)
    if case.sinks:
        arrays["sinks"] = jnp.asarray(normal(case.heads))
    if case.mask:
        mask = random.random(case.shape_of(case.mask)) < 0.7
        mask[0, 0, 0] = False
        arrays["mask"] = jnp.asarray(mask)
    if case.bias:
        bias = 2 * normal(*case.shape_of(case.bias))
        bias[..., ::7] = -3e38 if case.bias == "HS" else -np.inf
        arrays["bias"] = jnp.asarray(bias if case.bias == "HS" else np.asarray(bias, case.dtype))
    if case.page_size is not None:
        count = case.kv_length // case.page_size
        numbers = random.permutation(case.batch * count + 2)[: case.batch * count]
        key, value = (_in_pages(x, numbers, case.page_size) for x in (key, value))
        tables = numbers.reshape(case.batch, count)
        past = np.arange(count) * case.page_size >= np.array(case.lengths)[:, None]
        arrays["block_tables"] = jnp.asarray(np.where(past, 10**8, tables), jnp.int32)
    return arrays | {name: jnp.asarray(x, case.dtype) for name, x in zip("qkv", (query, key, value), strict=True)}


def why_not(case: DecodeCase, implementation: str) -> str | None:
    """The reason why this implementation cannot run a case on this machine; None if it can."""
    specs = jax.eval_shape(lambda: arrays_of(case))
    options = {"window": case.window, "softcap": case.softcap, "scale": case.scale, "implementation": implementation}
    return refusal(decode_attention, *(specs.pop(name) for name in "qkv"), **specs, **options)


def _in_pages(x, numbers, page_size):
    """A cache x [B, S, heads, D] as pages [pages + 2, page_size, heads, D]; two further pages are NaN.

    numbers: the index of each page in the result, in the order of the sequences.
    """
    pages = np.full((len(numbers) + 2, page_size, *x.shape[2:]), np.nan, np.float32)
    pages[numbers] = x.reshape(-1, page_size, *x.shape[2:])
    return pages


def _contiguous(x, tables) -> np.ndarray:
    """A key or value cache as float64 [B, S, heads, D], with its pages in order if `tables`, the block tables, are
    given.
    """
    x = np.asarray(x).astype(np.float64)
    if tables is None:
        return x
    return np.stack([np.concatenate([x[n] if n < len(x) else np.nan * x[0] for n in row]) for row in tables])


def run(case: DecodeCase, arrays: dict[str, Any], implementation: str | None):
    """(out [B, T, H, Dv], lse [B, H, T]) of decode_attention, jitted. arrays: from arrays_of."""

    # Compiling dominates a small case. Unoptimised code compiles in half the time.
    on_cpu = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None

    @functools.partial(jax.jit, compiler_options=on_cpu)
    def call(q, k, v, **arrays):
        options: Any = {"window": case.window, "softcap": case.softcap, "scale": case.scale}
        return decode_attention(q, k, v, **arrays, **options, return_lse=True, implementation=implementation)

    return call(**arrays)


def definition(case: DecodeCase, arrays: dict[str, Any], rounded: bool = False):
    """(out [B, T, H, Dv], lse [B, H, T]), computed in float64 by NumPy loops. arrays: from arrays_of.

    rounded: round the weights and out to the case's dtype, as a plain evaluation does.
    """
    tables = None if "block_tables" not in arrays else np.asarray(arrays["block_tables"])
    query = np.asarray(arrays["q"]).astype(np.float64)
    key, value = (_contiguous(arrays[name], tables) for name in "kv")
    sinks = np.asarray(arrays["sinks"]).astype(np.float64) if case.sinks else np.full(case.heads, -np.inf)
    left = case.window[0] if isinstance(case.window, tuple) else -1 if case.window is None else case.window
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    whole = lambda name, other: np.broadcast_to(
        np.asarray(arrays.get(name, other)).astype(np.float64), case.shape_of("BHTS")
    )
    mask, bias = whole("mask", True), whole("bias", 0.0)
    round_ = lambda x: np.asarray(jnp.asarray(x, case.dtype)).astype(np.float64) if rounded else x
    out = np.zeros((case.batch, case.q_length, case.heads, case.v_head_dim))
    lse = np.full((case.batch, case.heads, case.q_length), -np.inf)
    for b, t, h in np.ndindex(case.batch, case.q_length, case.heads):
        position = case.lengths[b] - case.q_length + t
        keys = [j for j in range(position + 1) if (left < 0 or j >= position - left) and mask[b, h, t, j]]
        head = h // (case.heads // case.kv_heads)
        scores = scale * key[b, keys, head] @ query[b, t, h]
        if case.softcap is not None:
            scores = case.softcap * np.tanh(scores / case.softcap)
        scores = scores + bias[b, h, t, keys]
        largest = max([*scores, sinks[h]], default=-np.inf)
        if largest > -np.inf:
            total = np.exp(scores - largest).sum() + np.exp(sinks[h] - largest)
            lse[b, h, t] = largest + np.log(total)
            weights = np.exp(scores - largest) / total
            out[b, t, h] = round_(round_(weights) @ value[b, keys, head])
    return out, lse


def errors(case: DecodeCase, arrays: dict[str, Any], got) -> dict[str, tuple[float, float]]:
    """(error, bound) of out and lse by name. got: (out, lse). The error is rms_error against float64.

    The bound of out is 1.1 times the error of a plain evaluation in the case's dtype; 2e-6 for float32 and for lse.
    """
    want, plain = definition(case, arrays), definition(case, arrays, rounded=True)
    if case.dtype == "float32":
        bound = 2e-6
    else:
        bound = max(1.1 * rms_error(plain[0], want[0]), float(jnp.finfo(case.dtype).eps) / 8)
    found = {name: rms_error(x, y) for name, x, y in zip(("out", "lse"), got, want, strict=True)}
    return {"out": (found["out"], bound), "lse": (found["lse"], 2e-6)}


def errors_by(case: DecodeCase, implementation: str) -> dict[str, tuple[float, float]]:
    """(error, bound) of out and lse by name, for a call by this implementation."""
    arrays = arrays_of(case)
    return errors(case, arrays, run(case, arrays, implementation))
