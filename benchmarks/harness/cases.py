"""A case to time: one attention of one shape, its inputs, its operation count, and the check of its results."""

import copy
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from harness.side_by_side import gpu_among_others
from jax_kernels.flops import attention_flops
from jax_kernels.inputs.attention import AttentionInputs, AttentionOptions
from jax_kernels.reference import attention as reference
from jax_kernels.reference import chunked_attention

MODES = ("fwd", "bwd", "fwdbwd")
DTYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16}
# Twice the L2 cache of an H200 (60 MB), so that a call finds none of its inputs in the cache.
ROTATION_BYTES = 120e6
# Relative error (2-norm, against float32) above which a result counts as wrong. bf16 rounding alone gives 0.003.
TOLERANCE = 2e-2
# The cap of softcap_mod, and of the softcap argument in the same run.
CAP = 30.0


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of one attention. seq is the length of query, key and value.

    value_head_dim is the head_dim of value and out; None is replaced by head_dim.
    """

    batch: int
    seq: int
    heads: int
    head_dim: int
    kv_heads: int
    value_head_dim: int | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.value_head_dim is None:
            object.__setattr__(self, "value_head_dim", self.head_dim)
        for name in ("batch", "seq", "heads", "head_dim", "kv_heads", "value_head_dim"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: got {getattr(self, name)}, want a positive number")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: got {self.kv_heads}, want a divisor of the {self.heads} heads")

    @property
    def numbers(self) -> list[int]:
        """[batch, seq, heads, head_dim, kv_heads], and value_head_dim if it differs from head_dim."""
        found = [self.batch, self.seq, self.heads, self.head_dim, self.kv_heads]
        return found if self.has_one_head_dim else [*found, self.value_head_dim]

    @property
    def has_one_head_dim(self) -> bool:
        return self.value_head_dim == self.head_dim


@dataclasses.dataclass(frozen=True)
class Case(Shape):
    """One attention. dtype: "bf16" or "fp16".

    mode: "fwd", the forward; "bwd", the whole backward op without the forward; "fwdbwd", forward and backward in one
    call.
    """

    dtype: str
    causal: bool
    mode: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode not in MODES:
            raise ValueError(f"mode: got {self.mode!r}, want one of {', '.join(MODES)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: got {self.dtype!r}, want one of {', '.join(DTYPES)}")

    @staticmethod
    def of(shape: Shape, *, dtype: str, causal: bool, mode: str) -> "Case":
        return Case(**dataclasses.asdict(shape), dtype=dtype, causal=causal, mode=mode)

    @property
    def flops(self) -> float:
        """Multiply-adds counted twice: two matmuls forward, five backward; half for causal."""
        pairs = self.batch * self.heads * self.seq * self.seq * (0.5 if self.causal else 1)
        of = lambda backward: attention_flops(pairs, self.head_dim, self.value_head_dim, backward=backward)
        return {"fwd": of(False), "bwd": of(True), "fwdbwd": of(False) + of(True)}[self.mode]

    @property
    def shape(self) -> Shape:
        return Shape(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Shape)})

    @property
    def label(self) -> str:
        heads = str(self.heads) if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        head_dim = str(self.head_dim) if self.has_one_head_dim else f"{self.head_dim}/{self.value_head_dim}"
        mask = "causal" if self.causal else "full"
        return f"{self.batch}x{self.seq} {heads}x{head_dim} {self.dtype} {mask} {self.mode}"

    def tflops(self, milliseconds: float) -> float:
        return self.flops / milliseconds / 1e9


def parse_shape(text: str, *, values: bool = False) -> Shape:
    """Parses "2,8192,16,128" or, with grouped heads, "2,8192,16,128,4".

    values: whether head_dim may be "192/128", with a head_dim of 128 for value. Raises ValueError for other texts.
    """
    words = [word.strip() for word in text.split(",")]
    value_head_dim = None
    try:
        if values and len(words) > 3 and "/" in words[3]:
            words[3], _, word = words[3].partition("/")
            value_head_dim = int(word)
        batch, seq, heads, head_dim, *rest = (int(word) for word in words)
        (kv_heads,) = rest or [heads]
    except ValueError:
        of_values = "[/value_head_dim]" if values else ""
        raise ValueError(f"shape: got {text!r}, want batch,seq,heads,head_dim{of_values}[,kv_heads]") from None
    return Shape(batch, seq, heads, head_dim, kv_heads, value_head_dim=value_head_dim)


def parse_shapes(text: str, *, values: bool = False) -> list[Shape]:
    """Parses one or more shapes separated by ";"."""
    parts = [part for part in text.split(";") if part.strip()] or [text]
    return [parse_shape(part, values=values) for part in parts]


@dataclasses.dataclass(frozen=True)
class InputSet:
    """query: [B, T, H, D]; key: [B, S, Hkv, D]; value: [B, S, Hkv, Dv]; dout: [B, T, H, Dv]. JAX arrays."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    dout: jax.Array

    @property
    def qkv(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        return self.query, self.key, self.value


def number_of_sets(shapes: Sequence[Sequence[int]], most: int = 64) -> int:
    """The number of sets of 16-bit arrays of these shapes that overflow the L2 cache; `most` at most."""
    size = 2 * sum(map(math.prod, shapes))
    return 1 if size >= ROTATION_BYTES / 2 else min(most, math.ceil(ROTATION_BYTES / size))


def input_sets(case: Case, seed: int = 0) -> list[InputSet]:
    """Sets of standard normal inputs. One round over all sets overflows the L2 cache."""
    queries = (case.batch, case.seq, case.heads, case.head_dim)
    keys = (case.batch, case.seq, case.kv_heads, case.head_dim)
    values, outs = ((*shape[:3], case.value_head_dim) for shape in (keys, queries))
    count = number_of_sets((queries, keys, values, outs))
    normal = jax.jit(jax.random.normal, static_argnums=(1, 2))
    sets = []
    for index in range(count):
        arrays = jax.random.split(jax.random.fold_in(jax.random.key(seed), index), 4)
        shapes = (queries, keys, values, outs)
        with gpu_among_others():
            made = [normal(k, shape, DTYPES[case.dtype]) for k, shape in zip(arrays, shapes, strict=True)]
            sets.append(InputSet(*jax.block_until_ready(made)))
    return sets


class Oracle:
    """Float32 results of an input set, for the first and the last (batch entry, key head).

    All query heads of these key heads are included.
    """

    def __init__(self, case: Case, inputs: InputSet):
        group = case.heads // case.kv_heads
        self.corners = []
        for batch, head in sorted({(0, 0), (case.batch - 1, case.kv_heads - 1)}):
            queries, keys = slice(head * group, (head + 1) * group), slice(head, head + 1)
            q, do = (_cut(x, batch, queries) for x in (inputs.query, inputs.dout))
            k, v = (_cut(x, batch, keys) for x in (inputs.key, inputs.value))
            want = [np.asarray(x) for x in _float32_attention(q, k, v, do, case.causal)]
            self.corners.append((batch, queries, keys, want))
        self.mode = case.mode

    def of_mode(self, mode: str) -> "Oracle":
        """The same results, for outputs of another mode."""
        other = copy.copy(self)
        other.mode = mode
        return other

    def error(self, outputs: tuple) -> float:
        """The largest relative error among outputs: (out,), (dq, dk, dv) or (out, dq, dk, dv), [B, T, H, D] each."""
        got, wanted = [], []
        for batch, queries, keys, want in self.corners:
            picks = (queries, queries, keys, keys)
            names = {"fwd": [0], "bwd": [1, 2, 3], "fwdbwd": [0, 1, 2, 3]}[self.mode]
            for output, which in zip(outputs, names, strict=True):
                got.append(as_numpy(output[batch : batch + 1, :, picks[which]]))
                wanted.append(want[which])
        return relative_error(got, wanted)


def _cut(x, batch, heads):
    return x[batch : batch + 1, :, heads].astype(jnp.float32)


def as_numpy(x) -> np.ndarray:
    """A JAX array or a torch tensor of any 16-bit type as float32 NumPy."""
    return np.asarray(x.astype(jnp.float32)) if isinstance(x, jax.Array) else x.detach().float().cpu().numpy()


def relative_error(outputs: Sequence[Any], wanted: Sequence[Any]) -> float:
    """The largest relative error (2-norm, over a whole array) among outputs, or NaN if one of them holds a NaN.

    The error is absolute if a wanted array is all zeros.
    """
    return float(_relative_error(tuple(outputs), tuple(wanted)))


@jax.jit
def has_nan(outputs: Any) -> jax.Array:
    """Whether an array of the tree holds a NaN."""
    return jnp.any(jnp.stack([jnp.isnan(x).any() for x in jax.tree.leaves(outputs)]))


@jax.jit
def _relative_error(outputs, wanted):
    pairs = [(x.astype(jnp.float32), y.astype(jnp.float32)) for x, y in zip(outputs, wanted, strict=True)]
    size = lambda y: jnp.where(jnp.any(y != 0), jnp.linalg.norm(y), 1)
    return jnp.max(jnp.stack([jnp.linalg.norm(x - y) / size(y) for x, y in pairs]))


@jax.jit(static_argnums=4)
def _float32_attention(q, k, v, do, causal):
    inputs = AttentionInputs(q, k, v)
    options = AttentionOptions(1 / math.sqrt(q.shape[-1]), is_causal=causal, precision="fp32")
    out, lse = chunked_attention.forward(inputs, options, out_dtype=jnp.float32)
    return (out, *chunked_attention.backward(inputs, options, *reference.row_terms(out, lse, do, None), do)[:3])


def softcap_mod(score, b, h, q_idx, kv_idx):
    """The score_mod that is equivalent to flash_attention's softcap."""
    return CAP * jnp.tanh(score / CAP)


def alibi_mod(heads: int):
    """The score_mod of ALiBi: Press, Smith and Lewis, "Train Short, Test Long" (2021), arXiv:2108.12409."""
    slopes = 2.0 ** (-8 * jnp.arange(1, heads + 1) / heads)
    return lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx).astype(jnp.float32)
