"""The ring of ring_attention: its steps, forward and backward, and the arrays that travel between them."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_kernels.ops.planned_op import inside_composed
from jax_kernels.ops.ring import halo
from jax_kernels.ops.ring.partial_results import BackwardInputs, Pair, Visitors, log_sum, merged_exactly, weight
from jax_kernels.ops.ring.ring_call import RingArrays, RingCall
from jax_kernels.reference.attention import row_terms
from jax_kernels.tracing.derivatives import in_both_modes, in_reverse_mode, no_forward_mode
from jax_kernels.tracing.promotion import under_defaults

__all__ = ["RESIDUALS", "gradients", "run", "with_results"]

REVERSE_MODE = no_forward_mode("ring_attention")
RESIDUALS = "ring_attention_out", "ring_attention_lse"  # names for policies of jax.checkpoint


def run(call: RingCall, arrays: RingArrays):
    """(out, lse) of a device's queries by the strategy "ring" or "halo", differentiable.

    out: [B, T, H, Dv] in query's dtype. lse: [B, H, T] float32.
    """
    return _plain(call, arrays) if call.by_xla else _by_kernels(call, arrays)


def _results(call, arrays):
    return _forward(call, arrays)[:2]


def _forward(call: RingCall, arrays: RingArrays) -> tuple[jax.Array, jax.Array, Any, Any]:
    """(out, lse, lse_lo, halos) of a device's queries, over all keys that they see and the sinks.

    lse_lo: the exact log-sum-exp minus lse, [B, H, T]; None without bias and score_mod. halos: the keys that arrived
    from other devices, for the backward of strategy "halo"; None with "ring".
    """
    halos: Any = None
    more: Any = ()
    if call.strategy == "halo":
        out, lse, halos = halo.forward(call, arrays)
    else:
        out, lse, *more = _of_steps(call, arrays)
    out = checkpoint_name(out.astype(arrays.query.dtype), RESIDUALS[0])
    lse, *more = (checkpoint_name(x, RESIDUALS[1]) for x in (lse, *more))
    return out, lse, more[0] if more else None, halos


def _of_steps(call: RingCall, arrays: RingArrays) -> tuple[jax.Array, ...]:
    """(out, lse) after all steps of a ring, with the sinks; with a bias or a score_mod (out, lse, lse_lo)."""
    numbers: list[int] = call.steps
    total: Any = None
    visitors: Any = Visitors(Pair((arrays.key, arrays.value)), arrays.segment_ids)
    visitors = call.step(0, arrays).with_key_norms(visitors)
    sendable: Any = call.sendable(arrays)._replace(key_norms=visitors.key_norms)
    coming: list[Any] = []  # the visitors of later steps that are already sent
    for at, number in enumerate(numbers):
        coming += call.sent(at, sendable)
        step, is_last = call.step(number, arrays), at == len(numbers) - 1 and arrays.sinks is None
        total = step.forward(visitors, total, is_last=is_last)
        # Without the barrier XLA fuses work on the next keys with work on these keys, which then waits for both.
        total, visitors = lax.optimization_barrier((total, coming.pop(0) if coming else None))
        sendable = visitors
    out, lse, *more = total
    if arrays.sinks is not None and more:
        sinks = jnp.broadcast_to(arrays.sinks[..., None], lse.shape)
        out, lse, *more = merged_exactly(total, (jnp.zeros_like(out), sinks, jnp.zeros_like(lse)))
    elif arrays.sinks is not None:
        with_sink = log_sum(lse, arrays.sinks[..., None])
        out, lse = out * weight(lse, with_sink), with_sink
    return out, lse, *more


@under_defaults
def _vjp_forward(call: RingCall, arrays: RingArrays):
    out, lse, lse_lo, halos = _forward(call, arrays)
    return (out, lse), (arrays, out, lse, lse_lo, halos)


@under_defaults
def _vjp_backward(call: RingCall, residuals: Any, cotangents: Any):
    arrays, out, lse, lse_lo, halos = residuals
    dout, dlse = cotangents
    return (gradients(call, arrays, out, lse, dout, dlse, lse_lo, halos),)


def with_results(call: RingCall, arrays: RingArrays, out: jax.Array, lse: jax.Array):
    """Returns (out, lse), which an earlier `run` of the same arguments gave, without computing them again.

    Their gradients with respect to `arrays` are the gradients of `run`. The call has neither a bias nor a score_mod.
    """
    if call.by_xla:
        return _plain_with_results(call, arrays, out, lse)
    return _with_results(call, in_reverse_mode(arrays, REVERSE_MODE), out, lse)


def _given_results(call, arrays, out, lse):
    return out, lse


@under_defaults
def _with_results_forward(call: RingCall, arrays: RingArrays, out: jax.Array, lse: jax.Array):
    return (out, lse), (arrays, out, lse, None, None)


@under_defaults
def _with_results_backward(call: RingCall, residuals: Any, cotangents: Any):
    return *_vjp_backward(call, residuals, cotangents), None, None


_with_results = jax.custom_vjp(_given_results, nondiff_argnums=(0,))
_with_results.defvjp(_with_results_forward, _with_results_backward)
_plain_with_results = in_both_modes(
    _given_results,
    _with_results_forward,
    _with_results_backward,
    plain=lambda call, arrays, out, lse: _results(call, arrays),
)


def gradients(
    call: RingCall,
    arrays: RingArrays,
    out: Any,
    lse: Any,
    dout: Any,
    dlse: Any,
    lse_lo: Any = None,
    halos: Any = None,
) -> RingArrays:
    """The gradients of the arrays, each in its array's dtype; None for absent arrays.

    out, lse: the results of `run`; dout, dlse: their cotangents, dlse may be None. lse_lo: the exact log-sum-exp minus
    lse, with a bias or a score_mod. halos: from halo.forward; None if not kept: then devices exchange them again.
    """
    terms = row_terms(out, lse, dout, dlse)
    backward, dmod, dbias = BackwardInputs(lse=terms[0], delta=terms[1], dout=dout, lse_lo=lse_lo), None, None
    with inside_composed():
        if call.strategy == "halo":
            dquery, dkey, dvalue = halo.gradients(call, arrays, backward, halos)
        elif lse_lo is None:
            dquery, dkey, dvalue = _gradients(call, arrays, backward)
        else:
            dquery, dkey, dvalue, dmod, dbias = _all_gradients(call, arrays, backward)
    dsinks = None
    if arrays.sinks is not None:
        share = jnp.exp(arrays.sinks[..., None] - terms[0] - (0 if lse_lo is None else lse_lo))
        dsinks = -jnp.sum(share * terms[1], axis=(0, 2))[None]
    no_gradient = lambda ids: None if ids is None else jnp.zeros(ids.shape, jax.dtypes.float0)
    return RingArrays(
        query=(dquery * call.scale).astype(arrays.query.dtype),
        key=dkey.astype(arrays.key.dtype),
        value=dvalue.astype(arrays.value.dtype),
        segment_ids=no_gradient(arrays.segment_ids),
        all_ids=no_gradient(arrays.all_ids),
        sinks=dsinks,
        score_mod=dmod,
        bias=dbias,
    )


_by_kernels = jax.custom_vjp(_results, nondiff_argnums=(0,))
_by_kernels.defvjp(_vjp_forward, _vjp_backward)
_plain = in_both_modes(_results, _vjp_forward, _vjp_backward)


def _gradients(call: RingCall, arrays: RingArrays, backward: BackwardInputs) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of query (divided by the scale), key and value, all float32, by a ring without bias and score_mod.

    The gradients of keys and values follow the keys and values round the ring, one step behind, and return to their
    device at the end. XLA hides one collective at a time behind a kernel. So a step computes some heads while the next
    keys arrive, and the other heads while the gradients travel. For the device's own keys, the other heads are computed
    while the gradients return. The two groups of heads are proportional to the bytes that are sent at the same time:
    keys in their dtype, gradients in float32.
    """
    _, *numbers = call.steps
    # The barrier keeps XLA from saving the keys that arrived in the forward, which are the keys of all devices.
    (query, key, value, ids), backward = lax.optimization_barrier((arrays[:4], backward))
    arrays = arrays._replace(query=query, key=key, value=value, segment_ids=ids)
    mine = Visitors(Pair((key, value)), ids)
    own, dquery = call.step(0, arrays), jnp.zeros_like(query, jnp.float32)
    if not numbers:
        dquery, of_mine = own.gradients(mine, backward, dquery)
        return dquery, of_mine.key, of_mine.value
    share = key.dtype.itemsize / (key.dtype.itemsize + 4)
    own_parts: list[Any] = own.in_parts(mine, share)
    coming = call.sent(0, call.sendable(arrays, in_backward=True))
    dquery, of_mine = own.gradients(mine, backward, dquery, own_parts[0] if own_parts else None)
    (dquery, of_mine), visitors = lax.optimization_barrier(((dquery, of_mine), coming.pop(0)))
    travelling, at = None, 0
    for place, number in enumerate(numbers, 1):
        sent = call.sent(place, visitors)
        upcoming, *coming = [*coming, *sent] or [None]
        step = call.step(number, arrays)
        found: list[Pair] = []
        parts: list[Any] = step.in_parts(visitors, share) if sent and travelling is not None else []
        for part in parts[:1]:
            dquery, pair = step.gradients(visitors, backward, dquery, part)
            (dquery, pair), upcoming, travelling = lax.optimization_barrier(((dquery, pair), upcoming, travelling))
            found.append(pair)
        travelling = None if travelling is None else call.shifted(travelling, number - at)
        dquery, pair = step.gradients(visitors, backward, dquery, parts[1] if parts else None)
        found.append(pair)
        (dquery, found), visitors, travelling = lax.optimization_barrier(((dquery, found), upcoming, travelling))
        pair = _joined(found)
        travelling = pair if travelling is None else jax.tree.map(jnp.add, travelling, pair)
        at = number
    if own_parts:
        (backward, mine), dquery, travelling = lax.optimization_barrier(((backward, mine), dquery, travelling))
    home = call.shifted(travelling, -at)
    if own_parts:
        dquery, of_rest = own.gradients(mine, backward, dquery, own_parts[1])
        (dquery, of_rest), home = lax.optimization_barrier(((dquery, of_rest), home))
        of_mine = _joined([of_mine, of_rest])
    home = jax.tree.map(jnp.add, call.of_all_tokens(home), of_mine)
    return dquery, home.key, home.value


def _all_gradients(call: RingCall, arrays: RingArrays, backward: BackwardInputs) -> tuple[Any, ...]:
    """The gradients (query divided by the scale, key, value, score_mod, bias) by a ring with a bias or a score_mod.

    The first three are float32. The last two are None if the call lacks the argument. A step is one call of all heads.
    """
    mod, bias = arrays.score_mod, arrays.bias
    # The barrier is as in _gradients.
    (query, key, value, ids), backward = lax.optimization_barrier((arrays[:4], backward))
    arrays = arrays._replace(query=query, key=key, value=value, segment_ids=ids)
    numbers, visitors = call.steps, Visitors(Pair((key, value)), ids)
    sendable: Any = call.sendable(arrays, in_backward=True)
    coming: list[Any] = []
    dquery = jnp.zeros_like(query, jnp.float32)
    sums = () if mod is None else mod.zeros(of_arrays=True)
    of_columns = bias is not None and bias.shape[3] > 1
    dbias: Any = None if bias is None else jnp.zeros_like(bias, bias.dtype if of_columns else jnp.float32)
    of_mine: Any = None
    travelling: Any = None
    for at, number in enumerate(numbers):
        coming += call.sent(at, sendable)
        found = call.step(number, arrays).all_gradients(visitors, backward)
        dquery = dquery + found.query.astype(jnp.float32) / call.scale
        if jax.tree.leaves(sums):
            assert mod is not None
            assert found.score_mod is not None
            sums = jax.tree.map(jnp.add, sums, found.score_mod.arrays[: len(mod.arrays)])
        if of_columns:
            dbias = call.layout.with_keys(dbias, found.bias, call.layout.source(number, call.index))
        elif bias is not None:
            assert found.bias is not None
            dbias = dbias + found.bias.astype(jnp.float32)
        pair = Pair.of(*(x.astype(jnp.float32) for x in (found.key, found.value)))
        if number == 0:
            of_mine = pair
        else:
            before = numbers[at - 1]
            travelling = None if travelling is None else call.shifted(travelling, number - before)
            travelling = pair if travelling is None else jax.tree.map(jnp.add, travelling, pair)
        upcoming = coming.pop(0) if coming else None
        (dquery, sums, dbias, travelling), visitors = lax.optimization_barrier(
            ((dquery, sums, dbias, travelling), upcoming)
        )
        sendable = visitors
    if travelling is not None:
        of_mine = jax.tree.map(jnp.add, of_mine, call.shifted(travelling, -numbers[-1]))
    dmod = None if mod is None else mod.with_gradients(sums)
    return dquery, of_mine.key, of_mine.value, dmod, None if bias is None else dbias.astype(bias.dtype)


def _joined(parts: list[Pair]) -> Pair:
    """The gradients of all key heads, from one Pair for each range of heads, in order."""
    return jax.tree.map(lambda *of_heads: jnp.concatenate(of_heads, axis=-2), *parts) if len(parts) > 1 else parts[0]
