"""The cache, the lengths and the rotary embedding of a call of flash_attn_with_kvcache, with their checks."""

import dataclasses
from typing import Any, NamedTuple

import torch

from jax_kernels.bridge.interop import torch_internals
from jax_kernels.bridge.interop.arguments.autocast import autocast_dtype
from jax_kernels.bridge.interop.arguments.plain_numbers import plain_of
from jax_kernels.bridge.ops.attention.attention_checks import check_tensor
from jax_kernels.ops.attention.decode_attention import SMALLEST_PAGE

__all__ = [
    "KeyValueCache",
    "check_int32",
    "check_no_gradient",
    "checked_cache",
    "checked_lengths",
    "checked_new",
    "checked_rotary",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyValueCache:
    """The keys and values of `batch` sequences: [rows, S, Hkv, D], or with a table [pages, page_size, Hkv, D].

    rows: int32 [batch], the row of each sequence's keys; None: sequence b has row b. table: int32
    [batch, pages of a sequence], the page indices of each sequence, in order, or None.
    """

    key: torch.Tensor
    value: torch.Tensor
    batch: int
    rows: torch.Tensor | None = None
    table: torch.Tensor | None = None

    @property
    def capacity(self) -> int:
        """The number of keys that each sequence can have."""
        return self.key.shape[1] if self.table is None else self.table.shape[1] * self.key.shape[1]

    def write(self, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> None:
        """Writes new keys and values [batch, N, Hkv, D] into the cache, for sequence b from position lengths[b] on."""
        positions = lengths.long()[:, None] + torch.arange(k.shape[1], device=k.device)
        if self.table is not None:
            size = self.key.shape[1]
            at = self.table.long().gather(1, positions // size), positions % size
        elif self.rows is not None:
            at = self.rows.long()[:, None], positions
        else:
            at = torch.arange(self.batch, device=k.device)[:, None], positions
        self.key[at] = k
        self.value[at] = v

    def in_place(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Returns (key, value, block_tables) for decode_attention, without a copy where it supports the page size.

        block_tables is None if sequence b has row b. A row of the cache counts as a page. If the page size is no power
        of two from 16 on, returns copies of whole sequences and None.
        """
        tables, size = self.table, self.key.shape[1]
        if tables is None and self.rows is None:
            return self.key[: self.batch], self.value[: self.batch], None
        if size < SMALLEST_PAGE or size & (size - 1):
            return *self.whole(), None
        if tables is None and self.rows is not None:
            tables = self.rows[:, None]  # a row is a page
        return self.key, self.value, tables

    def whole(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (key, value), each [batch, S, Hkv, D]: copies, unless sequence b has row b."""
        if self.table is not None:
            pages = self.table.long().clamp(0, max(self.key.shape[0] - 1, 0))  # pages past a length may have any index
            return self.key[pages].flatten(1, 2), self.value[pages].flatten(1, 2)
        if self.rows is not None:
            return self.key[self.rows.long()], self.value[self.rows.long()]
        return self.key[: self.batch], self.value[: self.batch]

    def without_padding(self, leftpad: torch.Tensor) -> "KeyValueCache":
        """Returns a copy of the cache in which key leftpad[b] of each sequence b has become key 0.

        The copy has a row for each sequence, in order, and the same capacity. Its last leftpad[b] keys are no keys of
        the sequence: the caller subtracts leftpad from the lengths. leftpad: int32 [batch].
        """
        key, value = self.whole()
        index = leftpad.long()[:, None] + torch.arange(self.capacity, device=key.device)
        at = torch.arange(self.batch, device=key.device)[:, None], index.clamp(0, self.capacity - 1)
        return KeyValueCache(key=key[at], value=value[at], batch=self.batch)


class _Rotary(NamedTuple):
    """The cosines and sines of rotary embedding, each [positions, R / 2], for the first R features of a head.

    is_interleaved: whether the pairs of features are (0, 1), (2, 3), ...; otherwise (0, R / 2), (1, R / 2 + 1), ...
    """

    cos: torch.Tensor
    sin: torch.Tensor
    is_interleaved: bool

    def rotated(self, x: torch.Tensor, first: torch.Tensor, *, is_moving: bool = True) -> torch.Tensor:
        """Returns x [B, T, heads, D] with its first R features rotated, in x's dtype.

        Token i of sequence b has position first[b] + i; if not is_moving, all tokens have position first[b].
        """
        steps = torch.arange(x.shape[1], device=x.device) * is_moving
        positions = first.long()[:, None] + steps
        cos, sin = (table[positions][:, :, None].float() for table in (self.cos, self.sin))
        size = 2 * self.cos.shape[1]
        turned, rest = x[..., :size].float(), x[..., size:]
        if self.is_interleaved:
            a, b = turned[..., ::2], turned[..., 1::2]
            found = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
        else:
            a, b = turned.chunk(2, dim=-1)
            found = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
        return torch.cat([found.to(x.dtype), rest], dim=-1)


def check_no_gradient(**arguments: torch.Tensor | float | None) -> None:
    """Raises NotImplementedError if a tensor requires a gradient while gradients are enabled."""
    if not torch.is_grad_enabled():
        return
    for name, x in arguments.items():
        if isinstance(x, torch.Tensor) and x.requires_grad:
            raise NotImplementedError(
                f"{name}: got a tensor that requires a gradient, want none: attention to a cache has no gradient; call "
                "it under torch.no_grad()"
            )


def check_int32(name: str, x: Any, q: torch.Tensor, shape: tuple[int | None, ...]) -> None:
    """Raises ValueError, naming the argument, unless x is an int32 tensor of this shape on q's device.

    shape: the size of each axis; None for an axis of any size.
    """
    check_tensor(name, x, q)
    is_like = x.ndim == len(shape) and all(want in (None, got) for got, want in zip(x.shape, shape, strict=True))
    if x.dtype != torch.int32 or not is_like:
        axes = ", ".join("pages" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: got {x.dtype} {tuple(x.shape)}, want torch.int32 [{axes}]")


def _check_within(name: str, x: torch.Tensor, most: int, of: str) -> None:
    """Raises ValueError if an index in x is below 0 or not below `most`, where the host may read the values.

    name: the argument's name. of: the indexed items, such as "k_cache's rows", for the error.
    """
    if torch_internals.has_known_values(x) and x.numel() and not 0 <= int(x.min()) <= int(x.max()) < most:
        raise ValueError(f"{name}: got {int(x.min())} to {int(x.max())}, want indices of {of}, 0 to {most - 1}")


def checked_cache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: torch.Tensor | None,
    table: torch.Tensor | None,
) -> KeyValueCache:
    """Returns the cache of a call after checks of shapes, dtypes and devices. Raises TypeError or ValueError.

    rows, table: the arguments cache_batch_idx and block_table.
    """
    is_paged = table is not None
    cache_axes = "[pages, page_size, heads, head_dim]" if is_paged else "[rows, length, heads, head_dim]"
    for name, x, axes in (
        ("q", q, "[batch, length, heads, head_dim]"),
        ("k_cache", k_cache, cache_axes),
        ("v_cache", v_cache, cache_axes),
    ):
        check_tensor(name, x, q)
        if x.ndim != 4:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, want 4 axes {axes}")
        if x.dtype != q.dtype and autocast_dtype(q.device) is None:
            raise TypeError(f"{name}: got dtype {x.dtype}, want q's dtype {q.dtype}")
    if k_cache.shape[3] != q.shape[3] or not k_cache.shape[2] or q.shape[2] % k_cache.shape[2]:
        want = f"a divisor of q's {q.shape[2]} heads, and its head_dim {q.shape[3]}"
        raise ValueError(f"k_cache: got shape {tuple(k_cache.shape)}, want {want}")
    if k_cache.shape[:3] != v_cache.shape[:3]:
        want = f"k_cache's {tuple(k_cache.shape[:3])} in the first three axes"
        raise ValueError(f"v_cache: got shape {tuple(v_cache.shape)}, want {want}")
    batch = q.shape[0]
    if is_paged:
        if rows is not None:
            raise ValueError("cache_batch_idx: got one with block_table, want None: a table lists a sequence's pages")
        check_int32("block_table", table, q, (batch, None))
    elif rows is not None:
        check_int32("cache_batch_idx", rows, q, (batch,))
        _check_within("cache_batch_idx", rows, k_cache.shape[0], "k_cache's rows")
    elif k_cache.shape[0] < batch:
        raise ValueError(f"k_cache: got {k_cache.shape[0]} rows, want q's batch {batch} or more, or cache_batch_idx")
    return KeyValueCache(key=k_cache, value=v_cache, batch=batch, rows=rows, table=table)


def checked_lengths(given: Any, q: torch.Tensor, cache: KeyValueCache, *, has_new: bool) -> torch.Tensor:
    """Returns the argument cache_seqlens as int32 [B]; None becomes the cache's capacity.

    has_new: whether the call has new keys; None then raises ValueError. Lengths that the host may read are checked.
    """
    if given is None:
        if has_new:
            raise ValueError("cache_seqlens: got None with k, want an int or int32 [batch]: where k is written")
        given = cache.capacity
    if not isinstance(given, torch.Tensor):
        given = plain_of("cache_seqlens", given)
        if isinstance(given, bool) or not isinstance(given, int | torch.SymInt):
            raise TypeError(f"cache_seqlens: got {type(given).__name__}, want an int or an int32 tensor [batch]")
        found = torch.full((cache.batch,), given, dtype=torch.int32, device=q.device)
    elif given.ndim == 0 and not given.is_floating_point() and given.dtype != torch.bool:
        found = given.to(device=q.device, dtype=torch.int32).expand(cache.batch)
    else:
        check_int32("cache_seqlens", given, q, (cache.batch,))
        found = given
    _check_pages(cache, found, 0)
    return found


def _check_pages(cache: KeyValueCache, lengths: torch.Tensor, new: int) -> None:
    """Raises ValueError if the lengths plus `new` tokens exceed the cache, or if a page that they use is out of range.

    Only values that the host may read are checked. lengths: int32 [B], the keys before the call. new: the number of new
    tokens of each sequence.
    """
    if not torch_internals.has_known_values(lengths) or not lengths.numel():
        return
    low, high = int(lengths.min()), int(lengths.max())
    if low < 0 or high + new > cache.capacity:
        tokens = f" with {new} new tokens" if new else ""
        raise ValueError(f"cache_seqlens: got {low} to {high}{tokens}, want 0 to {cache.capacity - new}")
    if cache.table is not None:
        pages = torch.arange(cache.table.shape[1], device=lengths.device) * cache.key.shape[1]
        _check_within("block_table", cache.table[pages < lengths[:, None] + new], cache.key.shape[0], "k_cache's pages")


def checked_new(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, cache: KeyValueCache, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns k and v in the cache's dtype. Raises TypeError or ValueError for a wrong shape, dtype or length.

    A cache that torch.Tensor.expand made raises ValueError too: the keys of a sequence would replace another's keys.
    Only autocast lets k and v have another dtype than the cache. lengths: int32 [B], the keys before the call.
    """
    if v is None:
        raise ValueError("v: got None with k, want the new values")
    found = []
    for name, x, of in (("k", k, cache.key), ("v", v, cache.value)):
        check_tensor(name, x, q)
        want = (cache.batch, k.shape[1] if k.ndim > 1 else None, *of.shape[2:])
        if tuple(x.shape) != want:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, want {want}, [batch, length, heads, head_dim]")
        if x.dtype != of.dtype and autocast_dtype(x.device) is None:
            raise TypeError(f"{name}: got dtype {x.dtype}, want {name}_cache's {of.dtype}")
        shared = [axis for axis, size in enumerate(of.shape) if of.stride(axis) == 0 and size > 1]
        if shared:
            wanted = f"an entry of memory for each index, as {name} is written into it; make it with .contiguous()"
            raise ValueError(f"{name}_cache: got a tensor that expand made along axis {shared[0]}, want {wanted}")
        found.append(x.to(of.dtype))
    _check_pages(cache, lengths, k.shape[1])
    return found[0], found[1]


def checked_rotary(
    q: torch.Tensor, cos: Any, sin: Any, is_interleaved: bool, lengths: torch.Tensor, count: int
) -> _Rotary:
    """Returns the rotary embedding of a call after checks of its tensors. Raises ValueError.

    cos, sin: the arguments rotary_cos and rotary_sin, [positions, R / 2]. lengths: int32 [B], the keys of each sequence
    before the call. count: the number of positions that are read for sequence b, from lengths[b] on. If the host may
    read the lengths, cos and sin must have all these positions.
    """
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        if x is None:
            raise ValueError(f"{name}: got None, want both of rotary_cos and rotary_sin, or neither")
        check_tensor(name, x, q)
        if x.ndim != 2 or x.shape != cos.shape or not x.is_floating_point() or not 0 < 2 * x.shape[1] <= q.shape[3]:
            want = f"floats [positions, R / 2] with R at most {q.shape[3]}"
            raise ValueError(f"{name}: got {x.dtype} {tuple(x.shape)}, want {want}, alike in both")
    if (
        torch_internals.has_known_values(lengths)
        and lengths.numel()
        and (last := int(lengths.max()) + count) > cos.shape[0]
    ):
        raise ValueError(f"rotary_cos: got {cos.shape[0]} positions, want {last} or more")
    return _Rotary(cos=cos, sin=sin, is_interleaved=is_interleaved)
