"""flash_attention on PyTorch tensors: its operators and their gradient."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch

from jax_kernels.attention_inputs import AttentionResult
from jax_kernels.bridge import dlpack, library, sparse_attention
from jax_kernels.bridge.attention_checks import as_torch_is_set, check_inputs, check_statics, segment_pair, window_sides
from jax_kernels.bridge.once import once
from jax_kernels.masks import Mask
from jax_kernels.ops.attention import flash_attention as attention

__all__ = ["flash_attention"]


class _Tensors(NamedTuple):
    """The tensors of a call, in the operators' order. The first five have a gradient."""

    query: Any
    key: Any
    value: Any
    bias: Any
    sinks: Any
    mask: Any
    q_segment_ids: Any
    kv_segment_ids: Any
    kv_lengths: Any
    q_offset: Any


class _Options(NamedTuple):
    """The static arguments of a call, in the operators' order, after the tensors. q_offset: where it is no tensor."""

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


_DIFFERENTIATED = ("query", "key", "value", "bias", "sinks")
_TENSORS, _ALL = len(_Tensors._fields), len(_Tensors._fields) + len(_Options._fields)

_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? sinks, Tensor? mask, Tensor? q_segment_ids, "
    "Tensor? kv_segment_ids, Tensor? kv_lengths, Tensor? q_offset_array, "
    "bool is_causal, int window_left, int window_right, SymInt q_offset, float? scale, float? softcap, "
    "bool return_lse, bool? deterministic, str? precision, str? implementation"
)


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | Mask | None = None,
    is_causal: bool = False,
    window: int | tuple[int, int] | None = None,
    segment_ids: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    kv_lengths: torch.Tensor | None = None,
    q_offset: int | torch.Tensor = 0,
    score_mod: Any = None,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    precision: str | None = None,
    implementation: str | None = None,
) -> Any:
    """jax_kernels.flash_attention on PyTorch tensors: gradients of query, key, value, bias, sinks, also through lse.

    It runs on the tensors' own device, queued after the work on PyTorch's current stream and never waiting for
    the GPU on the host. Inputs are read in place where they are contiguous and aligned to 16 bytes, else
    copied; each result is copied once, from JAX's memory to a tensor that PyTorch owns (4 bytes of traffic
    for each element of a bfloat16 result), so that it may be used on any stream. It works under torch.compile
    (fullgraph=True, one JAX compilation for each set of shapes), autocast (query, key, value and a 16-bit bias are
    cast to the autocast dtype), activation checkpointing, torch.export, torch.func.grad and torch.func.vmap (a loop,
    where the mapped calls have sinks of their own, or gradients of a bias or of sinks). It cannot be captured in a
    CUDA graph, nor differentiated twice or in forward mode.

    Args:
      query: [B, T, H, D], bfloat16, float16 or float32, on a CPU or a CUDA device.
      key: [B, S, Hkv, D]; value: [B, S, Hkv, Dv]; in query's dtype and on its device.
      bias: broadcastable to [B, H, T, S], in query's dtype or float32.
      mask: bool, broadcastable to [B, H, T, S], True where a query may attend. Or a masks.Mask, prepared by
        prepare_mask or not. Its arrays get no gradient; those on another device than query are copied to it, those of
        JAX once for each Mask.
      segment_ids: int32 [B, T], or a (query, key) pair [B, T], [B, S].
      kv_lengths: [B] int32.
      q_offset: an int, or an int32 tensor, a scalar or [B].
      score_mod: a function of JAX scalars, as jax_kernels.flash_attention takes it, a constant of the call. What it
        closes over is JAX's, and gets no gradient here; bridge.from_jax of a function that closes over its arguments
        gives them one.
      sinks: [H], bfloat16, float16 or float32.
      deterministic: None follows torch.use_deterministic_algorithms, and where that is off, XLA's flag.
      The others are those of jax_kernels.flash_attention.

    With a Mask or a score_mod it runs as bridge.from_jax says: for each other function, structure of a Mask, and set of
    shapes, also of a Mask's arrays, JAX compiles anew, and keeps it. With a Mask torch.compile has a graph break here.
    A Mask is the same for all calls that torch.func.vmap maps.

    Returns:
      out [B, T, H, Dv] in query's dtype; with return_lse, (out, lse), lse float32 [B, H, T].

    Raises:
      TypeError: an argument is not a tensor, or has a dtype that is not taken.
      ValueError: shapes do not fit together, tensors are on several devices, or on one that is not served.
      NotImplementedError: an argument, or a named implementation, that cannot serve this call, and why; on
        differentiating in forward mode (torch.func.jvp, torch.autograd.forward_ad).
      RuntimeError: on differentiating twice, while capturing a CUDA graph, or where JAX lacks the device.
    """
    if score_mod is not None or isinstance(mask, Mask):
        return sparse_attention.attend(**locals())
    q_ids, kv_ids = segment_pair(segment_ids)
    check_inputs(query, key, value, bias, sinks, mask, (q_ids, kv_ids), kv_lengths, q_offset)
    check_statics(is_causal, scale, softcap, return_lse, deterministic, precision, implementation)
    q_offset_array = None
    if isinstance(q_offset, torch.Tensor):
        q_offset_array, q_offset = q_offset, 0

    query, key, value, bias, deterministic = as_torch_is_set(query, key, value, bias, deterministic)
    tensors = (query, key, value, bias, sinks, mask, q_ids, kv_ids, kv_lengths, q_offset_array)
    options = (is_causal, *window_sides(window), q_offset, scale, softcap)
    arguments = (*tensors, *options, return_lse, deterministic, precision, implementation)
    operator = _forward_op if return_lse else _inference_op
    if not library.is_plain_call():
        results = operator(*arguments)
    elif torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors[: len(_DIFFERENTIATED)]):
        results = _Attention.apply(return_lse, *arguments)
    else:
        results = library.below_autograd(operator, *arguments)
    if not return_lse:
        return results
    out, rows = results
    return out, rows if bias is None else rows[:, 0]


def _prepare(options: _Options, *arrays):
    arguments = _Tensors(*arrays)._asdict()
    q_ids, kv_ids = arguments.pop("q_segment_ids"), arguments.pop("kv_segment_ids")
    statics = options._asdict()
    window = (statics.pop("window_left"), statics.pop("window_right"))
    if arguments["q_offset"] is None:
        del arguments["q_offset"]
    segment_ids = None if q_ids is None else q_ids if q_ids is kv_ids else (q_ids, kv_ids)
    return attention.prepare(**statics | arguments, window=window, segment_ids=segment_ids)


@once
def _forward(device: torch.device, options: _Options):
    """The jitted forward: (out, rows). One for each device, as a plan made while tracing holds for that device alone.

    rows: lse [B, H, T], with a bias [B, 2, H, T] of lse and what the exact log-sum-exp is more than it.
    """

    def forward(*arrays):
        call, inputs = _prepare(options, *arrays)
        out, lse, excess = attention.attention_forward(call, inputs)
        if lse is None:  # nothing reads it, but the operator's results must not depend on the plan
            batch, length, heads = out.shape[:3]
            lse = jnp.zeros((batch, heads, length), jnp.float32)
            excess = None if inputs.bias is None else lse
        return out, lse if excess is None else jnp.stack([lse, excess], axis=1)

    return jax.jit(forward)


@once
def _inference(device: torch.device, options: _Options):
    forward = _forward(device, options)
    return jax.jit(lambda *arrays: forward(*arrays)[:1])


@once
def _backward(device: torch.device, options: _Options, bias_gradient: bool):
    """The jitted backward: the gradients of what there is of _DIFFERENTIATED, and of bias where it is asked for."""

    def backward(*arguments):
        tensors, (out, rows, dout, drows) = _Tensors(*arguments[:_TENSORS]), arguments[_TENSORS:]
        lse, dlse, excess = rows, drows, None
        if tensors.bias is not None:
            lse, excess = rows[:, 0], rows[:, 1]
            dlse = None if drows is None else drows[:, 0]
        given = {name: x for name, x in tensors._asdict().items() if name in _DIFFERENTIATED and x is not None}
        if not bias_gradient:
            given.pop("bias", None)
        call, inputs = _prepare(options, *tensors)
        call = dataclasses.replace(call, options=dataclasses.replace(call.options, bias_gradient=bias_gradient))
        dout = jnp.zeros_like(out) if dout is None else dout
        result = AttentionResult(out, lse, excess)
        gradients = attention.attention_backward(call, inputs, result, dout, dlse)

        # prepare changes the arrays: their shapes, and query's sign for a negative scale.
        def prepared(given):
            inputs = _prepare(options, *tensors._replace(**given))[1]
            return {name: getattr(inputs, name) for name in given}

        pullback = jax.vjp(prepared, given)[1]
        return tuple(pullback({name: getattr(gradients, name) for name in given})[0][name] for name in given)

    return jax.jit(backward)


def _forward_kernel(*arguments):
    tensors, options = arguments[:_TENSORS], _Options(*arguments[_TENSORS:])
    return tuple(library.run(_forward(tensors[0].device, options), tensors))


def _inference_kernel(*arguments):
    tensors, options = arguments[:_TENSORS], _Options(*arguments[_TENSORS:])
    return library.run(_inference(tensors[0].device, options), tensors)[0]


def _with_gradient(tensors, bias_gradient):
    """For each of _DIFFERENTIATED, whether the backward gives its gradient; else it gives an empty tensor."""
    present = dict(zip(_DIFFERENTIATED, (x is not None for x in tensors), strict=False))
    return list((present | {"bias": present["bias"] and bias_gradient}).values())


def _backward_kernel(*arguments):
    tensors, options, bias_gradient = arguments[:_TENSORS], _Options(*arguments[_TENSORS:_ALL]), arguments[_ALL]
    function = _backward(tensors[0].device, options, bias_gradient)
    gradients = iter(library.run(function, (*tensors, *arguments[_ALL + 1 :])))
    given = _with_gradient(tensors, bias_gradient)
    return tuple(next(gradients) if there else tensors[0].new_empty(0) for there in given)


@functools.lru_cache(maxsize=1024)
def _check(device: torch.device, options: _Options, *arrays: tuple[tuple[int, ...], torch.dtype] | None) -> None:
    """JAX's own checks, without running anything."""
    specs = [None if x is None else jax.ShapeDtypeStruct(x[0], dlpack.jax_dtype(x[1])) for x in arrays]
    with library.planning_for(device):
        jax.eval_shape(lambda *tracers: _prepare(options, *tracers)[1], *specs)


def _fake_forward(*arguments):
    tensors, options = _Tensors(*arguments[:_TENSORS]), _Options(*arguments[_TENSORS:])
    sizes = [size for tensor in tensors if tensor is not None for size in tensor.shape]
    if all(isinstance(x, int) for x in (*sizes, options.q_offset)):  # symbolic sizes are checked when it runs
        signatures = [None if x is None else (tuple(x.shape), x.dtype) for x in tensors]
        _check(tensors.query.device, options, *signatures)
    batch, length, heads, _ = tensors.query.shape
    out = tensors.query.new_empty((batch, length, heads, tensors.value.shape[-1]))
    rows = (batch, heads, length) if tensors.bias is None else (batch, 2, heads, length)
    return out, tensors.query.new_empty(rows, dtype=torch.float32)


def _fake_backward(*arguments):
    given = _with_gradient(arguments, arguments[_ALL])
    return tuple(
        x.new_empty(x.shape) if there else arguments[0].new_empty(0) for x, there in zip(arguments, given, strict=False)
    )


def _gradients(ctx, dout, drows):
    if dout is None and drows is None:
        return (None,) * (1 + _ALL)
    *tensors, out, rows = ctx.saved_tensors
    _, *needed = ctx.needs_input_grad
    bias_gradient = _Tensors(*needed[:_TENSORS]).bias
    gradients = library.call_in_backward(_backward_op, *tensors, *ctx.options, bias_gradient, out, rows, dout, drows)
    wanted = (x if is_needed else None for x, is_needed in zip(gradients, needed, strict=False))
    return (None, *wanted, *(None,) * (_ALL - len(_DIFFERENTIATED)))


class _Attention(torch.autograd.Function):
    """Attention with its gradient. A `setup_context` of its own would add 20 microseconds to each call."""

    @staticmethod
    def forward(ctx, with_rows, *arguments):
        """(out, rows), or out alone."""
        out, rows = library.below_function(_forward_op, *arguments)
        ctx.options = arguments[_TENSORS:]
        ctx.save_for_backward(*arguments[:_TENSORS], out, rows)
        ctx.set_materialize_grads(False)
        return (out, rows) if with_rows else out

    @staticmethod
    def backward(ctx, dout, drows=None):
        return _gradients(ctx, dout, drows)

    @staticmethod
    def jvp(ctx, *tangents):
        library.refuse_tangent("flash_attention")


def _differentiate_backward(*arguments):
    again = lambda *arguments: library.below_function(_backward_op, *arguments)
    return library.refuse_gradient("flash_attention", again, arguments)


_forward_op = library.define(
    "flash_attention",
    f"({_ARGUMENTS}) -> (Tensor, Tensor)",
    _forward_kernel,
    _fake_forward,
    lambda *arguments: library.apply(_Attention, True, *arguments),
    lambda *arguments: "flash_attention",
)
_inference_op = library.define(
    "flash_attention_inference",
    f"({_ARGUMENTS}) -> Tensor",
    _inference_kernel,
    lambda *arguments: _fake_forward(*arguments)[0],
    lambda *arguments: library.apply(_Attention, False, *arguments),
    lambda *arguments: "flash_attention",
)
_backward_op = library.define(
    "flash_attention_backward",
    f"({_ARGUMENTS}, bool bias_gradient, Tensor out, Tensor rows, Tensor? dout, Tensor? drows) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward_kernel,
    _fake_backward,
    _differentiate_backward,
    lambda *arguments: "flash_attention",
)


def _vmap_rule(op):
    """What torch.func.vmap does with one of the operators: the mapped axis joins the batch."""

    def rule(info, in_dims, *arguments):
        size = info.batch_size
        front = [x if dim is None else x.movedim(dim, 0) for x, dim in zip(arguments, in_dims, strict=True)]
        mapped = [dim is not None for dim in in_dims]
        tensors, is_mapped = _Tensors(*front[:_TENSORS]), _Tensors(*mapped[:_TENSORS])
        batch = tensors.query.shape[1 if is_mapped.query else 0]
        # All entries of a batch have the same sinks, and add to the gradient of sinks, or of a bias, that they share.
        shared = op is _backward_op and (tensors.sinks is not None or (tensors.bias is not None and arguments[_ALL]))
        if is_mapped.sinks or shared:
            each = [op(*(x[i] if m else x for x, m in zip(front, mapped, strict=True))) for i in range(size)]
            if isinstance(each[0], torch.Tensor):
                return torch.stack(each), 0
            return tuple(torch.stack(x) for x in zip(*each, strict=True)), (0,) * len(each[0])

        def join(x, is_mapped):
            if x is None:
                return None
            x = x if is_mapped else x.expand(size, *x.shape)
            return x.flatten(0, 1)

        def join_scores(x, is_mapped):
            """Of what is broadcast to [B, H, T, S]."""
            if x is None or (not is_mapped and (x.ndim < 4 or x.shape[0] == 1)):
                return x
            shape = x.shape[1:] if is_mapped else x.shape
            ones = (1,) * (4 - len(shape))
            x = x.reshape(size if is_mapped else 1, *ones, *shape)
            return x.expand(size, batch, *x.shape[2:]).flatten(0, 1)

        def join_offset(x, is_mapped):
            if x is None or (not is_mapped and x.ndim == 0):
                return x
            x = x.reshape(size if is_mapped else 1, -1)
            return x.expand(size, batch).flatten()

        own = {"bias": join_scores, "sinks": lambda x, _: x, "mask": join_scores, "q_offset": join_offset}
        names = _Tensors._fields
        head = [own.get(n, join)(x, m) for n, x, m in zip(names, tensors, is_mapped, strict=True)]
        statics = _ALL + (op is _backward_op)
        tail = [join(x, m) for x, m in zip(front[statics:], mapped[statics:], strict=True)]
        results = op(*head, *front[_TENSORS:statics], *tail)
        if isinstance(results, torch.Tensor):
            return results.unflatten(0, (size, batch)), 0
        split = lambda x: x.unflatten(0, (size, batch)) if x.ndim > 1 else x.new_empty(size, 0)
        return tuple(split(x) for x in results), (0,) * len(results)

    return rule


library.define_vmap("flash_attention", _vmap_rule(_forward_op))
library.define_vmap("flash_attention_inference", _vmap_rule(_inference_op))
library.define_vmap("flash_attention_backward", _vmap_rule(_backward_op))
