"""compile_attention for PyTorch tensors."""

import functools
import threading
from typing import Any

import torch

from jax_kernels.bridge.interop import dlpack, torch_internals
from jax_kernels.bridge.interop.arguments.autocast import cast_dtype
from jax_kernels.bridge.interop.arguments.plain_numbers import plain_arguments
from jax_kernels.bridge.jax_functions.argument_checks import check_float_dtype
from jax_kernels.bridge.jax_functions.mask_operands import on_device
from jax_kernels.bridge.ops.attention.attention_checks import check_tensor
from jax_kernels.bridge.ops.attention.flash_attention import flash_attention
from jax_kernels.bridge.ops.attention.prepare_mask import here
from jax_kernels.bridge.translate import mask_sources
from jax_kernels.masks import Mask
from jax_kernels.ops.attention import compile_attention as ops
from jax_kernels.ops.checks import check_names

__all__ = ["CompiledAttention", "compile_attention"]


class CompiledAttention:
    """Attention under a fixed mask, made by compile_attention: out = attention(query, key, value), with gradients.

    query is [B, seq_len, num_heads, head_dim]; key and value are [B, kv_len, num_kv_heads, head_dim]; B is any number.
    They have the dtype `dtype`, after autocast if it is on, and are on `device`. out has query's shape and that dtype.
    Calls run, and may be compiled and mapped, as calls of flash_attention with a Mask. Tensors of another shape, dtype
    or device raise ValueError or TypeError.

    mask: the masks.Mask. prepared_mask: the mask with its block lists, which all calls use. plan: the Plan of its
    calls, which names the implementation and its blocks. density: the fraction of blocks of 128 queries and 128 keys in
    which the mask keeps a pair. device, dtype: PyTorch's.
    """

    def __init__(
        self, compiled: ops.CompiledAttention, device: torch.device, dtype: torch.dtype, implementation: str | None
    ):
        self.mask = compiled.mask
        self.plan = compiled.plan
        self.density = compiled.density
        self.prepared_mask = compiled.prepared_mask
        self.device = device
        self.dtype = dtype
        self._compiled = compiled
        self._implementation = implementation
        self._passed: torch_internals.Check | None = None  # whether tensors resemble a checked call's

    def __reduce__(self) -> tuple[functools.partial["CompiledAttention"], tuple[Mask, int, int]]:
        """The state that pickle stores: a call of compile_attention with the mask.

        The loading process plans it again.
        """
        query, key, _ = self._compiled.specs.values()
        batch, length, heads, head_dim = query.shape
        make = functools.partial(
            compile_attention,
            kv_len=key.shape[1],
            batch=batch,
            num_heads=heads,
            num_kv_heads=key.shape[2],
            dtype=self.dtype,
            device=self.device,
            implementation=self._implementation,
        )
        return make, (self.mask, length, head_dim)

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            self._check(query, key, value)
        elif self._passed is None or not _holds(self._passed, query, key, value):
            self._check(query, key, value)
            if all(type(x) in (torch.Tensor, torch.nn.Parameter) for x in (query, key, value)):
                self._passed = torch_internals.tensor_guard((query, key, value))
        return flash_attention(query, key, value, mask=self.prepared_mask, implementation=self.plan.implementation)

    def _check(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Raises ValueError or TypeError unless the tensors have the planned shapes, device and dtype.

        The batch may be any. Under autocast its dtype counts, not the tensors'.
        """
        for (name, spec), x in zip(self._compiled.specs.items(), (query, key, value), strict=True):
            check_tensor(name, x, query)
            if tuple(x.shape[1:]) != spec.shape[1:]:
                sizes = ", ".join(map(str, spec.shape[1:]))
                raise ValueError(f"{name}: got shape {tuple(x.shape)}, want [batch, {sizes}]")
            if x.device != self.device:
                raise ValueError(f"{name}: got a tensor on {x.device}, want one on {self.device}")
            dtype = cast_dtype(x)
            if dtype != self.dtype:
                raise TypeError(f"{name}: got dtype {dtype}, want {self.dtype}")

    def measured_speedup(self, *, backward: bool = False, rounds: int = 5) -> ops.Speedup:
        """Times JAX's programs now: the speedup over flash_attention without a mask.

        The result's `speedup` is dense_milliseconds / milliseconds, each the median time of one call; `device` is the
        device's name. PyTorch's own cost of a call is not part of the times.

        backward: time forward and backward. rounds: the number of timings.
        """
        with here(self.device):
            return self._compiled.measured_speedup(backward=backward, rounds=rounds)

    def __repr__(self) -> str:
        return f"{self._compiled!r} on {self.device}"


def _holds(check: torch_internals.Check, *tensors: torch.Tensor) -> bool:
    """The result of a check from torch_internals.tensor_guard; False if it raises: an argument is no tensor."""
    try:
        return check(*tensors)
    except (RuntimeError, TypeError, ValueError):
        return False


@plain_arguments
def compile_attention(
    pattern: str | Mask,
    seq_len: int,
    head_dim: int,
    *,
    kv_len: int | None = None,
    batch: int = 1,
    num_heads: int = 8,
    num_kv_heads: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    implementation: str | None = None,
    **options: Any,
) -> CompiledAttention:
    """jax_kernels.compile_attention for tensors: attention under a fixed pattern, planned once and kept.

    Equivalent to the following code, with a mask that is prepared::

        mask = bridge.masks.preset(pattern, **options)  # or the Mask itself
        attention = lambda query, key, value: bridge.flash_attention(query, key, value, mask=mask)

    Args:
      pattern: the name of a preset ("causal", "sliding_window", "longformer", ...: see masks.preset), or a masks.Mask.
      seq_len, kv_len: the numbers of queries and of keys; kv_len: None is seq_len.
      head_dim: of query, key and value, up to 256.
      batch: the batch for which blocks are planned. Calls may have any batch.
      num_heads, num_kv_heads: the numbers of query heads and of key heads, a divisor. None is num_heads.
      dtype: torch.bfloat16, torch.float16 or torch.float32.
      device: the tensors' device. None is PyTorch's current CUDA device, or the CPU if there is no CUDA device.
      implementation: as in bridge.flash_attention; None picks the device's first that supports the call.
      options: the preset's options. An option cannot be a tensor; for a tensor, pass a masks.Mask.

    Returns:
      A CompiledAttention, a function of (query, key, value). The last 64 results are kept: an equal call returns the
        same object.

    Raises:
      ValueError, TypeError, NotImplementedError: an unsupported argument, option or shape; the error names it.
    """
    check_float_dtype(dtype)
    for name, option in options.items():
        if isinstance(option, torch.Tensor):
            raise TypeError(f"{name}: got a torch.Tensor, want a constant; for a tensor, pass a masks.Mask")
    check_names(implementation=implementation)
    place = dlpack.torch_device("device", device)
    if place.type not in ("cpu", "cuda"):
        raise ValueError(f"device: got {place}, want a CPU or a CUDA device")
    mask_sources.check([pattern])
    with here(place), _LOCK:
        compiled = ops.compile_attention(
            on_device(pattern, place) if isinstance(pattern, Mask) else pattern,
            seq_len,
            head_dim,
            kv_len=kv_len,
            batch=batch,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            dtype=dlpack.jax_dtype(dtype),
            implementation=implementation,
            **options,
        )
        return _kept(compiled, place, dtype, implementation)


_kept = functools.lru_cache(ops.CACHED)(CompiledAttention)
_LOCK = threading.RLock()  # so that threads that ask for the same attention at once get one object
