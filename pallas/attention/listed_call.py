"""Block lists that are made in advance, and the calls that may read them."""

import dataclasses
from typing import Protocol, Self

import jax

from jax_kernels.inputs.attention import AttentionInputs, AttentionOptions


@dataclasses.dataclass(frozen=True)
class ListedCall:
    """The static facts of a call, except its mask, on which its block lists depend.

    lengths: of queries and keys. blocks: (block_q, block_kv). by: "query" or "key", the side whose blocks are work
    tiles. head_group: the number of heads whose work tiles are neighbours in a table of tiles. is_causal, window,
    q_offset: the call's limits; q_offset is None if it is an array.
    """

    batch: int
    heads: int
    kv_heads: int
    lengths: tuple[int, int]
    blocks: tuple[int, int]
    by: str
    head_group: int
    is_causal: bool
    window: tuple[int, int] | None
    q_offset: int | None

    @staticmethod
    def of(
        inputs: AttentionInputs,
        options: AttentionOptions,
        block_q: int,
        block_kv: int,
        *,
        by: str,
        heads: tuple[int, int],
        head_group: int = 1,
    ) -> "ListedCall":
        """The static facts of these inputs on which block lists depend.

        heads: of queries and of keys. by: "query" or "key". The lists by key of "mosaic_gpu" belong to a kv head. If
        the mask differs between heads, such a list covers all query heads of the kv head's group, whose blocks of
        queries are numbered one head after another. The lists by key of "triton" belong to a query head.
        head_group: the number of heads whose work tiles are neighbours in the lists' table of tiles; 1 without a table.
        """
        (batch, q_length), kv_length = inputs.query.shape[:2], inputs.key.shape[1]
        sizes = (batch, *heads, (q_length, kv_length), (block_q, block_kv), by, head_group)
        q_offset = options.q_offset if inputs.q_offset is None else None
        return ListedCall(*sizes, options.is_causal, options.window, q_offset)


class RepeatedLists(Protocol):
    """The block lists of an implementation's kernels."""

    def repeated(self, times: int, batch: int) -> Self | None:
        """The lists of a batch that is `times` as large as `batch`, if all entries have one list; else None."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PreparedLists[L: "RepeatedLists"]:
    """The block lists of one kind of call, made in advance, for use by later calls with the same mask.

    call: the static facts of the call for which the lists were made.
    """

    lists: L
    call: ListedCall = dataclasses.field(metadata={"static": True})

    def of(self, call: ListedCall) -> L | None:
        """The lists for `call`; None if its lists may differ from the prepared lists.

        The batch of `call` may be a multiple of the prepared batch, if the batch entries have equal lists.
        """
        mine, times = self.call, call.batch // self.call.batch
        if dataclasses.replace(mine, batch=call.batch) != call or times * mine.batch != call.batch:
            return None
        if times == 1:
            return self.lists
        return self.lists.repeated(times, mine.batch)


def rounded_up(count: int) -> int:
    """`count` rounded up by at most an eighth.

    Similar masks, e.g. of layers, then have lists of one shape, and share a compiled program.
    """
    unit = 1 << max(0, count.bit_length() - 4)
    return -(-count // unit) * unit
