"""The implementations of flash_attention, and the requests that each of them supports."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jax_kernels.dispatch import Choice, Implementation, Request, interpreting, target_device, without_blocks
from jax_kernels.inputs.attention import AttentionGradients, AttentionInputs, AttentionOptions
from jax_kernels.masks.block_lists import count_arrays_by
from jax_kernels.ops import checks, unsupported
from jax_kernels.ops.attention import block_counts
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
from jax_kernels.reference import attention_chunks, chunked_attention
from jax_kernels.reference.attention import without_ignored
from jax_kernels.reference.score_mod_gradients import array_gradients
from jax_kernels.score_mod.tile_reads import why_not
from jax_kernels.score_mod.trace import moving


@dataclasses.dataclass(frozen=True)
class AttentionRequest(Request):
    """A flash_attention call without its arrays.

    window: (left, right), each -1 for no limit; None if it adds no limit to is_causal. With is_causal, right is 0.
    q_offset: the position of query 0; None if it is an array. mask_shape, bias_shape: with four axes; None without an
    array. has_mask_object: the mask is a masks.Mask that the op's other arguments cannot express. has_lists: block
    lists give the keys of each query. They come from a prepared mask, or are made from a Mask.
    """

    SIZES: ClassVar[tuple[str, ...]] = checks.SIZES
    ROUNDED: ClassVar[tuple[str, ...]] = (*checks.SIZES, "window", "mask_shape", "bias_shape", "q_offset")

    batch: int
    q_length: int
    kv_length: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str
    is_causal: bool
    window: tuple[int, int] | None
    softcap: float | None
    mask_shape: tuple[int, ...] | None
    has_mask_object: bool
    has_lists: bool
    bias_shape: tuple[int, ...] | None
    bias_dtype: str | None
    has_sinks: bool
    has_segment_ids: bool
    has_kv_lengths: bool
    has_score_mod: bool
    # The reason why a Triton kernel, and a Mosaic kernel, cannot inline the score_mod.
    not_in_tiles: str | None
    not_in_mosaic_tiles: str | None
    q_offset: int | None
    return_lse: bool
    deterministic: bool
    precision: str | None

    @property
    def bits(self) -> int:
        return 32 if self.dtype == "float32" else 16

    def options(self, scale: float) -> AttentionOptions:
        """The AttentionOptions of the call. scale: the factor of the scores, above 0."""
        return AttentionOptions(
            scale=scale,
            is_causal=self.is_causal,
            window=self.window,
            softcap=self.softcap,
            q_offset=self.q_offset,
            precision=self.precision,
            deterministic=self.deterministic,
        )

    @property
    def has_mask(self) -> bool:
        return self.mask_shape is not None

    @property
    def bias_tile_bits(self) -> int:
        """The bits of each value of a bias [.., T, S] that has a row for each query; 0 for all other calls."""
        if self.bias_shape is None or self.bias_shape[2] == 1:
            return 0
        return 32 if self.bias_dtype == "float32" else 16

    @property
    def skips_keys(self) -> bool:
        """Whether the Hopper kernels skip dead blocks of keys of a mask array that is the same for all queries."""
        has_bias = self.bias_shape is not None
        return self.mask_shape is not None and block_lists.skips_keys(self.mask_shape, self.q_length, has_bias)

    @property
    def dense_bits(self) -> int:
        """The bits of a mask or a bias for each pair of a query and a key: a number that selects block specs.

        32: a float32 bias with a row for each query. 1: no bias, and a mask array with a row for each query. 0: no
        bias, and no mask array, or one that block lists replace. 16: all other calls, i.e. another bias, or a mask
        array with one row for all queries.
        """
        if self.bias_tile_bits == 32:
            return 32
        mask_shape = None if self.has_lists else self.mask_shape
        if self.bias_shape is None and mask_shape is not None and mask_shape[2] > 1:
            return 1
        return 16 if mask_shape is not None or self.bias_shape is not None else 0


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
            dquery = block_specs.dquery_blocks(head_dim=widest, bias_bits=request.bias_tile_bits)
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
    return unsupported.no_gpu(request)


def _supports_cudnn(request: AttentionRequest) -> str | None:
    """The reason, in words for users, why cuDNN cannot serve the request; None if it can."""
    capability = request.device.compute_capability
    if capability is None:
        return f"it needs an NVIDIA GPU, and this runs on {request.device.name}"
    if reason := unsupported.below(request, (8, 0)):
        return reason
    if request.bits != 16:
        return "it takes bfloat16 and float16, not float32"
    if request.return_lse:
        return "its backward takes no gradient of the log-sum-exp"
    if request.has_segment_ids:
        return "it does not take segment_ids"
    if request.has_score_mod:
        return "it does not take a score_mod"
    if request.softcap is not None:
        return "it does not take a softcap"
    if request.has_sinks:
        return "it does not take sinks"
    if request.q_offset != 0:
        return "its causal mask starts at position 0: q_offset must be 0"
    if request.deterministic:
        return "its backward is not deterministic without XLA's own flag"
    limit = 256 if capability >= (9, 0) else 128
    if max(request.head_dim, request.v_head_dim) > limit:
        return f"its head_dim is at most {limit} here"
    if request.head_dim != request.v_head_dim:
        return "it needs one head_dim for query, key and value"
    if request.head_dim % 8:
        return "it needs a head_dim that is a multiple of 8"
    if request.q_length % 2 or request.kv_length % 2:
        return "its backward needs even lengths"
    return _window_by_cudnn(request) or _bias_by_cudnn(request)


# Wider backwards are for plain and causal attention.
_SPECIAL_BY_CUDNN = 128


def _window_by_cudnn(request: AttentionRequest) -> str | None:
    """The reason, in words for users, why cuDNN cannot serve the request's window; None if it can, or without one."""
    if request.window is None:
        return None
    if not request.is_causal:
        return "its window has only a left side, under a causal mask"
    if request.head_dim > _SPECIAL_BY_CUDNN:
        return f"with a window its head_dim is at most {_SPECIAL_BY_CUDNN}"
    if request.has_kv_lengths or request.has_mask or request.bias_shape is not None:
        return "it does not take a window with kv_lengths, a dense mask or a bias"
    if request.q_length > request.kv_length:
        return "with a window it needs a key for every query: kv_length may not be below q_length"
    return None


def _bias_by_cudnn(request: AttentionRequest) -> str | None:
    """The reason, in words for users, why cuDNN cannot serve the request's bias; None if it can, or without one."""
    if request.bias_shape is None:
        return None
    if request.has_mask:
        return "it does not take a bias with a dense mask"
    if request.head_dim > _SPECIAL_BY_CUDNN:
        return f"with a bias its head_dim is at most {_SPECIAL_BY_CUDNN}"
    if request.bias_dtype != request.dtype:
        return f"it takes a bias in query's dtype {request.dtype}, not {request.bias_dtype}"
    want = (1, request.heads, request.q_length, request.kv_length)
    if request.bias_shape != want:
        return f"it has a gradient only for a bias of shape [1, H, T, S] = {want}, not {request.bias_shape}"
    return None


def _without_mask_objects(supports):
    def supports_arrays(request: AttentionRequest) -> str | None:
        if request.has_mask_object:
            return "it supports only Masks built from causal, sliding_window, segments, prefix and dense with &"
        return supports(request)

    return supports_arrays


def _cudnn(inputs: AttentionInputs, options: AttentionOptions, *, out_dtype, config, interpret):
    """(out [B, T, H, Dv], None instead of lse) by cuDNN; JAX differentiates it. Queries without a key get out = 0."""
    del config, interpret
    query, key, value, mask, bias, kv_lengths = (
        getattr(inputs, name) for name in ("query", "key", "value", "mask", "bias", "kv_lengths")
    )
    dead = None  # queries without a key, for which cuDNN would average over all values
    if kv_lengths is not None:
        key, value, *_ = without_ignored(inputs)[1:]
        dead = (kv_lengths <= 0)[:, None, None, None]
        kv_lengths = jnp.clip(kv_lengths, 1, key.shape[1])
    if bias is not None:  # a row of only -inf would give NaN
        finite = bias != -jnp.inf
        bias = jnp.where(finite, bias, 0)
        mask = finite if mask is None else mask & finite
    if mask is not None:
        keep = mask
        if kv_lengths is not None:
            keep = keep & (jnp.arange(key.shape[1]) < kv_lengths[:, None, None, None])
        if options.is_causal:
            keep = keep & (jnp.arange(query.shape[1])[:, None] >= jnp.arange(key.shape[1]))
        empty = ~keep.any(axis=-1, keepdims=True).swapaxes(1, 2)
        dead = empty if dead is None else dead | empty
        mask = jnp.broadcast_to(mask, (*mask.shape[:2], query.shape[1], key.shape[1]))
    out = jax.nn.dot_product_attention(
        query,
        key,
        value,
        bias=bias,
        mask=mask,
        scale=options.scale,
        is_causal=options.is_causal,
        query_seq_lengths=None if kv_lengths is None else jnp.full_like(kv_lengths, query.shape[1]),
        key_value_seq_lengths=kv_lengths,
        local_window_size=options.window,
        implementation="cudnn",
    )
    out = out if dead is None else jnp.where(dead, 0, out)
    return out.astype(out_dtype), None


def chunk_bytes(*arrays: Any) -> int:
    """The limit of the bytes of a chunk of the "xla" implementation on the device for which a call is planned."""
    is_cpu = target_device(*arrays).compute_capability is None
    return attention_chunks.CPU_CHUNK_BYTES if is_cpu else attention_chunks.CHUNK_BYTES


# As one program, not as a program for each operation.
_COMPILED_FORWARD = jax.jit(
    chunked_attention.forward, static_argnums=1, static_argnames=("out_dtype", "chunk_bytes"), inline=True
)
_COMPILED_BACKWARD = jax.jit(chunked_attention.backward, static_argnums=1, static_argnames="chunk_bytes", inline=True)


def _has_function(x: Any) -> bool:
    """Whether a mask or a score_mod, or a part of it, holds a function, which may be another one in each call."""
    if isinstance(x, tuple | list):
        return any(map(_has_function, x))
    if dataclasses.is_dataclass(x):
        return any(_has_function(getattr(x, field.name)) for field in dataclasses.fields(x))
    return callable(x)


def _xla_forward(inputs, options, *, out_dtype, config, interpret):
    run = chunked_attention.forward if _has_function((inputs.mask, inputs.score_mod)) else _COMPILED_FORWARD
    return run(inputs, options, out_dtype=out_dtype, chunk_bytes=chunk_bytes(inputs.query))


def _xla_backward(inputs, options, lse, delta, dout, *, config, interpret, lse_lo=None):
    run = chunked_attention.backward if _has_function((inputs.mask, inputs.score_mod)) else _COMPILED_BACKWARD
    return run(inputs, options, lse, delta, dout, lse_lo, chunk_bytes=chunk_bytes(inputs.query))


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
    "cudnn": Implementation("cudnn", _without_mask_objects(_supports_cudnn), without_blocks, _cudnn, None),
    "xla": Implementation(
        "xla",
        lambda request: None,
        without_blocks,
        _xla_forward,
        _xla_backward,
    ),
}
