"""grouped_matmul and grouped_gated_matmul: matmuls of a mixture of experts. Each group of rows has its own weights."""

from collections.abc import Callable

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jax_kernels.inputs.grouped_matmul import GroupedInputs, GroupedOptions
from jax_kernels.ops.grouped import fp8, gradients
from jax_kernels.ops.grouped.checks import check, check_gated
from jax_kernels.ops.grouped.implementations import GATED, OP, GroupedRequest
from jax_kernels.ops.planned_op import PlannedOp
from jax_kernels.ops.sharding.explicit_axes import as_grouped, with_explicit_axes
from jax_kernels.plain_numbers import with_plain_numbers
from jax_kernels.quantization import QuantizedArray
from jax_kernels.tracing.manual_axes import as_varying, varying_axes
from jax_kernels.tracing.promotion import under_defaults

__all__ = ["grouped_gated_matmul", "grouped_matmul"]


@with_plain_numbers("transpose_w")
@with_explicit_axes(as_grouped)
@under_defaults
@jax.named_scope("grouped_matmul")
def grouped_matmul(
    x: Float[Array, "M K"] | Float[Array, "T K"] | QuantizedArray,
    w: Float[Array, "G K N"] | Float[Array, "G N K"] | QuantizedArray,
    group_sizes: Int[Array, " G"],
    *,
    bias: Float[Array, "G N"] | None = None,
    activation: str | Callable[[jax.Array], jax.Array] | None = None,
    gather_indices: Int[Array, " M"] | None = None,
    transpose_w: bool = False,
    out_dtype: DTypeLike | None = None,
    precision: str | None = None,
    implementation: str | None = None,
) -> Float[Array, "M N"]:
    """The matmul of rows that are sorted by group, each with its group's weights, with a bias and an activation.

    The first group_sizes[0] rows of x belong to group 0, the next group_sizes[1] rows to group 1, and so on. This is
    jax.lax.ragged_dot with an epilogue. Equivalent to the following JAX code, in float32 after the matmul::

        group = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(len(x)), side="right")
        w = w.mT if transpose_w else w
        out = jnp.einsum("mk,mkn->mn", x, w[group]) + bias[group]
        out = jnp.where(group[:, None] < len(w), activation(out), 0).astype(out_dtype)

    A group may have any number of rows, also none. Rows past the last group give 0, also with a bias, and have no
    influence on gradients. group_sizes stays on the device: the host does not wait for its values, and a program is
    compiled for all sizes.

    With precision="fp8" x and w are rounded to e4m3, as quantize(x, scaling="row") and quantize(w, scaling="row",
    axis=-2) do: with a float32 scale for each row of x, and for each column of each group's weights. Gradients treat
    rounding as the identity. The gradient of x is an 8-bit matmul of the cotangent in e5m2, with a scale for each row,
    and of w, with a scale for each of its rows. The gradient of w is a 16-bit matmul of values that are not rounded to
    8 bits, in bfloat16 for float32 x. Before it is rounded to e5m2, the cotangent is rounded to out_dtype.

    The gradient of w sums each group's rows in float32. With an activation, the forward of a differentiated call also
    saves x @ w + bias, in out_dtype, and the backward takes the activation's derivative at this value.

    Args:
      x: [M, K], bfloat16, float16 or float32. Or, if w is a QuantizedArray, one too: quantize(x, scaling="row"), or the
        result of rms_norm and layer_norm with quantize="e4m3". Its values are not rounded again, and have no gradients.
      w: [G, K, N] in x's dtype; [G, N, K] with transpose_w. Or a QuantizedArray of this shape, such as
        quantize(w, scaling="row", axis=-2), with transpose_w axis=-1: then precision is "fp8". Its values are not
        rounded again in the forward; [G, N, K] needs no copy. The gradient of x rounds them again, with scales for the
        rows of w.
      group_sizes: [G], integers. Sizes below 0 count as 0. If the sum is above M, the groups end at row M.
      bias: [G, N], in x's dtype or float32; if x has 8 bits, in bfloat16, float16 or float32.
      activation: "relu", "gelu" (exact), "gelu_tanh", "silu", "sigmoid" or "tanh"; or an elementwise jnp function of
        float32. It may not close over traced arrays.
      gather_indices: [M], integers, with x [T, K]: row i of the call is x[gather_indices[i]], and 0 for an index
        outside of x. The Triton kernels read these rows from x and make no copy of them. The gradient of a row of x is
        summed in float32.
      transpose_w: whether w is [G, N, K].
      out_dtype: bfloat16, float16 or float32; None is x's dtype, or bfloat16 if x has 8 bits.
      precision: for float32 inputs, "fp32" (exact products, the default) or "tf32". For all inputs, "fp8", "bf16" or
        "fp16": x and w are first rounded to it. None is x's dtype.
      implementation: "mosaic_gpu", "triton" or "xla"; None picks the device's first that supports the call. Only "xla"
        has derivatives in forward mode (jax.jvp) and second derivatives.

    Returns:
      out [M, N] in out_dtype.

    Raises:
      TypeError: a dtype, or the type of an argument, is wrong.
      ValueError: shapes do not fit together, a value is out of range, or x's rows or the groups are sharded over
        Explicit mesh axes.
      NotImplementedError: a named implementation cannot serve this call (the message has the reason); the GPU has no
        8-bit matmuls, and no implementation is named; or 8-bit arrays or their scales are differentiated.

    Source: Gale et al., "MegaBlocks: Efficient Sparse Training with Mixture-of-Experts" (2022), arXiv:2211.15841.
    """
    request, inputs, options = check(
        x=x,
        w=w,
        group_sizes=group_sizes,
        bias=bias,
        activation=activation,
        gather_indices=gather_indices,
        transpose_w=transpose_w,
        out_dtype=out_dtype,
        precision=precision,
        implementation=implementation,
    )
    return _run(OP, request, inputs, options, implementation)


@with_plain_numbers("transpose_w")
@with_explicit_axes(as_grouped)
@under_defaults
@jax.named_scope("grouped_gated_matmul")
def grouped_gated_matmul(
    x: Float[Array, "M K"] | Float[Array, "T K"] | QuantizedArray,
    w_gate: Float[Array, "G K N"] | Float[Array, "G N K"] | QuantizedArray,
    w_up: Float[Array, "G K N"] | Float[Array, "G N K"] | QuantizedArray,
    group_sizes: Int[Array, " G"],
    activation: str | Callable[[jax.Array], jax.Array] = "silu",
    *,
    gather_indices: Int[Array, " M"] | None = None,
    transpose_w: bool = False,
    out_dtype: DTypeLike | None = None,
    precision: str | None = None,
    implementation: str | None = None,
) -> Float[Array, "M N"]:
    """The gated unit activation(x @ w_gate) * (x @ w_up) of rows that are sorted by group, in one pass over x.

    Equivalent to the following JAX code, in float32 after the matmuls::

        gate, up = (grouped_matmul(x, w, group_sizes, transpose_w=transpose_w) for w in (w_gate, w_up))
        out = (activation(gate) * up).astype(out_dtype)

    The groups are as in grouped_matmul: rows past the last group give 0, and have no influence on gradients. The
    forward of a differentiated call also saves the results of the two matmuls, in out_dtype. One launch computes the
    gradient of x, and adds both of its matmuls in float32.

    precision="fp8" is as in grouped_matmul: x has a scale for each row, and w_gate and w_up have a scale for each
    column of each group's weights. In the gradient of x the cotangents of both matmuls share a scale for each row, as
    if they were one array [M, 2 N], and so do the rows of both weights.

    Args:
      x: [M, K], bfloat16, float16 or float32; or a QuantizedArray, as in grouped_matmul.
      w_gate, w_up: [G, K, N] in x's dtype; [G, N, K] with transpose_w. Both have one shape. Or two QuantizedArrays with
        one dtype of values, as in grouped_matmul.
      group_sizes: [G], integers, as in grouped_matmul.
      activation: a name, or an elementwise jnp function of float32, as grouped_matmul takes it.
      gather_indices: [M], integers, with x [T, K], as in grouped_matmul.
      transpose_w: whether w_gate and w_up are [G, N, K].
      out_dtype: bfloat16, float16 or float32; None is x's dtype, or bfloat16 if x has 8 bits.
      precision: None, "fp32", "tf32", "bf16", "fp16" or "fp8", as in grouped_matmul.
      implementation: "mosaic_gpu", "triton" or "xla"; None picks the device's first that supports the call. Only "xla"
        has derivatives in forward mode (jax.jvp) and second derivatives.

    Returns:
      out [M, N] in out_dtype.

    Raises:
      TypeError: a dtype, or the type of an argument, is wrong.
      ValueError: shapes do not fit together, a value is out of range, or x's rows or the groups are sharded over
        Explicit mesh axes.
      NotImplementedError: a named implementation cannot serve this call (the message has the reason); the GPU has no
        8-bit matmuls, and no implementation is named; or 8-bit arrays or their scales are differentiated.

    Sources: Shazeer, "GLU Variants Improve Transformer" (2020), arXiv:2002.05202; Gale et al., "MegaBlocks: Efficient
    Sparse Training with Mixture-of-Experts" (2022), arXiv:2211.15841.
    """
    request, inputs, options = check_gated(
        x=x,
        w_gate=w_gate,
        w_up=w_up,
        group_sizes=group_sizes,
        activation=activation,
        gather_indices=gather_indices,
        transpose_w=transpose_w,
        out_dtype=out_dtype,
        precision=precision,
        implementation=implementation,
    )
    return _run(GATED, request, inputs, options, implementation)


def _run(
    op: PlannedOp,
    request: GroupedRequest,
    inputs: GroupedInputs,
    options: GroupedOptions,
    implementation: str | None,
) -> jax.Array:
    """out [M, N] of a checked call. Tuning times the gradients of x and the weights that do not have 8 bits."""
    given = {"x": inputs.x_scale, "w": inputs.w_scale, "w_up": inputs.w_up_scale}
    moving = tuple(name for name, scale in given.items() if getattr(inputs, name) is not None and scale is None)
    inputs = as_varying(inputs, varying_axes(inputs))
    call = op.call(request, options, implementation)
    rows = request.m // max(request.groups, 1) if isinstance(request.m, int) else 0
    lengths = {"group_sizes": rows}
    planned = gradients.planned if options.scaling is None else fp8.planned
    return planned(*op.tuned(call, request, planned, inputs, implementation, lengths=lengths, moving=moving))


OP.explained_by(check)(grouped_matmul)
GATED.explained_by(check_gated)(grouped_gated_matmul)
