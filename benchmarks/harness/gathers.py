"""Dilated attention by index, in JAX and in PyTorch: the usual implementation.

For each branch the tokens of each head are gathered by index, attended to, and scattered into zeros of the full size.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from harness.cases import Case
from harness.contenders import Variant, fastest
from harness.timing import Built
from jax_kernels import flash_attention, hilbert_order

# Maps query, key and value, [entries, rows, heads, D], to out and lse, [entries, heads, rows], in natural log.
Attend = Callable[[Any, Any, Any], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Pattern:
    """The pattern of a dilated_attention. heads: "groups" goes with combine="mean", as in dilated-attention-pytorch."""

    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    heads: str = "all"
    layout: str = "overlap"
    order: str | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of dilated_attention."""
        return dataclasses.asdict(self) | {"combine": "mean" if self.heads == "groups" else "lse"}

    @property
    def is_merged(self) -> bool:
        """Whether a token of a head may be in several branches. Their lses then weigh the branches."""
        return self.heads == "all" and self.layout == "overlap"

    @property
    def share(self) -> float:
        """The factor of each branch if the lses do not weigh the branches."""
        return 1 / len(self.segment_lengths) if self.heads == "groups" else 1.0

    def flops(self, case: Case) -> float:
        """The operations of all branches, counted as in Case.flops."""
        pairs = 0.0  # in a batch entry; a class has size / rate tokens
        if self.layout == "partition":
            for size, rate in self._partition(case.seq):
                pairs += case.heads * size * size / rate
        else:
            sizes = zip(self.segment_lengths, self.dilation_rates, self._groups(case.heads), strict=True)
            for size, rate, heads in sizes:
                pairs += len(heads) * case.seq * min(size, case.seq) / rate**2
        return case.flops * pairs / (case.heads * case.seq**2)

    def places(self, length: int, num_heads: int, is_causal: bool) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields for each branch the tokens of its rows, int [entries, rows, heads], and its heads, int [heads].

        A row that a segment lacks has the token `length`. It is the last row of its class, so under is_causal no other
        row attends to it. Raises NotImplementedError if a segment does not divide the length, and, unless is_causal, if
        a rate does not divide its segment.
        """
        if self.layout == "partition":
            start = 0
            for size, rate in self._partition(length):
                classes = np.moveaxis(self._classes(size, rate, is_causal), 1, 0)[:, :, None]
                tokens = np.where(classes < size, start + classes, length)
                yield np.broadcast_to(tokens, (*tokens.shape[:2], num_heads)), np.arange(num_heads)
                start += size
            return
        sizes = zip(self.segment_lengths, self.dilation_rates, self._groups(num_heads), strict=True)
        for index, (size, rate, heads) in enumerate(sizes):
            size = min(size, length)
            if length % size:
                raise NotImplementedError(f"its segments must divide {length}")
            offsets = heads // -(-num_heads // rate) if self.heads == "all" else np.full(len(heads), index % rate)
            rows = self._classes(size, rate, is_causal)[:, offsets]
            yield np.where(rows < size, np.arange(0, length, size)[:, None, None] + rows, length), heads

    def _classes(self, size: int, rate: int, is_causal: bool) -> np.ndarray:
        """The tokens of each class of a segment, int [rows, rate], ascending, padded with `size`."""
        if size % rate and not is_causal:
            raise NotImplementedError("if not causal its rates must divide its segments")
        tokens = np.full((-(-size // rate), rate), size)
        visited = np.arange(size) if self.order is None else hilbert_order(size)
        for phase in range(rate):
            taken = np.sort(visited[phase::rate])
            tokens[: len(taken), phase] = taken
        return tokens

    def _groups(self, num_heads: int) -> Sequence[np.ndarray]:
        every = np.arange(num_heads)
        count = len(self.segment_lengths)
        return [every] * count if self.heads == "all" else np.array_split(every, count)

    def _partition(self, length: int) -> Iterator[tuple[int, int]]:
        """Yields (segment length, rate) of each segment in order, and of the tokens past the last segment."""
        for size, rate in (*zip(self.segment_lengths, self.dilation_rates, strict=True), (length, 1)):
            size = min(size, length)
            if size:
                yield size, min(rate, size)
            length -= size


def gathered(query, key, value, *, pattern: Pattern, is_causal: bool, implementation: str | None):
    """Dilated attention in JAX, by this library's attention."""
    batch, length, heads, _ = query.shape
    key, value = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (key, value))
    outs, lses = [], []
    attend = functools.partial(
        flash_attention, is_causal=is_causal, return_lse=pattern.is_merged, implementation=implementation
    )
    whole = jnp.zeros(query.shape, jnp.float32 if pattern.is_merged else query.dtype)
    for places, columns in pattern.places(length, heads, is_causal):
        columns = np.broadcast_to(columns, places.shape)
        pick = lambda x, places=places, columns=columns: x.at[:, places, columns].get(mode="clip")
        picked = (pick(x).reshape(-1, *places.shape[1:], x.shape[3]) for x in (query, key, value))
        put = lambda whole, x, places=places, columns=columns: whole.at[:, places, columns].set(x, mode="drop")
        out = attend(*picked)
        if pattern.is_merged:
            out, lse = out
            lse = lse.swapaxes(1, 2).reshape(batch, *places.shape)
            lses.append(put(jnp.full((batch, length, heads), -jnp.inf), lse))
        out = put(whole, out.reshape(batch, *places.shape, -1).astype(whole.dtype))
        outs.append(out)
        whole = whole if pattern.is_merged else out
    if not pattern.is_merged:
        return whole * jnp.asarray(pattern.share, whole.dtype)
    weights = jax.nn.softmax(jnp.stack(lses), axis=0)
    return sum(w[..., None] * out for w, out in zip(weights, outs, strict=True)).astype(query.dtype)


def gathered_in_torch(query, key, value, *, pattern: Pattern, places: Sequence[tuple], attend: Attend):
    """Dilated attention in PyTorch, over query, key and value as arrays of rows, [B * T * H, D].

    places: for each branch of the whole batch, the indices of the rows to gather, [entries, rows, heads], and of the
    rows to scatter to. Row B * T * H takes the dropped rows.
    """
    import torch

    batch, length, heads, head_dim = query.shape
    key, value = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (key, value))
    count = batch * length * heads
    outs, lses = [], []
    for taken, put in places:
        pick = lambda x, taken=taken: x.reshape(count, head_dim).index_select(0, taken.flatten())
        picked = (pick(x).view(*taken.shape, head_dim) for x in (query, key, value))
        out, lse = attend(*picked)
        out, put = out.reshape(-1, head_dim), put.flatten()
        if pattern.is_merged:
            outs.append(out.new_zeros(count + 1, head_dim, dtype=torch.float32).index_copy_(0, put, out.float()))
            lse = lse.transpose(1, 2).flatten().float()
            lses.append(lse.new_full((count + 1,), -torch.inf).index_copy_(0, put, lse))
        else:
            outs = [(outs[0] if outs else out.new_zeros(count + 1, head_dim)).index_copy_(0, put, out)]
    if pattern.is_merged:
        weights = torch.stack(lses).softmax(0)
        out = sum(w[:count, None] * out[:count] for w, out in zip(weights, outs, strict=True))
    else:
        out = outs[0][:count] * pattern.share
    return out.view(query.shape).to(query.dtype)


def places_in_torch(pattern: Pattern, case: Case, device: Any) -> list[tuple]:
    """The `places` of gathered_in_torch."""
    import torch

    batch, length, heads = case.batch, case.seq, case.heads
    found = []
    for tokens, columns in pattern.places(length, heads, case.causal):
        first = np.arange(batch)[:, None, None, None] * length
        rows = lambda tokens, first=first, columns=columns: (first + tokens) * heads + columns
        taken = rows(np.minimum(tokens, length - 1))
        put = np.where(tokens < length, rows(tokens), batch * length * heads)
        found.append(tuple(torch.from_numpy(x.reshape(-1, *x.shape[2:])).to(device) for x in (taken, put)))
    return found


def flex(is_causal: bool, rows: Sequence[int], device: Any, wrap: Callable[[Any], Any] = lambda f: f) -> Attend:
    """Makes an Attend of flex_attention, whose lse has a gradient, unlike PyTorch's flash attention's.

    rows: the possible numbers of rows of a call. wrap: applied to flex_attention, such as torch.compile.
    """
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    rule = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
    masks = {n: create_block_mask(rule, None, None, n, n, device=device) if is_causal else None for n in set(rows)}
    function = wrap(flex_attention)

    def attend(query, key, value):
        heads_first = (x.transpose(1, 2) for x in (query, key, value))
        out, aux = function(*heads_first, block_mask=masks[query.shape[1]], return_aux=AuxRequest(lse=True))
        return out.transpose(1, 2), aux.lse

    return attend


def in_torch(pattern: Pattern, case: Case, sets: Sequence[Any]) -> Built:
    """The faster of two variants: only flex_attention compiled, or also the gathers, the scatters and the merge."""
    import torch

    from harness import torch_contenders

    torch_contenders.settle_compiler()
    compiled = functools.partial(torch.compile, dynamic=False)
    tensors = torch_contenders.tensors(sets, heads_first=False)
    device = tensors[0].query.device
    places = places_in_torch(pattern, case, device)
    rows = [taken.shape[1] for taken, _ in places]

    def make(label: str, attend: Attend, wrap: Callable[[Any], Any]) -> Built:
        function = wrap(functools.partial(gathered_in_torch, pattern=pattern, places=places, attend=attend))
        return Built(torch_contenders.in_mode(function, case.mode, tensors, heads_first=False), label)

    words = "index_select, flex_attention and index_copy for each branch"
    in_parts = lambda: make(f"{words}, flex_attention compiled", flex(case.causal, rows, device, compiled), lambda f: f)
    as_one = lambda: make(f"{words}, compiled as one", flex(case.causal, rows, device), compiled)
    return fastest([Variant("in parts", in_parts), Variant("as one", as_one)], None, "torch").built


def by_package(pattern: Pattern, case: Case, sets: Sequence[Any]) -> Built:
    """The op of the package dilated-attention-pytorch."""
    if pattern.heads != "groups" or pattern.layout != "overlap" or pattern.order is not None:
        raise NotImplementedError("it has only heads='groups', in the order of the sequence")
    if case.heads != case.kv_heads or case.heads % len(pattern.segment_lengths):
        raise NotImplementedError("it needs equal numbers of key heads and query heads, and groups of equal size")
    if any(case.seq % size for size in pattern.segment_lengths):
        raise NotImplementedError(f"its segments must divide {case.seq}")
    from harness import torch_contenders

    try:
        from dilated_attention_pytorch.dilated_attention import DilatedAttention
    except ImportError as error:
        raise NotImplementedError(f"dilated_attention_pytorch cannot be imported: {error}") from error
    op = DilatedAttention(list(pattern.segment_lengths), list(pattern.dilation_rates))
    tensors = torch_contenders.tensors(sets, heads_first=False)
    # Positional, because the flag has another name in older releases.
    call = torch_contenders.in_mode(lambda q, k, v: op(q, k, v, case.causal), case.mode, tensors, heads_first=False)
    return Built(call, "dilated_attention_pytorch.DilatedAttention, whose outputs are divided by their sums")
