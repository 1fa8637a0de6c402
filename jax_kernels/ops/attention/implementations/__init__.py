"""The implementations of flash_attention, and the requests that each of them supports."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_kernels.dispatch import Choice, Implementation, interpreting, without_blocks
from jax_kernels.inputs.attention import AttentionGradients, AttentionInputs, AttentionOptions
from jax_kernels.masks.block_lists import count_arrays_by
from jax_kernels.ops import unsupported
from jax_kernels.ops.attention import block_counts
from jax_kernels.ops.attention.implementations import cudnn, xla
from jax_kernels.ops.attention.implementations.request import AttentionRequest
from jax_kernels.ops.planned_op import Blocks, kernel
from jax_kernels.pallas import block_specs
from jax_kernels.pallas.attention.sm90.backward import launch as backward_sm90
from jax_kernels.pallas.attention.sm90.features import block_lists
from jax_kernels.pallas.attention.sm90.features.bias import with_bias_as_in_lse
from jax_kernels.pallas.attention.sm90.forward import launch as forward_sm90
from jax_kernels.pallas.attention.softmax import is_large
from jax_kernels.pallas.attention.triton import backward as backward_triton
from jax_kernels.pallas.attention.triton import bias_gradient as bias_gradient_triton
from jax_kernels.pallas.attention.triton import block_lists as lists_triton
from jax_kernels.pallas.attention.triton import common as common_triton
from jax_kernels.pallas.attention.triton import forward as forward_triton
from jax_kernels.pallas.attention.triton import large_lse_rows
from jax_kernels.pallas.block_specs.candidates import TiledCall, attention_candidates
from jax_kernels.pallas.triton import backend
from jax_kernels.reference import chunked_attention
from jax_kernels.reference.score_mod_gradients import array_gradients
from jax_kernels.score_mod.tile_reads import why_not
from jax_kernels.score_mod.trace import moving


def order(request: AttentionRequest) -> tuple[tuple[str, ...], str]:
    """(names of the implementations in the order in which they are tried, words for the source of this order)."""
    return block_specs.attention_order(request.device.compute_capability)


def _row(name: str, request: AttentionRequest):
    """(block spec row, words for its source) of the implementation `name` for a request."""
    has_lists, dense_bits = request.has_lists and request.bias_shape is None, request.dense_bits
    if name == "triton":  # all its masks are block lists
        has_lists = has_lists or request.has_mask
        dense_bits = 32 if request.bias_shape is not None or request.has_score_mod else 0
    elif request.skips_keys:
        has_lists, dense_bits = True, 0
    return block_specs.attention_row(
        request.device.compute_capability,
        name,
        head_dim=max(request.head_dim, request.v_head_dim),
        v_head_dim=request.v_head_dim,
        bits=request.bits,
        is_causal=request.is_causal,
        is_limited=request.window is not None or request.has_segment_ids,
        has_segments=request.has_segment_ids,
        dense_bits=dense_bits,
        has_lists=has_lists,
        kv_length=request.kv_length,
    )


def _config(name: str):
    """Returns the `config` of the implementation `name`: a function from an AttentionRequest to (Blocks, words).

    The words tell where the block spec row comes from, for the plan.
    """

    def config(request: AttentionRequest) -> tuple[Any, str]:
        row, source = _row(name, request)
        array_gradients = None
        wants_triton = request.bias_shape is not None or (request.has_score_mod and not request.has_lists)
        if name == "mosaic_gpu" and wants_triton:
            array_gradients = _row("triton", request)[0].backward
        backward = row.backward
        if name == "mosaic_gpu" and request.deterministic:
            widest = max(request.head_dim, request.v_head_dim)
            dquery = block_specs.dquery_blocks(head_dim=widest, bias_bits=request.dquery_bias_bits)
            backward = dataclasses.replace(backward, dquery=dquery)
        blocks = Blocks(
            forward=row.forward,
            backward=backward,
            core_count=request.device.core_count,
            array_gradients=array_gradients,
        )
        return blocks, source

    return config


def _candidates(name: str):
    """Returns the `candidates` of the implementation `name`: a function from an AttentionRequest to blocks to time."""

    def candidates(request: AttentionRequest) -> dict[str, tuple[Any, ...]]:
        blocks, _ = _config(name)(request)
        call = TiledCall(
            width=max(request.head_dim, request.v_head_dim),
            itemsize=request.bits // 8,
            is_causal=request.is_causal,
            shared_memory=request.device.shared_memory_per_block,
        )
        return {side: attention_candidates(getattr(blocks, side), call) for side in ("forward", "backward")}

    return candidates


def _supports_mosaic(request: AttentionRequest) -> str | None:
    """The reason, in words for users, why the Hopper kernels cannot serve the request; None if they can."""
    if reason := unsupported.no_gpu(request) or unsupported.not_hopper(request):
        return reason
    if request.bits != 16:
        return "its wgmma instructions take bfloat16 and float16 here, not float32"
    bias = request.bias_shape
    if bias is not None and bias[3] == 1:
        return f"it takes a bias with a value for each key, not of shape {bias}"
    if request.has_score_mod and (reason := _score_mod_by_mosaic(request)):
        return reason
    if request.dense_bits == 32 and max(request.head_dim, request.v_head_dim) > 128:
        return "above head_dim 128 it takes a bias for each query in 16 bits, not in float32"
    is_192_128 = 160 < request.head_dim <= 192 and request.v_head_dim <= 128
    if is_192_128 and request.has_segment_ids and bias is not None and bias[2] != 1:
        return "its shared memory has no room for segment_ids with a bias for each query at these head_dims"
    return unsupported.no_mosaic(request)


def _score_mod_by_mosaic(request: AttentionRequest) -> str | None:
    if request.bias_shape is not None:
        return "it takes a score_mod without a bias"
    return request.not_in_mosaic_tiles


def _supports_triton(request: AttentionRequest) -> str | None:
    """The reason, in words for users, why the Triton kernels cannot serve the request; None if they can."""
    if reason := unsupported.no_triton(request):
        return reason
    if request.has_score_mod and request.bias_shape is not None:
        return "it does not take a score_mod with a bias"
    if request.not_in_tiles:
        return request.not_in_tiles
    return unsupported.no_triton_gpu(request)


def _without_mask_objects(supports):
    def supports_arrays(request: AttentionRequest) -> str | None:
        if request.has_mask_object:
            return "it supports only Masks built from causal, sliding_window, segments, prefix and dense with &"
        return supports(request)

    return supports_arrays


def _mosaic_backward(inputs, options, *results, config, interpret, dquery=None, lse_lo=None, out=None, dlse=None):
    """The AttentionGradients by the Hopper kernels, plus other kernels for the arrays whose gradients they lack.

    results: (lse, delta, dout): the row terms [B, H, T] and the cotangent of out. dquery: None, or float32 like query,
    to which query's gradient / scale is added. lse_lo: [B, H, T], from the forward with a bias or a score_mod; else
    None. out, dlse: the forward's out and the cotangent of lse, from which the kernels compute delta; delta is then
    None. They are given only if `takes_results` is True. A dlse of None is zeros.
    """
    lse, delta, dout = results
    arguments, statics = (inputs, options, *results), {"config": config, "interpret": interpret}
    by_kernel = kernel(backward_sm90.attention_backward, "backward")
    gradients = by_kernel(*arguments, dquery=dquery, lse_lo=lse_lo, out=out, dlse=dlse, **statics)
    if inputs.bias is not None:
        as_in_lse = with_bias_as_in_lse(inputs)
        if backend.AVAILABLE:
            of_large_rows = kernel(large_lse_rows.large_rows, "array_gradients")
            gradients = of_large_rows(as_in_lse, options, gradients, *results, lse_lo, **statics)
        else:
            gradients = with_large_rows(as_in_lse, options, gradients, lse, delta, dout, lse_lo)
        if options.bias_gradient and gradients.bias is None:
            if backend.AVAILABLE:
                of_bias = kernel(bias_gradient_triton.bias_gradient, "array_gradients")
                dbias = of_bias(as_in_lse, options, *results, lse_lo=lse_lo, **statics)
            else:
                dbias = chunked_attention.backward(as_in_lse, options, lse, delta, dout, lse_lo).bias
            gradients = gradients._replace(bias=dbias.astype(inputs.bias.dtype))
    if inputs.score_mod is not None and options.score_mod_gradient and jax.tree.leaves(moving(inputs.score_mod.arrays)):
        # These are extra passes. Triton has two; XLA removes one if the arrays do not need it. Cases that Triton does
        # not support, such as masks, and all cases without Pallas-Triton, are summed over the live blocks.
        if backend.AVAILABLE and inputs.mask is None and why_not(inputs.score_mod) is None:
            by_triton = kernel(backward_triton.attention_backward, "array_gradients")
            of_arrays = by_triton(*arguments, lse_lo=lse_lo, **statics).score_mod
        else:
            of_arrays = array_gradients(inputs, options, lse, delta, dout, lse_lo)
        gradients = gradients._replace(score_mod=of_arrays)
    return gradients


def with_large_rows(
    inputs: AttentionInputs, options: AttentionOptions, gradients: AttentionGradients, lse, delta, dout, lse_lo
) -> AttentionGradients:
    """The result of large_lse_rows.large_rows, by XLA: the gradients, with the contributions of large rows added.

    A call without large rows computes none of it.
    """
    large = is_large(lse)
    options = dataclasses.replace(options, float32_gradients=True, bias_gradient=gradients.bias is not None)

    def added(gradients: AttentionGradients) -> AttentionGradients:
        more = chunked_attention.backward(inputs, options, jnp.where(large, lse, jnp.inf), delta, dout, lse_lo)
        return jax.tree.map(lambda x, y: (x.astype(jnp.float32) + y).astype(x.dtype), gradients, more)

    return jax.lax.cond(large.any(), added, lambda gradients: gradients, gradients)


def prepared_lists(choice: Choice, inputs: AttentionInputs, options: AttentionOptions) -> tuple[Any, ...]:
    """The block lists that a PreparedMask carries, for the kernels of this choice.

    The first entry is for the forward, the second for the backward's gradients of key and value ("mosaic_gpu" with
    deterministic=False: also of query). "mosaic_gpu" with deterministic=True, and "triton", have a third for the
    gradient of query. Empty without a mask, and for other implementations, which read no lists.
    """
    if inputs.mask is None:
        return ()
    with jax.enable_x64(False):
        if choice.implementation == "triton":
            sides = common_triton.listed_blocks(inputs, choice.config.forward, choice.config.backward)
            return tuple(lists_triton.prepared_lists(inputs, options, blocks, by=by) for blocks, by in sides)
        if choice.implementation != "mosaic_gpu":
            return ()
        head_dims = inputs.query.shape[-1], inputs.value.shape[-1]
        of_backward = backward_sm90.listed_blocks(choice.config.backward, *head_dims, options)
        every = [forward_sm90.listed_blocks(choice.config.forward), *of_backward]
        interpret = interpreting()
        return tuple(block_lists.prepared_lists(inputs, options, **blocks, interpret=interpret) for blocks in every)


def takes_results(implementation: str, inputs: AttentionInputs, options: AttentionOptions, out, config: Blocks) -> bool:
    """Whether the implementation's backward computes delta itself, from the forward's out and the cotangent of lse.

    out: the forward's result, [B, T, H, Dv].
    """
    if implementation == "triton":
        return config.backward.delta_in_dq
    return implementation == "mosaic_gpu" and backward_sm90.makes_rows(inputs, options, out, config=config.backward)


# The implementations that can run several calls in one launch. The calls have only query, key and value, and may differ
# in lengths and in the heads that they take. Arguments: lists of inputs and options; result: a list of results.
FORWARD_TOGETHER = {"mosaic_gpu": kernel(forward_sm90.attention_forward_together, "forward")}

count_arrays_by(block_counts.counts)

IMPLEMENTATIONS = {
    "mosaic_gpu": Implementation(
        "mosaic_gpu",
        _supports_mosaic,
        _config("mosaic_gpu"),
        kernel(forward_sm90.attention_forward, "forward"),
        _mosaic_backward,
        _candidates("mosaic_gpu"),
    ),
    "triton": Implementation(
        "triton",
        _supports_triton,
        _config("triton"),
        kernel(forward_triton.attention_forward, "forward"),
        kernel(backward_triton.attention_backward, "backward"),
        _candidates("triton"),
    ),
    "cudnn": Implementation("cudnn", _without_mask_objects(cudnn.supports), without_blocks, cudnn.forward, None),
    "xla": Implementation(
        "xla",
        lambda request: None,
        without_blocks,
        xla.forward,
        xla.backward,
    ),
}
