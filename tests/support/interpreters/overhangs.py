"""Finds loads and stores of Triton kernels that reach past the end of an array without a mask.

A block may hang over the end of its array: 256 columns of a head of 192. A GPU accesses the memory past the end; the
interpreter does not. `unmasked(function, *arrays)` traces the function and inspects every access of every kernel: if a
dimension of the block is longer than the rest of the array, the mask has to vary along that dimension. Nothing runs. An
access whose mask varies along the dimension counts as right; only the kernels' results can show that the mask is
correct. A load at a computed index along the dimension also counts as right: a loop over whole blocks needs no mask.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
from jax._src.state.indexing import Slice
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

ACCESSES = ("masked_load", "masked_swap", "get", "swap")


@dataclasses.dataclass(frozen=True)
class Block:
    """A kernel's view of an array. overhanging: for each dimension of the view, whether it may reach past the array."""

    name: str
    overhanging: tuple[bool, ...]


def unmasked(function: Any, *arrays: Any) -> list[str]:
    """One line for each access that lacks a mask. Equal lines are listed once."""
    calls = list(_kernels(jax.make_jaxpr(function)(*arrays).jaxpr))
    assert calls, "no kernel was traced"
    return list(dict.fromkeys(line for call in calls for line in _of_kernel(call.params)))


def _inner(eqn: Any) -> Iterator[Jaxpr]:
    for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: isinstance(x, Jaxpr | ClosedJaxpr)):
        if isinstance(value, ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, Jaxpr):
            yield value


def _kernels(jaxpr: Jaxpr) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            yield eqn
        else:
            for inner in _inner(eqn):
                yield from _kernels(inner)


def _of_kernel(params: dict[str, Any]) -> Iterator[str]:
    jaxpr = params["jaxpr"]
    blocks = {}
    for number, (var, mapping) in enumerate(zip(jaxpr.invars, params["grid_mapping"].block_mappings, strict=True)):
        sizes = [getattr(size, "block_size", None) for size in mapping.block_shape]
        over = [
            length % size != 0 for size, length in zip(sizes, mapping.array_aval.shape, strict=True) if size is not None
        ]
        blocks[var] = Block(f"{params['name']}: argument {number} {mapping.array_aval.str_short()}", tuple(over))
    yield from _of_jaxpr(jaxpr, blocks, {})


def _of_jaxpr(jaxpr: Jaxpr, blocks: dict[Var, Block], varies: dict[Var, frozenset[int]]) -> Iterator[str]:
    """varies: the dimensions along which a value differs. A value that is not in it may differ along all dimensions."""
    of = lambda x: frozenset() if isinstance(x, Literal) else varies.get(x, frozenset(range(x.aval.ndim)))
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ACCESSES:
            yield from _of_access(eqn, blocks, of)
        inners = list(_inner(eqn))
        for inner in inners:
            # The operands of a call, or the last operands of a loop or a branch.
            outer = eqn.invars[len(eqn.invars) - len(inner.invars) :]
            pairs = [(var, x) for var, x in zip(inner.invars, outer, strict=True) if not isinstance(x, Literal)]
            known = {var: blocks[x] for var, x in pairs if x in blocks}
            same = {var: varies[x] for var, x in pairs if x in varies and eqn.primitive.name in ("jit", "cond")}
            yield from _of_jaxpr(inner, known, same)
            if eqn.primitive.name == "jit":
                varies |= {out: same[x] for out, x in zip(eqn.outvars, inner.outvars, strict=True) if x in same}
        if not inners:
            varies |= {out: found for out in eqn.outvars if (found := _varying(eqn, of)) is not None}


def _varying(eqn: Any, of: Any) -> frozenset[int] | None:
    """The dimensions along which the result of an operation differs; None for all."""
    name, params = eqn.primitive.name, eqn.params
    if name == "iota":
        return frozenset([params["dimension"]])
    if name == "broadcast_in_dim":
        (operand, *_) = eqn.invars
        long = [i for i in of(operand) if operand.aval.shape[i] > 1]
        return frozenset(params["broadcast_dimensions"][i] for i in long)
    out = eqn.outvars[0].aval
    if eqn.primitive.name in ACCESSES or not hasattr(out, "shape"):
        return None
    if all(isinstance(x, Literal) or x.aval.shape in ((), out.shape) for x in eqn.invars) and len(eqn.outvars) == 1:
        return frozenset().union(*(of(x) for x in eqn.invars if x.aval.shape == out.shape))  # elementwise
    return None


def _of_access(eqn: Any, blocks: dict[Var, Block], of: Any) -> Iterator[str]:
    name, mask = eqn.primitive.name, None
    if name.startswith("masked"):
        ref, transforms, *rest = eqn.params["args_tree"].unflatten(eqn.invars)
        mask = rest[-2] if name == "masked_load" else rest[-1]
    else:
        ref, *rest = eqn.invars
        transforms = jax.tree.unflatten(eqn.params["tree"], rest if name == "get" else rest[1:])
    block = blocks.get(ref)
    if block is None or not any(block.overhanging):
        return
    assert len(transforms) <= 1, f"{block.name}: transforms {transforms}"
    indices = transforms[0].indices if transforms else [Slice(0, n) for n in ref.aval.shape]
    along = frozenset() if mask is None else of(mask)
    position = 0
    for dimension, index in enumerate(indices):
        is_slice = isinstance(index, Slice)
        covered = mask is not None if not is_slice or index.size == 1 else position in along
        covered |= name != "masked_swap" and is_slice and not isinstance(index.start, int)
        position += is_slice
        if block.overhanging[dimension] and not covered:
            yield f"{block.name}: {name} along dimension {dimension} of a view {ref.aval.shape}, at {index}"
