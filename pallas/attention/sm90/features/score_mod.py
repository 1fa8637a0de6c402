"""The program of a score_mod in the Hopper kernels, on a tile of scores in registers.

Values that depend only on a row or only on a column are computed once per row or column, and broadcast to the scores
late. All factors of the scores, including the scale and log2(e), become one factor if the program is a sum or a choice.
tanh, exp and the logistic function use exp2 and a reciprocal: the hardware's tanh has a relative error of 5e-4. Sums of
indices are computed in float32 if it is exact for them, which saves the conversion of a tile.

XLA reads the program's arrays beforehand (score_mod.tile_reads). This gives values of a batch entry and head, and
values of a query, of a key or of a difference query - key, which a kernel loads from device memory.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_kernels.inputs.attention import AttentionInputs, AttentionOptions
from jax_kernels.pallas.attention.score_mod_graph import (
    WHOLE,
    Node,
    interval,
    is_one,
    nodes,
    reads_large,
    tanh_factor,
)
from jax_kernels.pallas.attention.sm90.features.score_mod_part import Part
from jax_kernels.pallas.attention.sm90.features.softcap import tanh_limits
from jax_kernels.pallas.attention.softmax import LOG2E
from jax_kernels.pallas.kernel_types import Index
from jax_kernels.pallas.mosaic.layouts import PART
from jax_kernels.pallas.mosaic.registers import any_of_warp_above
from jax_kernels.score_mod.tile_reads import split


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mod:
    """A call's score_mod as a kernel reads it: its program, a graph of elementwise operations, and the operands
    (arrays) that the program reads.

    operands: [B or 1, H or 1] or [B or 1, H or 1, n]. axes: for each operand "", or "q", "k" or "d" if n counts
    queries, keys or differences q - k. leaves: for each operand the node of the graph that has its values. result,
    slope: the nodes of the new score and of its derivative with respect to the score. scale: the factor that turns
    query @ key^T into the score that the program gets. no_difference: the index of the value for q - k = 0 in operands
    of differences.
    """

    operands: tuple[Any, ...]
    axes: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    leaves: tuple[Node, ...] = dataclasses.field(metadata={"static": True})
    result: Node = dataclasses.field(metadata={"static": True})
    slope: Node = dataclasses.field(metadata={"static": True})
    scale: float = dataclasses.field(metadata={"static": True})
    no_difference: int = dataclasses.field(metadata={"static": True})

    @property
    def adds_only(self) -> bool:
        """Whether the new score's derivative with respect to the score is 1."""
        return is_one(self.slope)

    @property
    def may_mask(self) -> bool:
        """Whether the score_mod may give all keys of a query scores far from 0, such as the -1e9 of a mask.

        Scores then stay in natural units: times log2(e) they would be rounded by more than they differ, or overflow.
        It is a guess from the program: True if it has a large constant, or reads a float operand per query or per key.
        """
        return reads_large(self.result) or any(axis in ("q", "k") for axis in self._float_axes)

    @property
    def _float_axes(self) -> list[str]:
        """The entries of `axes` whose operands are floats."""
        return [axis for leaf, axis in zip(self.leaves, self.axes, strict=True) if leaf.is_float]

    @property
    def units(self) -> float:
        """The factor that takes the program's results to the units of the kernel's scores: log2(e), or 1 if
        may_mask.
        """
        return 1.0 if self.may_mask else LOG2E

    @property
    def tanh_factor(self) -> float | None:
        """The number c if the program has a single tanh, whose argument is c times the score; else None."""
        return tanh_factor(self.result)

    def highest(
        self, largest_score: jax.Array | None, farthest: int, *, no_later_keys: bool
    ) -> jax.Array | float | None:
        """An upper bound of the new scores in natural units, [B or 1, H or 1] or a float; None if the program gives no
        bound.

        largest_score: a bound on the magnitude of the scores before the score_mod, [B, H]; None if unknown. farthest:
        the largest distance between the index of a query and the index of a key that it attends to. no_later_keys:
        queries attend to no key with a greater index.
        """
        # With later keys, a row's first scores may be far below the scores at its diagonal: a bound is of no use.
        known: dict[Any, tuple[Any, Any]] = {"q - k": (0.0, float(farthest))} if no_later_keys else {}
        for leaf, x, axis in zip(self.leaves, self.operands, self.axes, strict=True):
            if not axis:
                known[leaf] = x, x
            elif axis == "d":
                met = x[:, :, self.no_difference :] if no_later_keys else x
                known[leaf] = met.min(axis=2), met.max(axis=2)
        if largest_score is not None:
            known["score"] = -largest_score, largest_score
        found = interval(self.result, known)
        return None if found is None else found[1]

    def of_head(self, b: Index, h: Index) -> list[jax.Array | None]:
        """For each operand the scalar of a batch entry and head; None for operands that vary along queries, keys or
        differences.
        """
        own = lambda ref: ref[0 if ref.shape[0] == 1 else b, 0 if ref.shape[1] == 1 else h]
        return [None if axis else own(ref) for ref, axis in zip(self.operands, self.axes, strict=True)]

    def on(
        self, scores: jax.Array, numbers: list[jax.Array | None], b, h, q_start, kv_start, *, transposed: bool = False
    ) -> "Tile":
        """An object (Tile) that computes the new scores of a tile, and their derivative.

        scores: query @ key^T of the tile, without the scale, in registers. numbers: the result of of_head for b and h.
        q_start, kv_start: the tile's first query and key. transposed: the rows of scores are keys.
        """
        return Tile(self, scores, numbers, (b, h), {"q": q_start, "k": kv_start}, 1 if transposed else 0)


def mod_of(inputs: AttentionInputs, options: AttentionOptions, block_q: int, block_kv: int) -> Mod | None:
    """The call's score_mod as the Hopper kernels read it: a graph and its operands; None if the call has none.

    block_q, block_kv: the largest blocks of the kernels that read the operands, which are padded to whole blocks.
    Raises NotImplementedError if the kernels cannot evaluate the score_mod.
    """
    if inputs.score_mod is None:
        return None
    (batch, q_length, heads), kv_length = inputs.query.shape[:3], inputs.key.shape[1]
    program = split(inputs.score_mod, mosaic=True)

    def as_read(x, axes):
        (axis,) = axes & {"q", "k", "d"} or ("",)
        numbers = x if axis == "d" else x[:, :, :, 0] if axis == "q" else x[:, :, 0]
        if not axis:
            return "", numbers[:, :, 0]
        # Padded with the values at the ends, which the program is made for: a division by zero past the queries would
        # give a NaN, and NaN times the zeros there is NaN.
        padded = lambda before, after: jnp.pad(numbers, [(0, 0), (0, 0), (before, after)], mode="edge")
        if axis == "d":
            return axis, padded(2 * block_kv, 2 * block_q)
        block = block_q if axis == "q" else block_kv
        # One more block: a tile with no block to visit visits the block after the last.
        return axis, padded(0, -numbers.shape[2] % block + block)

    operands = program.operands(inputs.score_mod.arrays, (batch, heads, q_length, kv_length))
    read = [as_read(x, axes) for x, (_, axes) in zip(operands, program.reads, strict=True)]
    names, numbers = tuple(axis for axis, _ in read), tuple(x for _, x in read)
    kinds = [(x.dtype, WHOLE if axis == "d" else frozenset(axis)) for axis, x in read]
    of_program = nodes(program.program, kinds, (q_length, kv_length))
    return Mod(numbers, names, *of_program, options.scale, no_difference=kv_length - 1 + 2 * block_kv)


class Tile:
    """The program of a score_mod on one tile of scores.

    It is evaluated eight columns at a time, so that the intermediate values fit registers.
    """

    def __init__(
        self,
        mod: Mod,
        scores: jax.Array,
        numbers: list[jax.Array | None],
        head: tuple[Index, Index],
        starts,
        first: int,
    ):
        """Prepares to evaluate mod's program on a tile of scores; computes nothing yet.

        scores: query @ key^T without the scale, [rows, columns]. numbers: for each operand its scalar for the head, or
        None if it varies along queries or keys. head: (batch entry, head). starts: a dict of the indices of the tile's
        first query, "q", and first key, "k". first: the axis of scores along which queries lie: 0, or 1 if transposed.
        """
        self.result, self.slope, self.units = mod.result, mod.slope, mod.units
        self.raw, self.scale, self.head, self.starts = scores, mod.scale, head, starts
        self.leaves = dict(zip(mod.leaves, zip(mod.operands, numbers, strict=True), strict=True))
        self.no_difference = mod.no_difference
        # The axis of the scores along which queries, or keys, lie.
        self.dimensions = {"q": first, "k": 1 - first}
        self.parts = self._parts(scores)

    def _parts(self, scores: jax.Array, tanh_factor: float | None = None) -> "list[Part]":
        """The tile as Parts of PART columns. tanh_factor: None, or the factor of the raw score in a tanh by
        polynomial.
        """
        of_rows: dict[Any, Any] = {}
        columns = [scores[:, i : i + PART] for i in range(0, scores.shape[1], PART)]
        return [Part(self, x, PART * i, of_rows, tanh_factor) for i, x in enumerate(columns)]

    def scores(self, *, by_warp: bool = False, small: bool = False) -> jax.Array:
        """The new scores of the tile, float32, in natural units if Mod.may_mask, else in base 2.

        by_warp: warps may take different branches, so that a warp with small scores computes a tanh by a polynomial.
        small: all scores of the tile are known to be small enough for the polynomial.
        """
        factor = tanh_factor(self.result) if by_warp or small else None
        joined = lambda parts: jnp.concatenate([part.whole(self.result, self.units) for part in parts], axis=1)
        # A smaller factor has powers that leave float32's range.
        if factor is None or abs(factor * self.scale) < 3e-4:
            return joined(self.parts)
        factor *= self.scale
        if small:
            return joined(self._parts(self.raw, factor))
        largest = functools.reduce(jnp.maximum, (jnp.abs(part.raw) for part in self.parts))
        exact = lambda scores: joined(self._parts(scores))
        polynomial = lambda scores: joined(self._parts(scores, factor))
        return lax.cond(any_of_warp_above(largest, tanh_limits(factor)), exact, polynomial, self.raw)

    def times_derivative(self, p: jax.Array, live: Any | None) -> jax.Array:
        """p times the derivative of the new scores with respect to the scores before the score_mod.

        p: the probabilities of the tile. live: bool, the pairs that the mask keeps, None if it keeps all. The result is
        0 for other pairs.
        """
        sloped = p * jnp.concatenate([part.whole(self.slope) for part in self.parts], axis=1)
        # The derivative of a pair without weight may have any value.
        if self.slope.may_be_infinite:
            return jnp.where(p > 0, sloped, 0)
        return sloped if live is None else jnp.where(live, sloped, 0)
