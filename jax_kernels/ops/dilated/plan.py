"""The planned call of dilated_attention: the attention calls of its branches, and the Plan that describes them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_kernels import chunks, dispatch
from jax_kernels.inputs.attention import AttentionInputs, FlashArguments
from jax_kernels.ops.attention.flash_attention import OP, flash_attention
from jax_kernels.ops.attention.flash_attention import prepare as prepare_attention
from jax_kernels.ops.attention.implementations.request import AttentionRequest
from jax_kernels.ops.attention.vjp import AttentionCall, vary_alike
from jax_kernels.ops.checks import with_positive_scale
from jax_kernels.ops.dilated import branches as dilated_views
from jax_kernels.ops.dilated import chunks as of_chunks
from jax_kernels.ops.dilated import launch_grouping as dilated_launches
from jax_kernels.ops.dilated import vjp as dilated_vjp
from jax_kernels.ops.dilated.branches import BranchCall
from jax_kernels.ops.dilated.checks import Checked, Pattern, check
from jax_kernels.ops.dilated.pieces import Piece
from jax_kernels.ops.dilated.vjp import DilatedCall
from jax_kernels.ops.planned_op import TunableCall, composed
from jax_kernels.pallas.triton import backend

__all__ = ["DilatedPlan", "plan_of_call", "prepare"]


@dataclasses.dataclass(frozen=True)
class DilatedPlan(dispatch.Plan):
    """The plan of dilated_attention. The fields of Plan describe its attention with most work.

    branches: (segment length, rate, plan) of each run of equal segments; a shorter last segment is a run of its own.
    The other fields have one value for each run. in_place, in_place_differentiated: whether the kernel reads the run in
    place (else its rows are gathered), in a call without gradients and in a call with gradients. devices: the number of
    devices that share a segment; if more than 1, the length in `branches` is the number of tokens on one device.
    shifts: the distances round the ring of these devices over which keys travel, one for each step.
    """

    branches: tuple[tuple[int, int, dispatch.Plan], ...] = ()
    in_place: tuple[bool, ...] = ()
    in_place_differentiated: tuple[bool, ...] = ()
    devices: tuple[int, ...] = ()
    shifts: tuple[tuple[int, ...], ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.implementation} ({self.why})", f"  device: {self.device}"]
        rows = zip(self.branches, self.in_place, self.in_place_differentiated, self.devices, self.shifts, strict=True)
        for (length, rate, plan), in_place, in_place_differentiated, devices, shifts in rows:
            how = f"{plan.implementation} {'in place' if in_place else 'of gathered rows'}"
            how += "" if in_place == in_place_differentiated else ", with gradients of gathered rows"
            if devices > 1:
                how += f" in {len(shifts)} steps of a ring of {devices} devices"
            blocks = "" if plan.config is None else f", {plan.config} from {plan.source}"
            lines.append(f"  segments of {length} at rate {rate}: {how}{blocks}")
        lines += [] if self.chunks is None else [f"  in {self.chunks}"]
        return "\n".join(lines + self.lines_of_others())


def plan_of_call(op: str, **arguments: Any) -> DilatedPlan:
    """The plan of a call of dilated_attention or sequence_parallel_dilated_attention. op: the name that the plan shows.

    arguments: the op's arguments; and shards, the mesh axis over which the tokens are sharded, or None. With shards,
    arrays have one device's tokens. Raises the op's errors for bad input.
    """
    checked = check(**arguments)
    request, arguments = checked.request, checked.arguments
    plans: dict[Piece, dispatch.Plan] = {}
    in_place: tuple[set[Piece], ...] = set(), set()
    launches: list[BranchCall] = []
    for views in checked.pattern.calls():
        with dispatch.on_device(request.device):
            plan = flash_attention.plan(**_specs(request, views), **arguments)  # type: ignore[attr-defined]
        plans |= dict.fromkeys(views.pieces, plan)
        of_views = _parts(views, plan, request)
        launches += of_views[0]
        for found, parts in zip(in_place, of_views, strict=True):
            found |= {piece for part in parts if part.is_strided for piece in part.pieces}
    pieces = sorted(plans, key=lambda piece: (piece.branch, piece.start))
    if pieces:
        most = plans[max(pieces, key=lambda piece: piece.segments * piece.rows**2)]
    else:
        most = flash_attention.plan(*checked.inputs[:3], **arguments)  # type: ignore[attr-defined]
    fields = {field.name: getattr(most, field.name) for field in dataclasses.fields(most)}
    branches = tuple((piece.length, piece.rate, plans[piece]) for piece in pieces)
    of_pieces = [tuple(piece in found for piece in pieces) for found in in_place]
    return DilatedPlan(
        **fields | {"op": op, "chunks": _why_chunks(checked, most, launches)},
        branches=branches,
        in_place=of_pieces[0],
        in_place_differentiated=of_pieces[1],
        devices=tuple(1 if piece.span is None else piece.span.devices for piece in pieces),
        shifts=tuple((0,) if piece.span is None else piece.span.shifts for piece in pieces),
    )


def _why_chunks(checked: Checked, most: dispatch.Plan, launches: Sequence[BranchCall]) -> str | None:
    """The chunks of a call without gradients, in words; if it has none, the chunks of its largest attention, or None.

    most: the plan of this attention. launches: the call's attentions.
    """
    by_kernels = most.implementation in ("mosaic_gpu", "triton")
    need = of_chunks.need_of(
        launches,
        of_chunks.Sizes.of_request(checked.request),
        branches=checked.merge["branches"],
        by_passes=by_kernels and backend.AVAILABLE,
        has_float32_out=_is_merged(checked.merge) and most.implementation != "mosaic_gpu",
    )
    return chunks.why(need, checked.request.device) or most.chunks


def _is_merged(merge: Mapping[str, Any]) -> bool:
    """Whether a token can be in several branches, or its result has a weight."""
    return merge["branches"] > 1 and (merge["is_mean"] or not merge["is_alone"])


def _specs(request: AttentionRequest, views: BranchCall) -> dict[str, Any]:
    """The query, key, value and segment_ids of one attention, by name, as jax.ShapeDtypeStructs of compact arrays."""
    entries = views.entries(request.batch, request.heads)
    spec = lambda *shape, dtype=request.dtype: jax.ShapeDtypeStruct((entries, *shape), jnp.dtype(dtype))
    specs: dict[str, Any] = {
        "query": spec(views.rows, views.heads, request.head_dim),
        "key": spec(views.rows, views.kv_heads, request.head_dim),
        "value": spec(views.rows, views.kv_heads, request.v_head_dim),
    }
    if views.is_masked:
        specs["segment_ids"] = (spec(views.rows, dtype="int32"),) * 2
    return specs


def prepare(**keywords: Any) -> tuple[DilatedCall, tuple[Any, ...]]:
    """Checks and plans a call of dilated_attention. Returns (call, arrays), the arguments of dilated_vjp.run.

    keywords: the arguments of dilated_attention, and shards: the mesh axis over which the tokens are sharded, or None.
    arrays: (query, key, value, segment ids or None). A scale below 0 has become part of query.
    """
    checked = check(**keywords)
    query, scale = with_positive_scale(checked.inputs.query, checked.arguments["scale"])  # outside the custom_vjp
    checked_call = _CheckedCall(
        pattern=checked.pattern,
        merge=tuple(checked.merge.items()),
        arguments=tuple((checked.arguments | {"scale": scale}).items()),
    )
    call = checked_call.planned()
    arrays = vary_alike((query, checked.inputs.key, checked.inputs.value, checked.inputs.q_segment_ids))
    if not call.attentions:
        OP.choose(checked.request, checked.arguments["implementation"])  # raises for a name that cannot be served
        return call, arrays
    parts = dataclasses.replace(checked_call, implementation=call.attentions[0][1].implementation)
    call = dataclasses.replace(call, of_heads=parts.planned)
    return call, tuple(composed(lambda: _recorded(call, checked, keywords, arrays), arrays))


class _Inputs(NamedTuple):
    query: jax.Array
    key: jax.Array
    value: jax.Array
    segment_ids: jax.Array | None


def _recorded(call: DilatedCall, checked: Any, keywords: dict[str, Any], arrays: tuple[Any, ...]) -> TunableCall:
    """The call for jax_kernels.analyze, with an attention for each BranchCall. keywords: of `prepare`."""
    request = checked.request
    parts = []
    for views in checked.pattern.calls():
        specs = _specs(request, views)
        ids = specs.pop("segment_ids", (None, None))
        of_views = dataclasses.replace(
            request,
            batch=views.entries(request.batch, request.heads),
            q_length=views.rows,
            kv_length=views.rows,
            heads=views.heads,
            kv_heads=views.kv_heads,
        )
        parts.append((of_views, AttentionInputs(**specs, q_segment_ids=ids[0], kv_segment_ids=ids[1])))
    specs_of = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.core.Tracer) else x
    is_sharded = keywords.get("shards") is not None
    name = "sequence_parallel_dilated_attention" if is_sharded else "dilated_attention"
    return TunableCall(
        op=OP,
        request=request,
        call=call,
        named=keywords.get("implementation"),
        run=lambda call, inputs: dilated_vjp.run(call, tuple(inputs)),
        inputs=_Inputs(*arrays),
        moving=("query", "key", "value"),
        parts=tuple(parts),
        axis_name=keywords["shards"].axis_name if is_sharded else None,
        plan=lambda: plan_of_call(name, **{name: specs_of(x) for name, x in keywords.items()}),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _CheckedCall:
    """A call whose checks have passed, which is planned for all heads or for one shard of the heads.

    merge: (name, value) of the fields of DilatedCall that say how branches are merged. arguments: (name, value) of
    options of flash_attention. implementation: the implementation of all attentions; None to choose it by `arguments`.
    """

    pattern: Pattern
    merge: tuple[tuple[str, Any], ...]
    arguments: tuple[tuple[str, Any], ...]
    implementation: str | None = None

    def planned(self, index: int = 0, count: int = 1) -> DilatedCall:
        """The planned call of shard `index` of the heads, if the heads are sharded over `count` devices."""
        request, merge, arguments = self.pattern.of_part(count), dict(self.merge), dict(self.arguments)
        if self.implementation is not None:
            arguments["implementation"] = self.implementation
        is_merged = _is_merged(merge)
        plan = lambda arrays: prepare_attention(FlashArguments(**arrays, **arguments))[0]
        attentions: list[tuple[BranchCall, AttentionCall]] = []
        differentiated: list[tuple[BranchCall, AttentionCall]] = []
        for views in self.pattern.calls(index, count):
            with dispatch.on_device(request.device):
                planned = jax.eval_shape(plan, _specs(request, views))
            # The Hopper kernel's blocks leave no shared memory for a float32 out, so it rounds partial outs once.
            if is_merged and planned.implementation != "mosaic_gpu":
                planned = dataclasses.replace(planned, out_dtype="float32")
            for found, parts in zip((attentions, differentiated), _parts(views, planned, request), strict=True):
                found += [(part, _of_views(planned, part, request)) for part in parts]
        sums_dquery = bool(attentions) and _reads_views(attentions[0][1], request)
        return DilatedCall(tuple(attentions), tuple(differentiated), **merge, sums_dquery=sums_dquery)


def _parts(
    views: BranchCall, planned: AttentionCall | dispatch.Plan, request: AttentionRequest
) -> tuple[tuple[BranchCall, ...], tuple[BranchCall, ...]]:
    """The calls into which one attention is split: (for a call without gradients, for a call with gradients).

    views: an attention of all pieces whose entries have one shape, none of them strided. planned: the planned call or
    the Plan of it. Without gradients, each piece that a kernel can read in place gets a strided call. With gradients,
    only pieces get one for which this saves time. request: of the whole dilated_attention, or of its shard of the
    heads.
    """
    if not _reads_views(planned, request):
        return (views,), (views,)
    in_place = dilated_views.split_strided(views, request.q_length, request.heads // request.kv_heads)
    return in_place, dilated_launches.launches_of(views, request, planned.config.forward.block_q)


def _reads_views(planned: AttentionCall | dispatch.Plan, request: AttentionRequest) -> bool:
    """Whether the attention's kernels can take some heads of a larger array, so that they read branches in place."""
    whole = request.head_dim == request.v_head_dim and request.head_dim in (64, 128, 256)
    return planned.implementation == "mosaic_gpu" and whole and not request.deterministic


def _of_views(planned: AttentionCall, views: BranchCall, request: AttentionRequest) -> AttentionCall:
    """The planned call for `views`: if strided, the options query_heads and kv_heads select the heads of its view.

    A call of gathered rows stays as it is. request: of the whole dilated_attention, or of its shard of the heads.
    """
    if not views.is_strided:
        return planned
    of_query, of_key = (views.head_view(request.heads, heads) for heads in (request.heads, request.kv_heads))
    options = dataclasses.replace(planned.options, query_heads=of_query, kv_heads=of_key)
    return dataclasses.replace(planned, options=options)
