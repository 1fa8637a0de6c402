"""prepare_mask: its lists, the calls that read them, and that all other calls see the original mask."""

import dataclasses
import re

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import (
    block_sparse_attention,
    compile_attention,
    dynamic_mask_attention,
    flash_attention,
    masks,
    prepare_mask,
)
from jax_kernels.dispatch import on_device
from jax_kernels.masks import PreparedMask
from jax_kernels.masks.arrays import DenseMask
from jax_kernels.pallas.attention.sm90.forward import launch as forward_sm90
from jax_kernels.testing import rms_error
from tests.support.cases import tiers

pytestmark = pytest.mark.usefixtures("no_interpret")

B, T, H, KV_HEADS = 2, 512, 4, 2
CELLS = np.random.default_rng(0).random((4, 4)) < 0.5
MASK = masks.block_sparse(CELLS, 128) & masks.causal()
QUERY, KEY = (jax.ShapeDtypeStruct((B, T, heads, 64), jnp.bfloat16) for heads in (H, KV_HEADS))


def prepared_on_hopper(mask=MASK, query=QUERY, key=KEY, **arguments):
    with on_device("H200"):
        return prepare_mask(mask, query, key, **arguments)


def primitives(jaxpr):
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from primitives(inner)


def sorts(mask, query=QUERY, key=KEY, wrap=lambda attend: attend, **arguments):
    """The number of sorts in flash_attention and its gradients. Making a list sorts its blocks and its tiles."""

    def loss(query, key, value, mask):
        attend = wrap(lambda *qkv: flash_attention(*qkv, mask=mask, **arguments))
        return attend(query, key, value).astype(jnp.float32).sum()

    with on_device("H200"):
        program = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(query, key, key, mask)
    names = list(primitives(program.jaxpr))
    assert "wgmma_ref" in names, set(names)
    return names.count("sort")


@pytest.mark.slow
def test_calls_reuse_the_lists():
    prepared = prepared_on_hopper()
    assert sorts(MASK) == 4
    assert sorts(prepared) == 0
    jitted = lambda attend: jax.jit(jax.checkpoint(attend))
    assert sorts(prepared, wrap=jitted) == 0
    assert sorts(prepared_on_hopper(is_causal=True, window=(300, -1)), is_causal=True, window=300) == 0
    larger, larger_key = (jax.ShapeDtypeStruct((3 * B, *x.shape[1:]), x.dtype) for x in (QUERY, KEY))
    assert sorts(prepared, larger, larger_key) == 0
    assert sorts(prepared, deterministic=True) == 2
    assert sorts(prepared_on_hopper(deterministic=True), deterministic=True) == 0
    with on_device("H200"):
        assert sorts(compile_attention(MASK, T, 64, num_heads=H, num_kv_heads=KV_HEADS).prepared_mask) == 0


def test_larger_batch_repeats_the_tiles():
    """The lists were made for two batch entries. A larger batch repeats their tiles for each next two entries."""
    for lists in prepared_on_hopper().lists:
        tiles = np.asarray(lists.lists.tiles)
        larger = np.asarray(lists.of(dataclasses.replace(lists.call, batch=3 * B)).tiles).reshape(3, *tiles.shape)
        for nth, of_pair in enumerate(larger):
            np.testing.assert_array_equal(of_pair[:, 0], tiles[:, 0] + nth * B)
            np.testing.assert_array_equal(of_pair[:, 1:], tiles[:, 1:])


def test_tiles_count_full_block_steps():
    """By key, each block has one step per head of its group. After the full blocks, a kernel looks up mask bits."""
    for made in prepared_on_hopper().lists:
        blocks = MASK.block_lists(T, T, *made.call.blocks, by=made.call.by)
        heads_of_step = {"query": 1, "key": H // KV_HEADS}[made.call.by]
        full, partial = (np.asarray(x)[0, 0] * heads_of_step for x in (blocks.full_count, blocks.partial_count))
        assert full.any()
        tiles = np.asarray(made.lists.tiles)
        np.testing.assert_array_equal(tiles[:, 3], np.maximum(full + partial, heads_of_step)[tiles[:, 2]])
        np.testing.assert_array_equal(tiles[:, 4], full[tiles[:, 2]])


def test_array_mask():
    """An array mask has lists, alone, with other limits, or prepared with a bias. "cudnn" takes it as an array."""
    array = jnp.asarray(np.random.default_rng(2).random((1, H, T, T)) < 0.5)
    for mask, arguments in (
        (masks.dense(array), {}),
        (masks.dense(array), {"is_causal": True}),
        (masks.dense(array) & masks.causal(), {}),
        (masks.dense(array) & masks.sliding_window(200, 10) & masks.prefix(300), {"is_causal": True}),
        (masks.dense(array[:, :1, :1]), {}),
        (masks.dense(array), {"deterministic": True}),
    ):
        prepared = prepared_on_hopper(mask, **arguments)
        assert len(prepared.lists) == 2 + len({"deterministic"} & set(arguments))
        assert (sorts(mask, **arguments) > 0) == (not isinstance(mask, DenseMask) or mask.array.shape[2] > 1)
        assert sorts(prepared, **arguments) == 0
        np.testing.assert_array_equal(prepared.to_dense(T, T), mask.to_dense(T, T))
    prepared, bias = prepared_on_hopper(masks.dense(array)), jnp.zeros((1, 1, 1, T), jnp.bfloat16)
    with on_device("H200"):
        arrays = QUERY, KEY, KEY
        assert flash_attention.plan(*arrays, mask=prepared, bias=bias).implementation == "mosaic_gpu"
        assert flash_attention.plan(*arrays, mask=prepared, implementation="cudnn").implementation == "cudnn"
    for shape in ((1, 1, 1, T), (1, H, T, T)):
        bias = jnp.zeros(shape, jnp.bfloat16)
        assert sorts(masks.dense(array), bias=bias) == 4
        assert sorts(prepared_on_hopper(masks.dense(array), bias=bias), bias=bias) == 0


OTHER_CALLS = {
    "is_causal": lambda: True,
    "window": lambda: 200,
    "q_offset": lambda: 8,
    "kv_lengths": lambda: jnp.array([T, 100]),
    "segment_ids": lambda: jnp.zeros((B, T), jnp.int32),
}


@pytest.mark.parametrize("name", tiers.cases(OTHER_CALLS, {"window", "kv_lengths"}))
def test_other_calls_build_their_lists(name):
    given = {name: OTHER_CALLS[name]()}
    assert sorts(prepared_on_hopper(), **given) == sorts(MASK, **given) >= 4
    array = masks.dense(np.random.default_rng(2).random((1, H, T, T)) < 0.5)
    assert sorts(prepared_on_hopper(array), **given) == sorts(array, **given) >= 4


def test_passes_through_scan_shard_map_and_vmap():
    prepared = prepared_on_hopper()
    sequence = lambda attend: lambda q, *kv: jax.lax.scan(lambda q, _: (attend(q, *kv), None), q, length=3)[0]
    assert sorts(prepared, wrap=sequence) == 0
    # vmap's axis joins the batch, which becomes a multiple of the prepared batch.
    assert sorts(prepared, wrap=lambda attend: lambda *x: jax.vmap(attend)(*(jnp.stack([y] * 3) for y in x))) == 0
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    statics = {"mesh": mesh, "in_specs": jax.P("data"), "out_specs": jax.P("data"), "check_vma": False}
    sharded = lambda attend: jax.shard_map(attend, **statics)
    assert sorts(prepared, wrap=sharded) == 0
    # Layers with separate masks, prepared under jit: the lists have one structure for any blocks.
    cells = jnp.asarray(np.random.default_rng(1).random((3, 1, 1, 4, 4)) < 0.5)
    with on_device("H200"):
        each = jax.jit(jax.vmap(lambda x: prepare_mask(masks.block_sparse(x, 128), QUERY, KEY)))(cells)

        def layers(query, key, masks):
            return jax.lax.scan(lambda q, mask: (flash_attention(q, key, key, mask=mask), None), query, masks)[0]

        program = jax.make_jaxpr(layers)(QUERY, KEY, each)
    assert "sort" not in set(primitives(program.jaxpr))


def test_is_a_mask():
    prepared = prepared_on_hopper()
    assert isinstance(prepared, masks.Mask)
    assert len(prepared.lists) == 2
    assert prepared == jax.tree.unflatten(*reversed(jax.tree.flatten(prepared)))
    assert hash(prepared) == hash(jax.tree.unflatten(*reversed(jax.tree.flatten(prepared))))
    assert repr(prepared) == "prepared(block_sparse(bool[1, 1, 4, 4], 128) & causal())"
    np.testing.assert_array_equal(prepared.to_dense(T, T), MASK.to_dense(T, T))
    assert prepared.density(T, T, 64) == MASK.density(T, T, 64)
    for composed, plain in (
        (prepared & masks.prefix(3), MASK & masks.prefix(3)),
        (masks.prefix(3) | prepared, masks.prefix(3) | MASK),
        (~prepared, ~MASK),
        (prepared & prepared, MASK & MASK),
    ):
        assert composed == plain
    assert (~prepared_on_hopper(~MASK)) == MASK
    assert prepared_on_hopper(prepared).mask is MASK
    again = prepared_on_hopper(jax.tree.map(jnp.copy, prepared))
    assert jax.tree.structure(again) == jax.tree.structure(prepared)


def test_without_lists():
    """Other implementations, and masks that arguments can express, have no lists."""
    assert prepare_mask(MASK, QUERY, KEY, implementation="xla").lists == ()
    band = prepared_on_hopper(masks.causal() & masks.sliding_window(100, 0))
    assert band.lists == ()
    assert sorts(band) == 0


@pytest.mark.parametrize(
    "arguments",
    [pytest.param({}, marks=pytest.mark.slow), {"is_causal": True, "window": 20}, {"q_offset": jnp.array([3, -5])}],
)
def test_results(arguments):
    """A prepared mask that differs between heads, passed to jit, in three ops, with gradients: equals the mask."""
    cells = np.random.default_rng(2).random((B, H, 4, 4)) < 0.6
    mask = masks.block_sparse(cells, 16) | masks.global_tokens(2)
    random = np.random.default_rng(0)
    query, key, value = (
        jnp.asarray(random.standard_normal((B, 64, heads, 64)), jnp.float32) for heads in (H, KV_HEADS, KV_HEADS)
    )
    prepared = prepared_on_hopper(mask, query.astype(jnp.bfloat16), key.astype(jnp.bfloat16))
    assert len(prepared.lists) == 2
    for attend in (
        lambda *qkv, mask: flash_attention(*qkv, mask=mask, **arguments),
        lambda *qkv, mask: block_sparse_attention(*qkv, mask, **arguments),
        lambda *qkv, mask: dynamic_mask_attention(*qkv, mask, **arguments),
    ):

        def loss(query, key, value, mask, attend=attend):
            return jnp.sin(attend(query, key, value, mask=mask)).sum()

        both = jax.jit(jax.value_and_grad(loss, (0, 1, 2)), compiler_options={"xla_backend_optimization_level": 0})
        got, want = both(query, key, value, prepared), both(query, key, value, mask)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert rms_error(x, y) == 0


def test_forward_reads_the_keys_per_query(monkeypatch):
    """The queries have too few keys for bounds to pay. A list's width does not show this."""
    looks = []
    monkeypatch.setattr(forward_sm90, "_bounds", lambda *args, **kwargs: looks.append(args) or (None, None))
    cells = np.random.default_rng(0).random((128, 128)) < 0.1
    cells[3] = True
    mask, query = masks.block_sparse(cells, 128), jax.ShapeDtypeStruct((1, 16384, 1, 64), jnp.bfloat16)
    prepared = prepared_on_hopper(mask, query, query)
    assert prepared.lists[0].lists.indices.shape[-1] == 128
    with on_device("H200"):
        for given, count in ((mask, 1), (prepared, 1), (prepared_on_hopper(~mask, query, query), 2)):
            jax.eval_shape(lambda q, given=given: flash_attention(q, q, q, mask=given), query)
            assert len(looks) == count


BAD = {
    "mask": (
        lambda: prepare_mask(np.ones((T, T), bool), QUERY, KEY),
        TypeError,
        "mask: got ndarray, want a masks.Mask; masks.dense makes one of an array",
    ),
    "segment_ids": (
        lambda: prepare_mask(MASK, QUERY, KEY, segment_ids=jnp.zeros((B, T), jnp.int32)),
        ValueError,
        "segment_ids: got ArrayImpl, want None: compose masks.segments(...) into the mask",
    ),
    "kv_lengths": (
        lambda: prepare_mask(MASK, QUERY, KEY, kv_lengths=[T, T]),
        ValueError,
        "kv_lengths: got list, want None: compose masks.prefix(...) into the mask",
    ),
    "q_offset": (
        lambda: prepare_mask(MASK, QUERY, KEY, q_offset=np.zeros(2, np.int32)),
        TypeError,
        "q_offset: got ndarray, want an int that is known when tracing",
    ),
    "lengths": (
        lambda: prepare_mask(masks.block_sparse(CELLS, 64), QUERY, KEY),
        ValueError,
        "block_sparse: got blocks of shape (1, 1, 4, 4) for 512 queries and 512 keys, want [batch, heads, 8, 8]",
    ),
    "shape": (
        lambda: prepare_mask(MASK, QUERY, jax.ShapeDtypeStruct((B, T, 3, 64), jnp.bfloat16)),
        ValueError,
        "key: got 3 heads, want a divisor of query's 4 heads",
    ),
    "value": (
        lambda: prepare_mask(MASK, QUERY, KEY, jax.ShapeDtypeStruct((B, 9, KV_HEADS, 64), jnp.bfloat16)),
        ValueError,
        "value: got (length, heads) (9, 2), want key's (512, 2)",
    ),
    "unknown": (lambda: prepare_mask(MASK, QUERY, KEY, causal=True), TypeError, "unexpected keyword argument 'causal'"),
    "implementation": (
        lambda: prepared_on_hopper(implementation="cudnn"),
        NotImplementedError,
        "'cudnn' cannot serve this flash_attention: it supports only Masks",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    call, error, message = BAD[name]
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_is_exported():
    assert type(prepared_on_hopper(masks.causal())) is PreparedMask
