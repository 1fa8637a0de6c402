"""The records of block specs, and the look-up of their rows."""

import dataclasses
import functools
import re
from pathlib import Path

import pytest

from jax_kernels.pallas import block_specs
from jax_kernels.pallas.block_specs.normalization_specs import NormOrder, NormRow, NormTriton
from jax_kernels.pallas.block_specs.record import first
from jax_kernels.pallas.block_specs.sm86 import SM86
from jax_kernels.pallas.block_specs.sm90 import SM90
from jax_kernels.pallas.block_specs.specs import H200

SPECS = list(block_specs.BLOCK_SPECS.values())


def row(columns, **fields):
    blocks = NormTriton(block_rows=1, chunk=1024, num_warps=1)
    return NormRow(implementation="triton", columns=columns, forward=blocks, backward=blocks, **fields)


def test_first_takes_the_first_row_that_serves():
    small, large = row(100), row(None)
    assert first((small, large), "triton", 100) is small
    assert first((small, large), "triton", 101) is large
    with pytest.raises(LookupError, match="no mosaic_gpu row serves 1"):
        first((small, large), "mosaic_gpu", 1)
    with pytest.raises(LookupError, match="no triton row serves 101"):
        first((small,), "triton", 101)
    orders = NormOrder(columns=5, names=("a",)), NormOrder(names=("b",))
    assert first(orders, None, 6).names == ("b",)


def test_every_file_has_the_record_of_its_name():
    """A record in sm87.py that keeps the capability (8, 6) of the record that it copies would replace that record."""
    files = [path.stem for path in Path(block_specs.__file__).parent.glob("sm*.py")]
    want = {name for name in files if re.fullmatch(r"sm\d+", name)}
    assert {specs.name.replace("_", "") for specs in SPECS} == want
    assert [specs.capability for specs in SPECS] == sorted(specs.capability for specs in SPECS)


@pytest.mark.parametrize("specs", SPECS, ids=lambda specs: specs.name)
def test_every_record_is_found_by_its_capability(specs):
    assert block_specs.nearest(specs.capability) is specs
    major, minor = specs.capability
    assert specs.name == f"sm_{major}{minor}"
    assert block_specs.nearest((major, minor + 1)).capability >= specs.capability


@pytest.mark.parametrize("specs", [x for x in SPECS if x.inherited_from], ids=lambda specs: specs.name)
def test_an_inherited_order_is_the_one_of_its_owner(specs):
    (owner,) = (x for x in SPECS if x.name == specs.inherited_from)
    assert specs.attention_order is owner.attention_order
    assert specs.measured_on is None or specs.measured_on.capability == specs.capability


def test_only_hopper_is_measured():
    """A figure of another GPU ends this: it is to say so in its record."""
    assert [specs.name for specs in SPECS if specs.measured_on is not None] == ["sm_90"]


@pytest.mark.parametrize(
    ("capability", "columns", "source"),
    [
        ((9, 0), 4096, "sm_80's rows, inherited by sm_90, measured on NVIDIA H200"),
        ((9, 0), 128, "sm_80's rows, inherited by sm_90, not measured"),
        ((8, 0), 4096, "sm_80's rows, not measured on sm_80, only on NVIDIA H200"),
        ((8, 9), 128, "sm_80's rows, inherited by sm_89, not measured"),
        ((9, 9), 128, "heuristic: sm_80's rows, inherited by sm_90, for sm_99, which has none, not measured"),
        (None, 128, "heuristic: sm_80's rows, for the interpreter, not measured"),
        (None, 4096, "heuristic: sm_80's rows, for the interpreter, measured on NVIDIA H200"),
    ],
)
def test_the_source_of_a_row(capability, columns, source):
    assert block_specs.norm_row(capability, "triton", columns=columns)[1] == source


@pytest.mark.parametrize("specs", [specs for specs in SPECS if specs.name != "sm_90"], ids=lambda specs: specs.name)
def test_a_narrow_value_has_larger_blocks(specs):
    """Keys of 192 columns with values of 128: the row after it, for values of up to 256 columns, has smaller blocks.

    Hopper's row for 256 has as many queries.
    """
    find = functools.partial(block_specs.attention_row, specs.capability, "triton", bits=16, is_causal=True)
    (narrow, source), (wide, _) = find(head_dim=192, v_head_dim=128), find(head_dim=192)
    assert (narrow.head_dim, wide.head_dim) == (192, 256)
    assert narrow.forward.block_q > wide.forward.block_q
    assert source.endswith("not measured")
    assert find(head_dim=192, v_head_dim=129)[0] is wide
    assert find(head_dim=128, v_head_dim=64)[0].head_dim == 128
    bias, _ = find(head_dim=192, v_head_dim=128, dense_bits=32)
    assert bias.v_head_dim == 128


def test_replaced_tables_end_with_their_block():
    """Also a row that no record has belongs to somebody: to the record that it was put into."""
    before = block_specs.norm_row((8, 6), "triton", columns=64)
    mine = row(64, measured_on=H200)
    with block_specs.replaced_tables((8, 6), norm=(mine, *SM86.norm)):
        found, source = block_specs.norm_row((8, 6), "triton", columns=64)
        assert found is mine
        assert source == "sm_86's rows, not measured on sm_86, only on NVIDIA H200"
        assert block_specs.norm_row((8, 6), "triton", columns=256) == before
    assert block_specs.norm_row((8, 6), "triton", columns=64) == before
    assert before[0] is SM86.norm[0]


def test_a_copy_says_that_it_is_not_measured():
    new = dataclasses.replace(SM90, capability=(9, 1), inherited_from="sm_90", measured_on=None)
    block_specs.BLOCK_SPECS[9, 1] = new
    try:
        names, source = block_specs.attention_order((9, 1))
        _, of_row = block_specs.attention_row((9, 1), "mosaic_gpu", head_dim=64, bits=16, is_causal=True)
    finally:
        del block_specs.BLOCK_SPECS[9, 1]
    assert names == SM90.attention_order
    assert source == "sm_90's order, inherited by sm_91, not measured"
    assert of_row == "sm_90's rows, inherited by sm_91, not measured on sm_91, only on NVIDIA H200"
