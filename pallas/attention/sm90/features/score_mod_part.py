"""Evaluates a score_mod's graph on some columns of a tile of scores, in registers."""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.pallas.attention.score_mod_graph import (
    WHOLE,
    Node,
    is_difference,
)
from jax_kernels.pallas.attention.sm90.features import relative_reads
from jax_kernels.pallas.attention.sm90.features.bias import of_head
from jax_kernels.pallas.attention.sm90.features.softcap import tanh_polynomial
from jax_kernels.pallas.attention.softmax import LOG2E
from jax_kernels.pallas.kernel_types import Ref, needed
from jax_kernels.pallas.mosaic.layouts import COLUMN, PART, ROW, WGMMA
from jax_kernels.pallas.mosaic.registers import reciprocal

if TYPE_CHECKING:
    from jax_kernels.pallas.attention.sm90.features.score_mod import Tile

__all__ = ["Part"]


EXACT = 1 << 24  # float32 has every integer up to this


class Part:
    """PART (8) neighbouring columns of a Tile, on which the nodes of the program are evaluated.

    Each value is computed at its first use, and kept. of_rows: values that do not vary along columns, common to all
    parts of a tile. first: the index of the first column. tanh_factor: if not None, a polynomial computes the program's
    tanh, whose argument is tanh_factor times the raw score.
    """

    def __init__(self, tile: "Tile", scores: jax.Array, first: int, of_rows: dict[Any, Any], tanh_factor: float | None):
        self.raw, self.scale, self.shape, self.first = scores, tile.scale, scores.shape, first
        self.tile_shape, self.no_difference = tile.raw.shape, tile.no_difference
        self.leaves, self.head, self.dimensions = tile.leaves, tile.head, tile.dimensions
        self.columns, self.rows = ("q", "k") if tile.dimensions["q"] == 1 else ("k", "q")
        self.starts, self.first_starts = tile.starts | {self.columns: tile.starts[self.columns] + first}, tile.starts
        self.made: dict[Any, Any] = {}
        self.of_rows, self.tanh_factor = of_rows, tanh_factor

    def _memo(self, node: Node) -> dict[Any, Any]:
        """The cache for a node's values: common to all parts if the node does not vary along columns."""
        return self.of_rows if all(self.dimensions[axis] == 0 for axis in node.axes) else self.made

    def whole(self, node: Node, factor: float = 1.0) -> jax.Array:
        """A node's value times a factor, for all pairs of the part: [rows, PART]."""
        return self._broadcast(self._of(node, factor), node.axes, WHOLE)

    def _broadcast(self, x: jax.Array, axes: frozenset[str], wanted: frozenset[str]) -> jax.Array:
        """x, which varies along `axes`, broadcast to the axes `wanted`; a scalar stays a scalar unless all pairs are
        wanted.
        """
        if axes == wanted:
            return x
        shape = self.shape if wanted == WHOLE else (self.shape[self.dimensions[next(iter(wanted))]],)
        if not axes:
            if wanted != WHOLE:
                return x
            return lax.broadcast_in_dim(jnp.asarray(x), shape, ())
        dimension = self.dimensions[next(iter(axes))]
        if x.dtype == bool:
            return lax.broadcast_in_dim(jnp.where(x, 1, 0).astype(jnp.int32), shape, (dimension,)) != 0
        return lax.broadcast_in_dim(x, shape, (dimension,))

    def _of(self, node: Node, factor: float = 1.0) -> Any:
        """A node's value along its own axes, times a factor if it is a float."""
        made = self._memo(node)
        if (node, factor) not in made:
            if factor != 1 and node.kind != "score" and (node, 1.0) in made and node.axes == WHOLE:
                value = made[node, 1.0] * factor
            else:
                value = self._make(node, factor)
            made[node, factor] = value
        return made[node, factor]

    def _inputs(self, node: Node, *factors: float) -> list[Any]:
        """The values of a node's inputs times the factors (default 1), broadcast to the node's axes except for
        literals.
        """
        factors = factors or (1.0,) * len(node.inputs)
        values = [self._of(x, factor) for x, factor in zip(node.inputs, factors, strict=True)]
        is_literal = [x.kind == "literal" for x in node.inputs]
        return [
            x if literal else self._broadcast(x, of.axes, node.axes)
            for x, of, literal in zip(values, node.inputs, is_literal, strict=True)
        ]

    def _make(self, node: Node, factor: float) -> Any:
        """Computes a node's value times a factor. The factor is passed on to the inputs where the operation allows
        it.
        """
        kind, inputs = node.kind, node.inputs
        if kind == "literal":
            return float(node.value) * factor if node.is_float else node.value.item()
        if kind == "score":
            return self.raw * (self.scale * factor)
        if kind in ("q", "k"):
            return self._index(kind, self.starts)
        if kind == "operand":
            return self._operand(node) * factor if factor != 1 else self._operand(node)
        if not node.is_float:
            return self._integer(node)
        if kind == "convert_element_type":
            (x,) = inputs
            value = self._as_float(x) if x.bound is not None and x.bound <= EXACT else None
            if value is None:
                value = jnp.where(self._of(x), 1.0, 0.0) if x.dtype == bool else self._of(x).astype(node.dtype)
            return value * factor if factor != 1 else value
        if kind in ("add", "add_any", "sub"):
            a, b = self._inputs(node, factor, factor)
            return a - b if kind == "sub" else a + b
        if kind == "neg":
            return self._of(inputs[0], -factor)
        if kind == "mul":
            a, b = inputs
            if a.kind == "literal" or (b.kind != "literal" and len(a.axes) < len(b.axes)):
                a, b = b, a
            if b.kind == "literal":
                return self._of(a, float(b.value) * factor)
            if not b.axes and a.kind == "convert_element_type" and _is_exact_difference(a.inputs[0]):
                return self._difference(a.inputs[0].inputs[0].kind, self._of(b, factor))
            # The factor goes to the smaller operand, where it costs least.
            node = dataclasses.replace(node, inputs=(a, b))
            a, b = self._inputs(node, 1.0, factor)
            return a * b
        if kind == "div" and inputs[1].kind == "literal":
            return self._of(inputs[0], factor / float(inputs[1].value))
        if kind == "div":
            a, b = self._inputs(node, factor, 1.0)
            return a / b
        if kind == "select_n":
            which, no, yes = self._inputs(node, 1.0, factor, factor)
            return jnp.where(which, yes, no)
        if kind == "tanh" and self.tanh_factor is not None:
            return tanh_polynomial(self.raw, self.tanh_factor, factor)
        if kind in ("tanh", "logistic"):  # 1 - 2 / (1 + exp(2 x)) and 1 / (1 + exp(-x))
            is_tanh = kind == "tanh"
            made = self._memo(node)
            if (node, "half") not in made:
                power = self._of(inputs[0], (2 if is_tanh else -1) * LOG2E)
                inverse = reciprocal if node.axes == WHOLE else lambda x: 1 / x
                made[node, "half"] = inverse(1 + jnp.exp2(power))
            half = made[node, "half"]
            return factor - half * (2 * factor) if is_tanh else half * factor if factor != 1 else half
        if kind in ("max", "min") and factor > 0:
            a, b = self._inputs(node, factor, factor)
            return jnp.maximum(a, b) if kind == "max" else jnp.minimum(a, b)
        value = self._float(node)
        return value * factor if factor != 1 else value

    def _float(self, node: Node) -> jax.Array:
        """The value of a float node, without a factor multiplied in, for kinds that `_make` does not treat itself."""
        kind = node.kind
        if kind == "exp":
            return jnp.exp2(self._of(node.inputs[0], LOG2E))
        values = self._inputs(node)
        x = values[0]
        if kind == "sign":
            return jnp.where(x > 0, 1.0, jnp.where(x < 0, -1.0, 0.0))
        if kind == "integer_pow":
            power = node.params["y"]
            result = functools.reduce(lambda a, b: a * b, [x] * abs(power))
            return result if power > 0 else 1 / result
        return FLOATS[kind](*values)

    def _integer(self, node: Node) -> Any:
        """Computes the value of an int or bool node."""
        kind, (x, *_) = node.kind, node.inputs
        if kind == "convert_element_type":
            value = self._of(x)
            return jnp.where(value, 1, 0).astype(node.dtype) if x.dtype == bool else value.astype(node.dtype)
        if kind == "neg":
            return 0 - self._of(x)
        if kind == "not":
            return ~self._of(x)
        values = self._inputs(node)
        if kind == "select_n":
            return jnp.where(values[0], values[2], values[1])
        if kind in ("div", "rem"):
            a, b = (jnp.full(self.shape, v, node.dtype) if jnp.ndim(v) == 0 else v for v in values)
            return lax.div(a, b) if kind == "div" else lax.rem(a, b)
        return INTEGERS[kind](*values)

    def _operand(self, node: Node) -> jax.Array:
        """The operand's values for this part, loaded from device memory: a scalar, one per row or column, or one per
        pair.
        """
        ref, number = self.leaves[node]
        if not node.axes:
            return needed(number)
        if node.axes == WHOLE:
            return self._of_differences(node, of_head(ref, *self.head))
        (axis,) = node.axes
        size = self.shape[self.dimensions[axis]]
        layout = ROW if self.dimensions[axis] == 0 else COLUMN
        rows = of_head(ref, *self.head).at[pl.ds(self.starts[axis], size)]
        return plgpu.load(rows, layout=layout, optimized=False)

    def _of_differences(self, node: Node, ref: Ref) -> jax.Array:
        """The operand's values for the pairs, [rows, PART], from one value per difference q - k.

        ref: the values of a batch entry and head in device memory, by ascending difference.
        """
        start = self.first_starts["q"] - self.first_starts["k"] + self.no_difference
        first, before = self.of_rows.get((node, "part"), (None, None))
        before = before if first == self.first - PART else None
        is_transposed = self.columns == "q"
        part = relative_reads.load(ref, start, self.tile_shape, self.first, before, transposed=is_transposed)
        self.of_rows[node, "part"] = self.first, part
        return part

    def _index(self, axis: str, starts: dict[str, Any]) -> Any:
        """The query or key index of each row or column, int32. axis: "q" or "k". starts: the first indices."""
        dimension = self.dimensions[axis]
        layout = ROW if dimension == 0 else COLUMN
        return starts[axis] + plgpu.broadcasted_iota(jnp.int32, (self.shape[dimension],), 0, layout=layout)

    def _as_float(self, node: Node) -> Any:
        """The value of an integer node in float32, which is exact because the node's bound is at most 2**24."""
        made = self._memo(node)
        if (node, "float") not in made:
            made[node, "float"] = self._make_float(node)
        return made[node, "float"]

    def _make_float(self, node: Node) -> Any:
        """Computes the value of an integer node in float32, for `_as_float`, which keeps it."""
        if node.kind == "literal":
            return float(node.value)
        if node.kind in ("q", "k"):
            if self.dimensions[node.kind] == 0:
                return self._of(node).astype(jnp.float32)
            if node not in self.of_rows:
                self.of_rows[node] = self._index(node.kind, self.first_starts).astype(jnp.float32)
            return self.of_rows[node] + float(self.first)
        if _is_exact_difference(node):
            return self._difference(node.inputs[0].kind)
        if node.kind == "neg":
            return -self._as_float(node.inputs[0])
        values = [
            x if of.kind == "literal" else self._broadcast(x, of.axes, node.axes)
            for of, x in ((of, self._as_float(of)) for of in node.inputs)
        ]
        operations: dict[str, Callable[..., Any]]
        operations = {"add": jnp.add, "sub": jnp.subtract, "abs": jnp.abs, "max": jnp.maximum, "min": jnp.minimum}
        return operations[node.kind](*values)

    def _difference(self, first: str, factor: jax.Array | float = 1.0) -> jax.Array:
        """(q - k) * factor for the pairs of this part, or (k - q) * factor if `first` is "k": float32 [rows, PART].

        Neighbouring parts differ by a constant, so that with a factor each part is computed from the part before it.
        """
        columns, rows = self.columns, self.rows
        sign = 1.0 if first == columns else -1.0
        memo = self.of_rows.setdefault("difference", {})
        if first not in memo:
            iota = functools.partial(plgpu.broadcasted_iota, jnp.int32, self.shape, layout=WGMMA)
            number = (self.first_starts[columns] - self.first_starts[rows]) + (iota(1) - iota(0))
            memo[first] = number.astype(jnp.float32) * sign
        if isinstance(factor, float) and factor == 1:
            return memo[first] + sign * self.first
        # Add step by step: otherwise every part's own offset times the factor would stay in registers between steps.
        new = factor, [memo[first] * factor], factor * (sign * PART)
        _, values, step = memo.setdefault((first, id(factor)), new)
        while len(values) * PART <= self.first:
            values.append(values[-1] + step)
        return values[self.first // PART]


def _is_exact_difference(node: Node) -> bool:
    """Whether the node is a difference of a query's and a key's index that float32 holds exactly."""
    return is_difference(node) and node.bound is not None and node.bound <= EXACT


FLOATS: dict[str, Callable[..., Any]] = {
    "abs": jnp.abs,
    "exp2": jnp.exp2,
    "expm1": lambda x: jnp.exp2(x * LOG2E) - 1,
    "log": lax.log,
    "log1p": lambda x: lax.log(1 + x),
    "max": jnp.maximum,
    "min": jnp.minimum,
    "one_minus_square": lambda x: 1 - x * x,
    "rsqrt": lax.rsqrt,
    "sqrt": lax.sqrt,
    "square": lambda x: x * x,
}

INTEGERS: dict[str, Callable[..., Any]] = {
    "abs": lambda x: jnp.maximum(x, 0 - x),
    "add": lambda a, b: a + b,
    "and": lambda a, b: a & b,
    "eq": lambda a, b: a == b,
    "ge": lambda a, b: a >= b,
    "gt": lambda a, b: a > b,
    "le": lambda a, b: a <= b,
    "lt": lambda a, b: a < b,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "mul": lambda a, b: a * b,
    "ne": lambda a, b: a != b,
    "or": lambda a, b: a | b,
    "sign": lambda x: jnp.where(x > 0, 1, jnp.where(x < 0, -1, 0)),
    "square": lambda x: x * x,
    "sub": lambda a, b: a - b,
    "xor": lambda a, b: a ^ b,
}
