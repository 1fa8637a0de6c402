"""The axes of a grouped matmul's arrays that the devices of a mesh may shard: K and N.

A device that holds a part of the rows would need the groups of these rows. Inside jax.shard_map the caller has them.
"""

from collections.abc import Callable
from typing import Any

import jax

from jax_kernels.inputs.grouped_matmul import GroupedInputs, GroupedOptions, GroupedResult, WeightGradientInputs
from jax_kernels.ops.sharding.partitioning import Axis, Shares, is_partitioned, partitioned

__all__ = ["shared_matmul", "shared_weight_gradient"]

COLUMNS, DEPTH = Axis("columns"), Axis("depth")
WARNING = (
    "grouped_matmul: the rows of x are sharded, and are gathered on every device; call it inside jax.shard_map, with "
    "the sizes of each device's groups"
)


def shared_matmul(
    function: Callable[[GroupedInputs], GroupedResult], options: GroupedOptions
) -> Callable[[GroupedInputs], GroupedResult]:
    """Returns the kernel's function with its work sharded over the devices of a mesh under jit.

    Devices that shard K sum their matmuls, each in the call's out_dtype. A matmul with an epilogue, which belongs
    after the sum, does not shard K.
    """

    def run(inputs: GroupedInputs) -> GroupedResult:
        if not is_partitioned():
            return function(inputs)
        _, _, columns, depth = options.sizes(inputs)
        is_product = inputs.bias is None and options.activation is None and not inputs.is_gated
        of_w = (None, COLUMNS, DEPTH) if options.transpose_w else (None, DEPTH, COLUMNS)
        of_x = None, DEPTH
        axes: dict[str, Any] = {"x": of_x, "w": of_w, "group_sizes": (None,), "bias": (None, COLUMNS)}
        axes |= {"w_up": of_w, "x_up": of_x, "gather": (None,), "x_scale": (None,), "w_scale": (None, COLUMNS)}
        axes["w_up_scale"] = None, COLUMNS
        shares = Shares(
            arguments=[axes[name] for name, y in inputs._asdict().items() if y is not None],
            results=lambda result: [(None, COLUMNS)] * len(jax.tree.leaves(result)),
            lengths={COLUMNS.name: columns} | ({DEPTH.name: depth} if is_product else {}),
            warning=WARNING,
        )
        return partitioned(function, shares)(inputs)

    return run


def shared_weight_gradient(
    function: Callable[[WeightGradientInputs], jax.Array], options: GroupedOptions
) -> Callable[[WeightGradientInputs], jax.Array]:
    """Returns the kernel's function for the gradient of w, with its work sharded over the devices under jit."""

    def run(inputs: WeightGradientInputs) -> jax.Array:
        if not is_partitioned():
            return function(inputs)
        of_w = (None, COLUMNS, DEPTH) if options.transpose_w else (None, DEPTH, COLUMNS)
        shares = Shares(
            arguments=[(None, DEPTH), (None, COLUMNS), (None,), *([] if inputs.gather is None else [(None,)])],
            results=lambda _: [of_w],
            lengths={COLUMNS.name: inputs.dz.shape[1], DEPTH.name: inputs.x.shape[1]},
        )
        return partitioned(function, shares)(inputs)

    return run
