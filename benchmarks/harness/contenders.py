"""The registry of contenders, and those that run in JAX.

A builder takes (Case, list of InputSet) and returns Built: call(i) queues one op on input set i and returns
its outputs, [B, T, H, D] each: (out,) for "fwd", (dq, dk, dv) for "bwd", (out, dq, dk, dv) for "fwdbwd".
"""

import dataclasses
import functools
import importlib.util
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

import jax_kernels
from harness.cases import TOLERANCE, Case, InputSet, Oracle
from harness.side_by_side import gpu_alone, gpu_among_others
from harness.timing import Built, Call, Contender, first_line, host_timer
from jax_kernels.ops.attention import flash_attention as attention
from jax_kernels.ops.attention.table import IMPLEMENTATIONS

PEERS = ("torch-cudnn", "torch-fa2", "torch-flex", "jax-cudnn", "jax-triton", "tokamax", "fa4")
OURS = tuple(IMPLEMENTATIONS)
# The modules that a peer needs, the most telling last.
_NEEDS = {
    "torch-cudnn": ("torch",),
    "torch-fa2": ("torch",),
    "torch-flex": ("torch",),
    "tokamax": ("tokamax",),
    "fa4": ("torch", "flash_attn", "flash_attn.cute"),
    "torch-gather": ("torch",),
    "dilated-attention-pytorch": ("torch", "dilated_attention_pytorch"),
}


def framework(name: str) -> str:
    return "torch" if name.startswith("torch-") or name.endswith("-pytorch") or name == "fa4" else "jax"


def unavailable(name: str) -> str | None:
    """Why a contender cannot run here, or None; nothing is compiled to find out."""
    for module in _NEEDS.get(name, ()):
        if importlib.util.find_spec(module) is None:
            return f"the Python module {module} is not installed"
    if name in PEERS and jax.default_backend() != "gpu":
        return f"it needs an NVIDIA GPU, and JAX runs on {jax.default_backend()}"
    if framework(name) == "torch":
        import torch

        if not torch.cuda.is_available():
            return "PyTorch sees no CUDA device"
    return None


def need(name: str) -> None:
    """Raises NotImplementedError, with the reason, for a contender that cannot run here."""
    reason = unavailable(name)
    if reason is not None:
        raise NotImplementedError(reason)


def build(name: str, case: Case, sets: Sequence[InputSet], oracle: Oracle) -> Contender:
    """A contender, compiled, run once on the first input set and checked: its status says what came of it."""
    contender = Contender(name, framework(name))
    with contender.attempt():
        need(name)
        built = _builder(name)(case, sets, oracle)
        contender.judge(oracle.error(contender.start(built.call, built.plan)), "float32")
    return contender


def _builder(name: str) -> Callable[[Case, Sequence[InputSet], Oracle], Built]:
    if name in OURS:
        return functools.partial(_ours, name)
    if framework(name) == "torch":
        from harness import torch_contenders

        return functools.partial(torch_contenders.build, name)
    return {"jax-cudnn": _jax_cudnn, "jax-triton": _jax_triton, "tokamax": _tokamax}[name]


def from_function(
    function: Callable[..., jax.Array], case: Case, sets: Sequence[InputSet], plan: str, *given: Any
) -> Built:
    """Any differentiable function(*given, query, key, value) -> out, compiled, in the case's mode.

    given: arrays that all input sets share, which have no gradient and which no program holds as constants.
    """
    if case.mode == "fwd":
        forward = jax.jit(lambda given, *qkv: (function(*given, *qkv),))
        forward.lower(given, *sets[0].qkv).compile()
        return Built(lambda i: forward(given, *sets[i % len(sets)].qkv), plan)
    if case.mode == "bwd":
        return Built(split_backward(function, sets, *given), plan)

    @jax.jit
    def both(given, q, k, v, do):
        out, vjp = jax.vjp(functools.partial(function, *given), q, k, v)
        return (out, *vjp(do))

    both.lower(given, *sets[0].qkv, sets[0].dout).compile()
    return Built(lambda i: both(given, *sets[i % len(sets)].qkv, sets[i % len(sets)].dout), plan)


def split_backward(function: Callable[..., jax.Array], sets: Sequence[InputSet], *given: Any) -> Call:
    """call(i) -> (dq, dk, dv): the backward of function alone. Its forward runs once a set, here."""
    forward = jax.jit(lambda given, *qkv: jax.vjp(functools.partial(function, *given), *qkv)[1])
    forward.lower(given, *sets[0].qkv).compile()
    with gpu_alone():
        saved = jax.block_until_ready([jax.tree.flatten(forward(given, *inputs.qkv)) for inputs in sets])
    tree = saved[0][1]
    backward = jax.jit(lambda residuals, do: jax.tree.unflatten(tree, residuals)(do))
    backward.lower(saved[0][0], sets[0].dout).compile()
    return lambda i: backward(saved[i % len(sets)][0], sets[i % len(sets)].dout)


def _ours(name: str, case: Case, sets: Sequence[InputSet], oracle: Oracle) -> Built:
    options = {"is_causal": case.causal, "implementation": name}
    plan = jax_kernels.explain(jax_kernels.flash_attention, *sets[0].qkv, **options)
    words = name
    if plan.config is not None:
        forward, backward = plan.config.forward, plan.config.backward
        words += {"fwd": f" {forward}", "bwd": f" {backward}", "fwdbwd": f" {forward} {backward}"}[case.mode]
        words += f" from {plan.source}"
    if case.mode == "fwdbwd" or IMPLEMENTATIONS[name].backward is None:
        return from_function(functools.partial(jax_kernels.flash_attention, **options), case, sets, words)

    calls = [attention.prepare(query=s.query, key=s.key, value=s.value, **options) for s in sets]
    forward = jax.jit(functools.partial(attention.attention_forward, calls[0][0]))
    if case.mode == "fwd":
        return Built(lambda i: forward(calls[i % len(sets)][1])[:1], words)
    saved = [forward(inputs) for _, inputs in calls]

    @jax.jit
    def backward(inputs, results, do):
        return attention.attention_backward(calls[0][0], inputs, *results, do, None)[:3]

    return Built(lambda i: backward(calls[i % len(sets)][1], saved[i % len(sets)], sets[i % len(sets)].dout), words)


def _jax_cudnn(case: Case, sets: Sequence[InputSet], oracle: Oracle) -> Built:
    if not case.has_one_head_dim:
        raise NotImplementedError("jax.nn.dot_product_attention takes values of key's head_dim alone")
    function = functools.partial(jax.nn.dot_product_attention, is_causal=case.causal, implementation="cudnn")
    return from_function(function, case, sets, "jax.nn.dot_product_attention, cudnn")


def fastest(
    variants: Iterable[tuple[str, Callable[[], Built]]], oracle: Oracle | None, framework: str = "jax"
) -> tuple[str, Built]:
    """The fastest variant, by a host clock, of those that run and are right; raises the last error if none.

    oracle: None to leave it to the caller to judge what comes of it.
    """
    best: tuple[float, str, Built] | None = None
    last: Exception = RuntimeError("no variant")
    for label, make in variants:
        try:
            with gpu_among_others():
                built = make()
                outputs = built.call(0)
            with gpu_alone():
                error = 0.0 if oracle is None else oracle.error(outputs)
                if not error <= TOLERANCE:
                    raise ValueError(f"{label}: relative error {error:.2g}")
                calls = max(2, min(20, math.ceil(20 / host_timer(built.call, 2, framework).ms)))
                ms = min(host_timer(built.call, calls, framework).ms for _ in range(2))
        except Exception as error:
            last = error
            continue
        if best is None or ms < best[0]:
            best = (ms, label, built)
    if best is None:
        raise last
    return best[1], best[2]


# jax's kernel: (block_q, block_k, num_warps, num_stages) forward, the first being its default ...
_JAX_TRITON_FORWARD = (
    (128, 128, None, 2),
    (128, 64, 4, 3),
    (128, 64, 8, 2),
    (128, 32, 4, 4),
    (64, 64, 4, 3),
    (64, 128, 4, 2),
)
# ... and (block_q_dkv, block_kv_dkv, block_q_dq, block_kv_dq) backward; it wants block_q_dq = block_kv_dkv.
_JAX_TRITON_BACKWARD = (
    (32, 32, 32, 32),
    (64, 64, 64, 64),
    (32, 64, 64, 32),
    (32, 128, 128, 32),
    (64, 128, 128, 64),
    (128, 128, 128, 128),
)


def _jax_triton(case: Case, sets: Sequence[InputSet], oracle: Oracle) -> Built:
    if case.heads != case.kv_heads:
        raise NotImplementedError("jax.experimental.pallas.ops.gpu.attention.mha takes no grouped heads")
    if not case.has_one_head_dim:
        raise NotImplementedError("jax.experimental.pallas.ops.gpu.attention.mha takes values of key's head_dim alone")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha

    def variant(mode: str, forward: tuple, backward: tuple) -> tuple[str, Callable[[], Built]]:
        block_q, block_k, num_warps, num_stages = forward
        blocks = BlockSizes(block_q, block_k, *backward)
        words = [f"num_warps={num_warps}"]
        if mode != "bwd":
            words += [f"block_q={block_q}", f"block_k={block_k}", f"num_stages={num_stages}"]
        if mode != "fwd":
            names = ("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
            words += [f"{name}={block}" for name, block in zip(names, backward, strict=True)]

        def function(q, k, v):
            scale = 1 / math.sqrt(case.head_dim)
            return mha(q, k, v, None, scale, case.causal, blocks, "triton", num_warps, num_stages)

        label = "mha " + " ".join(words)
        return label, lambda: from_function(function, dataclasses.replace(case, mode=mode), sets, label)

    backward = _JAX_TRITON_BACKWARD[0]
    if case.mode == "bwd":  # num_warps belongs to both directions
        variants = [variant("bwd", (64, 64, w, 2), b) for b in _JAX_TRITON_BACKWARD for w in (4, 8)]
    else:
        variants = [variant("fwd", f, backward) for f in _JAX_TRITON_FORWARD]
    forward_oracle = oracle.of_mode("fwd") if case.mode == "fwdbwd" else oracle
    label, built = fastest(variants, forward_oracle)
    if case.mode == "fwdbwd":  # the backward blocks on top of the fastest forward
        forward = _JAX_TRITON_FORWARD[[v[0] for v in variants].index(label)]
        variants = [variant("fwdbwd", forward, b) for b in _JAX_TRITON_BACKWARD]
        label, built = fastest(variants, oracle)
    return dataclasses.replace(built, plan=f"{label} (the fastest of {len(variants)})")


def _tokamax(case: Case, sets: Sequence[InputSet], oracle: Oracle) -> Built:
    """tokamax with its Mosaic kernel, autotuned; where the tuning fails the plan says so."""
    import tokamax

    def variant(implementation: str) -> tuple[str, Callable[[], Built]]:
        function = functools.partial(
            tokamax.dot_product_attention, is_causal=case.causal, implementation=implementation
        )
        return implementation, lambda: _tokamax_tuned(tokamax, function, case, sets, implementation)

    _, built = fastest([variant("mosaic_gpu"), variant("mosaic")], oracle)  # one name in older, one in newer releases
    return built


def _tokamax_tuned(tokamax: Any, function: Callable, case: Case, sets: Sequence[InputSet], name: str) -> Built:
    def with_gradients(q, k, v, do):
        out, vjp = jax.vjp(function, q, k, v)
        return (out, *vjp(do))

    first = sets[0]
    try:
        if case.mode == "fwd":
            tuned = tokamax.autotune(function, *first.qkv)
        else:
            tuned = tokamax.autotune(with_gradients, *first.qkv, first.dout)
    except Exception as error:
        return from_function(function, case, sets, f"tokamax {name}, not tuned: {first_line(error)}")
    with tuned:
        built = from_function(function, case, sets, f"tokamax {name}, autotuned")

    def call(index: int) -> Any:
        with tuned:
            return built.call(index)

    return Built(call, built.plan)
