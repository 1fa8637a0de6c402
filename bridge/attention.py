"""flash_attention on PyTorch tensors: its operators and their gradient."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch

from jax_kernels.bridge import dlpack, library
from jax_kernels.ops import attention

__all__ = ["check_tensor", "flash_attention"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class _Options(NamedTuple):
    """The static arguments of a call, in the operators' order."""

    is_causal: bool
    q_offset: int
    scale: float | None
    return_lse: bool
    deterministic: bool | None
    precision: str | None
    implementation: str | None


_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? kv_lengths, Tensor? q_offset_array, "
    "bool is_causal, SymInt q_offset, float? scale, bool return_lse, bool? deterministic, str? precision, "
    "str? implementation"
)


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    bias: Any = None,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    window: Any = None,
    segment_ids: Any = None,
    kv_lengths: torch.Tensor | None = None,
    q_offset: int | torch.Tensor = 0,
    score_mod: Any = None,
    sinks: Any = None,
    scale: float | None = None,
    softcap: Any = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    precision: str | None = None,
    implementation: str | None = None,
) -> Any:
    """jax_kernels.flash_attention on PyTorch tensors, with gradients of query, key, value, also through lse.

    It runs on the tensors' own device, queued after the work on PyTorch's current stream and never waiting for
    the GPU on the host. Inputs are read in place where they are contiguous and aligned to 16 bytes, else
    copied; each result is copied once, from JAX's memory to a tensor that PyTorch owns (4 bytes of traffic
    for each element of a bfloat16 result), so that it may be used on any stream. It works under torch.compile
    (fullgraph=True, one JAX compilation for each set of shapes), autocast (query, key and value are cast to the
    autocast dtype), activation checkpointing, torch.export, torch.func.grad and torch.func.vmap. It cannot be
    captured in a CUDA graph, nor differentiated twice.

    Args:
      query: [B, T, H, D], bfloat16, float16 or float32, on a CPU or a CUDA device.
      key: [B, S, Hkv, D]; value: [B, S, Hkv, Dv]; in query's dtype and on its device.
      mask: bool, broadcastable to [B, H, T, S], True where a query may attend.
      kv_lengths: [B] int32.
      q_offset: an int, or an int32 tensor, a scalar or [B].
      deterministic: None follows torch.use_deterministic_algorithms, and where that is off, XLA's flag.
      The others are those of jax_kernels.flash_attention.

    Returns:
      out [B, T, H, Dv] in query's dtype; with return_lse, (out, lse), lse float32 [B, H, T].

    Raises:
      TypeError: an argument is not a tensor, or has a dtype that is not taken.
      ValueError: shapes do not fit together, tensors are on several devices, or on one that is not served.
      NotImplementedError: an argument, or a named implementation, that cannot serve this call, and why.
      RuntimeError: on differentiating twice, while capturing a CUDA graph, or where JAX lacks the device.
    """
    later = {"bias": bias, "window": window, "segment_ids": segment_ids}
    later |= {"score_mod": score_mod, "sinks": sinks, "softcap": softcap}
    if any(argument is not None for argument in later.values()):
        _refuse(later)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, tensor, query)
        if tensor.dtype not in _DTYPES:
            raise TypeError(
                f"{name}: got dtype {tensor.dtype}, want torch.bfloat16, torch.float16 or torch.float32; cast it, with "
                f"{name}.to(torch.float32)"
            )
        if tensor.ndim != 4:
            raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, want 4 axes [batch, length, heads, head_dim]")
    if mask is not None:
        check_tensor("mask", mask, query)
        if mask.dtype != torch.bool:
            raise TypeError(
                f"mask: got dtype {mask.dtype}, want torch.bool (True = attend); an additive mask is a bias"
            )
    if kv_lengths is not None:
        _check_int32("kv_lengths", kv_lengths, query)
    q_offset_array = None
    if isinstance(q_offset, torch.Tensor):
        _check_int32("q_offset", q_offset, query)
        q_offset_array, q_offset = q_offset, 0
    elif isinstance(q_offset, bool) or not isinstance(q_offset, int | torch.SymInt):
        raise TypeError(f"q_offset: got {type(q_offset).__name__}, want an int or an int32 tensor")
    _check_statics(is_causal, scale, return_lse, deterministic, precision, implementation)

    if deterministic is None and torch.are_deterministic_algorithms_enabled():
        deterministic = True
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)

    key, value = library.distinct(key, [query]), library.distinct(value, [query, key])
    options = (is_causal, q_offset, scale, return_lse, deterministic, precision, implementation)
    arguments = (query, key, value, mask, kv_lengths, q_offset_array, *options)
    if library.transforming():
        out, lse = _TransformedAttention.apply(*arguments)
        return (out, lse) if return_lse else out
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return _Attention.apply(*arguments)
    return _forward_op(*arguments) if return_lse else _inference_op(*arguments)


def _refuse(later: dict[str, Any]) -> None:
    """Raises for arguments that the operators do not carry, what JAX's function raises wherever it does."""
    attention.prepare(query=None, key=None, value=None, **later)
    names = ", ".join(name for name, value in later.items() if value is not None)
    raise NotImplementedError(f"{names}: not served yet on PyTorch tensors; want None")


def check_tensor(name: str, tensor: Any, query: torch.Tensor) -> None:
    """Raises, naming the argument, unless it is a dense tensor on query's device, a CPU or a CUDA one."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: got {type(tensor).__module__}.{type(tensor).__name__}, want a torch.Tensor")
    if tensor.layout != torch.strided:
        raise ValueError(f"{name}: got layout {tensor.layout}, want a dense tensor; convert it with .to_dense()")
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name}: got a tensor on {tensor.device}, want one on a CPU or a CUDA device")
    if tensor.device != query.device:
        raise ValueError(f"{name}: got a tensor on {tensor.device}, want query's device {query.device}")


def _check_int32(name: str, tensor: Any, query: torch.Tensor) -> None:
    check_tensor(name, tensor, query)
    if tensor.dtype != torch.int32:
        raise TypeError(f"{name}: got dtype {tensor.dtype}, want torch.int32; cast it with {name}.to(torch.int32)")


def _check_statics(is_causal, scale, return_lse, deterministic, precision, implementation) -> None:
    for name, flag in (("is_causal", is_causal), ("return_lse", return_lse)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name}: got {type(flag).__name__}, want a bool")
    if deterministic is not None and not isinstance(deterministic, bool):
        raise TypeError(f"deterministic: got {type(deterministic).__name__}, want True, False or None")
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, int | float)):
        raise TypeError(f"scale: got {type(scale).__name__}, want a number")
    for name, choice in (("precision", precision), ("implementation", implementation)):
        if choice is not None and not isinstance(choice, str):
            raise TypeError(f"{name}: got {type(choice).__name__}, want a name or None")


def _prepare(options: _Options, query, key, value, mask, kv_lengths, q_offset_array):
    arguments = options._asdict()
    if q_offset_array is not None:
        arguments["q_offset"] = q_offset_array
    return attention.prepare(query=query, key=key, value=value, mask=mask, kv_lengths=kv_lengths, **arguments)


@functools.cache
def _forward(device: torch.device, options: _Options):
    """The jitted forward. One for each device, as a plan made while tracing holds for that device alone."""

    def forward(*arrays):
        call, prepared = _prepare(options, *arrays)
        out, lse = attention.attention_forward(call, *prepared)
        if lse is None:  # nothing reads it, but the operator's results must not depend on the plan
            batch, length, heads = out.shape[:3]
            lse = jnp.zeros((batch, heads, length), jnp.float32)
        return out, lse

    return jax.jit(forward)


@functools.cache
def _inference(device: torch.device, options: _Options):
    forward = _forward(device, options)
    return jax.jit(lambda *arrays: forward(*arrays)[:1])


@functools.cache
def _backward(device: torch.device, options: _Options):
    def backward(query, key, value, mask, kv_lengths, q_offset_array, out, lse, dout, dlse):
        def prepare(query, key, value):
            return _prepare(options, query, key, value, mask, kv_lengths, q_offset_array)

        call, arrays = prepare(query, key, value)
        # prepare may change query, key and value, as it does for a negative scale.
        _, pullback = jax.vjp(lambda *qkv: prepare(*qkv)[1][:3], query, key, value)
        dout = jnp.zeros_like(out) if dout is None else dout
        arguments = (call, *arrays, out, lse, dout, dlse)
        return pullback(attention.attention_backward(*arguments))

    return jax.jit(backward)


def _forward_kernel(query, *rest):
    return tuple(library.run(_forward(query.device, _Options(*rest[5:])), (query, *rest[:5])))


def _inference_kernel(query, *rest):
    return library.run(_inference(query.device, _Options(*rest[5:])), (query, *rest[:5]))[0]


def _backward_kernel(query, *rest):
    function = _backward(query.device, _Options(*rest[5:12]))
    return tuple(library.run(function, (query, *rest[:5], *rest[12:])))


@functools.lru_cache(maxsize=1024)
def _check(device: torch.device, options: _Options, *arrays: tuple[tuple[int, ...], torch.dtype] | None) -> None:
    """JAX's own checks, without running anything."""
    specs = [None if x is None else jax.ShapeDtypeStruct(x[0], dlpack.jax_dtype(x[1])) for x in arrays]
    with library.planning_for(device):
        jax.eval_shape(lambda *tracers: _prepare(options, *tracers)[1], *specs)


def _fake_forward(query, key, value, mask, kv_lengths, q_offset_array, *options):
    tensors = (query, key, value, mask, kv_lengths, q_offset_array)
    sizes = [size for tensor in tensors if tensor is not None for size in tensor.shape]
    if all(isinstance(x, int) for x in (*sizes, options[1])):  # symbolic sizes are checked when it runs
        signatures = [None if x is None else (tuple(x.shape), x.dtype) for x in tensors]
        _check(query.device, _Options(*options), *signatures)
    batch, length, heads, _ = query.shape
    out = query.new_empty((batch, length, heads, value.shape[-1]))
    return out, query.new_empty((batch, heads, length), dtype=torch.float32)


def _fake_backward(query, key, value, *_):
    return tuple(tensor.new_empty(tensor.shape) for tensor in (query, key, value))


_forward_op = library.define("flash_attention", f"({_ARGUMENTS}) -> (Tensor, Tensor)", _forward_kernel, _fake_forward)
_inference_op = library.define(
    "flash_attention_inference",
    f"({_ARGUMENTS}) -> Tensor",
    _inference_kernel,
    lambda *arguments: _fake_forward(*arguments)[0],
)
_backward_op = library.define(
    "flash_attention_backward",
    f"({_ARGUMENTS}, Tensor out, Tensor lse, Tensor? dout, Tensor? dlse) -> (Tensor, Tensor, Tensor)",
    _backward_kernel,
    _fake_backward,
)


def _vmap_rule(op):
    """What torch.func.vmap does with one of the operators: the mapped axis joins the batch."""

    def rule(info, in_dims, *arguments):
        size = info.batch_size
        front = [x if dim is None else x.movedim(dim, 0) for x, dim in zip(arguments, in_dims, strict=True)]
        mapped = [dim is not None for dim in in_dims]
        batch = front[0].shape[1 if mapped[0] else 0]

        def join(x, is_mapped):
            if x is None:
                return None
            x = x if is_mapped else x.expand(size, *x.shape)
            return x.flatten(0, 1)

        def join_mask(x, is_mapped):
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

        joins = (join, join, join, join_mask, join, join_offset)
        head = [f(x, m) for f, x, m in zip(joins, front[:6], mapped[:6], strict=True)]
        tail = [join(x, m) for x, m in zip(front[13:], mapped[13:], strict=True)]
        results = op(*head, *front[6:13], *tail)
        if isinstance(results, torch.Tensor):
            return results.unflatten(0, (size, batch)), 0
        return tuple(x.unflatten(0, (size, batch)) for x in results), (0,) * len(results)

    return rule


library.define_vmap("flash_attention", _vmap_rule(_forward_op))
library.define_vmap("flash_attention_inference", _vmap_rule(_inference_op))
library.define_vmap("flash_attention_backward", _vmap_rule(_backward_op))


class _Backward(torch.autograd.Function):
    """The gradient, where autograd watches it: it cannot be differentiated again, and says so."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments):
        return _backward_op(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    backward = library.refuse_double_backward("flash_attention")


def _gradients(ctx, dout, dlse):
    if dout is None and dlse is None:
        return (None,) * 13
    *arrays, out, lse = ctx.saved_tensors
    arguments = (*arrays, *ctx.options, out, lse, dout, dlse)
    gradients = _Backward.apply(*arguments) if torch.is_grad_enabled() else _backward_op(*arguments)
    wanted = (x if needed else None for x, needed in zip(gradients, ctx.needs_input_grad, strict=False))
    return (*wanted, *(None,) * 10)


class _Attention(torch.autograd.Function):
    """The forward of eager mode. A `setup_context` of its own would add 20 microseconds to each call."""

    @staticmethod
    def forward(ctx, *arguments):
        out, lse = _forward_op(*arguments)
        ctx.options = arguments[6:]
        ctx.save_for_backward(*arguments[:6], out, lse)
        ctx.set_materialize_grads(False)
        return (out, lse) if _Options(*ctx.options).return_lse else out

    @staticmethod
    def backward(ctx, dout, dlse=None):
        return _gradients(ctx, dout, dlse)


class _TransformedAttention(torch.autograd.Function):
    """The forward under torch.func's transforms, which need `setup_context`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments):
        return _forward_op(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.options = inputs[6:]
        ctx.save_for_backward(*inputs[:6], *output)
        ctx.set_materialize_grads(False)
        if not _Options(*ctx.options).return_lse:
            ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, dout, dlse):
        return _gradients(ctx, dout, dlse)
