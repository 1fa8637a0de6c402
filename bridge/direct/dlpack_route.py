"""The DLPack route: JAX runs a function on PyTorch's tensors, in chunks where the memory does not suffice."""

import dataclasses
import warnings
from collections.abc import Callable, Hashable, Sequence

import jax
import torch

from jax_kernels import chunks
from jax_kernels.bridge.interop import dlpack, donated_outputs, memory
from jax_kernels.bridge.interop.bounded_dict import drop_oldest
from jax_kernels.bridge.interop.donated_outputs import FlatArguments, JaxFunction
from jax_kernels.bridge.interop.keyed_cache import memoize
from jax_kernels.bridge.interop.planning_device import planning_on

__all__ = ["by_jax", "run"]

_COUNTS = (2, 4, 8, 16, 32, 64)
_MOST = 1024  # keys of a function


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Chunked:
    """The calls of a function that ran out of memory, by FlatArguments.key.

    counts: the number of chunks in which the call ran. splits: by key and this number, the numbers of chunks of the
    call's ops. Only a trace splits ops, and JAX traces each number once.
    """

    counts: dict[Hashable, int] = dataclasses.field(default_factory=dict)
    splits: dict[tuple[Hashable, int], list[int]] = dataclasses.field(default_factory=dict)


@memoize
def _chunked(function: JaxFunction) -> _Chunked:
    return _Chunked()


def run(function: JaxFunction, arguments: FlatArguments, device: torch.device) -> list[torch.Tensor]:
    """Calls a jitted JAX function by JAX. Returns its results as a list of new tensors.

    If the call runs out of memory, it is traced again such that its ops run in 2 chunks, then 4, and so on, with one
    RuntimeWarning. Later calls of the same shapes begin with the number of chunks that sufficed. Raises the error of
    memory if no op can be split further, and RuntimeError while a CUDA graph is being captured.
    """
    dlpack.refuse_capture(device)

    def call() -> list[torch.Tensor]:
        is_cuda = device.type == "cuda" and not chunks.is_forced()  # a donating program does not depend on the chunks
        if is_cuda and (found := donated_outputs.run(function, arguments, device)) is not None:
            return found
        arrays, owners = dlpack.import_tensors(arguments.tensors, device, is_one_call=True)
        with planning_on(device):
            results = function(*arguments.placed(arrays))
        return dlpack.export_arrays(results, device, owners)

    chunked, error = _chunked(function), None
    if not chunked.counts or arguments.key not in chunked.counts:
        try:
            return memory.retry_on_oom(device, call)
        except (jax.errors.JaxRuntimeError, torch.OutOfMemoryError) as failed:
            if not _is_out_of_memory(failed):
                raise
            memory.free_locals(failed)
            error = failed
    return _in_chunks(chunked, arguments.key, device, call, getattr(function, "__name__", "from_jax"), error)


def by_jax(flat: JaxFunction, device: torch.device) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
    """A function of a list of tensors that runs `flat`, a JAX function of arrays, by JAX.

    For launches that run out of memory: JAX may have free memory in its pool, and can run the call in chunks.
    """
    jitted = jax.jit(flat)
    return lambda tensors: run(jitted, FlatArguments((), tensors, (False,) * len(tensors)), device)


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or chunks.is_out_of_memory(error)


def _in_chunks(
    chunked: _Chunked,
    key: Hashable,
    device: torch.device,
    call: Callable[[], list[torch.Tensor]],
    name: str,
    error: BaseException | None,
) -> list[torch.Tensor]:
    """call(), traced again such that its ops run in chunks: twice as many after each error.

    chunked: of the function. key: of the call. name: of the function, for the warning. error: why the whole call
    failed; raised if no op can be split further. None if the number of chunks is known.
    """
    before: list[int] = []
    for count in _COUNTS:
        if count < chunked.counts.get(key, 0):
            continue
        with chunks.forced(count) as split:
            try:
                results = memory.retry_on_oom(device, call)
            except (jax.errors.JaxRuntimeError, torch.OutOfMemoryError) as failed:
                if not _is_out_of_memory(failed):
                    raise
                memory.free_locals(failed)
                error = error or failed
                results = None
        split = chunked.splits.setdefault((key, count), split)
        drop_oldest(chunked.splits, len(_COUNTS) * _MOST)
        if results is not None:
            if chunked.counts.get(key) != count:
                chunked.counts[key] = count
                drop_oldest(chunked.counts, _MOST)
                text = f"{name}: out of memory on {device}; the call ran in {count} chunks"
                warnings.warn(text, RuntimeWarning, stacklevel=3)
            return results
        if not split or split == before:
            break
        before = split
    chunked.counts.pop(key, None)
    assert error is not None
    raise error
