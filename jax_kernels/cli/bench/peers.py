"""Calls of other libraries with the arguments of a standard call: PyTorch, FlexAttention and jax.nn.

A peer is timed only if its result agrees with this library's. PyTorch is imported by the first of its peers.
"""

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kernels.ops.attention.flash_attention import flash_attention
from jax_kernels.tuning import timers
from jax_kernels.tuning.benchmark import ImplementationTime, read_in_turns
from jax_kernels.tuning.timers import Program

__all__ = ["density_times", "times"]

# The largest difference of a peer's result, as a part of the result's norm: both round to 16 bits.
_TOLERANCE = 0.03

type Peer = Callable[..., Any]


@dataclasses.dataclass(frozen=True, eq=False)
class _Pending:
    """Tensors of PyTorch that may not be computed yet. Timers wait for them by the same method as for JAX's arrays."""

    results: Any

    def block_until_ready(self) -> "_Pending":
        torch = importlib.import_module("torch")
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return self


def _heads_first(given: Mapping[str, Any]) -> list[Any]:
    return [given[name].transpose(1, 2) for name in ("query", "key", "value")]


def _sdpa(torch: Any, given: Mapping[str, Any]) -> Any:
    function = torch.nn.functional.scaled_dot_product_attention
    grouped = given["query"].shape[2] != given["key"].shape[2]
    causal = bool(given.get("is_causal", False))
    return function(*_heads_first(given), is_causal=causal, enable_gqa=grouped).transpose(1, 2)


def _layer_norm(torch: Any, given: Mapping[str, Any]) -> Any:
    x = given["x"]
    return torch.nn.functional.layer_norm(x, x.shape[-1:], given["scale"].to(x.dtype), given["bias"].to(x.dtype))


def _rms_norm(torch: Any, given: Mapping[str, Any]) -> Any:
    x = given["x"]
    return torch.nn.functional.rms_norm(x, x.shape[-1:], given["scale"].to(x.dtype), 1e-6)


def _gated(torch: Any, given: Mapping[str, Any]) -> Any:
    return torch.nn.functional.silu(given["x"] @ given["w_gate"]) * (given["x"] @ given["w_up"])


_TORCH: dict[str, dict[str, Peer]] = {
    "flash_attention": {"torch SDPA": _sdpa},
    "decode_attention": {"torch SDPA": _sdpa},
    "matmul": {"torch matmul": lambda torch, given: given["x"] @ given["w"]},
    "gated_matmul": {"torch": _gated},
    "mlp": {"torch": lambda torch, given: _gated(torch, given) @ given["w_down"]},
    "layer_norm": {"torch layer_norm": _layer_norm},
    "rms_norm": {"torch rms_norm": _rms_norm},
}


def _dot_product_attention(given: Mapping[str, Any]) -> jax.Array:
    arrays = (given[name] for name in ("query", "key", "value"))
    return jax.nn.dot_product_attention(*arrays, is_causal=bool(given["is_causal"]))


def times(
    op: str, given: Mapping[str, Any], function: Callable[..., Any], *, gradients: bool, seconds: float
) -> list[ImplementationTime]:
    """The times of an op's peers, the fastest first; a peer without a time has a reason.

    given: the op's arguments by name. function: the op. gradients: with the gradients of all floating-point arrays, for
    cotangents of 1.
    """
    want = jax.jit(lambda arrays: function(**{**given, **arrays}))(_arrays(given))
    peers: dict[str, Callable[[], Program]] = {}
    if op == "flash_attention":
        peers["jax.nn"] = lambda: _jax_program(_dot_product_attention, given, gradients, want)
    for name, peer in _TORCH.get(op, {}).items():
        peers[name] = lambda peer=peer: _torch_program(peer, given, gradients, want)  # type: ignore[misc]
        if op not in ("flash_attention", "decode_attention", "matmul") and _on_gpu():
            peers[f"{name}, compiled"] = lambda peer=peer: _torch_program(  # type: ignore[misc]
                peer, given, gradients, want, compiled=True
            )
    if op == "flash_attention" and _on_gpu():
        flex = _flex(causal=bool(given["is_causal"]))
        peers["FlexAttention"] = lambda: _torch_program(flex, given, gradients, want)
    return _timed(peers, seconds)


def density_times(
    given: Mapping[str, Any], blocks: np.ndarray, block: int, *, seconds: float
) -> list[ImplementationTime]:
    """The times of attention's peers under a mask of blocks of block x block positions, bool [rows, columns].

    FlexAttention on a GPU, where torch.compile makes a kernel; PyTorch's SDPA with a dense mask elsewhere.
    """
    want = flash_attention(**given)
    arrays = {name: given[name] for name in ("query", "key", "value")}

    def sdpa(torch: Any, given: Mapping[str, Any]) -> Any:
        dense = torch.as_tensor(np.kron(blocks, np.ones((block, block), bool)), device=given["query"].device)
        function = torch.nn.functional.scaled_dot_product_attention
        return function(*_heads_first(given), attn_mask=dense).transpose(1, 2)

    name, peer = ("FlexAttention", _flex(blocks=blocks, block=block)) if _on_gpu() else ("torch SDPA, dense mask", sdpa)
    return _timed({name: lambda: _torch_program(peer, arrays, False, want)}, seconds)


def _flex(*, causal: bool = False, blocks: np.ndarray | None = None, block: int = 128) -> Peer:
    """FlexAttention compiled, with a causal mask or one of blocks; its block mask is made at the first call."""
    made: list[Any] = []

    def call(torch: Any, given: Mapping[str, Any]) -> Any:
        query, key, value = _heads_first(given)
        if not made:
            flex = importlib.import_module("torch.nn.attention.flex_attention")
            kept = None if blocks is None else torch.as_tensor(blocks, device=query.device)

            def mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
                return q >= kv if kept is None else kept[q // block, kv // block]

            lengths = query.shape[2], key.shape[2]
            needs_mask = causal or blocks is not None
            mask = flex.create_block_mask(mod, None, None, *lengths, device=query.device) if needs_mask else None
            made.extend((torch.compile(flex.flex_attention), mask))
        function, mask = made
        return function(query, key, value, block_mask=mask).transpose(1, 2)

    return call


def _on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def _arrays(given: Mapping[str, Any]) -> dict[str, jax.Array]:
    return {name: x for name, x in given.items() if isinstance(x, jax.Array)}


def _timed(peers: Mapping[str, Callable[[], Program]], seconds: float) -> list[ImplementationTime]:
    programs: dict[str, Program] = {}
    refused = []
    for name, build in peers.items():
        try:
            programs[name] = build()
        except Exception as error:  # it is not installed, does not support the call, or needs too much memory
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            refused.append(ImplementationTime(implementation=name, plan=None, reason=reason))
    timer = timers.choose()
    found = read_in_turns(programs, timer, seconds)
    timed = [ImplementationTime.of(name, None, readings=x, timer=timer.name) for name, x in found.items()]
    return sorted(timed, key=lambda x: x.ms or 0.0) + refused


def _jax_program(peer: Callable[..., Any], given: Mapping[str, Any], gradients: bool, want: Any) -> Program:
    arrays, others = _arrays(given), {name: x for name, x in given.items() if not isinstance(x, jax.Array)}
    forward = jax.jit(lambda arrays: peer({**others, **arrays}))
    _check(forward(arrays), want)

    def differentiated(arrays: Any) -> Any:
        out, vjp = jax.vjp(lambda arrays: peer({**others, **arrays}), arrays)
        return vjp(jnp.ones_like(out))

    call = jax.jit(differentiated) if gradients else forward
    return _program("jax", lambda: call(arrays))


def _torch_program(peer: Peer, given: Mapping[str, Any], gradients: bool, want: Any, compiled: bool = False) -> Program:
    if importlib.util.find_spec("torch") is None:
        raise ModuleNotFoundError("torch is not installed: pip install 'jax-kernels[torch]'")
    torch = importlib.import_module("torch")
    tensors = {name: torch.from_dlpack(x) for name, x in _arrays(given).items()}
    others = {name: x for name, x in given.items() if name not in tensors}
    moving = [x for x in tensors.values() if x.is_floating_point()] if gradients else []
    for x in moving:
        x.requires_grad_()
    function = torch.compile(lambda given: peer(torch, given)) if compiled else lambda given: peer(torch, given)
    out = function({**others, **tensors})
    _check(jnp.asarray(out.detach().float().cpu().numpy()), want)

    def forward() -> Any:
        with torch.no_grad():
            return _Pending(function({**others, **tensors}))

    def differentiated() -> Any:
        out = function({**others, **tensors})
        return _Pending(torch.autograd.grad(out, moving, torch.ones_like(out)))

    return _program("torch", differentiated if gradients else forward)


def _program(name: str, call: Callable[[], Any]) -> Program:
    jax.block_until_ready(call())
    return Program(implementation=name, config=None, direction="forward", call=call)


def _check(got: Any, want: Any) -> None:
    """Raises ValueError if a peer's result differs from this library's."""
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    if got.shape != want.shape:
        raise ValueError(f"its result has the shape {got.shape}, want {want.shape}")
    error = float(np.linalg.norm(got - want) / max(float(np.linalg.norm(want)), 1e-30))
    if not error <= _TOLERANCE:
        raise ValueError(f"its result differs by {error:.1e} of the norm")
