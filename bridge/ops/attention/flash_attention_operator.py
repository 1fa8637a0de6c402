"""PyTorch's operators of flash_attention, and their gradient.

| operator | results |
|---|---|
| flash_attention | out, and `rows`: lse [B, H, T], or with a bias [B, 2, H, T], which stacks lse and lse_lo |
| flash_attention_inference | out |
| flash_attention_backward | gradients of query, key, value, bias and sinks; an unwanted gradient is an empty tensor |

lse_lo is the exact log-sum-exp minus lse. The backward of a bias needs lse_lo. On Hopper the forward of a mask
of keys also returns an lse_lo, which no backward reads.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch

from jax_kernels.bridge.direct.call_key import describe
from jax_kernels.bridge.interop import dlpack, planning_device, torch_internals
from jax_kernels.bridge.interop.keyed_cache import memoize
from jax_kernels.bridge.operators import torch_operator
from jax_kernels.bridge.operators.profiler_names import named
from jax_kernels.bridge.ops.attention import length_buckets
from jax_kernels.inputs.attention import AttentionResult, FlashArguments

__all__ = [
    "DIFFERENTIATED",
    "Arguments",
    "Attention",
    "BackwardArguments",
    "Options",
    "Tensors",
    "backward_op",
    "backward_program",
    "forward_op",
    "forward_program",
    "gradient_bits",
    "inference_op",
    "inference_program",
    "names_of",
    "need_gradient",
    "split",
]

DIFFERENTIATED = ("query", "key", "value", "bias", "sinks")


class Tensors[Value](NamedTuple):
    """The tensors of a call of flash_attention, in the order of the operators' arguments; None for an absent tensor.

    The first five can get gradients; DIFFERENTIATED lists their names. q_offset: int32 [] or [B], or None if the offset
    is an int. Value: the entries' type, such as torch.Tensor, jax.Array or bool.
    """

    query: Value
    key: Value
    value: Value
    bias: Value | None
    sinks: Value | None
    mask: Value | None
    q_segment_ids: Value | None
    kv_segment_ids: Value | None
    kv_lengths: Value | None
    q_offset: Value | None

    @property
    def differentiated(self) -> tuple[Value | None, ...]:
        """(query, key, value, bias, sinks): the tensors that can get gradients."""
        return self[: len(DIFFERENTIATED)]

    @property
    def has_lse_lo(self) -> bool:
        """Whether the forward operator's result `rows` is [B, 2, H, T], of lse and lse_lo: in calls with a bias.

        Without a bias `rows` is lse [B, H, T]. The plan may not decide this: torch.compile asks for the result's shape
        before there is a plan.
        """
        return self.bias is not None

    def lse_of[Array: (torch.Tensor, jax.Array)](self, rows: Array) -> Array:
        """Returns lse [B, H, T] from the operator's result `rows`, which is [B, H, T], or with a bias [B, 2, H, T]."""
        return rows[:, 0] if self.has_lse_lo else rows


def need_gradient(tensors: Tensors[torch.Tensor]) -> bool:
    """Whether gradients are enabled and a tensor requires one."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors.differentiated)


class Options(NamedTuple):
    """The arguments of a call that are no tensors, in the order of the operators' arguments, after the tensors.

    window_left, window_right: -1 is no limit. q_offset: 0 if the offset is a tensor.
    """

    is_causal: bool
    window_left: int
    window_right: int
    q_offset: int
    scale: float | None
    softcap: float | None
    return_lse: bool
    deterministic: bool | None
    precision: str | None
    implementation: str | None


class BackwardArguments(NamedTuple):
    """The arguments of the backward operator that follow the forward's arguments.

    wanted: a bit mask; bit i is 1 if the i-th of (query, key, value, bias, sinks) gets a gradient. out, rows: the
    forward's results; rows is lse [B, H, T], or with a bias [B, 2, H, T] of lse and lse_lo. dout, drows: the
    gradients of out and rows, or None for zeros.
    """

    wanted: int
    out: torch.Tensor
    rows: torch.Tensor
    dout: torch.Tensor | None
    drows: torch.Tensor | None


class Arguments(NamedTuple):
    """The arguments of one of the three operators, by group.

    The operators are flash_attention (out and rows), flash_attention_inference (only out) and flash_attention_backward.
    backward: a BackwardArguments for the last one, else None.
    """

    tensors: Tensors[torch.Tensor]
    options: Options
    backward: Any

    @property
    def device(self) -> torch.device:
        return self.tensors.query.device


TENSORS, ALL = len(Tensors._fields), len(Tensors._fields) + len(Options._fields)


def split(arguments: Sequence[Any]) -> Arguments:
    """Groups the flat arguments of an operator by name.

    arguments: the tensors, the options, and in the backward operator also the fields of BackwardArguments, in this
    order.
    """
    return Arguments(
        tensors=Tensors(*arguments[:TENSORS]),
        options=Options(*arguments[TENSORS:ALL]),
        backward=BackwardArguments(*arguments[ALL:]) if len(arguments) > ALL else None,
    )


def _prepare(options: Options, *arrays):
    """Checks and plans a call as jax_kernels.flash_attention does.

    arrays: jax.Arrays or None, in the order of Tensors. Returns (the planned call, which has no arrays; the arrays that
    its kernels read).
    """
    arguments = Tensors(*arrays)._asdict()
    q_ids, kv_ids = arguments.pop("q_segment_ids"), arguments.pop("kv_segment_ids")
    statics = options._asdict()
    window = (statics.pop("window_left"), statics.pop("window_right"))
    if arguments["q_offset"] is None:
        del arguments["q_offset"]
    segment_ids = None if q_ids is None else q_ids if q_ids is kv_ids else (q_ids, kv_ids)
    from jax_kernels.ops.attention.flash_attention import prepare  # the kernels' modules, which take a second

    return prepare(FlashArguments(**statics | arguments, window=window, segment_ids=segment_ids))


@memoize
def _forward(device: torch.device, options: Options):
    """Returns the jitted forward, from the arrays of Tensors to (out, rows).

    rows: lse [B, H, T], or with a bias [B, 2, H, T] of lse and lse_lo. device: part of the cache key only. JAX
    plans during tracing, for the device that is current then, so the plan holds only for this device.
    """

    def forward(*arrays):
        from jax_kernels.ops.attention import vjp as attention

        call, inputs = _prepare(options, *arrays)
        out, lse, lse_lo = attention.attention_forward(call, inputs)
        if lse is None:  # unread, but the operator's results must not depend on the plan
            batch, length, heads = out.shape[:3]
            lse = jnp.zeros((batch, heads, length), jnp.float32)
        if not Tensors(*arrays).has_lse_lo:
            return out, lse
        return out, jnp.stack([lse, jnp.zeros_like(lse) if lse_lo is None else lse_lo], axis=1)

    jitted = jax.jit(named(forward, "flash_attention"), keep_unused=True)
    return describe(jitted, "flash_attention forward", options)


@memoize
def _inference(device: torch.device, options: Options):
    """Returns the jitted forward without lse, from the arrays of Tensors to (out,). device: only for the cache key."""

    def inference(*arrays):
        from jax_kernels.ops.attention import vjp as attention

        call, inputs = _prepare(options, *arrays)
        return (attention.attention_forward(attention.with_options(call, has_lse=False), inputs).out,)

    jitted = jax.jit(named(inference, "flash_attention"), keep_unused=True)
    return describe(jitted, "flash_attention inference", options)


def gradient_bits(needed: Sequence[bool | None]) -> int:
    """Returns BackwardArguments.wanted, an int whose bit i is 1 if needed[i] is true.

    needed: whether (query, key, value, bias, sinks) need a gradient, in this order. Further entries are ignored.
    """
    return sum(1 << index for index, is_needed in enumerate(needed[: len(DIFFERENTIATED)]) if is_needed)


def names_of(wanted: int) -> list[str]:
    """Returns the names of the tensors that get a gradient, in the order query, key, value, bias, sinks.

    wanted: an int; bit i is 1 if the i-th of these tensors gets a gradient.
    """
    return [name for index, name in enumerate(DIFFERENTIATED) if wanted >> index & 1]


@memoize
def _backward(device: torch.device, options: Options, wanted: int):
    """Returns the jitted backward, from the arrays of Tensors, then out, rows, dout and drows, to the wanted gradients.

    The gradients are in the order query, key, value, bias, sinks, without the unwanted ones. XLA removes computations
    that only unwanted gradients need. device: part of the cache key only. wanted: an int; bit i is 1 if the i-th of
    these tensors gets a gradient.
    """
    names = names_of(wanted)

    def backward(*arrays):
        from jax_kernels.ops.attention import vjp as attention

        tensors = Tensors(*arrays[:TENSORS])
        out, rows, dout, drows = arrays[TENSORS:]
        lse, dlse = tensors.lse_of(rows), None if drows is None else tensors.lse_of(drows)
        given = {name: getattr(tensors, name) for name in names}
        call, inputs = _prepare(options, *tensors)
        call = attention.with_options(call, bias_gradient="bias" in names)
        dout = jnp.zeros_like(out) if dout is None else dout
        lse_lo = rows[:, 1] if tensors.has_lse_lo else None
        result = AttentionResult(out=out, lse=lse, lse_lo=lse_lo)
        gradients = attention.attention_backward(call, inputs, result, dout, dlse)

        # prepare changes the arrays: their shapes, and query's sign for a negative scale.
        def prepared(given):
            _, inputs = _prepare(options, *tensors._replace(**given))
            return {name: getattr(inputs, name) for name in given}

        _, pullback = jax.vjp(prepared, given)
        (pulled,) = pullback({name: getattr(gradients, name) for name in given})
        return tuple(pulled[name] for name in names)

    jitted = jax.jit(named(backward, "flash_attention_backward"), keep_unused=True)
    return describe(jitted, "flash_attention backward", options, wanted)


def forward_program(*arguments):
    """Returns the JaxCall, a jitted function and its arguments, of the operator flash_attention: out and rows.

    The function's arguments are the fields of Tensors, None where the call lacks one. They may differ from the given
    tensors: see length_buckets.canonicalized. arguments: the operator's tensors, then its options.
    """
    call = length_buckets.canonicalized(split(arguments), ("bias", "mask", "key", "value"))
    return torch_operator.JaxCall(_forward(call.device, call.options), call.tensors)


def inference_program(*arguments):
    """Returns the JaxCall, a jitted function and its arguments, of the operator flash_attention_inference: only out.

    The function's arguments are the fields of Tensors, None where the call lacks one. They may differ from the given
    tensors: see length_buckets.canonicalized. arguments: the operator's tensors, then its options.
    """
    call = length_buckets.canonicalized(split(arguments), ("bias", "mask", "key", "value"))
    return torch_operator.JaxCall(_inference(call.device, call.options), call.tensors)


def backward_program(*arguments):
    """Returns the JaxCall, a jitted function and its arguments, of the operator flash_attention_backward.

    The function returns only the wanted gradients. Its arguments are the fields of Tensors, None where the call lacks
    one, then out, rows, dout and drows. arguments: the operator's tensors, options, and fields of BackwardArguments.
    """
    call = split(arguments)
    names = names_of(call.backward.wanted)
    call = length_buckets.canonicalized(call, [name for name in ("bias", "mask", "key", "value") if name not in names])
    wanted, *arrays = call.backward
    return torch_operator.JaxCall(_backward(call.device, call.options, wanted), (*call.tensors, *arrays))


def _gradients(*arguments):
    """Returns a function that turns the backward program's results into the operator's five results.

    The program computes only the wanted gradients. The operator returns one tensor for each of query, key, value, bias
    and sinks: an empty tensor for an unwanted gradient. arguments: the arguments of flash_attention_backward.
    """
    call = split(arguments)
    names, dtype, device = names_of(call.backward.wanted), call.tensors.query.dtype, call.device

    def unpack(found):
        named = dict(zip(names, found, strict=True))
        return tuple(
            named[name] if name in named else torch.empty(0, dtype=dtype, device=device) for name in DIFFERENTIATED
        )

    return unpack


class _Spec(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype


@functools.lru_cache(maxsize=1024)
def _check(device: torch.device, options: Options, *tensors: _Spec | None) -> None:
    """Raises the errors of jax_kernels.flash_attention for these shapes, dtypes and options. No kernel runs.

    device: the call is planned for this device; some errors depend on it. tensors: shape and
    dtype of each tensor, in the order of Tensors, or None.
    """
    specs = [None if x is None else jax.ShapeDtypeStruct(x.shape, dlpack.jax_dtype(x.dtype)) for x in tensors]

    def inputs(*tracers):
        _, checked = _prepare(options, *tracers)
        return checked

    with planning_device.planning_on(device):
        jax.eval_shape(inputs, *specs)


def _fake_forward(*arguments):
    """Returns empty tensors with the shapes and dtypes of flash_attention's results (out, rows), after shape checks."""
    call = split(arguments)
    tensors, options = call.tensors, call.options
    sizes = [size for tensor in tensors if tensor is not None for size in tensor.shape]
    if all(isinstance(x, int) for x in (*sizes, options.q_offset)):  # symbolic sizes are checked when the call runs
        _check(call.device, options, *(None if x is None else _Spec(tuple(x.shape), x.dtype) for x in tensors))
    batch, length, heads, _ = tensors.query.shape
    out = tensors.query.new_empty((batch, length, heads, tensors.value.shape[-1]))
    rows = (batch, 2, heads, length) if tensors.has_lse_lo else (batch, heads, length)
    return out, tensors.query.new_empty(rows, dtype=torch.float32)


def _fake_inference(*arguments):
    out, _ = _fake_forward(*arguments)
    return out


def _fake_backward(*arguments):
    """Returns empty tensors with the shapes of flash_attention_backward's results; unwanted gradients have size 0."""
    call = split(arguments)
    empty = lambda x: call.tensors.query.new_empty(0) if x is None else x.new_empty(x.shape)
    names = names_of(call.backward.wanted)
    return tuple(empty(getattr(call.tensors, name) if name in names else None) for name in DIFFERENTIATED)


class Attention(torch.autograd.Function):
    """The autograd function of flash_attention: operators compute its results and its gradients.

    The forward calls forward_op, the backward backward_op. It serves eager calls and the operators' "Autograd"
    implementation. A separate `setup_context` would add 20 microseconds to each call.
    """

    @staticmethod
    @torch_internals.skip_dynamo
    def forward(ctx, with_rows, *arguments):
        """Returns (out, rows), or only out. rows: lse [B, H, T], or with a bias [B, 2, H, T] of lse and lse_lo.

        with_rows: whether to return rows. arguments: the operator's arguments, the tensors then the options.
        """
        out, rows = torch_operator.inside_function(forward_op, *arguments)
        ctx.options = arguments[TENSORS:]
        ctx.save_for_backward(*arguments[:TENSORS], out, rows)
        ctx.set_materialize_grads(False)
        return (out, rows) if with_rows else out

    @staticmethod
    @torch_internals.skip_dynamo
    def backward(ctx, dout, drows=None):
        """Returns the gradient of each argument of forward: None for with_rows, the options and unwanted gradients."""
        if dout is None and drows is None:
            return (None,) * (1 + ALL)
        *tensors, out, rows = ctx.saved_tensors
        _, *needed = ctx.needs_input_grad
        differentiated = needed[: len(DIFFERENTIATED)]
        extra = BackwardArguments(wanted=gradient_bits(differentiated), out=out, rows=rows, dout=dout, drows=drows)
        gradients = torch_operator.call_in_backward(backward_op, *tensors, *ctx.options, *extra)
        found = (x if is_needed else None for x, is_needed in zip(gradients, differentiated, strict=True))
        return (None, *found, *(None,) * (ALL - len(DIFFERENTIATED)))

    @staticmethod
    def jvp(ctx, *tangents):
        torch_operator.refuse_tangent("flash_attention")


def _differentiate_backward(*arguments):
    """Runs the backward operator so that a second derivative raises. arguments: the operator's."""
    again = lambda *arguments: torch_operator.inside_function(backward_op, *arguments)
    return torch_operator.refuse_gradient("flash_attention", again, arguments)


def _label(*arguments):
    return "flash_attention"


_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? sinks, Tensor? mask, Tensor? q_segment_ids, "
    "Tensor? kv_segment_ids, Tensor? kv_lengths, Tensor? q_offset_array, "
    "bool is_causal, int window_left, int window_right, SymInt q_offset, float? scale, float? softcap, "
    "bool return_lse, bool? deterministic, str? precision, str? implementation"
)

forward_op = torch_operator.define_operator(
    "flash_attention",
    f"({_ARGUMENTS}) -> (Tensor, Tensor)",
    program=forward_program,
    unpack=lambda *arguments: tuple,
    fake=_fake_forward,
    differentiate=lambda *arguments: torch_operator.apply(Attention, True, *arguments),
    label=_label,
)
inference_op = torch_operator.define_operator(
    "flash_attention_inference",
    f"({_ARGUMENTS}) -> Tensor",
    program=inference_program,
    unpack=lambda *arguments: operator.itemgetter(0),
    fake=_fake_inference,
    differentiate=lambda *arguments: torch_operator.apply(Attention, False, *arguments),
    label=_label,
)
backward_op = torch_operator.define_operator(
    "flash_attention_backward",
    f"({_ARGUMENTS}, int wanted, Tensor out, Tensor rows, Tensor? dout, Tensor? drows) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    program=backward_program,
    unpack=_gradients,
    fake=_fake_backward,
    differentiate=_differentiate_backward,
    label=_label,
)
