"""The planned grouped matmul with its gradients: a grouped matmul for x, and a sum over each group's rows for w."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_kernels import chunks, dispatch
from jax_kernels.inputs.group_tiles import group_offsets
from jax_kernels.inputs.grouped_matmul import GroupedInputs, GroupedOptions, GroupedResult, WeightGradientInputs
from jax_kernels.ops.grouped.implementations import IMPLEMENTATIONS, OP, need_of, request_of
from jax_kernels.ops.grouped.partitioning import shared_matmul, shared_weight_gradient
from jax_kernels.ops.matmul.gradients import ScaledCotangents, epilogue_gradients
from jax_kernels.ops.planned_op import MOST_CALLS, PlannedCall, no_calls
from jax_kernels.ops.sharding.partitioning import is_partitioned
from jax_kernels.reference.grouped_matmul import sum_of_rows
from jax_kernels.tracing.derivatives import in_both_modes, in_reverse_mode, no_forward_mode
from jax_kernels.tracing.promotion import under_defaults

__all__ = [
    "forward_of",
    "further",
    "input_gradient",
    "of_rows",
    "planned",
    "scattered",
    "weight_gradient",
    "without_other_rows",
]


def planned(call: PlannedCall, inputs: GroupedInputs) -> jax.Array:
    """out [M, N] of a planned grouped_matmul or grouped_gated_matmul, differentiable."""
    if call.implementation == "xla":
        return _plain(call, inputs)
    name = "grouped_gated_matmul" if inputs.is_gated else "grouped_matmul"
    return _by_kernels(call, in_reverse_mode(inputs, no_forward_mode(name)))


def _out(call, inputs):
    return forward_of(call)(inputs).out


@under_defaults
def _forward(call, inputs):
    saves = call.options.activation is not None or inputs.is_gated
    options = dataclasses.replace(call.options, saves_preactivation=saves)
    result = forward_of(dataclasses.replace(call, options=options))(inputs)
    return result.out, (inputs, result._replace(out=None))  # type: ignore[arg-type]


@under_defaults
def _backward(call, residuals, dout):
    """(GroupedInputs of the gradients,). dout: the cotangent of out, [M, N]."""
    inputs, saved = residuals
    dz, dup = epilogue_gradients(call.options, saved, dout.astype(jnp.float32))
    if inputs.x.dtype == jnp.float16 and dout.dtype == jnp.float32:  # other rows may not set the scale of float16
        dz, dup = (None if y is None else without_other_rows(y, inputs.group_sizes) for y in (dz, dup))
    dbias = None if inputs.bias is None else sum_of_rows(dz, inputs.group_sizes).astype(inputs.bias.dtype)
    scaled = ScaledCotangents.of(dz, dup, dout.dtype, inputs.x.dtype)
    dx = scaled.back(functools.partial(input_gradient, call, inputs, scaled.dz, scaled.dup))
    dx = dx if inputs.gather is None else scattered(dx, inputs.gather, inputs.x.shape[0])
    dw, dw_up = (
        None if y is None else scaled.back(functools.partial(weight_gradient, call, inputs, y))
        for y in (scaled.dz, scaled.dup)
    )
    return (GroupedInputs(x=dx, w=dw, group_sizes=None, bias=dbias, w_up=dw_up),)  # type: ignore[arg-type]


def scattered(rows: jax.Array, index: jax.Array, count: int) -> jax.Array:
    """[count, K] in rows' dtype: row t is the float32 sum of the rows [M, K] with index t."""
    index = jnp.where(index < 0, count, index)  # JAX counts negative indices from the end
    total = jnp.zeros_like(rows, jnp.float32, shape=(count, rows.shape[1]))
    return total.at[index].add(rows.astype(jnp.float32), mode="drop").astype(rows.dtype)


def without_other_rows(dz: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """dz [M, N] with 0 in the rows past the last group, which may hold anything. The kernels ignore these rows."""
    rows, groups = dz.shape[0], group_sizes.shape[0]
    end = group_offsets(group_sizes, rows)[-1] if groups else 0
    return jnp.where(lax.iota(jnp.int32, rows)[:, None] < end, dz, 0)


def input_gradient(
    call: PlannedCall, inputs: GroupedInputs, dz: jax.Array, dup: jax.Array | None, out_dtype: str | None = None
) -> jax.Array:
    """The gradient of the call's rows [M, K]: dz [M, N] times each group's transposed w, plus dup times w_up.

    dz, dup: the cotangents of x @ w and, of a gated unit, of x @ w_up. out_dtype: None is x's dtype. The rows past the
    last group are 0 if the call's results have zeros there.
    """
    options = GroupedOptions(
        out_dtype=out_dtype or str(dz.dtype),
        transpose_w=not call.options.transpose_w,
        precision=call.options.precision,
        has_zeros=call.options.has_zeros,
    )
    w_up = None if dup is None else inputs.w_up
    given = GroupedInputs(x=dz, w=inputs.w, group_sizes=inputs.group_sizes, x_up=dup, w_up=w_up)
    return further(call, given, options).out


def further(call: PlannedCall, inputs: GroupedInputs, options: GroupedOptions) -> GroupedResult:
    """The GroupedResult of another matmul that a planned call needs, such as one of its backward.

    call: gives only the implementation. A matmul that it does not support runs by Triton, or else by XLA.
    """
    request = request_of(options, inputs, dispatch.target_device(inputs.x))
    names = dict.fromkeys([call.implementation, "triton", "xla"])
    name = next(name for name in names if IMPLEMENTATIONS[name].supports(request) is None)
    return forward_of(OP.call(request, options, name))(inputs)


def weight_gradient(call: PlannedCall, inputs: GroupedInputs, dz: jax.Array, out_dtype: str | None = None) -> jax.Array:
    """The gradient of w, in w's shape, from the cotangent dz of x @ w. out_dtype: None is x's dtype."""
    options = GroupedOptions(
        out_dtype=out_dtype or str(dz.dtype),
        transpose_w=call.options.transpose_w,
        precision=call.options.precision,
    )
    given = WeightGradientInputs(x=inputs.x, dz=dz, group_sizes=inputs.group_sizes, gather=inputs.gather)
    return _weight_gradient_of(dataclasses.replace(call, options=options))(given)


_by_kernels = jax.custom_vjp(_out, nondiff_argnums=(0,))
_by_kernels.defvjp(_forward, _backward)
_plain = in_both_modes(_out, _forward, _backward)


def forward_of(call: PlannedCall) -> Callable[[GroupedInputs], GroupedResult]:
    """A function from GroupedInputs to the GroupedResult of the call's implementation, in chunks if memory requires it.

    The chunks are of rows. They may end inside a group.
    """
    whole = functools.partial(_run, call, "forward") if call.implementation == "xla" else _shared_forward(call)
    return functools.partial(_in_chunks, call, whole)


def _in_chunks(
    call: PlannedCall, whole: Callable[[GroupedInputs], GroupedResult], inputs: GroupedInputs
) -> GroupedResult:
    groups, rows, columns, _ = call.options.sizes(inputs)
    if not all(isinstance(size, int) for size in (groups, rows, columns)) or rows < 2 or groups == 0:
        return whole(inputs)
    results = (3 if inputs.is_gated else 2) if call.options.saves_preactivation else 1
    need = need_of(call.implementation, rows, columns, call.options.out_dtype, results)
    name = "grouped_gated_matmul" if inputs.is_gated else "grouped_matmul"
    return chunks.by_rows(name, need, inputs.x, lambda part: whole(of_rows(inputs, *part)), is_partitioned(), [rows])


def of_rows(inputs: GroupedInputs, part: slice | None = None) -> GroupedInputs:
    """The inputs of the call for the rows of `part`, None for all. group_sizes: each group's number of rows in it."""
    if part is None:
        return inputs
    ends = jnp.clip(group_offsets(inputs.group_sizes, inputs.rows), part.start, part.stop)
    moving = ("x", "x_up", "x_scale") if inputs.gather is None else ("gather",)
    arrays = {name: x[part] for name in moving if (x := getattr(inputs, name)) is not None}
    return inputs._replace(group_sizes=jnp.diff(ends).astype(inputs.group_sizes.dtype), **arrays)


def _weight_gradient_of(call: PlannedCall) -> Callable[[WeightGradientInputs], jax.Array]:
    """A function from WeightGradientInputs to the gradient of w by the call's implementation."""
    return functools.partial(_run, call, "backward") if call.implementation == "xla" else _shared_weight_gradient(call)


def _run(call: PlannedCall, direction: str, inputs: Any) -> Any:
    """Runs the call's implementation. direction: "forward" or "backward"."""
    function = getattr(IMPLEMENTATIONS[call.implementation], direction)
    return function(inputs, call.options, config=call.config, interpret=call.interpret)


def _run_shard(call: PlannedCall, inputs: GroupedInputs) -> GroupedResult:
    """The GroupedResult of a device's shard, by XLA if the call's implementation does not support the shard's sizes."""
    if is_partitioned():
        request = request_of(call.options, inputs, dispatch.target_device(inputs.x))
        if IMPLEMENTATIONS[call.implementation].supports(request) is not None:
            call = dataclasses.replace(call, implementation="xla", config=None)
    return _run(call, "forward", inputs)


@functools.lru_cache(maxsize=MOST_CALLS)
def _shared_forward(call: PlannedCall) -> Callable[[GroupedInputs], GroupedResult]:
    return _one_by_one(shared_matmul(functools.partial(_run_shard, call), call.options))


@functools.lru_cache(maxsize=MOST_CALLS)
def _shared_weight_gradient(call: PlannedCall) -> Callable[[WeightGradientInputs], jax.Array]:
    return _one_by_one(shared_weight_gradient(functools.partial(_run, call, "backward"), call.options))


def _one_by_one(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The function of a tree of arrays, with a rule by which the calls of a vmap run one after the other."""
    wrapped = jax.custom_batching.custom_vmap(function)

    @wrapped.def_vmap
    def _(size: int, mapped: Any, inputs: Any) -> Any:
        if size == 0:
            return no_calls(wrapped, mapped, (inputs,))
        leaves, tree = jax.tree.flatten(inputs)
        moving = [i for i, is_mapped in enumerate(jax.tree.leaves(mapped[0])) if is_mapped]

        def of_call(arrays: list[jax.Array]) -> Any:
            given = dict(zip(moving, arrays, strict=True))
            return wrapped(jax.tree.unflatten(tree, [given.get(i, x) for i, x in enumerate(leaves)]))

        results = lax.map(of_call, [leaves[i] for i in moving])
        return results, jax.tree.map(lambda _: True, results)

    return wrapped
