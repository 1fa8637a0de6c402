"""The registry of contenders, and the contenders that run in JAX.

A builder takes a Case, its input sets and its Oracle, and returns Built. It raises NotImplementedError for a case that
its contender does not support.
"""

import dataclasses
import functools
import importlib.util
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

import jax_kernels
from harness.cases import TOLERANCE, Case, InputSet, Oracle
from harness.side_by_side import gpu_alone, gpu_among_others
from harness.timing import Built, Call, Contender, first_line, host_timer
from jax_kernels.inputs.attention import FlashArguments
from jax_kernels.ops.attention import vjp as attention
from jax_kernels.ops.attention.flash_attention import prepare
from jax_kernels.ops.attention.implementations import IMPLEMENTATIONS

PEERS = (
    "torch-cudnn",
    "torch-fa2",
    "torch-flex",
    "torch-flex-flash",
    "jax-cudnn",
    "jax-triton",
    "tokamax",
    "fa3",
    "fa4",
)
OURS = tuple(IMPLEMENTATIONS)
# The modules that a peer needs. unavailable() names the first missing module.
_NEEDS = {
    "torch-cudnn": ("torch",),
    "torch-fa2": ("torch",),
    "torch-flex": ("torch",),
    "torch-flex-flash": ("torch", "flash_attn", "flash_attn.cute"),
    "tokamax": ("tokamax",),
    "fa3": ("dew_flash_attn",),
    "fa4": ("torch", "flash_attn", "flash_attn.cute"),
    "torch-gather": ("torch",),
    "dilated-attention-pytorch": ("torch", "dilated_attention_pytorch"),
}


def framework(name: str) -> str:
    return "torch" if name.startswith("torch-") or name.endswith("-pytorch") or name == "fa4" else "jax"


def unavailable(name: str) -> str | None:
    """The reason why a contender cannot run here, or None. Compiles nothing."""
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
    """Raises NotImplementedError, with the reason, if a contender cannot run."""
    reason = unavailable(name)
    if reason is not None:
        raise NotImplementedError(reason)


def build(name: str, case: Case, sets: Sequence[InputSet], oracle: Oracle) -> Contender:
    """Compiles a contender, runs it once on the first input set and checks it. Its status has the outcome."""
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
    return {"jax-cudnn": _jax_cudnn, "jax-triton": _jax_triton, "tokamax": _tokamax, "fa3": _fa3}[name]


def from_function(
    function: Callable[..., jax.Array], case: Case, sets: Sequence[InputSet], plan: str, *given: Any
) -> Built:
    """Compiles a differentiable function(*given, query, key, value) -> out in the case's mode.

    given: arrays common to all input sets. They are arguments of the program, not constants, and get no gradient.
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
    """Makes call(i) -> (dq, dk, dv), only the backward of function. The forward runs here, once for each set."""
    forward = jax.jit(lambda given, *qkv: jax.vjp(functools.partial(function, *given), *qkv)[1])
    forward.lower(given, *sets[0].qkv).compile()
    with gpu_alone():
        saved = jax.block_until_ready([jax.tree.flatten(forward(given, *inputs.qkv)) for inputs in sets])
    residuals, trees = zip(*saved, strict=True)
    tree = trees[0]
    backward = jax.jit(lambda residuals, do: jax.tree.unflatten(tree, residuals)(do))
    backward.lower(residuals[0], sets[0].dout).compile()
    return lambda i: backward(residuals[i % len(sets)], sets[i % len(sets)].dout)


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

    prepared = [prepare(FlashArguments(query=s.query, key=s.key, value=s.value, **options)) for s in sets]
    calls, inputs = zip(*prepared, strict=True)
    call = calls[0]
    forward = jax.jit(functools.partial(attention.attention_forward, call))
    if case.mode == "fwd":
        return Built(lambda i: forward(inputs[i % len(sets)])[:1], words)
    saved = [forward(x) for x in inputs]

    @jax.jit
    def backward(inputs, result, do):
        return attention.attention_backward(call, inputs, result, do, None)[:3]

    return Built(lambda i: backward(inputs[i % len(sets)], saved[i % len(sets)], sets[i % len(sets)].dout), words)


def _jax_cudnn(case: Case, sets: Sequence[InputSet], oracle: Oracle) -> Built:
    if not case.has_one_head_dim:
        raise NotImplementedError("jax.nn.dot_product_attention takes only values of key's head_dim")
    function = functools.partial(jax.nn.dot_product_attention, is_causal=case.causal, implementation="cudnn")
    return from_function(function, case, sets, "jax.nn.dot_product_attention, cudnn")


def _fa3(case: Case, sets: Sequence[InputSet], oracle: Oracle) -> Built:
    """FlashAttention-3, by its port to JAX."""
    from dew_flash_attn import flash_mha

    if not case.has_one_head_dim:
        raise NotImplementedError("dew_flash_attn takes only values of key's head_dim")
    function = functools.partial(flash_mha, is_causal=case.causal)
    return from_function(function, case, sets, "dew_flash_attn.flash_mha")


class Variant(NamedTuple):
    """One way to run a contender. make compiles it."""

    label: str
    make: Callable[[], Built]


class Fastest(NamedTuple):
    """A Variant that was built and timed. ms: one call, by a host clock."""

    label: str
    built: Built
    ms: float


def fastest(variants: Iterable[Variant], oracle: Oracle | None, framework: str = "jax") -> Fastest:
    """The fastest variant, by a host clock, that runs and is right. Raises the last error if no variant is.

    oracle: None to leave the check of the results to the caller.
    """
    best: Fastest | None = None
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
        if best is None or ms < best.ms:
            best = Fastest(label, built, ms)
    if best is None:
        raise last
    return best


class TritonForward(NamedTuple):
    """The forward blocks of JAX's kernel. num_warps: None for the kernel's own choice."""

    block_q: int
    block_k: int
    num_warps: int | None
    num_stages: int


class TritonBackward(NamedTuple):
    """The backward blocks of JAX's kernel, which needs block_q_dq = block_kv_dkv."""

    block_q_dkv: int
    block_kv_dkv: int
    block_q_dq: int
    block_kv_dq: int


# The first blocks are the kernel's defaults.
_JAX_TRITON_FORWARD = (
    TritonForward(128, 128, None, 2),
    TritonForward(128, 64, 4, 3),
    TritonForward(128, 64, 8, 2),
    TritonForward(128, 32, 4, 4),
    TritonForward(64, 64, 4, 3),
    TritonForward(64, 128, 4, 2),
)
_JAX_TRITON_BACKWARD = (
    TritonBackward(32, 32, 32, 32),
    TritonBackward(64, 64, 64, 64),
    TritonBackward(32, 64, 64, 32),
    TritonBackward(32, 128, 128, 32),
    TritonBackward(64, 128, 128, 64),
    TritonBackward(128, 128, 128, 128),
)


def _jax_triton(case: Case, sets: Sequence[InputSet], oracle: Oracle) -> Built:
    """The fastest of JAX's own Pallas-Triton kernels over the blocks above."""
    if case.heads != case.kv_heads:
        raise NotImplementedError("jax.experimental.pallas.ops.gpu.attention.mha takes no grouped heads")
    if not case.has_one_head_dim:
        raise NotImplementedError("jax.experimental.pallas.ops.gpu.attention.mha takes only values of key's head_dim")
    variant = functools.partial(_triton_variant, case, sets)
    default = _JAX_TRITON_BACKWARD[0]
    if case.mode == "bwd":  # num_warps applies to both directions
        forwards = [TritonForward(64, 64, num_warps, 2) for num_warps in (4, 8)]
        variants = [variant("bwd", forward, blocks) for blocks in _JAX_TRITON_BACKWARD for forward in forwards]
        best = fastest(variants, oracle)
    else:
        by_label = {(made := variant("fwd", blocks, default)).label: (made, blocks) for blocks in _JAX_TRITON_FORWARD}
        variants = [made for made, _ in by_label.values()]
        best = fastest(variants, oracle.of_mode("fwd"))
    if case.mode == "fwdbwd":  # the backward blocks on top of the fastest forward
        _, forward = by_label[best.label]
        variants = [variant("fwdbwd", forward, blocks) for blocks in _JAX_TRITON_BACKWARD]
        best = fastest(variants, oracle)
    return dataclasses.replace(best.built, plan=f"{best.label} (the fastest of {len(variants)})")


def _triton_variant(
    case: Case, sets: Sequence[InputSet], mode: str, forward: TritonForward, backward: TritonBackward
) -> Variant:
    """JAX's kernel with these blocks, in this mode; its label names the blocks that the mode uses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha

    sizes = BlockSizes(forward.block_q, forward.block_k, *backward)
    told = {"num_warps": forward.num_warps}
    if mode != "bwd":
        told |= {"block_q": forward.block_q, "block_k": forward.block_k, "num_stages": forward.num_stages}
    if mode != "fwd":
        told |= backward._asdict()

    def function(q, k, v):
        scale = 1 / math.sqrt(case.head_dim)
        return mha(q, k, v, None, scale, case.causal, sizes, "triton", forward.num_warps, forward.num_stages)

    label = "mha " + " ".join(f"{name}={value}" for name, value in told.items())
    return Variant(label, lambda: from_function(function, dataclasses.replace(case, mode=mode), sets, label))


def _tokamax(case: Case, sets: Sequence[InputSet], oracle: Oracle) -> Built:
    """Tokamax's Mosaic kernel, autotuned. The plan says so if the tuning failed."""
    import tokamax

    def variant(implementation: str) -> Variant:
        function = functools.partial(
            tokamax.dot_product_attention, is_causal=case.causal, implementation=implementation
        )
        return Variant(implementation, lambda: _tokamax_tuned(tokamax, function, case, sets, implementation))

    # Older and newer releases have different names.
    return fastest([variant("mosaic_gpu"), variant("mosaic")], oracle).built


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
