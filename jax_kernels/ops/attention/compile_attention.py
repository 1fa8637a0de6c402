"""compile_attention: attention of one shape under one pattern, with its plan, density and measured speed."""

import functools
import inspect
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jax_kernels import dispatch, masks
from jax_kernels.device import DeviceInfo
from jax_kernels.masks import checks
from jax_kernels.masks.presets import PRESETS
from jax_kernels.ops.attention.flash_attention import flash_attention
from jax_kernels.ops.attention.prepare_mask import prepare_mask
from jax_kernels.ops.checks import check_names, checked_array
from jax_kernels.plain_numbers import dtype_of, dtype_text, plain_of
from jax_kernels.spelling import did_you_mean

__all__ = ["CompiledAttention", "Speedup", "compile_attention"]

CACHED = 64
# The number of queries, and of keys, in the blocks that `density` counts.
BLOCK = 128
# The seconds of work that is queued between two readings of the clock.
SECONDS = 0.02


class Speedup(NamedTuple):
    """A measured speedup over attention without a mask.

    milliseconds: the median time of a call under the mask. dense_milliseconds: the same without a mask. speedup:
    dense_milliseconds / milliseconds. device: the name of the device that ran both.
    """

    speedup: float
    milliseconds: float
    dense_milliseconds: float
    device: str


class CompiledAttention:
    """A jitted, differentiable attention under one mask, made by compile_attention: out = attention(query, key, value).

    query [B, seq_len, num_heads, head_dim], key and value [B, kv_len, num_kv_heads, head_dim], in dtype; any B. out is
    like query. Raises ValueError or TypeError for arrays of another shape or dtype.

    mask: the masks.Mask. prepared_mask: the mask with its block lists, made for the planned batch and its multiples.
    specs: jax.ShapeDtypeStructs of query, key and value, by name. plan: the Plan of its calls. density: the fraction of
    blocks of 128 queries and 128 keys that hold a pair which the mask keeps.
    """

    def __init__(self, mask: masks.Mask, specs: dict[str, jax.ShapeDtypeStruct], implementation: str | None):
        self.mask = mask
        self.specs = specs
        self.plan = dispatch.explain(flash_attention, **specs, mask=mask, implementation=implementation)
        self.density = float(mask.density(specs["query"].shape[1], specs["key"].shape[1], BLOCK))
        self.prepared_mask = prepare_mask(mask, **specs, implementation=self.plan.implementation)
        self._attend = jax.jit(functools.partial(flash_attention, implementation=self.plan.implementation))

    def __call__(
        self, query: Float[Array, "B T H D"], key: Float[Array, "B S Hkv D"], value: Float[Array, "B S Hkv D"]
    ) -> Float[Array, "B T H D"]:
        return self._attend(*self._checked(query, key, value), mask=self.prepared_mask)

    def plan_of_call(
        self, query: Float[Array, "B T H D"], key: Float[Array, "B S Hkv D"], value: Float[Array, "B S Hkv D"]
    ) -> dispatch.Plan:
        """The Plan of a call with these arrays, for jax_kernels.explain.

        Raises ValueError or TypeError for arrays of another shape or dtype.
        """
        self._checked(query, key, value)
        return self.plan

    def _checked(self, *arrays: Any) -> list[Any]:
        """[query, key, value] as jax.Arrays. Raises ValueError or TypeError for another shape or dtype; any batch."""
        checked = []
        for (name, spec), x in zip(self.specs.items(), arrays, strict=True):
            x = checked_array(name, x, (spec.dtype,))
            if x.shape[1:] != spec.shape[1:]:
                sizes = ", ".join(map(str, spec.shape[1:]))
                raise ValueError(f"{name}: got shape {x.shape}, want [batch, {sizes}]")
            if x.dtype != spec.dtype:
                raise TypeError(f"{name}: got dtype {x.dtype}, want {spec.dtype}")
            checked.append(x)
        return checked

    def measured_speedup(self, *, backward: bool = False, rounds: int = 5) -> Speedup:
        """The Speedup over flash_attention without a mask. Both run now, in turns, on JAX's device.

        The inputs are normal random numbers, with compile_attention's batch. The time is measured by a host clock
        around a queue of calls, until their results are ready, without compilation. backward: the calls also compute
        the gradients of query, key and value. rounds: the number of timings of each; the median counts.
        """
        rounds = checks.integer("rounds", rounds, 1)
        keys = jax.random.split(jax.random.key(0), 4)
        *given, dout = (
            jax.random.normal(k, x.shape, x.dtype)
            for k, x in zip(keys, (*self.specs.values(), self.specs["query"]), strict=True)
        )

        def run_of(attend: Callable[..., Any]) -> Callable[[], Any]:
            if not backward:
                jitted = jax.jit(attend)
                return lambda: jitted(*given)
            with_gradients = jax.jit(lambda dout, *qkv: jax.vjp(attend, *qkv)[1](dout))
            return lambda: with_gradients(dout, *given)

        ours, dense = run_of(self), run_of(flash_attention)
        times: tuple[list[float], list[float]] = ([], [])
        calls = [max(1, min(100, round(SECONDS / _seconds(run, 1, warm=2)))) for run in (ours, dense)]
        for _ in range(rounds):
            for run, count, found in zip((ours, dense), calls, times, strict=True):
                found.append(_seconds(run, count))
        ms, dense_ms = (statistics.median(found) * 1e3 for found in times)
        return Speedup(dense_ms / ms, ms, dense_ms, dispatch.target_device(given[0]).name)

    def __repr__(self) -> str:
        return f"CompiledAttention({self.mask!r}, density {self.density:.3f}, {self.plan.implementation})"


def _seconds(run: Callable[[], Any], calls: int, *, warm: int = 1) -> float:
    """The mean seconds of run(), over `calls` calls until their results are ready.

    warm: the number of calls before the clock starts.
    """
    for _ in range(warm):
        jax.block_until_ready(run())
    start = time.perf_counter()
    for _ in range(calls):
        out = run()
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / calls


def compile_attention(
    pattern: str | masks.Mask,
    seq_len: int,
    head_dim: int,
    *,
    kv_len: int | None = None,
    batch: int = 1,
    num_heads: int = 8,
    num_kv_heads: int | None = None,
    dtype: DTypeLike = jnp.bfloat16,
    implementation: str | None = None,
    **options: Any,
) -> CompiledAttention:
    """A CompiledAttention: attention under a pattern, planned once and cached.

    Equal arguments on the same device return the same object.

    The mask is prepared here, so that calls with this batch, or a multiple of it, compute no lists of blocks, forward
    or backward. Equivalent to the following JAX code::

        mask = masks.preset(pattern, **options)  # or the Mask itself
        mask = prepare_mask(mask, query, key, value)
        attention = jax.jit(lambda query, key, value: flash_attention(query, key, value, mask=mask))

    Args:
      pattern: the name of a preset ("causal", "sliding_window", "longformer", "bigbird", ...: see masks.preset), or a
        masks.Mask. A pattern from an array is passed as a Mask: "block_sparse" as masks.block_sparse(...).
      seq_len, kv_len: the number of queries and of keys, 0 or more. kv_len: None is seq_len.
      head_dim: of query, key and value, up to 256.
      batch: for plan, lists of blocks and measured_speedup. A call may have another batch; it computes lists of its own
        if its batch is not a multiple, or the mask differs between batch entries. 0 counts as 1.
      num_heads, num_kv_heads: the number of query heads, and of key and value heads, a divisor. None is num_heads.
      dtype: bfloat16, float16 or float32.
      implementation: "mosaic_gpu", "triton", "cudnn" or "xla"; None picks the device's first that supports the call.
      options: the preset's options, except arrays; q_length and kv_length, if the preset has them, are seq_len and
        kv_len.

    The last 64 objects are kept; compile_attention.cache_info() and cache_clear() are the methods of
    functools.lru_cache. A Mask with arrays is the same only if its arrays are the same objects.

    Raises:
      ValueError, TypeError, NotImplementedError: an argument, an option or a shape is not supported; the message names
        it.
    """
    seq_len = checks.integer("seq_len", seq_len, 0)
    kv_len = seq_len if kv_len is None else checks.integer("kv_len", kv_len, 0)
    batch = max(checks.integer("batch", batch, 0), 1)  # an empty batch works with any plan
    num_heads = checks.integer("num_heads", num_heads, 0)
    num_kv_heads = checks.integer("num_kv_heads", num_heads if num_kv_heads is None else num_kv_heads, 0)
    head_dim = checks.integer("head_dim", head_dim, 1)
    dtype = _dtype(dtype)
    if num_heads % num_kv_heads if num_kv_heads else num_heads:
        raise ValueError(f"num_kv_heads: got {num_kv_heads}, want a divisor of num_heads {num_heads}")
    if not isinstance(pattern, str | masks.Mask):
        raise TypeError(f"pattern: got {type(pattern).__name__}, want the name of a preset or a masks.Mask")
    if isinstance(pattern, str) and pattern not in PRESETS:
        known = ", ".join(map(repr, PRESETS))
        raise ValueError(f"pattern: got {pattern!r}, want one of {known}{did_you_mean(pattern, PRESETS)}")
    check_names(implementation=implementation)
    if isinstance(pattern, masks.Mask) and options:
        raise TypeError(f"options: got {', '.join(options)} with a Mask, want none: only presets have options")
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(pattern)):
        raise TypeError("pattern: got a Mask of traced arrays, want known arrays; flash_attention takes traced masks")
    options = {name: _constant(name, plain_of(name, options[name])) for name in sorted(options)}
    query = jax.ShapeDtypeStruct((batch, seq_len, num_heads, head_dim), dtype)
    key = jax.ShapeDtypeStruct((batch, kv_len, num_kv_heads, head_dim), dtype)
    with jax.ensure_compile_time_eval():  # the cached object must not belong to a trace
        return _compiled(
            *(pattern, query, key, implementation, dispatch.target_device(), dispatch.interpreting()), **options
        )


def _constant(name: str, option: Any) -> Any:
    """The option. Raises TypeError, with its name, if it is not hashable."""
    try:
        hash(option)
    except TypeError:
        got = repr(option) if isinstance(option, tuple) else type(option).__name__
        raise TypeError(f"{name}: got {got}, want a constant; for an array, pass a masks.Mask") from None
    return option


def _dtype(x: Any) -> Any:
    dtype = None if x is None else dtype_of(x)
    if dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise TypeError(f"dtype: got {dtype_text(x)}, want bfloat16, float16 or float32")
    return dtype


def preset_mask(pattern: str, q_length: int, kv_length: int, options: dict[str, Any]) -> masks.Mask:
    """masks.preset(pattern, **options), with these lengths if the preset has them and the options don't."""
    takes = inspect.signature(PRESETS[pattern]).parameters if pattern in PRESETS else ()
    lengths = {"q_length": q_length, "kv_length": kv_length}
    return masks.preset(pattern, **{name: x for name, x in lengths.items() if name in takes} | options)


@functools.lru_cache(CACHED, typed=True)  # typed: the options 1 and True are equal
def _compiled(
    pattern: str | masks.Mask,
    query: jax.ShapeDtypeStruct,
    key: jax.ShapeDtypeStruct,
    implementation: str | None,
    device: DeviceInfo,
    interpreting: bool,
    /,
    **options: Any,
) -> CompiledAttention:
    """The CompiledAttention for these arguments. device, interpreting: the plan depends on them."""
    if isinstance(pattern, str):
        mask = preset_mask(pattern, query.shape[1], key.shape[1], options)
    else:
        mask = pattern.unprepared
    return CompiledAttention(mask, {"query": query, "key": key, "value": key}, implementation)


compile_attention.cache_info = _compiled.cache_info  # type: ignore[attr-defined]
compile_attention.cache_clear = _compiled.cache_clear  # type: ignore[attr-defined]
