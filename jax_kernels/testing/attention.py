"""The float64 oracle of attention, the error that a result may have, and the runs of its cases.

Tests, benchmarks and `jax-kernels check` read the same cases, from jax_kernels.testing.attention_cases. The cases of
other ops are in jax_kernels.testing.matmul and jax_kernels.testing.normalization.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_kernels.inputs.attention import AttentionInputs, AttentionOptions
from jax_kernels.ops.attention.flash_attention import flash_attention
from jax_kernels.reference import attention as reference
from jax_kernels.testing.attention_cases import ATTENTION_CASES, GPU_ATTENTION_CASES, AttentionCase
from jax_kernels.testing.refusals import refusal
from jax_kernels.testing.typical_call import TypicalCall

__all__ = [
    "ATTENTION_CASES",
    "GPU_ATTENTION_CASES",
    "TYPICAL",
    "AttentionCase",
    "AttentionResults",
    "attention_float64",
    "attention_inputs",
    "errors_of_attention",
    "largest_error",
    "named_errors",
    "plain_attention",
    "rms_error",
    "run_attention",
    "tolerance",
    "tolerance_by",
    "tolerance_of",
    "why_not",
    "without_garbage",
]


class _AttentionResults(NamedTuple):
    out: Any
    lse: Any
    dq: Any
    dk: Any
    dv: Any
    dbias: Any = None
    dsinks: Any = None


class AttentionResults(_AttentionResults):
    """out [B, T, H, Dv], lse [B, H, T] and the gradients, shaped like query, key, value, bias and sinks.

    A result that a call does not return is None, and is left out of _asdict(), which maps names to results.
    """

    __slots__ = ()

    def _asdict(self) -> dict[str, Any]:
        return {name: x for name, x in zip(self._fields, self, strict=True) if x is not None}


def _shapes(case: AttentionCase) -> tuple[tuple[int, ...], ...]:
    """The shapes of query, key, value, dout and dlse."""
    return (
        (case.batch, case.q_length, case.heads, case.head_dim),
        (case.batch, case.kv_length, case.kv_heads, case.head_dim),
        (case.batch, case.kv_length, case.kv_heads, case.v_head_dim),
        (case.batch, case.q_length, case.heads, case.v_head_dim),
        (case.batch, case.heads, case.q_length),
    )


def attention_inputs(case: AttentionCase, seed: int = 0) -> tuple[jax.Array, ...]:
    """(query, key, value, dout, dlse) for a case: normal random values, in the case's dtype; dlse is float32.

    dout, dlse: the cotangents of out [B, T, H, Dv] and lse [B, H, T].
    """
    random = np.random.default_rng(seed)
    query, key, value, dout, dlse = (random.standard_normal(shape, np.float32) for shape in _shapes(case))
    if case.garbage:
        counts = case.counts()
        key, value = np.where(counts, key, np.nan), np.where(counts, value, np.where(np.abs(value) > 1, np.nan, np.inf))
    arrays = (jnp.asarray(x, case.dtype) for x in (query * case.magnitude, key, value * case.value_magnitude, dout))
    return *arrays, jnp.asarray(dlse)


def without_garbage(case: AttentionCase, key: Any, value: Any) -> tuple[Any, Any]:
    """key and value with zeros past kv_lengths, where the op ignores them."""
    if not case.garbage:
        return key, value
    counts = case.counts()
    return jnp.where(counts, key, 0).astype(key.dtype), jnp.where(counts, value, 0).astype(value.dtype)


def why_not(case: AttentionCase, implementation: str) -> str | None:
    """The reason why this implementation cannot run the case on this machine; None if it can."""
    query, key, value = (jax.ShapeDtypeStruct(shape, jnp.dtype(case.dtype)) for shape in _shapes(case)[:3])
    arguments = case.arguments | {"return_lse": _gives_lse(implementation), "implementation": implementation}
    return refusal(flash_attention, query, key, value, **arguments)


def _gives_lse(implementation: str | None) -> bool:
    """Whether an implementation (None: the default) returns lse; only "cudnn" does not."""
    return implementation != "cudnn"


def _call(case: AttentionCase, query, key, value, bias, sinks) -> tuple[AttentionInputs, AttentionOptions]:
    """The case as arguments of jax_kernels.reference.attention. bias, sinks: arrays or None; the others as in the
    case.
    """
    arguments = case.arguments
    q_ids, kv_ids = arguments["segment_ids"] or (None, None)
    inputs = AttentionInputs(
        query,
        key,
        value,
        mask=arguments["mask"],
        bias=bias,
        sinks=None if sinks is None else sinks[None],
        q_segment_ids=q_ids,
        kv_segment_ids=kv_ids,
        kv_lengths=arguments["kv_lengths"],
        q_offset=None if isinstance(case.q_offset, int) else arguments["q_offset"],
    )
    options = AttentionOptions(
        scale=1 / math.sqrt(case.head_dim),
        is_causal=case.is_causal,
        window=(case.window, case.window) if isinstance(case.window, int) else case.window,
        softcap=case.softcap,
        q_offset=case.q_offset if isinstance(case.q_offset, int) else None,
        precision=case.precision,
    )
    return inputs, options


def _results(forward, primals: dict[str, Any], cotangents) -> AttentionResults:
    """The results of forward(primals) = (out, lse), and the gradients of primals for the cotangents (dout, dlse).

    primals: the arrays with a gradient, by name.
    """
    (out, lse), vjp = jax.vjp(forward, primals)
    gradients = vjp(cotangents)[0]
    return AttentionResults(out, lse, *(gradients.get(name) for name in ("query", "key", "value", "bias", "sinks")))


def _primals(case: AttentionCase, query, key, value) -> dict[str, Any]:
    """The arrays with a gradient by name: query, key and value, and the case's bias and sinks."""
    extra = {name: case.arguments[name] for name in case.differentiated[3:]}
    return {"query": query, "key": key, "value": value} | extra


# XLA takes most of the time of a small case, for compiling. Without optimisation it compiles in half the time.
@functools.partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
def _float64(case, primals, cotangents):
    def forward(primals):
        return reference.attention(*_call(case, **{"bias": None, "sinks": None} | primals))

    return _results(forward, primals, cotangents)


def attention_float64(case: AttentionCase, query, key, value, dout, dlse=None) -> AttentionResults:
    """The right answer, AttentionResults in NumPy float64, by the reference on the CPU. dlse None is zeros."""
    key, value = without_garbage(case, key, value)
    primals = {name: np.asarray(x).astype(np.float64) for name, x in _primals(case, query, key, value).items()}
    dlse = np.zeros(_shapes(case)[-1]) if dlse is None else dlse
    cotangents = tuple(np.asarray(x).astype(np.float64) for x in (dout, dlse))
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        return jax.tree.map(np.asarray, _float64(case, primals, cotangents))


def _rounded(x, dtype):
    """x rounded to dtype and back, and its cotangent too. Without the barrier, XLA may leave out a pair of casts."""
    return jax.lax.optimization_barrier(x.astype(dtype)).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _rounded_gradient(x, dtype):
    return x


_rounded_gradient.defvjp(lambda x, dtype: (x, None), lambda dtype, _, dx: (_rounded(dx, dtype),))


@functools.partial(jax.jit, static_argnums=0)
def _plain(case, primals, cotangents):
    """plain_attention for the arrays with a gradient (primals, by name) and cotangents (dout, dlse), jitted."""
    dtype = primals["query"].dtype
    group = case.heads // case.kv_heads
    precision = jax.lax.Precision.DEFAULT if case.precision == "tf32" else jax.lax.Precision.HIGHEST

    def forward(primals):
        inputs, options = _call(case, **{"bias": None, "sinks": None} | primals)
        query, key, value = (x.astype(jnp.float32) for x in (inputs.query, inputs.key, inputs.value))
        key, value = (jnp.repeat(x, group, axis=2) for x in (key, value))
        products = jnp.einsum("bthd,bshd->bhts", query, key, precision=precision)
        scores = reference.scores_of(_rounded_gradient(products, dtype), inputs.bias, options)
        live = reference.live(inputs, options) & ~jnp.isneginf(scores)
        scores = jnp.where(live, scores, -jnp.inf)
        sinks = -jnp.inf if inputs.sinks is None else inputs.sinks[..., None, None]
        highest = jnp.maximum(scores.max(axis=-1, keepdims=True), sinks)
        highest = jax.lax.stop_gradient(jnp.where(jnp.isneginf(highest), 0, highest))
        weights = jnp.exp(scores - highest)
        total = weights.sum(axis=-1, keepdims=True) + jnp.exp(sinks - highest)
        dead = total == 0
        weights = weights / jnp.where(dead, 1, total)
        lse = jnp.where(dead, -jnp.inf, jnp.log(jnp.where(dead, 1, total)) + highest)[..., 0]
        out = jnp.einsum("bhts,bshd->bthd", _rounded(weights, dtype), value, precision=precision).astype(dtype)
        return out, lse

    return _results(forward, primals, cotangents)


def plain_attention(case: AttentionCase, query, key, value, dout, dlse=None) -> AttentionResults:
    """The AttentionResults of a plain evaluation in the inputs' dtype, whose error is the yardstick for other results.

    It has whole score matrices and JAX's gradient. Matmuls accumulate in float32 and softmax is in float32. Operands of
    matmuls, and the gradient of the probabilities, are rounded to the inputs' dtype, as in PyTorch's own attention.
    dlse None is zeros.
    """
    dlse = jnp.zeros(_shapes(case)[-1]) if dlse is None else dlse
    key, value = without_garbage(case, key, value)
    return _plain(case, _primals(case, query, key, value), (dout, dlse))


def run_attention(
    case: AttentionCase,
    arrays,
    implementation: str | None = None,
    op: Callable[..., Any] = flash_attention,
    **kwargs: Any,
) -> dict[str, Any]:
    """The results and gradients of flash_attention by name ("out", "lse", "dq", ...), from one jitted call.

    arrays: (query, key, value, dout, dlse), from attention_inputs. op: another function with the arguments and results
    of flash_attention. kwargs go to it. "cudnn" gives no lse: there, lse is left out and dlse counts as zero.
    """
    with_lse = _gives_lse(implementation)

    @jax.jit
    def run(primals, dout, dlse):
        arguments = case.arguments | {"return_lse": with_lse, "implementation": implementation} | kwargs

        def forward(primals):
            results = op(**arguments | primals)
            return results if with_lse else (results, None)

        return _results(forward, primals, (dout, dlse if with_lse else None))

    query, key, value, dout, dlse = arrays
    return run(_primals(case, query, key, value), dout, dlse)._asdict()


def errors_of_attention(
    case: AttentionCase, got: dict[str, Any], implementation: str | None = None
) -> dict[str, tuple[float, float]]:
    """(error, bound) of each result by name. got: from run_attention for the case and attention_inputs(case).

    implementation: the one that `got` is from. The error is rms_error against float64; the bounds are tolerance_by's.
    """
    arrays, bounds = attention_inputs(case), tolerance_by(case, implementation)
    want = attention_float64(case, *(arrays if "lse" in got else arrays[:-1]))
    return {name: (rms_error(x, getattr(want, name)), bounds[name]) for name, x in got.items()}


def rms_error(got: Any, want: Any) -> float:
    """||got - want|| / ||want|| in float64; if want is all zeros, the root mean square of got.

    Equal infinities at equal indices are ignored. Any other infinity, and any NaN, makes the result inf.
    """
    got, want = (np.asarray(x).astype(np.float64) for x in (got, want))
    if got.shape != want.shape:
        raise ValueError(f"got: shape {got.shape}, want {want.shape}")
    finite = np.isfinite(want)
    if not np.array_equal(got[~finite], want[~finite]) or not np.isfinite(got[finite]).all():
        return math.inf
    difference = np.linalg.norm(got[finite] - want[finite])
    return float(difference / (np.linalg.norm(want[finite]) or math.sqrt(want.size)))


def largest_error(got: Any, want: Any, floor: float | None = None) -> float:
    """The largest |got - want|, or with a floor the largest |got - want| / (|want| + floor); NaN if there is a NaN."""
    got, want = (np.asarray(x).astype(np.float64) for x in (got, want))
    if got.shape != want.shape:
        raise ValueError(f"got: shape {got.shape}, want {want.shape}")
    error = np.abs(got - want)
    return float((error if floor is None else error / (np.abs(want) + floor)).max(initial=0))


def named_errors(
    got: dict[str, Any], want: dict[str, Any], bound: Callable[[str, Any, np.ndarray], float]
) -> dict[str, tuple[float, float]]:
    """(largest error, bound) of each result by name. bound: of (name, the result's dtype, the right answer).

    Raises ValueError if got and want have other names.
    """
    if sorted(got) != sorted(want):
        raise ValueError(f"got: results {sorted(got)}, want {sorted(want)}")
    return {
        name: (largest_error(got[name], right), bound(name, got[name].dtype, right)) for name, right in want.items()
    }


@functools.cache
def tolerance(case: AttentionCase, seed: int = 0) -> dict[str, float]:
    """The largest rms_error that each result may have, by name, for the arrays attention_inputs(case, seed).

    16-bit: 1.1 times the error of plain_attention. lse and exact float32: 2e-6, about ten roundings of
    float32, or twice the plain error, because tiles add in another order. tf32: 2e-3. It rounds every operand to
    11 bits, 2.8e-4 root mean square each, which gives up to 1e-3 over the backward's chain of matmuls.
    """
    arrays = attention_inputs(case, seed)
    return tolerance_of(case, arrays, attention_float64(case, *arrays))


def tolerance_by(case: AttentionCase, implementation: str | None) -> dict[str, float]:
    """The largest rms_error that each result of this implementation may have, by name: `tolerance`, twice for "cudnn".

    cuDNN's kernels are not part of this library. With grouped queries they round the gradients of keys and values for
    each query head, and again their sum over a group: 1.2 times the error of one rounding was measured.
    """
    return {name: bound * (2 if implementation == "cudnn" else 1) for name, bound in tolerance(case).items()}


def tolerance_of(case: AttentionCase, arrays, want: AttentionResults) -> dict[str, float]:
    """The largest rms_error that each result may have, by name, for these arrays, as `tolerance` explains.

    arrays: (query, key, value, dout, dlse). want: the right answer.
    """
    plain = plain_attention(case, *arrays)
    bounds = {}
    for name, right in want._asdict().items():
        error = rms_error(getattr(plain, name), right)
        if case.precision == "tf32":
            bounds[name] = 2e-3
        elif name == "lse":
            bounds[name] = max(2 * error, 2e-6)
        elif name == "dsinks" and case.dtype != "float32":
            # A few values, each the sum of one rounding of out for every query: the size of such a sum is chance.
            bounds[name] = max(3 * error, float(jnp.finfo(case.dtype).eps))
        elif case.dtype == "float32":
            # P is exp(score - lse). score and lse are rounded at their largest size, four times the magnitude.
            rounding = 0 if case.magnitude == 1 else 4 * case.magnitude * float(jnp.finfo(jnp.float32).eps)
            bounds[name] = max(2 * error, 2e-6, rounding)
        elif case.bias_whole and name in ("dk", "dv"):
            # "mosaic_gpu" adds the gradients from masked rows to the rounded gradients of other rows: two roundings.
            bounds[name] = 1.5 * error
        elif case.magnitude > 1 and name in ("dq", "dk"):
            # If the softmax is almost one-hot, dP and its row sum delta almost cancel. A tiled backward takes delta
            # from the rounded out, the plain backward from its weights: measured 1.6 times the error with float32
            # matmuls, 1.9 times with 16-bit matmuls.
            bounds[name] = 2.2 * error
        else:
            bounds[name] = max(1.1 * error, float(jnp.finfo(case.dtype).eps) / 8)
    return bounds


TYPICAL = {"flash_attention": TypicalCall(flash_attention)}
