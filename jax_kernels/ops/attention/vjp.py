"""A planned call of flash_attention: its implementation's forward and backward, its gradient and its vmap."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_kernels.inputs.attention import AttentionGradients, AttentionInputs, AttentionResult
from jax_kernels.masks import Mask
from jax_kernels.ops.attention import implementations
from jax_kernels.ops.attention.chunks import backward_in_chunks, forward_in_chunks, tried_again
from jax_kernels.ops.attention.partitioning import shared_attention
from jax_kernels.ops.planned_op import (
    MOST_CALLS,
    PlannedCall,
    jitted_in_eager_shard_map,
    join_batch,
    merged_vmap,
    no_calls,
    split_batch,
)
from jax_kernels.reference.attention import row_terms
from jax_kernels.tracing.derivatives import in_both_modes, in_reverse_mode, no_forward_mode, with_plain_derivative
from jax_kernels.tracing.manual_axes import as_varying, varying_axes
from jax_kernels.tracing.promotion import under_defaults

__all__ = [
    "RESIDUALS",
    "AttentionCall",
    "attention_backward",
    "attention_forward",
    "attention_forward_together",
    "attention_gradients",
    "run",
    "vary_alike",
    "with_options",
    "with_results",
]

REVERSE_MODE = no_forward_mode("flash_attention")
RESIDUALS = "flash_attention_out", "flash_attention_lse"  # names for policies of jax.checkpoint


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class AttentionCall(PlannedCall):
    """The static half of a planned attention call: a PlannedCall whose options are AttentionOptions.

    out_dtype: the name of the dtype of out, such as "bfloat16".
    """

    out_dtype: str


def with_options(call: AttentionCall, **options: Any) -> AttentionCall:
    """The call with some fields of its AttentionOptions replaced."""
    return dataclasses.replace(call, options=dataclasses.replace(call.options, **options))


def vary_alike(inputs):
    """The inputs, each marked inside jax.shard_map as varying over all mesh axes over which any of them varies.

    The values stay the same. The gradient of an array that was equal on all devices is then summed over the devices.
    """
    return as_varying(inputs, varying_axes(inputs))


def run(call: AttentionCall, inputs: AttentionInputs):
    """(out [B, T, H, Dv], lse float32 [B, H, T]) of a prepared call, differentiable.

    lse is None if the call's options have has_lse=False.
    """
    if call.implementation == "xla":
        return _plain(call, inputs)
    inputs = in_reverse_mode(inputs, REVERSE_MODE)
    if implementations.IMPLEMENTATIONS[call.implementation].backward is None:
        return _asked_for(call, attention_forward(call, inputs))
    return _by_kernels(call, inputs)


def _asked_for(call: AttentionCall, result: AttentionResult) -> tuple[Any, Any]:
    return result.out, result.lse if call.options.has_lse else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(call, inputs):
    return _asked_for(call, attention_forward(call, inputs))


@under_defaults
def _attention_fwd(call, primals):
    """(AttentionResult, residuals): the forward under differentiation. primals: AttentionInputs of CustomVJPPrimals.

    The call's options are set such that the backward computes only the gradients of bias and score_mod that are wanted.
    """
    inputs = jax.custom_derivatives.custom_vjp_primal_tree_values(primals)
    perturbed = lambda tree: any(x.perturbed for x in jax.tree.leaves(tree, is_leaf=_is_primal))
    wanted = {f"{name}_gradient": perturbed(getattr(primals, name)) for name in ("bias", "score_mod")}
    call = with_options(call, has_lse=True, **wanted)
    named: Callable[[Any, str], Any] = lambda x, name: None if x is None else checkpoint_name(x, name)
    found = attention_forward(call, inputs)
    result = AttentionResult(
        out=named(found.out, RESIDUALS[0]),
        lse=named(found.lse, RESIDUALS[1]),
        lse_lo=named(found.lse_lo, RESIDUALS[1]),
    )
    return result, (call, inputs, result)


def _is_primal(x):
    return isinstance(x, jax.custom_derivatives.CustomVJPPrimal)


@under_defaults
def _attention_bwd(_, residuals, cotangents):
    call, inputs, result = residuals
    is_zero = lambda x: isinstance(x, jax.custom_derivatives.SymbolicZero)
    dout, dlse, *_ = cotangents
    dout = jnp.zeros_like(result.out) if is_zero(dout) else dout
    return (_input_gradients(call, inputs, result, dout, None if is_zero(dlse) else dlse),)


def _asked_for_fwd(call, primals):
    result, kept = _attention_fwd(call, primals)
    return _asked_for(call, result), kept


_attention.defvjp(_asked_for_fwd, _attention_bwd, symbolic_zeros=True)
_by_kernels = jitted_in_eager_shard_map(_attention)


@jitted_in_eager_shard_map
def _plain(call, inputs):
    return _asked_for(call, attention_forward(call, inputs))


def _input_gradients(call, inputs, result, dout, dlse) -> AttentionInputs:
    """The gradients of attention_backward as AttentionInputs; None for inputs without a gradient."""
    gradients = attention_backward(call, inputs, result, dout, dlse)
    fields: dict[str, Any] = dict.fromkeys(AttentionInputs._fields) | gradients._asdict()
    return AttentionInputs(**fields)


def with_results(call: AttentionCall, inputs: AttentionInputs, out: jax.Array, lse: jax.Array):
    """Returns (out, lse), which an earlier `run` of the same arguments gave, without computing them again.

    Their gradients with respect to `inputs` are the gradients of `run`. The call has neither a bias nor a score_mod.
    """
    if call.implementation == "xla":
        return _plain_with_results(call, inputs, out, lse)
    return _with_results(call, in_reverse_mode(inputs, REVERSE_MODE), out, lse)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_results(call, inputs, out, lse):
    return out, lse


@under_defaults
def _with_results_fwd(call, inputs, out, lse):
    return (out, lse), (inputs, AttentionResult(out=out, lse=lse, lse_lo=None))


@under_defaults
def _with_results_bwd(call, residuals, cotangents):
    inputs, result = residuals
    return _input_gradients(call, inputs, result, *cotangents), None, None


_with_results.defvjp(_with_results_fwd, _with_results_bwd)
_plain_with_results = in_both_modes(
    lambda call, inputs, out, lse: (out, lse),
    _with_results_fwd,
    _with_results_bwd,
    plain=lambda call, inputs, out, lse: attention_forward(call, inputs)[:2],
)


def attention_forward(call: AttentionCall, inputs: AttentionInputs) -> AttentionResult:
    """The AttentionResult of the call's implementation, as its kernels return it. A vmap is merged into the batch.

    It is differentiable only with "xla" and "cudnn". It runs in chunks if the memory requires it.
    """
    run = _plain_forward if call.implementation == "xla" else _split_forward
    return tried_again("flash_attention", call, inputs, lambda: run(call, inputs))


def _split_forward(call: AttentionCall, inputs: AttentionInputs) -> AttentionResult:
    return forward_in_chunks(lambda call, inputs: _batched(_forward, call)(inputs), call, inputs)


def attention_forward_together(
    calls: Sequence[AttentionCall], inputs: Sequence[AttentionInputs]
) -> list[AttentionResult]:
    """The AttentionResult of each of several calls, in order. Calls share one kernel launch if they can.

    They can with "mosaic_gpu" if they have only query, key and value, equal blocks, and equal options but for heads.
    """
    groups: dict[Any, list[int]] = {}  # by the properties that a launch has only once
    for i, (call, of_call) in enumerate(zip(calls, inputs, strict=True)):
        alike: Any = i
        if call.implementation in implementations.FORWARD_TOGETHER and all(x is None for x in of_call[3:]):
            options = dataclasses.replace(call.options, query_heads=None, kv_heads=None)
            alike = call.implementation, call.config.forward, options, call.out_dtype, call.interpret
        groups.setdefault(alike, []).append(i)
    results: dict[int, AttentionResult] = {}
    for members in groups.values():
        of_group = tuple(calls[i] for i in members)
        if len(members) == 1:
            results[members[0]] = attention_forward(of_group[0], inputs[members[0]])
        else:
            results |= zip(members, _batched_together(of_group)([inputs[i] for i in members]), strict=True)
    return [results[i] for i in range(len(calls))]


@functools.lru_cache(maxsize=MOST_CALLS)
def _batched_together(calls: tuple[AttentionCall, ...]):
    """A function from a list of AttentionInputs, one for each call, to their AttentionResults, by one launch.

    A vmap is merged into the batch of each call.
    """

    @merged_vmap
    def forward(inputs):
        first = calls[0]
        statics = {"out_dtype": jnp.dtype(first.out_dtype), "config": first.config, "interpret": first.interpret}
        found = implementations.FORWARD_TOGETHER[first.implementation](
            inputs, [call.options for call in calls], **statics
        )
        return [AttentionResult(*of_call) for of_call in found]

    return forward


def attention_backward(
    call: AttentionCall, inputs: AttentionInputs, result: AttentionResult, dout, dlse
) -> AttentionGradients:
    """The gradients of all inputs. result: of attention_forward. dout, dlse: the cotangents of out and lse.

    dout: [B, T, H, Dv]. dlse: [B, H, T], or None for zeros. It runs in chunks if the memory requires it.
    """
    run = lambda: backward_in_chunks(_whole_backward, call, inputs, result, dout, dlse)
    return tried_again("flash_attention's backward", call, inputs, run)


def _whole_backward(
    call: AttentionCall, inputs: AttentionInputs, result: AttentionResult, dout, dlse
) -> AttentionGradients:
    if result.lse is None:  # "cudnn" is differentiated by JAX
        return _batched(_backward, call)(inputs, None, None, dout)
    lse_lo = result.lse_lo
    if inputs.sinks is None and implementations.takes_results(
        call.implementation, inputs, call.options, result.out, call.config
    ):
        return _batched(_backward, call)(inputs, result.lse, None, dout, None, None, result.out, dlse)
    lse, delta = row_terms(result.out, result.lse, dout, dlse)
    gradients = attention_gradients(call, inputs, lse, delta, dout, lse_lo=lse_lo)
    if inputs.sinks is None:
        return gradients
    share = jnp.exp(inputs.sinks[..., None] - lse - (0 if lse_lo is None else lse_lo))  # the sink's probability
    return gradients._replace(sinks=-jnp.sum(share * delta, axis=(0, 2))[None])


def attention_gradients(call: AttentionCall, inputs: AttentionInputs, lse, delta, dout, dquery=None, lse_lo=None):
    """The AttentionGradients of all inputs except the sinks.

    lse, delta: the row terms, float32 [B, H, T]. dout: [B, T, H, Dv], the cotangent of out. dquery: None, or a float32
    array of query's shape, only for "mosaic_gpu": the returned gradient of query is then dquery + gradient / scale, in
    float32. lse_lo: [B, H, T], from the forward of a call with a bias or a score_mod; else None.
    """
    run = functools.partial(_plain_backward, call) if call.implementation == "xla" else _batched(_backward, call)
    return run(inputs, lse, delta, dout, dquery, lse_lo)


def _forward(call, inputs):
    implementation = implementations.IMPLEMENTATIONS[call.implementation]
    statics = {"out_dtype": jnp.dtype(call.out_dtype), "config": call.config, "interpret": call.interpret}
    return AttentionResult(*implementation.forward(inputs, call.options, **statics))


def _backward(call, inputs, lse, delta, dout, dquery=None, lse_lo=None, out=None, dlse=None):
    """The AttentionGradients of all inputs except the sinks, by the call's implementation.

    lse, delta: the row terms, float32 [B, H, T]. dout: the cotangent of out. dquery: None, or float32 like query, only
    for "mosaic_gpu": the returned gradient of query is then dquery + gradient / scale. lse_lo: [B, H, T] with a bias or
    a score_mod; else None. out, dlse: None, or the forward's out and the cotangent of lse (None is zeros). With out,
    delta is None: the implementation computes it, or, if it cannot because a vmap changed the shapes, it is computed
    here. Both lse and delta are None for "cudnn", which JAX differentiates.
    """
    if out is not None and not implementations.takes_results(
        call.implementation, inputs, call.options, out, call.config
    ):
        lse, delta = row_terms(out, lse, dout, dlse)
        out = dlse = None
    backward = implementations.IMPLEMENTATIONS[call.implementation].backward
    if backward is not None:
        given = {"dquery": dquery, "lse_lo": lse_lo, "out": out, "dlse": dlse}
        given = {name: x for name, x in given.items() if x is not None}
        statics = {"config": call.config, "interpret": call.interpret}
        return backward(inputs, call.options, lse, delta, dout, **given, **statics)
    # JAX differentiates the forward, which runs once more.
    wanted = {name: getattr(inputs, name) for name in ("query", "key", "value", "bias")}
    if not call.options.bias_gradient:
        del wanted["bias"]
    forward = lambda wanted: _forward(call, inputs._replace(**wanted)).out
    return AttentionGradients(**jax.vjp(forward, wanted)[1](dout)[0])


# The arrays whose batch may be 1 for any batch of query.
_SHARED = ("mask", "bias", "sinks")


@functools.lru_cache(maxsize=MOST_CALLS)
def _batched(function, call):
    """A function (inputs, *arrays) -> function(call, inputs, *arrays), with a vmap that is merged into the batch.

    function: _forward or _backward. The first axis of each array is the batch. Kernels are sharded over devices under
    jit. Calls whose Masks or score_mods differ run one after the other.
    """
    plain: Any = functools.partial(function, call)
    if call.implementation in ("mosaic_gpu", "triton"):
        plain = shared_attention(plain, call.options)
    if implementations.IMPLEMENTATIONS[call.implementation].backward is None:
        return plain  # JAX differentiates it, which a custom_vmap prevents
    wrapped = jax.custom_batching.custom_vmap(plain)

    @wrapped.def_vmap
    def _(size, batched, inputs, *results):
        if size == 0:
            return no_calls(wrapped, batched, (inputs, *results))
        length = inputs.query.shape[1 if batched[0].query else 0]
        if _has_own_lists(inputs, batched[0]) or inputs.score_mod is not None:
            return _one_by_one(wrapped, batched, (inputs, *results))

        def join(x, has_axis):
            return None if x is None else join_batch(size, x, has_axis, length)

        bias, with_gradient = inputs.bias, function is _backward and call.options.bias_gradient
        # Each mapped call has its own gradient of a bias that its batch entries may share.
        sum_bias = with_gradient and bias is not None and length != 1 and bias.shape[int(batched[0].bias)] == 1
        if bias is not None and sum_bias:
            inputs = inputs._replace(bias=bias.astype(jnp.float32))

        def join_input(name, x, has_axis):
            if isinstance(x, Mask) or name == "lists":
                return x
            is_shared = x is not None and not has_axis and x.shape[0] == 1 and name in _SHARED
            return x if is_shared and not (name == "bias" and with_gradient) else join(x, has_axis)

        joined = AttentionInputs(*map(join_input, AttentionInputs._fields, inputs, batched[0]))
        outs = jax.tree.map(functools.partial(split_batch, size), wrapped(joined, *map(join, results, batched[1:])))
        if sum_bias:
            outs = outs._replace(bias=outs.bias.sum(axis=1, keepdims=True).astype(bias.dtype))
        return outs, jax.tree.map(lambda _: True, outs)

    return wrapped


def _has_own_lists(inputs: AttentionInputs, batched: Any) -> bool:
    """Whether batch entries, or the calls under a vmap, have block lists of their own, so that a vmap must loop.

    batched: AttentionInputs of bools: whether each array has the mapped axis.
    """
    mask = inputs.mask
    if not isinstance(mask, Mask) and inputs.lists is None:
        return False
    batch = mask.batch if isinstance(mask, Mask) else cast(jax.Array, mask).shape[int(batched.mask)]
    return batch != 1 or any(jax.tree.leaves((batched.mask, batched.lists)))


def _one_by_one(function, batched, arguments):
    """The value of a vmap rule, computed by a loop over the calls: (results with the mapped axis first, True for each).

    batched: for each leaf of the arguments, whether it has the mapped axis.
    """
    leaves, structure = jax.tree.leaves(arguments), jax.tree.structure(arguments)
    has_axis = jax.tree.leaves(batched)

    def one(mapped):
        mapped = iter(mapped)
        return function(
            *jax.tree.unflatten(
                structure, [next(mapped) if has else x for x, has in zip(leaves, has_axis, strict=True)]
            )
        )

    outs = lax.map(one, [x for x, has in zip(leaves, has_axis, strict=True) if has])
    return outs, jax.tree.map(lambda _: True, outs)


_plain_forward = in_both_modes(
    _split_forward,
    _attention_fwd,
    _attention_bwd,
    plain=_forward,
    symbolic_zeros=True,
)
_plain_backward = with_plain_derivative(lambda call, *arrays: _batched(_backward, call)(*arrays), _backward)
