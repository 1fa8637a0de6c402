"""The cases of dilated_attention for tests and `jax-kernels check`, on one device or a sharded sequence.

The oracle is jax_kernels.reference.dilated_attention in float64.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jax_kernels.ops.dilated.dilated_attention import dilated_attention
from jax_kernels.ops.dilated.sequence_parallel import sequence_parallel_dilated_attention
from jax_kernels.reference import dilated_attention as reference
from jax_kernels.testing.attention import rms_error
from jax_kernels.testing.refusals import refusal
from jax_kernels.testing.ring_attention import AXIS, mesh_of
from jax_kernels.testing.typical_call import LENGTH, TypicalCall

__all__ = ["CASES", "GPU", "TYPICAL", "DilatedCase", "errors_of", "run", "run_sharded", "why_not", "why_not_sharded"]

# The bounds of out, of lse and of the gradients. out is rounded once in a branch and once in the merge; gradients are
# rounded in each branch.
BOUNDS = {"float32": (2e-6, 2e-6, 4e-6), "float16": (4e-4, 1e-5, 8e-4), "bfloat16": (3e-3, 1e-5, 6e-3)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DilatedCase:
    """A call of dilated_attention, without its arrays.

    The fields from segment_lengths on are its arguments. packed: whether it has segment_ids.
    """

    batch: int = 2
    length: int = 48
    num_heads: int = 4
    kv_heads: int = 4
    head_dim: int = 64
    v_head_dim: int = 64
    dtype: str = "bfloat16"
    packed: bool = False
    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    is_causal: bool = False
    heads: str = "all"
    combine: str = "lse"
    layout: str = "overlap"
    order: str | None = None
    stop_gradient_weights: bool = False

    @property
    def pattern(self) -> dict[str, Any]:
        """The keyword arguments of dilated_attention that are fields of this case, by name."""
        names = "segment_lengths", "dilation_rates", "is_causal", "heads", "combine", "layout", "order"
        return {name: getattr(self, name) for name in (*names, "stop_gradient_weights")}

    def ids(self) -> Any:
        """segment_ids, int32 [B, T], of three packed sequences and some padding; None without `packed`."""
        if not self.packed:
            return None
        ids = np.sort(np.random.default_rng(1).integers(0, 3, (self.batch, self.length)), axis=1)
        return np.where(np.arange(self.length) % 13 == 7, -1, ids).astype(np.int32)

    def shapes(self, length: int) -> tuple[tuple[int, ...], ...]:
        """The shapes of query, key and value for a sequence of this length."""
        sizes = (self.num_heads, self.head_dim), (self.kv_heads, self.head_dim), (self.kv_heads, self.v_head_dim)
        return tuple((self.batch, length, *size) for size in sizes)

    def arrays(self) -> tuple[jax.Array, ...]:
        """(query, key, value, dout, dlse): normal random values, in the case's dtype; dlse is float32."""
        random = np.random.default_rng(0)
        shapes = *self.shapes(self.length), (self.batch, self.length, self.num_heads, self.v_head_dim)
        tensors = (jnp.asarray(random.standard_normal(shape, np.float32), self.dtype) for shape in shapes)
        return *tensors, jnp.asarray(random.standard_normal((self.batch, self.num_heads, self.length), np.float32))


def _results(attend: Callable[..., Any], arrays: tuple[Any, ...]) -> dict[str, Any]:
    """The results of attend(query, key, value) = (out, lse), and the gradients dq, dk and dv, by name.

    arrays: (query, key, value, dout, dlse).
    """
    query, key, value, dout, dlse = arrays
    (out, lse), vjp = jax.vjp(attend, query, key, value)
    dq, dk, dv = vjp((dout, jnp.where(jnp.isneginf(lse), 0, dlse)))
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def run(case: DilatedCase, implementation: str | None) -> dict[str, Any]:
    """The results of dilated_attention and its gradients by name: out, lse, dq, dk, dv."""
    statics = case.pattern | {"return_lse": True, "implementation": implementation}
    attend = functools.partial(dilated_attention, segment_ids=case.ids(), **statics)
    return jax.jit(functools.partial(_results, attend))(case.arrays())


def run_sharded(case: DilatedCase, implementation: str | None) -> dict[str, Any]:
    """The results of sequence_parallel_dilated_attention by name (out, lse, dq, dk, dv), on the devices of this
    machine.

    The arrays are whole and in the order of the sequence.
    """
    statics = case.pattern | {"return_lse": True, "implementation": implementation, "axis_name": AXIS}
    tokens, ids = PartitionSpec(None, AXIS), case.ids()

    def attend(query: Any, key: Any, value: Any, ids: Any) -> Any:
        return sequence_parallel_dilated_attention(query, key, value, segment_ids=ids, **statics)

    sharded = jax.shard_map(
        attend,
        mesh=mesh_of(case.length),
        in_specs=(tokens, tokens, tokens, None if ids is None else tokens),
        out_specs=(tokens, PartitionSpec(None, None, AXIS)),
        check_vma=False,
    )
    of_whole = lambda query, key, value: sharded(query, key, value, ids)
    return jax.jit(functools.partial(_results, of_whole))(case.arrays())


@functools.cache
def _float64(case: DilatedCase) -> dict[str, np.ndarray]:
    """The right results by name (out, lse, dq, dk, dv), in NumPy float64."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        arrays = tuple(jnp.asarray(np.asarray(x).astype(np.float64)) for x in case.arrays())
        attend = functools.partial(reference.dilated_attention, segment_ids=case.ids(), **case.pattern)
        run = jax.jit(functools.partial(_results, attend), compiler_options={"xla_backend_optimization_level": 0})
        return {name: np.asarray(x) for name, x in run(arrays).items()}


def errors_of(case: DilatedCase, got: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """(error, bound) of each result by name. got: from `run` or run_sharded. The error is rms_error against float64."""
    of_out, of_lse, of_gradients = BOUNDS[case.dtype]
    bounds, want = {"out": of_out, "lse": of_lse}, _float64(case)
    names = "out", "lse", "dq", "dk", "dv"
    return {name: (rms_error(got[name], want[name]), bounds.get(name, of_gradients)) for name in names}


def why_not(case: DilatedCase, implementation: str) -> str | None:
    """The reason why this implementation of dilated_attention cannot run a case on this machine; None if it can."""
    return _why_not(dilated_attention, case, case.length, implementation=implementation)


def why_not_sharded(case: DilatedCase, implementation: str) -> str | None:
    """The reason why this implementation of sequence_parallel_dilated_attention cannot run a case here; None if it
    can.
    """
    mesh = mesh_of(case.length)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        length, op = case.length // mesh.size, sequence_parallel_dilated_attention
        return _why_not(op, case, length, implementation=implementation, axis_name=AXIS)


def _why_not(op: Callable[..., Any], case: DilatedCase, length: int, **arguments: Any) -> str | None:
    """The reason why `op` cannot run the case for arrays of this length; None if it can. arguments: further ones of
    op.
    """
    query, key, value = (jax.ShapeDtypeStruct(shape, jnp.dtype(case.dtype)) for shape in case.shapes(length))
    ids = jax.ShapeDtypeStruct((case.batch, length), jnp.int32) if case.packed else None
    return refusal(op, query, key, value, segment_ids=ids, **case.pattern, **arguments)


def _case(lengths: tuple[int, ...], rates: tuple[int, ...], **fields: Any) -> DilatedCase:
    return DilatedCase(segment_lengths=lengths, dilation_rates=rates, **fields)


def _long(lengths: tuple[int, ...], rates: tuple[int, ...], **fields: Any) -> DilatedCase:
    sizes = {"batch": 1, "length": 2048, "num_heads": 8, "kv_heads": 8, "head_dim": 128, "v_head_dim": 128}
    return _case(lengths, rates, **sizes | fields)


CASES = {
    "longnet": _case((8, 16, 48), (1, 2, 4), is_causal=True),
    "odd": _case((10, 100), (3, 4), kv_heads=2, head_dim=40, v_head_dim=24),
    "groups": _case((16, 48), (2, 4), heads="groups", combine="mean", is_causal=True),
    "packed_fp32": _case((12, 48), (2, 3), packed=True, dtype="float32", is_causal=True),
    "partition_fp16": _case((12, 24, 7), (2, 4, 1), layout="partition", dtype="float16"),
    "hilbert": _case((16, 48), (2, 4), order="hilbert", kv_heads=1),
    "stopped_fp32": _case((16, 48), (1, 4), stop_gradient_weights=True, dtype="float32"),
}
# For a GPU: segments that fill tiles, which the Hopper kernels can read in place.
GPU = {
    "long": _long((512, 1024, 2048), (1, 2, 4), is_causal=True),
    "long_full": _long((256, 2048), (1, 4), kv_heads=2),
    "long_groups": _long((512, 1024), (1, 2), heads="groups", head_dim=64, v_head_dim=64, is_causal=True),
    "long_packed": _long((512, 2048), (1, 4), packed=True, is_causal=True),
    "long_partition": _long((1024, 1024), (4, 4), layout="partition"),
    "long_hilbert": _long((512, 2048), (2, 4), order="hilbert", is_causal=True),
}
_PATTERN = {"segment_lengths": (LENGTH // 2,), "dilation_rates": (2,)}
TYPICAL = {
    "dilated_attention": TypicalCall(
        dilated_attention, implementations=("mosaic_gpu", "triton", "xla"), arguments=dict(_PATTERN)
    ),
    "sequence_parallel_dilated_attention": TypicalCall(
        sequence_parallel_dilated_attention,
        implementations=("mosaic_gpu", "triton", "xla"),
        arguments=_PATTERN | {"axis_name": AXIS},
        devices=8,
    ),
}
