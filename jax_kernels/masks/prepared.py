"""A mask with block lists that were made beforehand."""

from typing import Any

from jax_kernels.masks.mask import Composite, Mask, node


@node
class PreparedMask(Composite):
    """A mask with block lists, from jax_kernels.prepare_mask. It is valid wherever a Mask is.

    mask: the mask that was prepared. lists: pytrees of block lists; each one knows for which lengths, heads, options
    and block sizes it was made. An op that finds no fitting list makes its own from the mask. `&`, `|` and `~` compose
    the mask, without the lists.
    """

    mask: Mask
    lists: tuple[Any, ...]

    @property
    def unprepared(self):
        return self.mask

    def terms(self, negated):
        return self.mask.terms(negated)

    def restricted(self, piece):
        return self.mask.restricted(piece)

    def of_heads(self, first, count):
        return self.mask.of_heads(first, count)

    def keeps_none(self, queries, keys):
        return self.mask.keeps_none(queries, keys)

    def block_counts(self, grid):
        return self.mask.block_counts(grid)

    def elements(self, b, h, q_index, k_index, *, q_offset=0):
        return self.mask.elements(b, h, q_index, k_index, q_offset=q_offset)

    def rows(self, q_index, kv_length, *, q_offset=0):
        return self.mask.rows(q_index, kv_length, q_offset=q_offset)

    def __repr__(self) -> str:
        return f"prepared({self.mask!r})"
