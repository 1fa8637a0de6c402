"""A call of ring_attention, as jax_kernels.analyze records it."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
from jax.sharding import AbstractMesh, AxisType

from jax_kernels import dispatch
from jax_kernels.dispatch import Request
from jax_kernels.ops.attention.flash_attention import OP
from jax_kernels.ops.planned_op import TunableCall
from jax_kernels.ops.ring.plan import RingPlan
from jax_kernels.ops.ring.ring_call import RingArrays, RingCall
from jax_kernels.ops.ring.traffic import pairs_of_devices

__all__ = ["RingRequest", "recorded"]


@dataclasses.dataclass(frozen=True)
class RingRequest(Request):
    """A call of ring_attention without its arrays. Sizes are of one device, but kv_length is of all devices.

    pairs: of a query and a key for a head, on the device that has most. differentiated_pairs: the same of a
    differentiated call. is_bound: whether masks, a bias or segment ids may leave fewer pairs.
    """

    SIZES: ClassVar[tuple[str, ...]] = ("batch", "q_length", "kv_length", "heads", "kv_heads", "head_dim", "v_head_dim")

    devices: int
    batch: int
    q_length: int
    kv_length: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str
    precision: str | None
    is_causal: bool
    window: tuple[int, int] | None
    has_mask: bool
    bias_shape: tuple[int, ...] | None
    pairs: float
    differentiated_pairs: float
    is_bound: bool

    def differentiated(self) -> "RingRequest":
        """The request of the call under differentiation."""
        return dataclasses.replace(self, pairs=self.differentiated_pairs)


def recorded(
    call: RingCall,
    arrays: RingArrays,
    run: Callable[[RingCall, RingArrays], Any],
    plan: Callable[..., RingPlan],
    arguments: dict[str, Any],
) -> TunableCall:
    """The TunableCall of a prepared call. arguments: of ring_attention, by name. plan: takes them, inside a mesh."""
    layout, (batch, length, heads, head_dim) = call.layout, arrays.query.shape
    most = lambda strategy: max(pairs_of_devices(layout, strategy))
    others = arrays.mask, arrays.bias, arrays.segment_ids
    request = RingRequest(
        op="ring_attention",
        device=dispatch.target_device(arrays.query),
        devices=layout.devices,
        batch=batch,
        q_length=length,
        kv_length=layout.devices * length,
        heads=heads,
        kv_heads=arrays.key.shape[2],
        head_dim=head_dim,
        v_head_dim=arrays.value.shape[3],
        dtype=str(arrays.query.dtype),
        precision=dict(call.options)["precision"],
        **layout.limits,
        has_mask=arrays.mask is not None,
        bias_shape=None if arrays.bias is None else arrays.bias.shape,
        pairs=most(call.strategy),
        differentiated_pairs=most(call.differentiated),
        is_bound=any(x is not None for x in others),
    )
    spec_of = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.core.Tracer) else x
    specs, of_plan = jax.tree.map(spec_of, (arrays, arguments))

    def planned() -> RingPlan:
        mesh = AbstractMesh((layout.devices,), (call.axis_name,), axis_types=(AxisType.Auto,))
        with jax.sharding.use_abstract_mesh(mesh):
            return plan(axis_name=call.axis_name, **of_plan)

    return TunableCall(
        op=OP,
        request=request,
        call=call,
        named=arguments["implementation"],
        run=run,
        inputs=arrays,
        moving=("query", "key", "value"),
        parts=((request, specs),),
        plan=planned,
        axis_name=call.axis_name,
    )
