"""jax_kernels.masks for PyTorch: builders of the same names, which take tensors instead of arrays.

For example::

    from jax_kernels.bridge import masks

    mask = masks.causal() & masks.segments(ids) | masks.prefix(lengths)  # int32 tensors
    out = bridge.flash_attention(query, key, value, mask=mask)

A mask is a jax_kernels Mask of JAX arrays. The arrays are copies on the tensors' device: later changes of an argument
do not reach them, and no gradient passes through them. The tensors of one call are on one device, with the dtypes that
JAX's builder takes; array arguments stay unchanged. Methods of a Mask return JAX arrays, which torch.from_dlpack
converts. pooled_scores of tensors returns a tensor with a gradient.

from_function also takes a function in torch operations, such as a mask_mod of FlexAttention. Pass `batch` and `heads`
if the function reads b or h. The function may read tensors, and the mask keeps the values that they have when it is
made. After such a tensor changes, the mask raises ValueError: make it again. A score_mod, by contrast, reads the
current values in each call.

In a graph of torch.compile a Mask is a constant. Builders, and `&`, `|` and `~`, run eagerly: torch.compile breaks its
graph there, torch.func.vmap cannot map their arguments, and a CUDA graph cannot capture them. For one program, write a
JAX function that builds the mask and calls attention, and pass it to bridge.from_jax.
"""

import functools
import inspect
from collections.abc import Callable
from collections.abc import Sequence as _Sequence
from typing import Any
from typing import overload as _overload

import jax
import numpy as np
import torch
from jax.typing import ArrayLike as _ArrayLike

from jax_kernels import masks as _masks
from jax_kernels.bridge.interop import dlpack as _dlpack
from jax_kernels.bridge.interop import fork as _fork
from jax_kernels.bridge.interop import torch_internals as _private
from jax_kernels.bridge.interop.arguments import dtensors as _dtensors
from jax_kernels.bridge.interop.arguments.plain_numbers import plain_of as _plain_of
from jax_kernels.bridge.jax_functions.api import from_jax as _from_jax
from jax_kernels.bridge.jax_functions.argument_checks import check_tensors as _check_tensors
from jax_kernels.bridge.jax_functions.mask_operands import on_device as _on_device
from jax_kernels.bridge.operators import torch_operator as _library
from jax_kernels.bridge.translate import captures as _captures
from jax_kernels.bridge.translate import mask_sources as _mask_sources
from jax_kernels.bridge.translate import score_mods as _score_functions
from jax_kernels.lazy_names import dir_of as _dir_of
from jax_kernels.masks import BlockLists as BlockLists
from jax_kernels.masks import Mask as Mask
from jax_kernels.masks import PackedBlocks as PackedBlocks
from jax_kernels.masks import PreparedMask as PreparedMask
from jax_kernels.masks import causal as causal
from jax_kernels.masks.arrays.cu_seqlens import check_cu_seqlens as _check_cu_seqlens

# Options that determine the structure of a mask. The other options may be data.
_NUMBERS = frozenset(
    (
        *("batch", "block_size", "global_blocks", "heads", "k", "kv_length", "left", "q_length", "random_blocks"),
        *("rate", "right", "seed", "stride", "window", "window_blocks"),
    )
)


def _number(name: str, x: Any) -> Any:
    """Returns x, a mask builder's argument; a scalar that determines the mask's structure becomes a Python number.

    The structure, such as a window, is a constant of compiled programs. x may be a tensor, or a NumPy or JAX scalar.
    Other arguments, such as segment ids, are data, and are returned unchanged. name: the argument's name.
    """
    return _plain_of(name, x) if name in _NUMBERS else x


__dir__ = _dir_of(__name__, lambda name: name in dir(_masks))


@functools.wraps(_masks.dilated)
def dilated(rate: int | torch.Tensor) -> Mask:
    return _masks.dilated(_plain_of("rate", rate))


@functools.wraps(_masks.sliding_window)
def sliding_window(left: int | torch.Tensor | None, right: int | torch.Tensor | None) -> Mask:
    return _masks.sliding_window(_plain_of("left", left), _plain_of("right", right))


def _of_tensors(builder: Callable[..., Mask], *, is_traced: bool = False) -> Callable[..., Mask]:
    """Returns a mask builder that also takes tensors, which it copies to JAX arrays on their device.

    builder: a function of jax_kernels.masks. is_traced: whether the builder reads no values of arrays, so that it may
    run under jit.
    """
    by_position = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    names = [x.name for x in inspect.signature(builder).parameters.values() if x.kind in by_position]

    @functools.wraps(builder)
    def build(*args: Any, **kwargs: Any) -> Mask:
        _fork.refuse()
        args = tuple(_number(names[min(index, len(names) - 1)], x) for index, x in enumerate(args))
        kwargs = {name: _number(name, x) for name, x in kwargs.items()}
        named = [(names[min(index, len(names) - 1)], x) for index, x in enumerate(args)] + list(kwargs.items())
        found = {index: name for index, (name, x) in enumerate(named) if isinstance(x, torch.Tensor)}
        _mask_sources.check([x for _, x in named])
        if not found:
            return builder(*args, **kwargs)
        given = [x for _, x in named]
        device = given[next(iter(found))].device
        for index, name in found.items():
            given[index] = _checked(name, given[index], device)
            # from_function may take uint32. In other builders an id or a length above 2**31 would become negative.
            if given[index].dtype == torch.uint32 and builder is not _masks.from_function:
                raise TypeError(f"{name}: got dtype torch.uint32, want torch.int32; cast it with .to(torch.int32)")
        given = [_on_device(x, device) if isinstance(x, Mask) else x for x in given]

        def of(make: Callable[..., Mask], arrays: _Sequence[jax.Array]) -> Mask:
            filled = list(given)
            for index, array in zip(found, arrays, strict=True):
                filled[index] = array
            return make(*filled[: len(args)], **dict(zip(kwargs, filled[len(args) :], strict=True)))

        tensors = [given[index] for index in found]
        if is_traced:
            compiled = functools.partial(_compiled, builder)
            return _dlpack.call_on_tensors(lambda *arrays: of(compiled, arrays), tensors, device)
        return of(builder, _dlpack.copy_to_jax(tensors, device))

    return _private.not_in_graph(build, reason="jax_kernels: a Mask is no constant that torch.compile takes")


def _checked(name: str, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns the tensor, detached, after checks of its device, layout and dtype. Raises TypeError or ValueError.

    Wrappers of torch.func.grad and the like are removed. Raises NotImplementedError for a tensor that torch.func.vmap
    maps.

    name: the builder's argument, for errors. device: the device that all tensors of the call must be on.
    """
    _dlpack.check_dense(name, tensor)
    _dtensors.refuse("a mask's builder", **{name: tensor})
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name}: got a tensor on {tensor.device}, want one on a CPU or a CUDA device")
    if tensor.device != device:
        raise ValueError(f"{name}: got a tensor on {tensor.device}, want the device of the others, {device}")
    _dlpack.check_dtype(name, tensor.dtype)
    return _library.unwrapped(name, tensor)


def _compiled(builder: Callable[..., Mask], *args: Any, **kwargs: Any) -> Mask:
    """Runs the builder under jit. Returns its Mask.

    Arrays and floats among the arguments are inputs of the jitted function; all other arguments are its constants.
    """
    leaves, structure = jax.tree.flatten((args, kwargs))
    is_data = tuple(isinstance(x, jax.Array | np.ndarray | float) for x in leaves)
    constants = tuple(None if data else x for x, data in zip(leaves, is_data, strict=True))
    return _jitted(builder, structure, is_data, constants, [x for x, data in zip(leaves, is_data, strict=True) if data])


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _jitted(
    builder: Callable[..., Mask],
    structure: jax.tree_util.PyTreeDef,
    is_data: tuple[bool, ...],
    constants: tuple[Any, ...],
    data: Any,
) -> Mask:
    """Calls the builder with arguments that are put together from constants and data.

    structure: of (args, kwargs). is_data: for each leaf, whether it is the next entry of `data`, or its own entry of
    `constants`.
    """
    data = iter(data)
    leaves = [next(data) if is_one else x for x, is_one in zip(constants, is_data, strict=True)]
    args, kwargs = jax.tree.unflatten(structure, leaves)
    return builder(*args, **kwargs)


def segment_ids_from_cu_seqlens(cu_seqlens: torch.Tensor, length: int) -> torch.Tensor:
    """Returns the segment ids of documents that lie one after the other: int32 [1, length], for segment_ids.

    cu_seqlens: integers [documents + 1] as in flash-attn: 0, then the end of each document, in ascending order. The
    ids are on its device. length: the number of tokens, T or S; tokens past the last document have the id -1. Raises
    as jax_kernels.masks.segment_ids_from_cu_seqlens; the values are checked only on a CPU, outside of graphs.
    """
    length = _plain_of("length", length)
    _check_tensors(cu_seqlens=cu_seqlens)
    if cu_seqlens.is_floating_point() or cu_seqlens.is_complex() or cu_seqlens.dtype == torch.bool:
        raise TypeError(f"cu_seqlens: got dtype {cu_seqlens.dtype}, want integers [documents + 1]")
    if not torch.compiler.is_compiling():
        _check_cu_seqlens(tuple(cu_seqlens.shape), cu_seqlens.numpy() if cu_seqlens.is_cpu else None, length)
    tokens = torch.arange(length, dtype=torch.int32, device=cu_seqlens.device)
    ends = cu_seqlens.to(torch.int32)
    ids = torch.searchsorted(ends[1:].contiguous(), tokens, right=True, out_int32=True)
    return torch.where(tokens < ends[-1], ids, -1)[None]


block_sparse = _of_tensors(_masks.block_sparse)
dense = _of_tensors(_masks.dense)
_from_function = _of_tensors(_masks.from_function)
global_tokens = _of_tensors(_masks.global_tokens)
prefix = _of_tensors(_masks.prefix)
preset = _of_tensors(_masks.preset)
segments = _of_tensors(_masks.segments)
threshold = _of_tensors(_masks.threshold, is_traced=True)
top_k = _of_tensors(_masks.top_k, is_traced=True)
top_k_blocks = _of_tensors(_masks.top_k_blocks, is_traced=True)


@functools.wraps(_masks.from_function, assigned=("__module__", "__name__", "__qualname__"))
def from_function(
    function: _score_functions.Function,
    *arrays: torch.Tensor | _ArrayLike,
    batch: int | None = None,
    heads: int | None = None,
) -> Mask:
    """Returns a Mask that keeps the pairs for which a function (b, h, q, k) is True.

    The function is in jnp code, or in torch operations of scalars: b and h are the indices of batch entry and head, q
    and k the positions of query and key. This is jax_kernels.masks.from_function on tensors.

    Args:
      function: in torch operations it may read tensors: from closures, defaults, globals, lists, dicts, partials, or
        attributes of objects, such as the buffers of a module. int64 tensors are read as int32.
      arrays: arrays or tensors that the function takes after k. They are copied: later changes do not reach the mask.
      batch, heads: the numbers of batch entries and heads for which the function differs; None if it does not read b,
        or h.

    The mask keeps the values that the function's tensors have when the mask is made; a score_mod reads the current
    values instead. After PyTorch counts a change of such a tensor, or a variable holds another tensor, every use of the
    mask raises ValueError. Changes that PyTorch does not count, through `.data` or NumPy's memory, are not detected.

    Raises:
      TypeError: the function uses an operation without a form in jnp, or is not elementwise. The text has its name.
      ValueError: batch or heads is missing, or an int64 tensor has a value beyond int32. The text names the tensor.
    """
    batch, heads = _plain_of("batch", batch), _plain_of("heads", heads)
    made, read, paths = _score_functions.mask_mod(function, arrays)
    mask = _from_function(made, *read, *arrays, batch=batch, heads=heads)
    return _mask_sources.attach(mask, _captures.root_of(function), paths) if paths else mask


from_function = _private.not_in_graph(
    from_function, reason="jax_kernels: a Mask is no constant that torch.compile takes"
)

_pooled_scores = _from_jax(_masks.pooled_scores)


@_overload
def pooled_scores(query: jax.Array, key: jax.Array, block_size: int | tuple[int, int]) -> jax.Array: ...
@_overload
def pooled_scores(query: torch.Tensor, key: torch.Tensor, block_size: int | tuple[int, int]) -> torch.Tensor: ...
@functools.wraps(_masks.pooled_scores)
def pooled_scores(query: Any, key: Any, block_size: int | tuple[int, int]) -> Any:
    is_tensor = isinstance(query, torch.Tensor) or isinstance(key, torch.Tensor)
    if is_tensor:
        _check_tensors(query=query, key=key)
    return (_pooled_scores if is_tensor else _masks.pooled_scores)(query, key, _plain_of("block_size", block_size))


_private.break_graph("jax", "jax_kernels.masks")
