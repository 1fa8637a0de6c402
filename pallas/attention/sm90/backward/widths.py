"""The numbers of columns of the Hopper backward's tiles, and how its two compute warpgroups divide the work.

A thread has 240 registers. A warpgroup's float32 sums of dkey and dvalue for 64 keys take (key + value) / 2 of them.

| key + value, block_q | the warpgroups | a step |
|---|---|---|
| up to 256, 64 (up to 128, 128) | own 64 of 128 keys each | also issues the next step's scores |
| up to 320, 64 (up to 192, 128) | own 64 of 128 keys each | issues dP when P is in 16 bits, for lack of registers |
| more, 64 | split the columns of the same 64 keys, and both compute the scores | issues scores and dP together |
"""

import dataclasses

COMPUTE_WGS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Widths:
    """The columns of the tiles. key: of key and query, value: of value and dout. block_q: queries of a step."""

    key: int
    value: int
    block_q: int

    @classmethod
    def of(cls, head_dim: int, v_head_dim: int, block_q: int, *, deterministic: bool) -> "Widths":
        """The narrowest tiles that hold these head_dims. deterministic: for the kernels of a deterministic backward."""
        widest = max(head_dim, v_head_dim)
        if deterministic or widest <= 64 or 96 < widest <= 128 or widest > 192:
            width = next(width for width in (64, 128, 256) if widest <= width)
            return cls(key=width, value=width, block_q=block_q)
        if block_q == 128:
            sixteens = lambda columns: max(64, -(-columns // 16) * 16)
            return cls(key=sixteens(head_dim), value=sixteens(v_head_dim), block_q=block_q)
        if widest <= 96:
            return cls(key=96, value=96, block_q=block_q)
        narrowest = lambda columns: next(width for width in (128, 160, 192) if columns <= width)
        widths = cls(key=narrowest(head_dim), value=narrowest(v_head_dim), block_q=block_q)
        return cls(key=192, value=192, block_q=block_q) if widths.splits_columns else widths

    @property
    def splits_columns(self) -> bool:
        """Whether the warpgroups split the columns of the same 64 keys, instead of having 64 keys each."""
        return self.key + self.value > _MOST_WHOLE

    @property
    def scores_ahead(self) -> bool:
        """Whether there are registers for the next step's scores behind a step's own gradients."""
        return (self.key + self.value) * self.block_q <= 256 * 64

    @property
    def block_kv(self) -> int:
        """The number of keys in a block of keys, which a CTA owns."""
        return 64 if self.splits_columns else 64 * COMPUTE_WGS

    @property
    def halves(self) -> int:
        """The number of parts of the columns, one for each group of accumulators."""
        return COMPUTE_WGS if self.splits_columns else 1

    @property
    def takes_any_queries(self) -> bool:
        """Whether copies take any number of queries: a tile's columns, all operands of one wgmma, are one atom."""
        return max(self.key, self.value) // self.halves <= 64

    @property
    def takes_any_rows(self) -> bool:
        """Whether copies take any number of keys, which needs swizzle atoms of 64 columns."""
        return self.chunk == 64 and self.value // self.halves % 64 == 0

    @property
    def chunk(self) -> int:
        """The columns of a block of dquery, and of a tile of keys.

        They are all columns if block_q = 128 leaves each warpgroup 64 queries of dquery. Otherwise 64, or half of all.
        """
        if self.block_q == 128 and self.key > 64:
            return self.key
        return self.key // COMPUTE_WGS if self.key in (96, 160, 192) else 64


# The most columns of key and value together for which a warpgroup has the sums of 64 keys in registers.
_MOST_WHOLE = 320
