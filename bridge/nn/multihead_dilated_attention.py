"""Multi-head dilated attention as a PyTorch module."""

import contextlib
import itertools
import math
import numbers
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import torch
from torch.nn import functional

from jax_kernels import dispatch
from jax_kernels.bridge.interop import dlpack, planning_device
from jax_kernels.bridge.interop.arguments.plain_numbers import plain_arguments
from jax_kernels.bridge.jax_functions.argument_checks import FLOATS, check_float_dtype, check_tensors
from jax_kernels.bridge.jax_functions.argument_names import rename
from jax_kernels.bridge.nn.layers import check_flags, empty_attention, positive
from jax_kernels.bridge.ops import symbolic_trace
from jax_kernels.bridge.ops.attention.dilated_attention import dilated_attention
from jax_kernels.bridge.ops.explain import benchmark_implementations
from jax_kernels.device import DeviceInfo, device_info
from jax_kernels.dispatch import explain
from jax_kernels.ops.attention.implementations import IMPLEMENTATIONS
from jax_kernels.ops.dilated import dilated_attention as ops
from jax_kernels.ops.dilated.checks import check_pattern

__all__ = ["MultiheadDilatedAttention"]

# Names of kernels in dilated-attention-pytorch and its forks. Each means None.
_FASTEST = ("auto", "sdpa", "flash", "flash_attn", "flash_attn_2", "flash_attn_3", "xformers", "manual")


def _checked_backend(backend: str | None) -> str | None:
    """Returns the implementation that attention_backend names; None if the op may choose it.

    None for None, and for other libraries' names of kernels, such as "auto" or "flash_attn". Raises TypeError for a
    value that is neither a string nor None, ValueError for an unknown name.
    """
    if backend is None:
        return None
    if not isinstance(backend, str):
        raise TypeError(f"attention_backend: got {type(backend).__name__}, want a name or None")
    if backend not in (*IMPLEMENTATIONS, *_FASTEST):
        known = ", ".join(map(repr, (*IMPLEMENTATIONS, *_FASTEST)))
        raise ValueError(f"attention_backend: got {backend!r}, want one of {known}, or None")
    return None if backend in _FASTEST else backend


@contextlib.contextmanager
def _by_own_name() -> Iterator[None]:
    """A context manager that replaces `implementation` by `attention_backend` in the errors raised inside it."""
    try:
        yield
    except (NotImplementedError, ValueError) as error:
        rename(error, implementation="attention_backend")
        raise


class _Timed(NamedTuple):
    """The result of benchmark_backends: the fastest implementation, and the device and dtype that were timed.

    It is the module's implementation only while the module's parameters have this device and dtype.
    """

    device: torch.device
    dtype: torch.dtype
    fastest: str


class MultiheadDilatedAttention(torch.nn.Module):
    """Multi-head dilated attention, batch first, with MAGNETO's LayerNorm and initialisation.

    state_dict() has the names and shapes of dilated-attention-pytorch: q_proj, k_proj, v_proj and out_proj with weight
    [embed_dim, embed_dim] and, with bias, bias [embed_dim]; with layer_norm also norm.weight and norm.bias. A state
    dict with a fused qkv_proj [3 * embed_dim, embed_dim] can be loaded.
    Its attention differs from that package in one point: it does not divide outputs by their sum over the segment. This
    division is no mean, and it shows later tokens to every token.

    Args:
      embed_dim: width of input and output; a multiple of num_heads, with heads of at most 256.
      segment_lengths, dilation_rates: one value per branch. A branch cuts the sequence into segments of its length. In
        a segment, every rate-th token takes part; these tokens attend to each other. The first one depends on the head.
      dropout: the probability with which elements of the output are zeroed in training. Attention weights are not
        dropped: they are never stored.
      bias: whether the projections have a bias.
      layer_norm: whether there is a LayerNorm before out_proj. layer_norm_eps: its epsilon.
      gamma_init: the projections' weights are Xavier normal; the weights of v_proj and out_proj are multiplied by this.
      attention_backend: the implementation, "mosaic_gpu", "triton" or "xla". None picks the device's first that
        supports the call. So do other libraries' names of kernels: "auto", "sdpa", "flash", "flash_attn",
        "flash_attn_2", "flash_attn_3", "xformers" and "manual".
      dtype, device: of the parameters, as in any PyTorch module.
      benchmark_backends: with attention_backend None, the constructor times forward and backward of each supported
        implementation once, for one sequence over the longest segment (at most 8192 tokens). The fastest one is used
        while the parameters have this device and dtype.
      heads: "all": every head runs every branch; "groups": branch i serves only the i-th group of heads. None:
        "groups", as in that package; with layout="partition", "all", the only value that it takes.
      combine: "lse" weights the branches' outputs by the softmax of their log-sum-exps; "mean" averages them. None:
        "mean", as in that package; with layout="partition", "lse", the only value that it takes.
      layout: "overlap": as above. "partition": segments of these lengths follow one another; in segment i, all tokens
        with equal positions modulo rate i attend to each other, for all heads.
      order: None, or "hilbert": positions in a segment follow a Hilbert curve.

    Attributes:
      attention_backend: the implementation that runs with the parameters' current device and dtype; None on the meta
        device.
      gpu_info: the DeviceInfo of this device; None on the meta device.
      device, dtype: of the parameters.
      backend_times: the milliseconds of each timed implementation; empty without benchmark_backends.

    Raises:
      TypeError, ValueError: an argument is out of range. The text names it.
      NotImplementedError: attention_backend is not supported here. The text has the reason.

    Source: Ding et al., "LongNet" (2023), arXiv:2307.02486; Wang et al., "Foundation Transformers" (2022),
    arXiv:2210.06423.
    """

    @plain_arguments
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        dropout: float = 0.0,
        bias: bool = True,
        layer_norm: bool = True,
        layer_norm_eps: float = 1e-5,
        gamma_init: float = 1.0,
        attention_backend: str | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        *,
        benchmark_backends: bool = False,
        heads: str | None = None,
        combine: str | None = None,
        layout: str = "overlap",
        order: str | None = None,
    ) -> None:
        super().__init__()
        overlaps = layout == "overlap"
        heads = ("groups" if overlaps else "all") if heads is None else heads
        combine = ("mean" if overlaps else "lse") if combine is None else combine
        if positive("embed_dim", embed_dim) % positive("num_heads", num_heads):
            raise ValueError(f"embed_dim: got {embed_dim} with num_heads={num_heads}, want a multiple of num_heads")
        for name, number in (("dropout", dropout), ("layer_norm_eps", layer_norm_eps), ("gamma_init", gamma_init)):
            if isinstance(number, bool) or not isinstance(number, numbers.Real):
                raise TypeError(f"{name}: got {number!r}, want a number")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout: got {dropout}, want a probability, from 0 to below 1")
        if not 0 < gamma_init < math.inf:
            raise ValueError(f"gamma_init: got {gamma_init}, want a finite number above 0")
        check_flags(bias=bias, layer_norm=layer_norm, benchmark_backends=benchmark_backends)
        if benchmark_backends and attention_backend is not None:
            raise ValueError(
                f"benchmark_backends: got True with attention_backend={attention_backend!r}, want one of the two"
            )
        attention_backend = _checked_backend(attention_backend)
        branches = check_pattern(segment_lengths, dilation_rates, heads, combine, layout, order)
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.dropout = dropout
        self.gamma_init = gamma_init
        self.pattern: dict[str, Any] = {
            "segment_lengths": tuple(length for length, _ in branches),
            "dilation_rates": tuple(rate for _, rate in branches),
            "heads": heads,
            "combine": combine,
            "layout": layout,
            "order": order,
        }
        check_float_dtype(torch.get_default_dtype() if dtype is None else dtype)
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        linear: Callable[[], torch.nn.Linear] = lambda: torch.nn.Linear(embed_dim, embed_dim, bias=bias, **place)
        self.q_proj, self.k_proj, self.v_proj = linear(), linear(), linear()
        self.norm = torch.nn.LayerNorm(embed_dim, eps=layer_norm_eps, **place) if layer_norm else None
        self.out_proj = linear()
        if benchmark_backends and self.device.type == "meta":
            raise ValueError("benchmark_backends: got True on the meta device, want a device that can run them")
        self.reset_parameters()

        self._asked = attention_backend
        self._timed: _Timed | None = None
        self.backend_times: dict[str, float] = {}
        if benchmark_backends:
            self.backend_times = self._time_backends()
            fastest = min(self.backend_times, key=lambda name: self.backend_times[name])
            self._timed = _Timed(device=self.device, dtype=self.dtype, fastest=fastest)
        elif self.device.type != "meta":
            with _by_own_name():
                self._plan(attention_backend)  # raises the errors of a call

    @property
    def attention_backend(self) -> str | None:
        if self.device.type == "meta":
            return None
        return self._implementation or self._plan(None).implementation

    @property
    def gpu_info(self) -> DeviceInfo | None:
        return None if self.device.type == "meta" else device_info(dlpack.jax_device(self.device))

    @property
    def dtype(self) -> torch.dtype:
        found = (x.dtype for x in self.parameters() if x.dtype in FLOATS)
        return next(found, torch.get_default_dtype())  # low-bit weights without a bias have no parameters

    @property
    def device(self) -> torch.device:
        return next(itertools.chain(self.parameters(), self.buffers())).device

    @property
    def _implementation(self) -> str | None:
        """The implementation that forward passes to dilated_attention; None lets dilated_attention choose."""
        timed = self._timed
        if timed is not None and (timed.device, timed.dtype) == (self.device, self.dtype):
            return timed.fastest
        return self._asked

    def _load_from_state_dict(self, state_dict: dict[str, torch.Tensor], prefix: str, *others: Any) -> None:
        """Loads the module's parameters as torch.nn.Module does, after splitting a fused qkv_proj of the state dict.

        The fused weight is [3 * embed_dim, embed_dim], in the order query, key, value.
        """
        for kind in ("weight", "bias"):
            fused = state_dict.get(f"{prefix}qkv_proj.{kind}")
            if fused is not None and fused.shape[0] == 3 * self.embed_dim:
                del state_dict[f"{prefix}qkv_proj.{kind}"]
                for name, part in zip("qkv", fused.chunk(3), strict=True):
                    state_dict[f"{prefix}{name}_proj.{kind}"] = part
        super()._load_from_state_dict(state_dict, prefix, *others)

    def reset_parameters(self) -> None:
        """Draws new weights, Xavier normal, for v_proj and out_proj multiplied by gamma_init. Biases become 0."""
        for projection, gain in (
            (self.q_proj, 1.0),
            (self.k_proj, 1.0),
            (self.v_proj, self.gamma_init),
            (self.out_proj, self.gamma_init),
        ):
            torch.nn.init.xavier_normal_(projection.weight, gain=gain)
            if projection.bias is not None:
                torch.nn.init.zeros_(projection.bias)
        if self.norm is not None:
            self.norm.reset_parameters()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        is_causal: bool = False,
        *,
        segment_ids: torch.Tensor | None = None,
        need_weights: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, None]:
        """Returns the output [B, T, embed_dim], or with need_weights (the output, None).

        query, key, value: [B, T, embed_dim]; None for key is query, None for value is key. An empty batch gives an
        empty output.

        is_causal: a token attends to itself and to earlier ones only. segment_ids: int32 [B, T]: packed sequences: a
        token attends only to tokens with its id. need_weights: return a pair; attention weights are never stored.

        Raises ValueError, naming the tensor, if a tensor is nested or has a wrong shape.
        """
        if symbolic_trace.is_traced(query, key, value):
            return symbolic_trace.leaf(
                self, query, key, value, is_causal, segment_ids=segment_ids, need_weights=need_weights
            )
        key = query if key is None else key
        value = key if value is None else value
        for name, x in (("query", query), ("key", key), ("value", value)):
            check_tensors(**{name: x})
            dlpack.check_dense(name, x)
            if x.ndim != 3 or x.shape[-1] != self.embed_dim:
                raise ValueError(f"{name}: got shape {tuple(x.shape)}, want [batch, length, {self.embed_dim}]")
        split = lambda x: x.unflatten(-1, (self.num_heads, -1))
        query, key, value = split(self.q_proj(query)), split(self.k_proj(key)), split(self.v_proj(value))
        out = empty_attention(query, key, value)
        if out is None:
            try:
                out = self._attend(query, key, value, is_causal=is_causal, segment_ids=segment_ids)
            except (NotImplementedError, ValueError) as error:
                rename(error, implementation="attention_backend")
                raise
        out = out.flatten(-2)
        if self.norm is not None:
            out = self.norm(out)
        out = functional.dropout(self.out_proj(out), self.dropout, self.training)
        return (out, None) if need_weights else out

    __prepare_scriptable__ = symbolic_trace.no_script

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **limits: Any) -> torch.Tensor:
        """Returns the attention [B, T, num_heads, head_dim] of projected query, key and value of the same shape.

        limits: is_causal and segment_ids.
        """
        return dilated_attention(query, key, value, implementation=self._implementation, **limits, **self.pattern)

    def _shape(self) -> tuple[int, int, int, int]:
        """Returns the shape (1, length, num_heads, head_dim) of the query with which the module is planned and timed.

        length: the longest of segment_lengths, but at most 8192.
        """
        length = min(max(self.pattern["segment_lengths"]), 8192)
        return 1, length, self.num_heads, self.embed_dim // self.num_heads

    def _plan(self, implementation: str | None) -> dispatch.Plan:
        """Returns the plan of a call with a typical query: one sequence over the longest segment.

        implementation: a name, or None for the device's first that supports the call. Raises NotImplementedError if the
        named one does not support it.
        """
        x = jax.ShapeDtypeStruct(self._shape(), dlpack.jax_dtype(self.dtype))
        with planning_device.planning_on(self.device):
            return explain(ops.dilated_attention, x, x, x, implementation=implementation, **self.pattern)

    def _time_backends(self) -> dict[str, float]:
        """Times the supported implementations now. Returns {name: milliseconds of forward and backward together}.

        The tensors are random: one sequence over the longest segment, of at most 8192 tokens.
        """
        inputs = [x.requires_grad_() for x in torch.randn(3, *self._shape(), dtype=self.dtype, device=self.device)]
        return benchmark_implementations(dilated_attention, *inputs, gradients=True, **self.pattern)
