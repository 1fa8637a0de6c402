"""The attentions of benchmarks/attention_table.py, and their contenders."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_kernels
from harness.cases import InputSet, as_numpy, number_of_sets, relative_error
from harness.contenders import framework, need
from harness.side_by_side import gpu_alone, gpu_among_others
from harness.timing import Built, Contender
from jax_kernels.flops import attention_flops
from jax_kernels.inputs.attention import FlashArguments
from jax_kernels.ops.attention import vjp as attention
from jax_kernels.ops.attention.flash_attention import prepare

__all__ = ["CASES", "PEERS", "TableCase", "build", "input_sets", "oracle"]

PEERS = ("fa4", "torch-cudnn")
# Lengths of eight packed documents, as shares of the sequence.
DOCUMENTS = (0.02, 0.05, 0.3, 0.08, 0.2, 0.04, 0.16, 0.15)


@dataclasses.dataclass(frozen=True)
class TableCase:
    """One attention in bfloat16.

    kv_length, kv_heads, v_head_dim: None for q_length, heads and head_dim. window: (left, right) keys of a query.
    documents: lengths of the packed documents as shares of q_length. query_scale: factor of the standard normal
    queries. With fewer queries than keys, causal queries are the last positions.
    """

    label: str
    batch: int
    q_length: int
    heads: int
    head_dim: int
    kv_length: int | None = None
    kv_heads: int | None = None
    v_head_dim: int | None = None
    is_causal: bool = False
    window: tuple[int, int] | None = None
    documents: tuple[float, ...] = ()
    query_scale: float = 1.0

    def __post_init__(self) -> None:
        same = {"kv_length": self.q_length, "kv_heads": self.heads, "v_head_dim": self.head_dim}
        for name, value in same.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    @property
    def q_offset(self) -> int:
        """The position of the first query."""
        return self.kv_length - self.q_length if self.is_causal else 0

    @property
    def starts(self) -> np.ndarray:
        """[number of documents + 1] int32: the first position of each document, and the length of the sequence."""
        ends = np.cumsum(np.array(self.documents or (1.0,)) * self.q_length).astype(np.int32)
        return np.concatenate([[0], ends[:-1], [self.q_length]]).astype(np.int32)

    @property
    def pairs(self) -> int:
        """The number of (query, key) pairs that are kept, over all heads."""
        position = np.arange(self.q_length) + self.q_offset
        first, last = np.zeros_like(position), np.full_like(position, self.kv_length - 1)
        if self.window:
            first, last = position - self.window[0], position + self.window[1]
        if self.is_causal:
            last = np.minimum(last, position)
        if self.documents:
            document = np.searchsorted(self.starts, position, side="right") - 1
            first, last = np.maximum(first, self.starts[document]), np.minimum(last, self.starts[document + 1] - 1)
        kept = np.minimum(last, self.kv_length - 1) - np.maximum(first, 0) + 1
        return int(kept.sum()) * self.batch * self.heads

    def flops(self, mode: str) -> float:
        return attention_flops(self.pairs, self.head_dim, self.v_head_dim, backward=mode == "bwd")

    def arguments(self, batch: int) -> dict[str, Any]:
        """The keyword arguments of flash_attention for this number of batch entries."""
        found: dict[str, Any] = {"is_causal": self.is_causal, "window": self.window, "q_offset": self.q_offset}
        if self.documents:
            ids = np.searchsorted(self.starts, np.arange(self.q_length), side="right")
            found["segment_ids"] = jnp.asarray(np.tile(ids, (batch, 1)), jnp.int32)
        return found


def _cases() -> tuple[TableCase, ...]:
    of = TableCase
    both = lambda label, *sizes, **more: (
        of(f"{label} full", *sizes, **more),
        of(f"{label} causal", *sizes, is_causal=True, **more),
    )
    return (
        *both("128", 2, 8192, 16, 128),
        *both("64", 2, 8192, 32, 64),
        *both("256", 2, 8192, 8, 256),
        of("192/128 causal", 2, 8192, 16, 192, v_head_dim=128, is_causal=True),
        of("96 causal", 2, 8192, 16, 96, is_causal=True),
        of("80 causal", 2, 8192, 16, 80, is_causal=True),
        of("160 causal", 2, 8192, 8, 160, is_causal=True),
        of("64/128 causal", 2, 8192, 16, 64, v_head_dim=128, is_causal=True),
        *both("8 documents", 2, 8192, 16, 128, documents=DOCUMENTS),
        of("8191 full", 2, 8191, 16, 128),
        *both("queries x8", 2, 8192, 16, 128, query_scale=8.0),
        of("777 queries, 3001 keys", 4, 777, 16, 128, kv_length=3001),
        of("1024 queries behind 15,360 causal", 1, 1024, 16, 128, kv_length=16384, is_causal=True),
        of("1 head of 32,768 causal", 1, 32768, 1, 128, is_causal=True),
        of("window 1024 causal", 2, 8192, 16, 128, is_causal=True, window=(1024, 0)),
        of("window 512 to both sides", 2, 8192, 16, 128, window=(512, 512)),
        of("GQA 40/8, 12,288 causal", 1, 12288, 40, 128, kv_heads=8, is_causal=True),
        of("GQA 32/8, 4096 causal", 2, 4096, 32, 128, kv_heads=8, is_causal=True),
        of("8 x 512 causal", 8, 512, 16, 128, is_causal=True),
    )


CASES = _cases()


def input_sets(case: TableCase) -> list[InputSet]:
    """Sets of normal inputs. One round over all sets overflows the L2 cache."""
    shapes = (
        (case.batch, case.q_length, case.heads, case.head_dim),
        (case.batch, case.kv_length, case.kv_heads, case.head_dim),
        (case.batch, case.kv_length, case.kv_heads, case.v_head_dim),
        (case.batch, case.q_length, case.heads, case.v_head_dim),
    )
    count = number_of_sets(shapes)
    sets = []
    for index in range(count):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(0), index), 4)
        with gpu_among_others():
            query, *others = (jax.random.normal(k, shape, jnp.bfloat16) for k, shape in zip(keys, shapes, strict=True))
            sets.append(InputSet(*jax.block_until_ready([query * case.query_scale, *others])))
    return sets


def oracle(case: TableCase, inputs: InputSet) -> dict[str, list[np.ndarray]]:
    """By mode: float32 results for the first batch entry and the query heads of the first key head."""
    group = case.heads // case.kv_heads
    heads = (group, 1, 1, group)
    arrays = (*inputs.qkv, inputs.dout)
    *qkv, dout = (x[:1, :, :n].astype(jnp.float32) for x, n in zip(arrays, heads, strict=True))
    attend = functools.partial(jax_kernels.flash_attention, **case.arguments(1), implementation="xla")

    @jax.jit
    def both(qkv, dout):
        out, vjp = jax.vjp(attend, *qkv)
        return out, vjp(dout)

    compiled = both.lower(qkv, dout).compile()
    with gpu_alone():
        out, gradients = compiled(qkv, dout)
        return {"fwd": [np.asarray(out)], "bwd": [np.asarray(x) for x in gradients]}


def build(
    name: str, case: TableCase, mode: str, sets: Sequence[InputSet], wanted: dict[str, list[np.ndarray]]
) -> Contender:
    """A contender, compiled, run once and compared with `wanted`. A peer with a large error is timed, with a note."""
    contender = Contender(name, framework(name))
    with contender.attempt():
        need(name)
        built = _ours(case, mode, sets) if name == "ours" else _in_torch(name, case, mode, sets)
        outputs = contender.start(built.call, built.plan)
        with gpu_alone():
            got = [as_numpy(x[:1, :, : w.shape[2]]) for x, w in zip(outputs, wanted[mode], strict=True)]
            error = relative_error(got, wanted[mode])
        if name == "ours":
            contender.judge(error, "float32")
        else:
            contender.judge(error, "float32", tolerance=math.inf)
    return contender


def _ours(case: TableCase, mode: str, sets: Sequence[InputSet]) -> Built:
    arguments = case.arguments(case.batch)
    prepared = [prepare(FlashArguments(query=s.query, key=s.key, value=s.value, **arguments)) for s in sets]
    calls, inputs = zip(*prepared, strict=True)
    call = calls[0]
    of_direction = {"fwd": "forward", "bwd": "backward"}[mode]
    plan = f"{call.implementation} {getattr(call.config, of_direction, call.config)}"
    forward = jax.jit(functools.partial(attention.attention_forward, call))
    forward.lower(inputs[0]).compile()
    if mode == "fwd":
        return Built(lambda i: forward(inputs[i % len(sets)])[:1], plan)
    with gpu_alone():
        saved = jax.block_until_ready([forward(x) for x in inputs])

    @jax.jit
    def backward(inputs, result, dout):
        return attention.attention_backward(call, inputs, result, dout, None)[:3]

    backward.lower(inputs[0], saved[0], sets[0].dout).compile()
    return Built(lambda i: backward(inputs[i % len(sets)], saved[i % len(sets)], sets[i % len(sets)].dout), plan)


def _in_torch(name: str, case: TableCase, mode: str, sets: Sequence[InputSet]) -> Built:
    from harness import torch_contenders

    function, plan, heads_first = (_cudnn if name == "torch-cudnn" else _fa4)(case)
    tensors = torch_contenders.tensors(sets, heads_first)
    with gpu_among_others():
        return Built(torch_contenders.in_mode(function, mode, tensors, heads_first), plan)


def _cudnn(case: TableCase) -> tuple[Callable[..., Any], str, bool]:
    """(a function of [B, H, T, D] tensors, its plan, True)."""
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if case.window or case.documents or case.q_offset:
        raise NotImplementedError("scaled_dot_product_attention has no windows, documents or offsets for cuDNN")
    options = {"is_causal": case.is_causal, "enable_gqa": case.heads != case.kv_heads}

    def function(q, k, v):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, **options)

    return function, "scaled_dot_product_attention, CUDNN_ATTENTION", True


def _fa4(case: TableCase) -> tuple[Callable[..., Any], str, bool]:
    """(a function of [B, T, H, D] tensors, its plan, False)."""
    import torch
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    options = {"softmax_scale": 1 / math.sqrt(case.head_dim), "causal": case.is_causal}
    if case.window:
        left, right = case.window
        options["window_size"] = (left, 0 if case.is_causal else right)
    of_result = lambda result: result[0] if isinstance(result, tuple) else result  # newer releases return lse too
    if not case.documents:
        return lambda q, k, v: of_result(flash_attn_func(q, k, v, **options)), "flash_attn.cute.flash_attn_func", False
    starts = case.starts
    joined = np.concatenate([[0], *(starts[1:] + i * case.q_length for i in range(case.batch))]).astype(np.int32)
    sequences = torch.from_numpy(joined).cuda()
    longest = int(np.diff(starts).max())

    def packed(q, k, v):
        flat = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
        of_lengths = {"max_seqlen_q": longest, "max_seqlen_k": longest}
        result = flash_attn_varlen_func(*flat, cu_seqlens_q=sequences, cu_seqlens_k=sequences, **of_lengths, **options)
        return of_result(result).reshape(*q.shape[:3], v.shape[-1])

    return packed, "flash_attn.cute.flash_attn_varlen_func", False
