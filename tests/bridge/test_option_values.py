"""Successive calls that differ in one option's value: each has its own result and gradients, not a cached call's.

Every option of every function of the bridge has a case. The reference is JAX's op of the name, or PyTorch's function.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_kernels
from jax_kernels import bridge
from jax_kernels.bridge.operators import call_cache
from tests.support.cases.option_values import ACTIVATIONS, CASES, COUNTED, LEFT_OUT, RAISING


def function_of(op: str):
    return getattr(bridge, op.split()[0])


def names_of(op: str) -> set[str]:
    """The arguments of a function that have several values."""
    arguments = inspect.signature(function_of(op)).parameters
    names = {name for name, x in arguments.items() if x.kind is not x.VAR_KEYWORD}
    if len(names) < len(arguments) and not op.startswith(
        "flash_attention"
    ):  # they belong to flash_attention, with the same names
        of_attention = names_of("flash_attention")
        names |= of_attention - {"mask"} if op == "block_sparse_attention" else of_attention
    return {name for name in names if not {name, f"{name} of {op}"} & RAISING}


def test_every_option_has_a_case():
    functions = {name for name in dir(bridge) if callable(getattr(bridge, name)) and not name.startswith("_")}
    assert functions == {op.split()[0] for op in CASES} | LEFT_OUT
    for op, (given, options) in CASES.items():
        others = {name for name in given if name not in options} | ({"score_mod"} if op.endswith("a Mask") else set())
        assert not names_of(op) - others - set(options) - set(COUNTED), op
        assert set(options) <= names_of(op), op


def in_jax(x):
    """An argument of the bridge as an argument of JAX's op."""
    if isinstance(x, torch.Tensor):
        is_fp8, bits = x.dtype == torch.float8_e4m3fn, x.detach().contiguous()
        array = jnp.asarray((bits.view(torch.uint8) if is_fp8 else bits).numpy())
        return array.view(jnp.float8_e4m3fn) if is_fp8 else array
    if isinstance(x, tuple | list):
        return tuple(map(in_jax, x))
    if isinstance(x, torch.dtype):
        return str(x).removeprefix("torch.")
    if isinstance(x, torch.nn.LeakyReLU):
        return lambda y: jax.nn.leaky_relu(y, x.negative_slope)
    return ACTIVATIONS.get(x, x) if callable(x) else x


def flash_attn(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
               return_attn_probs=False):  # fmt: skip
    """flash_attn_func according to its docstring: aligned bottom-right, and with a bias from slopes."""
    offset = k.shape[1] - q.shape[1]
    if alibi_slopes is not None:
        distance = jnp.abs(jnp.arange(q.shape[1])[:, None] + offset - jnp.arange(k.shape[1]))
        alibi_slopes = -alibi_slopes.reshape(-1, q.shape[2], 1, 1) * distance
    found = jax_kernels.flash_attention(
        q, k, v, scale=softmax_scale, is_causal=causal, window=window_size, softcap=softcap or None, q_offset=offset,
        bias=alibi_slopes, return_lse=return_attn_probs,
    )  # fmt: skip
    return found


def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, return_attn_probs=False, **options):
    """Each sequence in a call of its own."""
    cu_seqlens_q, cu_seqlens_k = (np.asarray(x) for x in (cu_seqlens_q, cu_seqlens_k))
    found = []
    slopes = options.pop("alibi_slopes", None)
    for i in range(2):
        (q_start, q_end), (k_start, k_end) = (x[i : i + 2] for x in (cu_seqlens_q, cu_seqlens_k))
        parts = q[q_start:q_end][None], k[k_start:k_end][None], v[k_start:k_end][None]
        own = slopes[i] if slopes is not None and slopes.ndim == 2 else slopes
        found.append(flash_attn(*parts, **options, alibi_slopes=own, return_attn_probs=True))
    out, lse = jnp.concatenate([x[0][0] for x in found]), jnp.concatenate([x[1][0] for x in found], -1)
    return (out, lse) if return_attn_probs else out


def dmattn(query, key, value, attn_mask=None, attn_bias=None, is_causal=None, mask=None, bias=None, **options):
    options |= {"mask": mask if attn_mask is None else attn_mask, "bias": bias if attn_bias is None else attn_bias}
    return jax_kernels.flash_attention(query, key, value, is_causal=bool(is_causal), **options)


def flex(query, key, value, block_mask=None, enable_gqa=False, return_lse=False, **options):
    out, lse = jax_kernels.flash_attention(
        *(x.swapaxes(1, 2) for x in (query, key, value)), mask=block_mask, return_lse=True, **options
    )
    return (out.swapaxes(1, 2), lse) if return_lse else out.swapaxes(1, 2)


def dot_product(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    is_bias = attn_mask is not None and attn_mask.dtype != bool
    return jax_kernels.flash_attention(
        *(x.swapaxes(1, 2) for x in (query, key, value)), is_causal=is_causal, scale=scale,
        **{"bias" if is_bias else "mask": attn_mask},
    ).swapaxes(1, 2)  # fmt: skip


def rounded(x, **options):
    found = jax_kernels.quantize(x, **options)
    return found.values, found.scale


def grouped(op, **options):
    """A grouped op, with a QuantizedArray for each array that has a scale."""
    for name in ("x", "w", "w_gate", "w_up"):
        scale, axis = options.pop(f"{name}_scale", None), -1 if name == "x" else -2
        if scale is not None:
            options[name] = jax_kernels.QuantizedArray(values=options[name], scale=scale, scaling="row", axis=axis)
    return op(**options)


REFERENCES = {
    "grouped_gated_matmul": functools.partial(grouped, jax_kernels.grouped_gated_matmul),
    "grouped_matmul": functools.partial(grouped, jax_kernels.grouped_matmul),
    "flash_attn_func": flash_attn,
    "flash_attn_varlen_func": varlen,
    "flash_dmattn_func": dmattn,
    "flex_attention": flex,
    "scaled_dot_product_attention": dot_product,
    "quantize": rounded,
}
# A cached call has its own gradients. These ops look them up by their options; other ops use the same ways.
WITH_GRADIENTS = {("flash_attention", "softcap"), ("flash_attention", "window"), ("matmul", "activation")}


def tensors_of(found) -> list:
    """The results of a call, in order."""
    if isinstance(found, tuple | list):
        return [x for each in found for x in tensors_of(each)]
    if isinstance(found, bridge.QuantizedTensor):
        return [found.values, found.scale]
    return [] if found is None else [found]


def numbers(x) -> np.ndarray:
    """A tensor's or an array's values; unsigned scales as their bits."""
    if isinstance(x, torch.Tensor):
        return x.detach().float().numpy()
    x = x.view(jnp.uint8) if x.dtype == jnp.float8_e8m0fnu else x
    return np.asarray(x.astype(jnp.float32))


def given_to(op, name, values):
    """The arguments of a call. Most options run without gradients."""
    fixed = lambda x: x.detach() if isinstance(x, torch.Tensor) and (op, name) not in WITH_GRADIENTS else x
    return {name: fixed(x) for name, x in values.items()}


def reference(op, given) -> list[np.ndarray]:
    """The results by JAX, and gradients of the sine of the float results."""
    function = REFERENCES.get(op) or getattr(jax_kernels, op.split()[0])
    moved = {name: in_jax(x) for name, x in given.items() if isinstance(x, torch.Tensor) and x.requires_grad}
    fixed = {name: in_jax(x) for name, x in given.items() if name not in moved}
    if not moved:
        return [numbers(x) for x in jax.tree.leaves(jax.jit(lambda: function(**fixed))())]

    @jax.jit
    def run(moved):
        def total(moved):
            found = function(**moved, **fixed)
            leaves = jax.tree.leaves(found)
            return sum(jnp.sin(x.astype(jnp.float32)).sum() for x in leaves), leaves

        gradients, leaves = jax.grad(total, has_aux=True)(moved)
        return leaves, gradients

    leaves, gradients = run(moved)
    return [numbers(x) for x in (*leaves, *(gradients[name] for name in moved))]


def results(op, given) -> list[np.ndarray]:
    """The results by the bridge, and gradients of the sine of the float results."""
    found = tensors_of(function_of(op)(**given))
    moved = [x for x in given.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    if moved:
        found += torch.autograd.grad(sum(x.float().sin().sum() for x in found), moved)
    return [numbers(x) for x in found]


def close(got, want, op) -> bool:
    rounding = 2**-7 if op == "flash_attention_fp8" else 2e-4  # its results are in bfloat16
    return len(got) == len(want) and all(
        x.shape == y.shape and np.allclose(x, y, atol=2e-4, rtol=rounding) for x, y in zip(got, want, strict=True)
    )


# They pass all options on together, to a key or to another function: a few options show an error.
QUICK = {
    "flash_attention beside a Mask": ("bias", "is_causal", "segment_ids", "kv_lengths", "q_offset", "sinks"),
    "block_sparse_attention": ("block_mask", "block_size", "bias", "softcap", "q_offset"),
    "dynamic_mask_attention": ("mask", "bias", "window", "scale"),
    "flash_attn_varlen_func": ("softmax_scale", "causal", "cu_seqlens_k", "alibi_slopes"),
}


def parameters(names_of_op):
    """Each op with each of its names."""
    marks = lambda op, name: () if name in QUICK.get(op, (name,)) or name in COUNTED else pytest.mark.slow
    return [
        pytest.param(op, name, id=f"{op}-{name}", marks=marks(op, name)) for op in CASES for name in names_of_op(op)
    ]


@pytest.mark.parametrize(("op", "name"), parameters(lambda op: CASES[op][1]))
def test_option_value_is_part_of_the_key(op, name, direct):
    given, options = CASES[op]
    values, others = options[name], {}
    if len(values) == 2 and isinstance(values[1], dict):
        values, others = values
    calls = [given_to(op, name, given | others | {name: value}) for value in values]
    want = [reference(op, call) for call in calls]
    for i, one in enumerate(want):
        assert not any(close(one, other, op) for other in want[:i]) or name.startswith("max_seqlen"), i
    for turn in range(2):
        for value, call, right in zip(values, calls, want, strict=True):
            got = results(op, call)
            assert close(got, right, op), (turn, value)


@pytest.mark.parametrize(
    ("op", "name"), parameters(lambda op: [name for name in COUNTED if name in names_of(op) - set(CASES[op][1])])
)
def test_option_without_visible_effect_is_part_of_the_key(op, name, direct):
    given, _ = CASES[op]
    counts = []
    for value in COUNTED[name] * 2:
        function_of(op)(**given | {name: value})
        counts.append(call_cache.count())
    assert counts[0] > 0
    assert counts[0] < counts[1] == counts[3]


@pytest.mark.parametrize("op", ["matmul", "gated_matmul", "grouped_matmul", "grouped_gated_matmul", "mlp"])
def test_matmul_precision_setting(op, direct):
    given, _ = CASES[op]
    before, counts = torch.get_float32_matmul_precision(), []
    try:
        for precision in ("highest", "high") * 2:
            torch.set_float32_matmul_precision(precision)
            function_of(op)(**given)
            counts.append(call_cache.count())
    finally:
        torch.set_float32_matmul_precision(before)
    assert 0 < counts[0] < counts[1] == counts[3]


@pytest.mark.parametrize(
    "op", ["flash_attention", "block_sparse_attention", "dynamic_mask_attention", "dilated_attention"]
)
def test_deterministic_algorithms_setting(op, direct):
    given, counts = CASES[op][0], []
    try:
        for is_on in (False, True) * 2:
            torch.use_deterministic_algorithms(is_on)
            function_of(op)(**given)
            counts.append(call_cache.count())
    finally:
        torch.use_deterministic_algorithms(False)
    assert 0 < counts[0] < counts[1] == counts[3]
