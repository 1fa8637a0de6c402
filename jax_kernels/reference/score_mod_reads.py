"""The reads of a score_mod, block by block, for the gradients of its arrays: `Operands` if it reads by q - k, else
`Arrays`.

Both classes have
  given(found): the values with respect to which some blocks (`found`) are differentiated, a tuple with None for
    integer arrays;
  modified(given, found, scores): the score_mod on scores [chunk, batch, heads, block_q, block_kv], float32;
  zeros(): the initial sums of the gradients;
  added(sums, gradients, found): the sums plus the gradients of these blocks;
  gradients(sums): a ScoreMod whose arrays are the gradients of the score_mod's arrays.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_kernels.score_mod.tile_reads import TileMod
from jax_kernels.score_mod.trace import ScoreMod, evaluated, moving, with_moving

__all__ = ["Arrays", "Blocks", "Operands", "at", "mapped"]


class Blocks(NamedTuple):
    """A chunk of blocks of pairs, given by the indices of their queries and keys.

    A block has one batch entry if the mask differs between entries, else all of them; heads likewise.

    b, h: int32 [chunk], the batch entry and the query head of each block, or None if each block has all. q, k: int32
    [chunk, block], indices of queries and keys, clamped to the last. keep: bool [chunk, block_q, block_kv], whether the
    mask keeps each pair; False for pairs past the last query or key.
    """

    b: Any
    h: Any
    q: Any
    k: Any
    keep: Any


@dataclasses.dataclass(frozen=True)
class Arrays:
    """The reader that calls the whole score_mod on the pairs of a block, so that its program looks up the arrays.

    Gradients are summed in the arrays' own shapes. mod: the score_mod. shape: (batch entries, heads) of the call.
    """

    mod: ScoreMod
    shape: tuple[int, int]  # batch entries and heads

    def given(self, found: Blocks) -> tuple[Any, ...]:
        return moving(self.mod.arrays)

    def modified(self, given: Any, found: Blocks, scores: jax.Array) -> jax.Array:
        arrays, program = with_moving(self.mod.arrays, given), self.mod.program
        return mapped(lambda score, _, *index: evaluated(program, (*arrays, score, *index)), found, self.shape, scores)

    def zeros(self) -> tuple[Any, ...]:
        return self.mod.zeros(of_arrays=True)

    def added(self, sums: Any, gradients: Any, found: Blocks) -> Any:
        return jax.tree.map(jnp.add, sums, gradients)

    def gradients(self, sums: Any) -> ScoreMod:
        return self.mod.with_gradients(sums)


@dataclasses.dataclass(frozen=True)
class Operands:
    """The operands of a score_mod: arrays of values looked up beforehand. An operand of q - k is read in windows.

    A window holds the differences of one block, 2 * block values for its diagonals. The gradients of windows are sums
    along the diagonals: added pair by pair, all pairs would update the same few values. Windows of the same diagonal of
    blocks are summed by a matmul, whose order is fixed.

    parts: the score_mod split into reads and a program. operands: the values that the reads give, made once for all
    blocks. shape: (batch entries, heads). lengths: (queries, keys). block: the queries, and the keys, of a block.
    """

    mod: ScoreMod
    parts: TileMod
    operands: list[jax.Array]
    shape: tuple[int, int]
    lengths: tuple[int, int]
    block: int

    @property
    def are_windows(self) -> list[bool]:
        """For each operand, whether it depends on q - k."""
        return ["d" in axes for _, axes in self.parts.reads]

    @property
    def columns(self) -> int:
        """The number of blocks of keys."""
        return -(-self.lengths[1] // self.block)

    @property
    def places(self) -> int:
        """The number of diagonals of blocks. Each diagonal has a window."""
        return -(-self.lengths[0] // self.block) + self.columns - 1

    @property
    def before(self) -> int:
        """The number of unused values at the start of the first window, for differences below 1 - S."""
        return self.columns * self.block - self.lengths[1]

    def at(self, found: Blocks) -> list[jax.Array]:
        """The operands for some blocks. An operand of q - k becomes windows [chunk, B or 1, H or 1, 2 * block]."""
        operands = zip(self.operands, self.are_windows, strict=True)
        return [self._windows(x, found) if is_window else x for x, is_window in operands]

    def given(self, found: Blocks) -> tuple[Any, ...]:
        return moving(self.at(found))

    def modified(self, given: Any, found: Blocks, scores: jax.Array) -> jax.Array:
        operands = with_moving(self.at(found), given)
        split = lambda wanted: [x for x, is_one in zip(operands, self.are_windows, strict=True) if is_one == wanted]
        tiles = [jnp.broadcast_to(_tile(x, self.block), scores.shape) for x in split(True)]

        def of_pair(score, tiles, b, h, q, k):
            own, others = iter(tiles), iter([at(x, score, b, h, q, k) for x in split(False)])
            return self.parts.of_pair(score, b, h, q, k, [next(own if x else others) for x in self.are_windows])

        return mapped(of_pair, found, self.shape, scores, tiles)

    def zeros(self) -> tuple[Any, ...]:
        windows = lambda x: jnp.zeros((self.places, *x.shape[:2], 2 * self.block), jnp.float32)
        every = zip(moving(self.operands), self.are_windows, strict=True)
        zeros = lambda x, is_window: windows(x) if is_window else jnp.zeros_like(x, jnp.float32)
        return tuple(None if x is None else zeros(x, is_window) for x, is_window in every)

    def added(self, sums: Any, gradients: Any, found: Blocks) -> Any:
        every = zip(sums, gradients, self.are_windows, strict=True)
        return tuple(
            None if x is None else x + (self._summed(dx, found, x.shape[1:3]) if is_window else dx)
            for x, dx, is_window in every
        )

    def gradients(self, sums: Any) -> ScoreMod:
        every = zip(sums, self.are_windows, strict=True)
        read = tuple(self._vector(x) if is_window and x is not None else x for x, is_window in every)
        sizes = (*self.shape, *self.lengths)
        of_arrays = lambda given: moving(self.parts.operands(with_moving(self.mod.arrays, given), sizes))
        return ScoreMod(jax.vjp(of_arrays, moving(self.mod.arrays))[1](read)[0], self.mod.program)

    def _place(self, found: Blocks) -> jax.Array:
        """The diagonal of blocks on which each of these blocks lies, from 0: int32 [chunk]. It is the index of its
        window.
        """
        return found.q[:, 0] // self.block - found.k[:, 0] // self.block + self.columns - 1

    def _windows(self, x: jax.Array, found: Blocks) -> jax.Array:
        """The windows of some blocks, [chunk, B or 1, H or 1, 2 * block], from an operand x [B or 1, H or 1, T + S -
        1].
        """
        count = (self.places + 1) * self.block
        x = jnp.pad(x, ((0, 0), (0, 0), (self.before, count - self.before - x.shape[2])))
        x = jnp.moveaxis(x.reshape(*x.shape[:2], -1, self.block), 2, 0)
        place = self._place(found)
        x = jnp.concatenate([x[place], x[place + 1]], axis=-1)
        for axis, own in ((1, found.b), (2, found.h)):
            if own is not None and x.shape[axis] > 1:
                x = jnp.take_along_axis(x, jnp.expand_dims(own, (1, 2, 3)), axis=axis)
        return x

    def _summed(self, dx: jax.Array, found: Blocks, shape: tuple[int, int]) -> jax.Array:
        """The gradients of windows, summed over the blocks of each diagonal: float32 [diagonals, *shape, 2 * block].

        dx: [chunk, batch, heads, 2 * block], the gradients of some blocks' windows. shape: (B or 1, H or 1) of the
        operand.
        """
        for axis, own, count in zip((1, 2), (found.b, found.h), shape, strict=True):
            if own is not None and count > 1:
                dx = dx * jnp.expand_dims(own[:, None] == jnp.arange(count), (3, 3 - axis))
        of_place = self._place(found)[:, None] == jnp.arange(self.places)
        return jnp.einsum("cp,cbhd->pbhd", of_place.astype(jnp.float32), dx, precision=lax.Precision.HIGHEST)

    def _vector(self, windows: jax.Array) -> jax.Array:
        """The gradient of an operand of q - k, [B or 1, H or 1, T + S - 1], from the summed gradients of its windows.

        windows: [diagonals, B or 1, H or 1, 2 * block]; the second half of each overlaps the first half of the next.
        """
        half = lambda part, pads: jnp.pad(windows[..., part], (pads, (0, 0), (0, 0), (0, 0)))
        x = half(slice(self.block), (0, 1)) + half(slice(self.block, None), (1, 0))
        x = jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], -1)
        return x[..., self.before : self.before + sum(self.lengths) - 1]


def _tile(windows: jax.Array, block: int) -> jax.Array:
    """Tiles [..., block, block] from windows [..., 2 * block]: entry (i, j) is the window's entry i - j + block - 1.

    Each row is the reversed window, shifted by one entry from the row before. So the derivative sums along diagonals.
    """
    rows = jnp.broadcast_to(windows[..., None, ::-1], (*windows.shape[:-1], block, 2 * block))
    rows = rows.reshape(*windows.shape[:-1], -1)[..., block:]
    return rows.reshape(*windows.shape[:-1], block, 2 * block - 1)[..., :block]


def mapped(function: Any, found: Blocks, shape: tuple[int, int], scores: jax.Array, tiles: Any = ()) -> jax.Array:
    """function(score, tiles, b, h, q, k), of scalars, mapped over the pairs of some blocks: shaped as scores.

    scores: [chunk, batch, heads, block_q, block_kv]. shape: (batch entries, heads) of the call. tiles: a pytree of
    arrays of scores' shape.

    The function is mapped one axis at a time. So a value that it looks up by some indices has only their axes, and the
    gradient is summed over the other axes before it goes into an array.
    """
    of_all = [jnp.arange(size, dtype=jnp.int32) for size in shape]
    b, h = (every if own is None else own[:, None] for own, every in zip((found.b, found.h), of_all, strict=True))
    for axis in (3, 2, 1, 0):
        function = jax.vmap(function, (0, 0, *(0 if axis == other else None for other in range(4))))
    of_chunk = (0, 0, None if found.b is None else 0, None if found.h is None else 0, 0, 0)
    return jax.vmap(function, of_chunk)(scores, tiles, b, h, found.q, found.k)


def at(array: jax.Array, score: jax.Array, *index: jax.Array) -> jax.Array:
    """The entry of `array` at these indices, one for each axis; an axis of length 1 has its only entry. score is not
    used.
    """
    return array[tuple(0 if size == 1 else at for size, at in zip(array.shape, index, strict=True))]
