"""The public ops as the command line names them. For plans, the command line imports jax_kernels.ops only here."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from jax_kernels import dispatch
from jax_kernels.ops.attention.block_sparse_attention import block_sparse_attention
from jax_kernels.ops.attention.decode_attention import decode_attention
from jax_kernels.ops.attention.dynamic_mask_attention import dynamic_mask_attention
from jax_kernels.ops.attention.flash_attention import flash_attention
from jax_kernels.ops.attention.flash_attention_fp8 import flash_attention_fp8
from jax_kernels.ops.dilated.dilated_attention import dilated_attention
from jax_kernels.ops.dilated.sequence_parallel import sequence_parallel_dilated_attention
from jax_kernels.ops.matmul.matmul import gated_matmul, matmul
from jax_kernels.ops.matmul.mlp import mlp
from jax_kernels.ops.normalization.normalization import layer_norm, rms_norm
from jax_kernels.ops.ring.ring_attention import ring_attention

__all__ = ["AXIS", "OPS", "Op", "on_devices", "spec"]

LENGTH = 1024
AXIS = "sequence"  # the mesh axis over which a sequence is sharded
EVERY = ("mosaic_gpu", "triton", "cudnn", "xla")


@dataclasses.dataclass(frozen=True)
class Op:
    """A public op, and a typical call, by which `jax-kernels info` judges its implementations.

    function: the op. implementations: the names that the op knows. q_length: the number of queries of the typical call
    of an attention op, which has one batch entry, LENGTH keys and 8 heads of head_dim 128. shapes: for an op that is
    no attention, the shapes of its arrays; () for attention. dtype: of all arrays; None for the 16-bit dtype that the
    device supports. arguments: the other arguments of the call, by name. devices: the number of devices over which the
    sequence is sharded; None for a whole sequence.
    """

    function: Callable[..., Any]
    implementations: tuple[str, ...] = EVERY
    q_length: int = LENGTH
    shapes: tuple[tuple[int, ...], ...] = ()
    dtype: str | None = None
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    devices: int | None = None

    def plan(self, sixteen_bits: str, implementation: str) -> dispatch.Plan:
        """The Plan of the typical call by this implementation. Raises NotImplementedError if it cannot serve the call.

        sixteen_bits: the name of the dtype of arrays whose `dtype` is None.
        """
        shapes = [(1, length, 8, 128) for length in (self.q_length, LENGTH, LENGTH)]
        given = (spec(shape, self.dtype or sixteen_bits) for shape in self.shapes or shapes)
        with on_devices(self.devices):
            return dispatch.explain(self.function, *given, **self.arguments, implementation=implementation)


def on_devices(count: int | None) -> contextlib.AbstractContextManager[Any]:
    """A context manager: plans inside it see a mesh with this number of devices along AXIS; no mesh for None."""
    if count is None:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(AbstractMesh((count,), (AXIS,), (AxisType.Auto,)))


def spec(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    """The ShapeDtypeStruct of an array of this shape and dtype."""
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


_PATTERN = {"segment_lengths": (LENGTH // 2,), "dilation_rates": (2,)}

OPS = {
    "flash_attention": Op(flash_attention),
    "flash_attention_fp8": Op(flash_attention_fp8, implementations=("mosaic_gpu", "xla"), dtype="float8_e4m3fn"),
    "decode_attention": Op(decode_attention, implementations=("mosaic_gpu", "triton", "xla"), q_length=1),
    "dilated_attention": Op(
        dilated_attention, implementations=("mosaic_gpu", "triton", "xla"), arguments=dict(_PATTERN)
    ),
    "sequence_parallel_dilated_attention": Op(
        sequence_parallel_dilated_attention,
        implementations=("mosaic_gpu", "triton", "xla"),
        arguments=_PATTERN | {"axis_name": AXIS},
        devices=8,
    ),
    "ring_attention": Op(ring_attention, arguments={"axis_name": AXIS}, devices=8),
    "dynamic_mask_attention": Op(dynamic_mask_attention, arguments={"mask": spec((1, 1, LENGTH, LENGTH), "bool")}),
    "block_sparse_attention": Op(
        block_sparse_attention, arguments={"block_mask": np.ones((LENGTH // 128, LENGTH // 128), bool)}
    ),
    "matmul": Op(matmul, implementations=("mosaic_gpu", "triton", "xla"), shapes=((LENGTH, 4096), (4096, 4096))),
    "gated_matmul": Op(
        gated_matmul,
        implementations=("mosaic_gpu", "triton", "xla"),
        shapes=((LENGTH, 4096), (4096, 4096), (4096, 4096)),
    ),
    "mlp": Op(
        mlp, implementations=("mosaic_gpu", "triton", "xla"), shapes=((LENGTH, 1024), (1024, 4096), (4096, 1024))
    ),
    "layer_norm": Op(layer_norm, implementations=("triton", "mosaic_gpu", "xla"), shapes=((LENGTH, 4096),)),
    "rms_norm": Op(rms_norm, implementations=("triton", "mosaic_gpu", "xla"), shapes=((LENGTH, 4096),)),
}
