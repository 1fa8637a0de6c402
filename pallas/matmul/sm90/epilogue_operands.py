"""The operands [m, n] of the epilogue in the stages of the pipeline: their blocks, their memory, and their fills.

The memory of w's block in a stage holds them. For transposed weights it holds parts (blocks of 64 rows and
traits.columns columns) one after the other. Parts are loaded in the order in which the epilogue reads them, so that it
begins before the last has arrived, and stages become free while it runs. Otherwise the memory of a part is not
contiguous, and a fill of a stage has 64 rows and all columns of an operand.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_kernels.pallas.kernel_types import Index, Ref
from jax_kernels.pallas.matmul.sm90.state import ROWS, Kernel, Traits

__all__ = ["EpilogueBlock", "epilogue_blocks", "fills_ending", "fills_starting", "memory_of", "part_of", "slot_of"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpilogueBlock:
    """64 rows and some columns of an operand, which one copy loads.

    name: the operand's field of MatmulInputs. block: the index of the 64 rows in the work tile. first: the first column
    in the work tile. width: the number of columns. fill: the index of the fill among the epilogue's fills. start: the
    first row (of transposed weights) or column of the memory in w's block.
    """

    name: str
    block: int
    first: int
    width: int
    fill: Index
    start: Index


def _memory_of_part(traits: Traits, operand: int, block: Index, part: int) -> tuple[Index, Index]:
    """(the fill of the epilogue that has a part of an operand, the start of its memory, as in EpilogueBlock).

    operand: the index of the operand in traits.epilogue_inputs. block: the index of the 64 rows in the work tile. part:
    the index of the traits.columns columns in the work tile.
    """
    blocks, room = traits.block_m // ROWS, traits.parts
    if not traits.options.transpose_w:
        return operand * blocks + block, part * traits.columns
    before = (part * len(traits.epilogue_inputs) + operand) * blocks
    if isinstance(block, int):
        fill, nth = divmod(before + block, room)
        return fill, nth * traits.columns
    if before % room + blocks <= room:  # one fill has all blocks
        return before // room, (before % room + block) * traits.columns
    index = before + block
    return lax.div(index, jnp.int32(room)), lax.rem(index, jnp.int32(room)) * traits.columns


def epilogue_blocks(traits: Traits) -> list[EpilogueBlock]:
    """The blocks of the epilogue's operands, in the order of their loads."""
    width = traits.columns if traits.options.transpose_w else traits.block_n
    parts, blocks = range(traits.block_n // width), range(traits.block_m // ROWS)
    found = []
    for part, (operand, name), block in itertools.product(parts, enumerate(traits.epilogue_inputs), blocks):
        fill, start = _memory_of_part(traits, operand, block, part)
        found.append(EpilogueBlock(name=name, block=block, first=part * width, width=width, fill=fill, start=start))
    return found


def _fills_of(traits: Traits, part: int) -> set[Index]:
    """The numbers of the fills of the epilogue's memory that hold operands of `part`."""
    first = part * traits.columns
    return {x.fill for x in epilogue_blocks(traits) if x.first <= first < x.first + x.width}


def fills_starting(traits: Traits, part: int) -> list[Index]:
    """The epilogue's fills that a part needs and no earlier part needs, in order."""
    return sorted(_fills_of(traits, part).difference(*(_fills_of(traits, x) for x in range(part))))


def fills_ending(traits: Traits, part: int) -> list[Index]:
    """The epilogue's fills that a part needs and no later part needs, in order."""
    return sorted(_fills_of(traits, part).difference(*(_fills_of(traits, x) for x in range(part + 1, traits.parts))))


def slot_of(kernel: Kernel, fill: Index, nth: Index) -> jax.Array:
    """The index of the stage that a fill of the epilogue of a work tile takes.

    nth: the number of work tiles that the CTA took before.
    """
    return lax.rem(nth * kernel.traits.fills + kernel.traits.steps + fill, jnp.int32(kernel.traits.stages))


def memory_of(kernel: Kernel, slot: Index, start: Index, width: int) -> Ref:
    """The shared memory of 64 rows and `width` columns of an operand, in stage `slot`. start: as in EpilogueBlock."""
    columns = pl.ds(start, width)
    return kernel.smem.w.at[slot, columns] if kernel.traits.options.transpose_w else kernel.smem.w.at[slot, :, columns]


def part_of(kernel: Kernel, name: str, block: Index, part: int, nth: Index) -> Ref:
    """The shared memory of a part of an operand.

    name: the operand's field of MatmulInputs. block, part: the indices of the part's rows and columns in the work tile.
    nth: the number of work tiles that the CTA took before.
    """
    fill, start = _memory_of_part(kernel.traits, kernel.traits.epilogue_inputs.index(name), block, part)
    return memory_of(kernel, slot_of(kernel, fill, nth), start, kernel.traits.columns)
