"""The standard sizes of `jax-kernels bench`: calls of each op, written as the options of `jax-kernels explain`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_kernels.cli import explain_options as options
from jax_kernels.flops import attention_flops, matmul_flops

__all__ = ["STANDARD", "StandardCall", "arrays", "flops", "traffic"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StandardCall:
    """A call of an op. name: a short text, which begins with the varied size. values: options of the command line."""

    name: str
    values: dict[str, Any]


def _of_lengths(lengths: tuple[int, ...], tokens: int, heads: int, head_dim: int, **values: Any) -> list[StandardCall]:
    """Attention calls with this number of tokens in all, or one sequence if it is longer."""
    words = " ".join(["causal"] * values.get("is_causal", False) + [f"D{head_dim}"])
    return [
        StandardCall(
            name=f"{length} {words}",
            values={"shape": f"{max(1, tokens // length)},{length},{heads},{head_dim}", **values},
        )
        for length in lengths
    ]


def _rows(rows: tuple[int, ...], inner: int, **values: Any) -> list[StandardCall]:
    return [StandardCall(name=f"{count} x {inner}", values={"shape": f"{count},{inner}", **values}) for count in rows]


def _grouped(rows: tuple[int, ...], inner: int, columns: int, groups: int) -> list[StandardCall]:
    return [
        StandardCall(
            name=f"{count} x {inner}, {groups} groups",
            values={"shape": f"{count},{inner}", "columns": columns, "groups": groups},
        )
        for count in rows
    ]


def _decode(lengths: tuple[int, ...], batch: int, heads: int, kv_heads: int) -> list[StandardCall]:
    return [
        StandardCall(
            name=f"{length} keys, batch {batch}",
            values={"shape": f"{batch},1,{heads},128", "kv_shape": f"{batch},{length},{kv_heads},128"},
        )
        for length in lengths
    ]


_LONG, _SHORT = (1024, 2048, 4096, 8192, 16384), (128, 256, 512)
_PATTERN = {"segment_lengths": "2048,4096", "dilation_rates": "1,2"}

# By op: (calls for a GPU, calls for a CPU).
STANDARD: dict[str, tuple[list[StandardCall], list[StandardCall]]] = {
    "flash_attention": (
        [
            *_of_lengths(_LONG, 16384, 16, 128, is_causal=True),
            *_of_lengths(_LONG, 16384, 16, 128),
            *_of_lengths(_LONG, 16384, 32, 64, is_causal=True),
        ],
        [*_of_lengths(_SHORT, 512, 4, 64, is_causal=True), *_of_lengths(_SHORT, 512, 4, 64)],
    ),
    "flash_attention_fp8": (
        _of_lengths(_LONG, 16384, 16, 128, is_causal=True),
        _of_lengths(_SHORT, 512, 4, 64, is_causal=True),
    ),
    "decode_attention": (_decode((4096, 16384), 64, 32, 8), _decode((256, 1024), 2, 8, 2)),
    "dilated_attention": (
        _of_lengths((8192, 16384), 16384, 16, 128, is_causal=True, **_PATTERN),
        _of_lengths((256, 512), 512, 4, 64, is_causal=True, segment_lengths="128,256", dilation_rates="1,2"),
    ),
    "matmul": (
        [*_rows((16, 1024, 4096, 8192), 4096, columns=4096), *_rows((8192,), 8192, columns=8192)],
        _rows((64, 256), 256, columns=256),
    ),
    "gated_matmul": (_rows((1024, 8192), 4096, columns=14336), _rows((64,), 256, columns=512)),
    "mlp": (
        _rows((1024, 8192), 4096, hidden=14336, columns=4096, w_gate=True),
        _rows((64,), 256, hidden=512, columns=256, w_gate=True),
    ),
    "grouped_matmul": (
        [*_grouped((8192, 32768), 2048, 1408, 64), *_grouped((8192, 32768), 4096, 14336, 8)],
        _grouped((64, 256), 128, 256, 4),
    ),
    "grouped_gated_matmul": (
        [*_grouped((8192, 32768), 2048, 1408, 64), *_grouped((8192, 32768), 4096, 14336, 8)],
        _grouped((64,), 128, 256, 4),
    ),
    "linear_cross_entropy": (
        [
            *_rows((4096, 16384), 4096, columns=32768, reduction="mean"),
            *_rows((8192,), 4096, columns=131072, reduction="mean"),
        ],
        _rows((64, 256), 128, columns=512, reduction="mean"),
    ),
    "layer_norm": (_rows((8192, 32768), 4096, scale=True, bias=True), _rows((256,), 512, scale=True, bias=True)),
    "rms_norm": (_rows((8192, 32768), 4096, scale=True), _rows((256,), 512, scale=True)),
}


def arrays(op: str, call: StandardCall) -> dict[str, Any]:
    """The arguments of the op, by name, with random arrays of the call's shapes.

    All keys count. The groups of rows have equal sizes, the last one also the rest, and targets are random.
    """
    defaults = {name: x.default for name, x in options.parameters_of(op).items()}
    given = options.given(op, defaults | call.values)
    keys = iter(jax.random.split(jax.random.key(0), len(given)))

    def fill(name: str, x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        if jnp.issubdtype(x.dtype, jnp.floating):
            return jax.random.normal(next(keys), x.shape, jnp.float32).astype(x.dtype)
        return _integers(name, x, given)

    found = {name: fill(name, x) for name, x in given.items()}
    return {name: x for name, x in found.items() if name != "implementation"}


def _integers(name: str, x: jax.ShapeDtypeStruct, given: dict[str, Any]) -> jax.Array:
    """The values of an argument of integers. given: all arguments of the op, by name."""
    if name == "group_sizes":
        rows, groups = given["x"].shape[0], x.shape[0]
        return jnp.full(groups, rows // groups, x.dtype).at[-1].add(rows % groups)
    if name == "targets":
        return jax.random.randint(jax.random.key(1), x.shape, 0, given["w"].shape[0 if given["transpose_w"] else 1])
    assert name == "kv_lengths", name
    return jnp.full(x.shape, given["key"].shape[1], x.dtype)


def flops(op: str, given: dict[str, Any], gradients: bool) -> float | None:
    """The floating-point operations of a call's matmuls; None for an op that is bound by memory, or by its pattern.

    A causal attention counts half of its pairs. A backward of attention counts 2.5 forwards, of a matmul 2. A row of a
    grouped matmul meets the weights of one group.
    """
    if op in ("flash_attention", "flash_attention_fp8"):
        batch, q_length, heads, head_dim = given["query"].shape
        pairs = batch * heads * q_length * given["key"].shape[1] * (0.5 if given["is_causal"] else 1)
        v_head_dim = given["value"].shape[-1]
        work = attention_flops(pairs, head_dim, v_head_dim, backward=False)
        return work + (attention_flops(pairs, head_dim, v_head_dim, backward=True) if gradients else 0)
    weights = [given[name] for name in ("w", "w_gate", "w_up", "w_down") if given.get(name) is not None]
    if not weights:
        return None
    rows = given["x"].size // given["x"].shape[-1]
    groups = given["group_sizes"].size if "group_sizes" in given else 1
    return matmul_flops(rows, 1, sum(w.size for w in weights) // groups) * (3 if gradients else 1)


def traffic(function: Any, given: dict[str, Any], gradients: bool) -> int:
    """The bytes of a call's arguments and results, each read or written once. A backward reads both again, reads the
    results' gradients and writes the arguments' gradients.
    """
    arrays = {name: x for name, x in given.items() if isinstance(x, jax.Array)}
    results = jax.eval_shape(lambda arrays: function(**{**given, **arrays}), arrays)
    size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
    return (size(arrays) + size(results)) * (3 if gradients else 1)
