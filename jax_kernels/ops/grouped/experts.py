"""The gated MLPs of a mixture of experts: grouped matmuls with a backward that computes the hidden values again.

The forward of a differentiated call keeps the results of the first matmuls, and drops the hidden values. In the
backward one pass over both computes the hidden values and the cotangents of the first matmuls.

If a call returns the weighted sum of each token's rows, the same pass multiplies by the weights and computes their
gradients. So the cotangents of the rows are copies of the tokens' cotangents, and the backward needs no result of the
last matmul.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int32

from jax_kernels import chunks
from jax_kernels.chunks import Need
from jax_kernels.inputs.grouped_matmul import GroupedInputs, GroupedOptions
from jax_kernels.inputs.matmul import in_range
from jax_kernels.ops.activations import has_known_activation
from jax_kernels.ops.grouped import gradients
from jax_kernels.ops.grouped.checks import check_gated, refuse_quantized
from jax_kernels.ops.grouped.implementations import GATED
from jax_kernels.ops.grouped.rows import can_skip, first_rows, summed_rows
from jax_kernels.ops.matmul.gradients import epilogue_gradients
from jax_kernels.ops.matmul.mlp import RESIDUALS
from jax_kernels.ops.planned_op import PlannedCall
from jax_kernels.ops.sharding.partitioning import is_partitioned
from jax_kernels.pallas.grouped.passes.live_rows import map_live_rows
from jax_kernels.reference.grouped_matmul import gathered
from jax_kernels.tracing.derivatives import in_both_modes, in_reverse_mode, no_forward_mode
from jax_kernels.tracing.manual_axes import as_varying, varying_axes
from jax_kernels.tracing.promotion import under_defaults

__all__ = ["Combination", "gated_experts"]


class Combination(NamedTuple):
    """The weighted sum of each token's rows. weights: float32 [tokens, each], a factor for each pair of a token and a
    group.

    order: int32 [M], from a row to its pair. inverse: int32 [tokens * each], from a pair to its row; M or more for a
    pair without a row, which adds 0. live_count: int32, the number of rows of all groups, if it may be far below M:
    passes over the rows then end there, and no kernel writes zeros to the other rows, so that x's gradient may have any
    values there, which token_rows leaves out. None otherwise.
    """

    weights: Float[Array, "tokens each"]
    order: Int32[Array, " M"]
    inverse: Int32[Array, " pairs"]
    live_count: Int32[Array, ""] | None = None

    def summed(self, rows: jax.Array) -> jax.Array:
        """The weighted sum over each token's rows, float32 [tokens, N]."""
        return summed_rows(rows, self.weights, self.order, self.inverse, self.live_count)

    def of_rows(self) -> jax.Array:
        """The weight of each row, float32 [M]."""
        return self.weights.reshape(-1).at[self.order].get(mode="clip")


class ExpertsInputs(NamedTuple):
    """The arrays of a call. first: of the gated unit, with x [M, K] and weights [G, K, H]. down: [G, H, N].

    combination: the weighted sum that the call returns for each token; None if it returns the rows.
    """

    first: GroupedInputs
    down: Float[Array, "G H N"]
    combination: Combination | None = None


@under_defaults
def gated_experts(
    x: Float[Array, "M K"],
    w_gate: Float[Array, "G K H"],
    w_up: Float[Array, "G K H"],
    w_down: Float[Array, "G H N"],
    group_sizes: Int32[Array, " G"],
    *,
    combination: Combination | None = None,
    activation: str | Callable[[jax.Array], jax.Array] = "silu",
    implementation: str | None = None,
) -> Float[Array, "M N"] | Float[Array, "tokens N"]:
    """The gated MLP of each group's rows [M, N], in x's dtype. Rows past the last group give 0.

    With a combination, the weighted sum over each token's rows: float32 [tokens, N], with gradients for the weights.

    Equivalent to the following JAX code::

        hidden = grouped_gated_matmul(x, w_gate, w_up, group_sizes, activation)
        out = grouped_matmul(hidden, w_down, group_sizes)
        # with a combination, where pairs without a row add 0
        of_pairs = out.astype(float32)[combination.inverse].reshape(*combination.weights.shape, N)
        out = (combination.weights[..., None] * of_pairs).sum(1)

    A policy of jax.checkpoint finds the results of the first matmuls by the names "mlp_gate" and "mlp_up". The
    arguments are as in grouped_gated_matmul, and raise the same errors.
    """
    refuse_quantized(x=x, w_gate=w_gate, w_up=w_up, w_down=w_down)
    request, first, options = check_gated(
        x=x, w_gate=w_gate, w_up=w_up, group_sizes=group_sizes, activation=activation, implementation=implementation
    )
    inputs = ExpertsInputs(first=first, down=w_down, combination=combination)
    options = dataclasses.replace(options, has_zeros=combination is None or combination.live_count is None)
    call = GATED.call(request, options, implementation)
    inputs = as_varying(inputs, varying_axes(inputs))
    reason = "a model's experts take the blocks of grouped_gated_matmul with these shapes: tune this call"
    moving = ("first", "down")
    return _planned(*GATED.tuned(call, request, _planned, inputs, implementation, reason=reason, moving=moving))


def _planned(call: PlannedCall, inputs: ExpertsInputs) -> jax.Array:
    if call.implementation == "xla":
        return _plain(call, inputs)
    return _by_kernels(call, in_reverse_mode(inputs, no_forward_mode("grouped_gated_matmul")))


def _out(call, inputs):
    """The rows [M, N], or their weighted sums [tokens, N]."""
    rows = _rows(call, inputs._replace(combination=None))
    return rows if inputs.combination is None else inputs.combination.summed(rows)


def _rows(call, inputs):
    """The rows [M, N]; in chunks of rows if the hidden values of all rows do not fit the memory."""
    whole = lambda inputs: _down(call, inputs, gradients.forward_of(call)(inputs.first).out)
    groups, rows, columns, _ = call.options.sizes(inputs.first)
    if not all(isinstance(size, int) for size in (groups, rows, columns)) or rows < 2 or groups == 0:
        return whole(inputs)
    x = inputs.first.x
    hidden = 1.0 * rows * columns * x.dtype.itemsize
    need = Need(kept=2.0 * x.size * x.dtype.itemsize, temporary=hidden, most=rows, axes="rows")
    part = lambda rows: whole(inputs._replace(first=gradients.of_rows(inputs.first, *rows)))
    return chunks.by_rows("gated_experts", need, x, part, is_partitioned(), [rows])


def _down(call: PlannedCall, inputs: ExpertsInputs, hidden: jax.Array, *, transpose_w: bool = False) -> jax.Array:
    """hidden @ w_down, or with transpose_w the cotangent of hidden from hidden = the cotangent of out."""
    options = GroupedOptions(
        out_dtype=str(inputs.first.x.dtype),
        transpose_w=transpose_w,
        precision=call.options.precision,
        has_zeros=call.options.has_zeros,
    )
    given = GroupedInputs(x=hidden, w=inputs.down, group_sizes=inputs.first.group_sizes)
    return gradients.further(call, given, options).out


@under_defaults
def _forward(call, inputs):
    saving = dataclasses.replace(call, options=dataclasses.replace(call.options, saves_preactivation=True))
    result = gradients.forward_of(saving)(inputs.first)
    saved = result._replace(
        out=None,  # type: ignore[arg-type]
        preactivation=checkpoint_name(result.preactivation, RESIDUALS[0]),
        up=checkpoint_name(result.up, RESIDUALS[1]),
    )
    rows = _down(call, inputs, result.out)
    return rows if inputs.combination is None else inputs.combination.summed(rows), (inputs, saved)


@under_defaults
def _backward(call, residuals, dout):
    """(ExpertsInputs of the gradients,). dout: the cotangent of the rows [M, N], or of their sums [tokens, N]."""
    inputs, saved = residuals
    (first, _, combination), dtype = inputs, inputs.first.x.dtype
    dout = dout.astype(dtype)
    dcombination = None
    if combination is None:
        dhidden = _down(call, inputs, dout, transpose_w=True).astype(jnp.float32)
        hidden = _hidden(call.options, saved).astype(dtype)
        dz, dup = (y.astype(dtype) for y in epilogue_gradients(call.options, saved, dhidden))
    else:
        dout = first_rows(dout, combination.order // combination.weights.shape[1], combination.live_count)
        dhidden = _down(call, inputs, dout, transpose_w=True)
        dz, dup, hidden, of_rows = _weighted_gradients(call, combination, saved, dhidden)
        of_rows = gradients.without_other_rows(of_rows[:, None], first.group_sizes)[:, 0]
        dweights = gathered(of_rows, combination.inverse)
        dcombination = Combination(dweights.reshape(combination.weights.shape), order=None, inverse=None)  # type: ignore[arg-type]
    dfirst = GroupedInputs(
        x=gradients.input_gradient(call, first, dz, dup),
        w=gradients.weight_gradient(call, first, dz),
        group_sizes=None,  # type: ignore[arg-type]
        w_up=gradients.weight_gradient(call, first, dup),
    )
    of_down = GroupedInputs(x=hidden, w=inputs.down, group_sizes=first.group_sizes)
    ddown = gradients.weight_gradient(call, of_down, dout)
    return (ExpertsInputs(first=dfirst, down=ddown, combination=dcombination),)


def _weighted_gradients(
    call: PlannedCall, combination: Combination, saved: Any, dhidden: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(cotangents of x @ w_gate and of x @ w_up, hidden values times their rows' weights, gradients of these weights).

    The first three are [M, H] in dhidden's dtype, the last is float32 [M]. saved: the GroupedResult of the first
    matmuls. dhidden: [M, H], the cotangents of the hidden values without the weights.
    """
    dtype, factors = dhidden.dtype, combination.of_rows()
    z, up = saved.preactivation, saved.up

    def of_block(z: jax.Array, up: jax.Array, dhidden: jax.Array, factors: jax.Array) -> tuple[jax.Array, ...]:
        part = saved._replace(preactivation=z, up=up)
        hidden, dhidden = _hidden(call.options, part), dhidden.astype(jnp.float32)
        cotangents = epilogue_gradients(call.options, part, dhidden * factors)
        return *cotangents, hidden * factors, dhidden * hidden

    if combination.live_count is not None and has_known_activation(call.options) and can_skip(z, z.shape):
        count = combination.live_count.reshape(1)
        of_rows = [z, up, dhidden]
        return map_live_rows(of_block, of_rows, factors, count, [dtype] * 3, interpret=call.interpret)  # type: ignore[return-value]
    dz, dup, hidden, summands = of_block(z, up, dhidden, factors[:, None])
    return dz.astype(dtype), dup.astype(dtype), hidden.astype(dtype), summands.sum(1)


def _hidden(options: GroupedOptions, saved: Any) -> jax.Array:
    """activation(z) * up, float32, from the saved results of the first matmuls."""
    z, up = (in_range(y.astype(jnp.float32), y.dtype) for y in (saved.preactivation, saved.up))
    return (z if options.activation is None else options.activation(z)) * up


_by_kernels = jax.custom_vjp(_out, nondiff_argnums=(0,))
_by_kernels.defvjp(_forward, _backward)
_plain = in_both_modes(_out, _forward, _backward)
