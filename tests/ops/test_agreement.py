"""Small random calls: every implementation that can serve a call here equals float64, forward and backward.

The suite draws a few calls. JAX_KERNELS_EXAMPLES=2000 draws 2000 random calls for each op and implementation::

    JAX_KERNELS_EXAMPLES=2000 python -m pytest tests/ops/test_agreement.py --timeout 36000
"""

import dataclasses
import os
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import flash_attention, masks
from jax_kernels.testing import decode_attention as decode_cases
from jax_kernels.testing import flash_attention_fp8 as fp8_cases
from tests.support.oracles import attention as attention_oracle

EXAMPLES = int(os.environ.get("JAX_KERNELS_EXAMPLES", "0"))
EPS = float(jnp.finfo(jnp.float32).eps)


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of flash_attention: the fields of an AttentionCase that the oracle reads, and its arrays.

    traced: names of the array arguments that are passed as tracers. past: the value in key and value past kv_lengths.
    lengths_as_mask: whether kv_lengths are passed as masks.prefix.
    """

    seed: int
    batch: int
    q_length: int
    kv_length: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str
    magnitude: float
    is_causal: bool
    window: Any
    q_offset: Any
    kv_lengths: tuple[int, ...] | None
    lengths_as_mask: bool
    segments: str | None
    bias: str | None
    bias_dtype: str | None
    bias_entries: float
    sinks: tuple[float, ...] | None
    mask: str | None
    mask_dtype: str
    softcap: float | None
    past: float
    traced: frozenset[str]
    pattern: None = None
    garbage: bool = False  # arrays has zeros past the lengths

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """query, key, value, dout, dlse; key and value with zeros past the lengths."""
        random = np.random.default_rng(self.seed)
        normal = lambda *shape: random.standard_normal(shape, np.float32)
        query = normal(self.batch, self.q_length, self.heads, self.head_dim) * np.float32(self.magnitude)
        key = normal(self.batch, self.kv_length, self.kv_heads, self.head_dim)
        value = normal(self.batch, self.kv_length, self.kv_heads, self.v_head_dim)
        dout = normal(self.batch, self.q_length, self.heads, self.v_head_dim)
        key, value = (np.where(self.is_past, 0, x) for x in (key, value))
        rounded = (np.asarray(jnp.asarray(x, self.dtype)) for x in (query, key, value, dout))
        return *rounded, normal(self.batch, self.heads, self.q_length)

    @property
    def is_past(self) -> np.ndarray:
        """Whether a key is past its length: [B, S, 1, 1]."""
        lengths = np.full(self.batch, self.kv_length) if self.kv_lengths is None else np.asarray(self.kv_lengths)
        return (np.arange(self.kv_length) >= lengths[:, None])[..., None, None]

    def _shape(self, axes: str) -> tuple[int, ...]:
        sizes = {"b": self.batch, "h": self.heads, "t": self.q_length, "s": self.kv_length}
        return tuple(size if axis in axes else 1 for axis, size in sizes.items())

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of flash_attention in NumPy, without query, key and value."""
        random = np.random.default_rng([self.seed, 1])
        found: dict[str, Any] = dict.fromkeys(("bias", "mask", "sinks", "segment_ids"))
        if self.bias is not None:
            bias = random.standard_normal(self._shape(self.bias), np.float32)
            low = random.random(bias.shape) < 0.3
            low[:, :, :1] |= random.random() < 0.5
            found["bias"] = np.asarray(
                jnp.where(low, self.bias_entries, jnp.asarray(bias, self.bias_dtype or self.dtype))
            )
        if self.mask is not None:
            found["mask"] = random.random(self._shape(self.mask)) < 0.6
        if self.sinks is not None:
            found["sinks"] = np.asarray(self.sinks, np.float32)
        if self.segments is not None:
            ids = lambda length: random.integers(-1, 2, (self.batch, length)).astype(np.int32)
            q_ids, kv_ids = ids(self.q_length), ids(self.kv_length)
            found["segment_ids"] = (np.sort(q_ids), np.sort(kv_ids)) if self.segments == "packed" else (q_ids, kv_ids)
        lengths = None if self.kv_lengths is None else np.asarray(self.kv_lengths, np.int32)
        offset = self.q_offset if isinstance(self.q_offset, int) else np.asarray(self.q_offset, np.int32)
        found |= {"is_causal": self.is_causal, "window": self.window, "softcap": self.softcap}
        return found | {"kv_lengths": lengths, "q_offset": offset}


@st.composite
def calls(draw, implementation):
    is_xla = implementation == "xla"
    batch, kv_heads = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    heads = kv_heads * draw(st.integers(1, 3))
    q_length, kv_length = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    offset = st.integers(-45, 45) | st.sampled_from([-(2**30) + 1, 2**30 - 1])
    dtype = draw(st.sampled_from(["float32", "bfloat16", "float16"]))
    bias_dtype = draw(st.sampled_from([None, "float32"]))
    lowest = float(jnp.finfo(bias_dtype or dtype).min)
    names = ("q_offset", "kv_lengths", "segment_ids", "mask", "bias", "sinks")
    return Call(
        seed=draw(st.integers(0, 1000)),
        batch=batch,
        q_length=q_length,
        kv_length=kv_length,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([8, 16, 33, 64])),
        v_head_dim=draw(st.sampled_from([8, 24, 64])),
        dtype=dtype,
        magnitude=draw(st.sampled_from([1.0, 1.0, 1e-4, 30.0, 1e3])),
        is_causal=draw(st.booleans()),
        window=draw(st.none() | st.integers(0, 30) | st.tuples(st.integers(-1, 30), st.integers(-1, 30))),
        q_offset=draw(st.one_of(offset, st.tuples(*[offset] * batch))),
        kv_lengths=draw(st.none() | st.tuples(*[st.integers(-2, kv_length + 3)] * batch)),
        lengths_as_mask=draw(st.booleans()),
        segments=draw(st.sampled_from([None, "packed", "mixed"])),
        bias=draw(st.none() | st.sampled_from(["", "h", "t", "bs", "hts", "bhts"])),
        bias_dtype=bias_dtype,
        bias_entries=draw(st.sampled_from([-np.inf, -np.inf, lowest])),
        sinks=draw(st.none() | st.tuples(*[st.sampled_from([-np.inf, -2.0, 0.5, 30.0])] * heads)),
        mask=draw(st.none() | st.sampled_from(["", "s", "bs", "ht", "bhts"])) if is_xla else None,
        mask_dtype=draw(st.sampled_from(["bool", "float32", "bfloat16", "float16"])),
        softcap=draw(st.none() | st.sampled_from([1.0, 20.0])),
        past=draw(st.sampled_from([0.0, np.nan, np.inf, -np.inf])),
        traced=draw(st.frozensets(st.sampled_from(names))),
    )


def run(call: Call, implementation: str) -> dict[str, Any]:
    """out, lse, and dq, dk, dv, dbias and dsinks if they exist."""
    query, key, value, dout, dlse = call.arrays
    past = np.asarray(call.past, key.dtype)
    primals = {"query": query, "key": np.where(call.is_past, past, key), "value": np.where(call.is_past, past, value)}
    arguments = call.arguments
    if arguments["mask"] is not None:
        arguments["mask"] = np.asarray(jnp.asarray(arguments["mask"], call.mask_dtype))
    statics = {name: x for name, x in arguments.items() if x is not None and name not in call.traced}
    traced = {name: x for name, x in arguments.items() if x is not None and name in call.traced}
    primals |= {name: arguments[name] for name in ("bias", "sinks") if arguments[name] is not None}

    @jax.jit
    def results(primals, traced, cotangents):
        def forward(primals):
            given = statics | traced | primals
            if call.lengths_as_mask and call.kv_lengths is not None:
                mask = masks.prefix(jnp.maximum(given.pop("kv_lengths"), 0))
                given["mask"] = mask & masks.dense(given["mask"]) if given.get("mask") is not None else mask
            return flash_attention(**given, return_lse=True, implementation=implementation)

        results, vjp = jax.vjp(forward, primals)
        return results, vjp(cotangents)[0]

    (out, lse), gradients = results(primals, traced, (dout, dlse))
    names = {"query": "dq", "key": "dk", "value": "dv", "bias": "dbias", "sinks": "dsinks"}
    return {"out": out, "lse": lse} | {names[name]: x for name, x in gradients.items()}


def bounds(call: Call, query, key, value, dout, dlse) -> dict[str, float]:
    """Error bound of each result: the roundings of the terms of its sums. The terms have magnitude 1.

    A score has the error of a float32 matmul, which is a relative error of its probability.
    """
    size = lambda x: float(np.abs(np.asarray(x).astype(np.float64)).max())
    scale, rows = call.head_dim**-0.5, call.q_length * call.heads // call.kv_heads
    score = scale * size(query) * size(key) * call.head_dim**0.5 * 4 + 30
    tolerance = 4 * float(jnp.finfo(call.dtype).eps) + 4 * EPS * score
    dscore = 2 * size(dout) * size(value) * call.v_head_dim + size(dlse)
    of_bias = call.batch * call.heads * max(call.q_length, call.kv_length)
    sums = {
        "out": size(value),
        "lse": 0,
        "dv": rows * size(dout),
        "dbias": of_bias * dscore,
        "dsinks": of_bias * dscore,
    }
    sums |= {"dq": scale * size(key) * dscore, "dk": scale * rows * size(query) * dscore}
    return {name: tolerance * x for name, x in sums.items()} | {"lse": 8 * EPS * score}


def check(call: Call, implementation: str) -> None:
    arrays = call.arrays
    want = attention_oracle.attention(call, *arrays)
    allowed = bounds(call, *arrays)
    for name, x in run(call, implementation).items():
        x, right = (np.asarray(y).astype(np.float64) for y in (x, getattr(want, name)))
        np.testing.assert_allclose(x, right, rtol=1e-2 if name != "lse" else 1e-6, atol=allowed[name], err_msg=name)
        if name in ("dk", "dv"):
            assert not np.where(call.is_past, x, 0).any(), f"{name} is not 0 past kv_lengths"


def settings(examples: int) -> Any:
    """Draws JAX_KERNELS_EXAMPLES random examples if it is set; otherwise a few examples, the same every time."""
    return hypothesis.settings(max_examples=EXAMPLES or examples, derandomize=not EXAMPLES, deadline=None)


def check_all(strategy, check, examples, implementation, monkeypatch):
    if implementation != "xla":
        monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")

    @settings(examples)
    @hypothesis.given(strategy)
    def any_call(call):
        check(call, implementation)
        if EXAMPLES:  # each call compiles a program, and a process can hold only a limited number
            jax.clear_caches()

    any_call()


def in_tiers(examples: dict[str, tuple[int, int]]) -> list[Any]:
    """examples: for each implementation, the number of examples of `make test`, and of `make test-all` in addition."""
    marks = ((), pytest.mark.slow)
    return [
        pytest.param(name, count, marks=mark)
        for name, counts in examples.items()
        for count, mark in zip(counts, marks, strict=True)
    ]


@pytest.mark.parametrize(("implementation", "examples"), in_tiers({"xla": (4, 8), "triton": (2, 4)}))
def test_flash_attention(implementation, examples, monkeypatch):
    check_all(calls(implementation), check, examples, implementation, monkeypatch)


@st.composite
def decode_calls(draw):
    batch, kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    page_size = draw(st.none() | st.sampled_from([16, 32]))
    kv_length = draw(st.integers(1, 40)) if page_size is None else page_size * draw(st.integers(1, 3))
    return decode_cases.DecodeCase(
        "any",
        batch=batch,
        q_length=draw(st.integers(1, 16)),
        kv_length=kv_length,
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([8, 33, 64])),
        v_head_dim=draw(st.sampled_from([8, 24, 64])),
        dtype=draw(st.sampled_from(["bfloat16", "float16"])),
        kv_lengths=draw(st.tuples(*[st.integers(-3, kv_length + 3)] * batch)),
        page_size=page_size,
        window=draw(st.none() | st.integers(0, 30)),
        softcap=draw(st.none() | st.just(3.0)),
        sinks=draw(st.booleans()),
        scale=draw(st.sampled_from([None, 0.3, -0.2])),
    )


def check_decode(case, implementation):
    arrays = decode_cases.arrays_of(case)
    got, want = decode_cases.run(case, arrays, implementation), decode_cases.definition(case, arrays)
    for name, x, right, tolerance in zip(("out", "lse"), got, want, (4 * jnp.finfo(case.dtype).eps, 1e-5), strict=True):
        x = np.asarray(x).astype(np.float64)
        np.testing.assert_allclose(x, right, rtol=float(tolerance), atol=4 * float(tolerance), err_msg=name)


@pytest.mark.parametrize(("implementation", "examples"), in_tiers({"xla": (2, 4), "triton": (2, 3)}))
def test_decode_attention(implementation, examples, monkeypatch):
    check_all(decode_calls(), check_decode, examples, implementation, monkeypatch)


@st.composite
def fp8_calls(draw):
    batch, kv_heads = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    q_length, kv_length = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    offset = st.integers(-45, 45)
    return fp8_cases.Fp8Case(
        "any",
        batch=batch,
        q_length=q_length,
        kv_length=kv_length,
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([8, 40, 64])),
        v_head_dim=draw(st.sampled_from([8, 24, 64])),
        is_causal=draw(st.booleans()),
        q_offset=draw(st.one_of(offset, st.tuples(*[offset] * batch))),
        kv_lengths=draw(st.none() | st.tuples(*[st.integers(-2, kv_length + 3)] * batch)),
        scale=draw(st.sampled_from([None, 0.2, -0.1])),
        rising=draw(st.sampled_from([1.0, 30.0])),
    )


def check_fp8(case, implementation):
    arrays = fp8_cases.arrays_of(case)
    (out, lse), want = fp8_cases.run(case, arrays, implementation), fp8_cases.definition(case, arrays)
    largest = np.abs(want[0]).max()
    np.testing.assert_allclose(np.asarray(out).astype(np.float64), want[0], rtol=2**-7, atol=1e-4 * largest)
    np.testing.assert_allclose(lse, want[1], rtol=1e-5, atol=1e-4)


def test_flash_attention_fp8(monkeypatch):
    check_all(fp8_calls(), check_fp8, 4, "xla", monkeypatch)
