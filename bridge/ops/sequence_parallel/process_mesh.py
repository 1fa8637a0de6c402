"""JAX and PyTorch in one process for each device: JAX's processes are the ranks of torch.distributed.

A process's tensor becomes, without a copy, its shard of a jax.Array over the devices of a process group.
"""

import contextlib
import functools
import os
import socket
from collections.abc import Sequence
from typing import NamedTuple

import jax
import torch
import torch.distributed as dist
from jax._src import distributed, xla_bridge

from jax_kernels.bridge.interop import dlpack

__all__ = ["ProcessMesh", "initialize_distributed", "process_mesh"]

AXIS = "sequence"


def initialize_distributed(*, timeout: float = 300.0) -> None:
    """Starts JAX's distributed runtime with the ranks of torch.distributed as its processes, one device each.

    Call it once in each process, after torch.distributed.init_process_group and torch.cuda.set_device, and before
    anything else uses JAX. On GPUs JAX then sees only the current CUDA device. On CPUs JAX uses Gloo's collectives. If
    it has run before, it does nothing.

    Args:
      timeout: seconds to wait for the other processes.

    Raises:
      RuntimeError: torch.distributed is not initialized, or JAX has started its backends already. JAX raises its own
        error if a process does not join within the timeout.
      ValueError: timeout is not positive.
    """
    if not timeout > 0:
        raise ValueError(f"timeout: got {timeout}, want seconds above 0")
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialized: call torch.distributed.init_process_group first")
    if _is_started():
        return
    if getattr(xla_bridge, "_backends", {}):
        raise RuntimeError(
            "JAX started before bridge.initialize_distributed(): call it before the first call of jax_kernels or JAX"
        )
    rank, count = dist.get_rank(), dist.get_world_size()
    told = [_free_address() if rank == 0 else None]
    dist.broadcast_object_list(told, src=0)
    device = 0
    if torch.cuda.is_available() and os.environ.get("JAX_PLATFORMS", "cuda") != "cpu":
        device = torch.cuda.current_device()
    else:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(told[0], count, rank, local_device_ids=[device], initialization_timeout=round(timeout))


def _is_started() -> bool:
    return distributed.global_state.client is not None


def _free_address() -> str:
    """Returns "host:port" with a free port of this machine that other processes can reach."""
    host = os.environ.get("MASTER_ADDR") or "127.0.0.1"
    with contextlib.closing(socket.socket()) as opened:
        opened.bind(("", 0))
        return f"{host}:{opened.getsockname()[1]}"


class ProcessMesh(NamedTuple):
    """The devices of a process group, one per process.

    mesh: the JAX mesh of these devices, in the order of the group's ranks. Its one axis has the name in this module's
    constant AXIS. rank: this process's index on the axis, which is its rank in the group.
    """

    mesh: jax.sharding.Mesh
    rank: int

    def to_global(
        self, tensors: Sequence[torch.Tensor], axes: Sequence[int | None]
    ) -> tuple[list[jax.Array], list[torch.Tensor]]:
        """Returns (arrays over the group, owners), where each array's shard in this process is the tensor's memory.

        Nothing is copied. Keep the owners alive until the arrays have been read: they own the memory.

        axes: for each tensor, the axis along which the processes' shards are concatenated; None if all processes pass
        the same tensor.
        """
        parts, owners = dlpack.import_tensors(tensors, tensors[0].device)
        arrays: list[jax.Array] = []
        for part, axis in zip(parts, axes, strict=True):
            spec: list[str | None] = [None] * part.ndim
            shape = list(part.shape)
            if axis is not None:
                spec[axis], shape[axis] = AXIS, shape[axis] * self.mesh.size
            sharding = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec(*spec))
            arrays.append(jax.make_array_from_single_device_arrays(tuple(shape), sharding, [part]))
        return arrays, owners

    def to_local(self, arrays: Sequence[jax.Array], device: torch.device) -> list[torch.Tensor]:
        """Returns this process's shards of arrays over the group, as new tensors on `device`."""
        return dlpack.export_arrays([array.addressable_data(0) for array in arrays], device)


def process_mesh(group: "dist.ProcessGroup | None") -> ProcessMesh:
    """Returns the ProcessMesh of a process group; None is the group of all processes.

    Raises RuntimeError if torch.distributed is not initialized or JAX does not know its processes, ValueError if this
    process is not in the group.
    """
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialized: call torch.distributed.init_process_group first")
    count = dist.get_world_size()
    if count > 1 and (not _is_started() or jax.process_count() != count):
        raise RuntimeError(
            f"JAX does not know the {count} processes of torch.distributed: call bridge.initialize_distributed() after "
            "torch.distributed.init_process_group, before anything else uses JAX"
        )
    ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    if dist.get_rank() not in ranks:
        raise ValueError(f"group: got ranks {ranks}, want a group with this process's rank {dist.get_rank()}")
    return ProcessMesh(mesh=_mesh(ranks), rank=ranks.index(dist.get_rank()))


@functools.cache
def _mesh(ranks: tuple[int, ...]) -> jax.sharding.Mesh:
    """Returns the mesh of the first JAX device of each of these processes. ranks: in torch.distributed's numbering."""
    of_process: dict[int, jax.Device] = {}
    for device in jax.devices():
        of_process.setdefault(device.process_index, device)
    devices = [of_process[rank] for rank in ranks]
    return jax.make_mesh((len(ranks),), (AXIS,), (jax.sharding.AxisType.Auto,), devices=devices)
