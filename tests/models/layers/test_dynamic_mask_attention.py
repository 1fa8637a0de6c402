"""DynamicMaskAttention: against a plain evaluation in float64, its cache, and its gradients."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_kernels import masks
from jax_kernels.models import DynamicMaskAttention

WIDTH, BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 32, 2, 17, 4, 2, 8

forward = nnx.jit(lambda attention, x, mask=None: attention(x, mask=mask))
decode = nnx.jit(lambda attention, x, cache: attention(x, cache=cache))


def module(**options):
    options = {"num_kv_heads": KV_HEADS, "keys_to_keep": 5, "use_rotary": False} | options
    attention = DynamicMaskAttention(WIDTH, HEADS, rngs=nnx.Rngs(0), **options)
    attention.A[...] = jnp.array([0.5, -0.7])  # like trained biases, which differ by more than a rounding
    return attention


def inputs(seed=1):
    return jax.random.normal(jax.random.key(seed), (BATCH, LENGTH, WIDTH))


def plain(attention, x, mask=True):
    """The module in float64 NumPy."""
    x = np.asarray(x, np.float64)
    weight = lambda linear: np.asarray(linear.kernel[...], np.float64)
    heads = lambda linear: (x @ weight(linear)).reshape(BATCH, LENGTH, -1, HEAD_DIM)
    q, k, v = heads(attention.q_proj), heads(attention.k_proj), heads(attention.v_proj)
    steps = v.reshape(BATCH, LENGTH, -1) @ weight(attention.dt_proj)
    bias = np.exp(np.asarray(attention.A[...], np.float64) * np.log1p(np.exp(steps))).transpose(0, 2, 1)
    keep = np.tri(LENGTH, dtype=bool) if attention.is_causal else np.ones((LENGTH, LENGTH), bool)
    keep = np.broadcast_to(keep & np.asarray(mask), (BATCH, KV_HEADS, LENGTH, LENGTH))
    rows = np.where(keep, bias[:, :, None], -np.inf)
    least = np.sort(rows, axis=-1)[..., -attention.keys_to_keep, None] if attention.keys_to_keep < LENGTH else -np.inf
    scores = np.where(keep & (rows >= least), bias[:, :, None], -np.inf).repeat(HEADS // KV_HEADS, axis=1)
    k, v = (y.repeat(HEADS // KV_HEADS, axis=2) for y in (k, v))
    scores = scores + np.einsum("bthd,bshd->bhts", q, k) / np.sqrt(HEAD_DIM)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = np.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdims=True), v)
    return out.reshape(BATCH, LENGTH, -1) @ weight(attention.out_proj)


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": False, "keys_to_keep": 1}, {"keys_to_keep": LENGTH - 1}], ids=str
)
def test_matches_a_plain_evaluation(options):
    attention, x = module(**options), inputs()
    np.testing.assert_allclose(forward(attention, x), plain(attention, x), atol=2e-6)


@pytest.mark.parametrize("keys_to_keep", [5, LENGTH])
def test_nan_bias_keeps_no_key(keys_to_keep):
    """Whether keys are ranked or all kept, heads with NaN bias give 0."""
    attention, x = module(keys_to_keep=keys_to_keep), inputs()
    kernel = attention.out_proj.kernel[...]
    attention.out_proj.kernel[...] = kernel.at[: WIDTH // KV_HEADS].set(0)  # as if these heads gave 0
    want = plain(attention, x)
    attention.out_proj.kernel[...] = kernel
    attention.A[...] = attention.A[...].at[0].set(jnp.nan)
    np.testing.assert_allclose(forward(attention, x), want, atol=2e-6)


def test_top_k_ranks_within_the_masks():
    """A key that a mask of the module or of the call excludes does not count among the kept keys."""
    some = jax.random.bernoulli(jax.random.key(2), 0.6, (BATCH, KV_HEADS, LENGTH, LENGTH)) | jnp.eye(LENGTH, dtype=bool)
    window, x = masks.sliding_window(9, 3), inputs()
    for attention, mask, want in (
        (module(mask=window, is_causal=False), None, window.to_dense(LENGTH, LENGTH)),
        (module(mask=window), some, some & window.to_dense(LENGTH, LENGTH)),
    ):
        np.testing.assert_allclose(forward(attention, x, mask), plain(attention, x, want), atol=2e-6)


def test_fewer_keys_than_top_k():
    """All keys that the mask leaves are kept, also for a Mask with the heads of the keys."""
    attention, x = module(keys_to_keep=LENGTH), inputs()
    some = jax.random.bernoulli(jax.random.key(2), 0.6, (BATCH, KV_HEADS, LENGTH, LENGTH)) | jnp.eye(LENGTH, dtype=bool)
    for mask in (some, masks.dense(some)):
        np.testing.assert_allclose(forward(attention, x, mask), plain(attention, x, some), atol=2e-6)


def of_parity(b, h, q, k):
    return ((k + h) % 2 == 0) | (k == q)


@pytest.mark.parametrize(
    "options",
    [{}, {"mask": masks.from_function(of_parity, heads=KV_HEADS), "keys_to_keep": 20}],
    ids=["few_keys", "all_keys_of_a_mask_of_heads"],
)
def test_decoding_equals_the_full_forward(options):
    attention, x = module(use_rotary=True, **options), inputs()
    cache, outs = attention.init_cache(BATCH, 20), []
    for start, end in ((0, 8), (8, 9), (9, LENGTH)):
        out, cache = decode(attention, x[:, start:end], cache)
        outs.append(out)
    np.testing.assert_allclose(jnp.concatenate(outs, axis=1), forward(attention, x), atol=1e-6)


def test_decoding_a_ragged_batch():
    attention, x = module(use_rotary=True), inputs()
    lengths = (8, 11)
    out, cache = decode(attention, x[:, :11], attention.init_cache(BATCH, 20))
    cache = cache.with_length(jnp.array(lengths))
    out, cache = decode(attention, jnp.stack([x[b, n : n + 6] for b, n in enumerate(lengths)]), cache)
    want = forward(attention, x)
    for b, n in enumerate(lengths):
        np.testing.assert_allclose(out[b], want[b, n : n + 6], atol=1e-6)


def test_unfilled_cache_is_not_ranked():
    """The cache's unfilled keys are zeros, with a bias larger than the bias of some tokens."""
    attention, x = module(is_causal=False, keys_to_keep=12), inputs()
    out, _ = decode(attention, x, attention.init_cache(BATCH, 24))
    np.testing.assert_allclose(out, plain(attention, x), atol=2e-6)


def test_bias_has_gradients():
    """A and dt_proj get the bias's gradient at fixed keys, which finite differences confirm."""
    attention, x = module(), inputs()
    loss = lambda attention: jnp.sin(attention(x)).sum()
    gradients = nnx.jit(nnx.grad(loss))(attention)
    step = 1e-4
    for name in ("A", "dt_proj"):
        parameter = attention.A if name == "A" else attention.dt_proj.kernel
        gradient = (gradients.A if name == "A" else gradients.dt_proj.kernel)[...]
        old = parameter[...]
        direction = gradient / jnp.linalg.norm(gradient)
        values = []
        for sign in (1, -1):
            parameter[...] = old + sign * step * direction
            values.append(np.sin(plain(attention, x)).sum())
        parameter[...] = old
        np.testing.assert_allclose((values[0] - values[1]) / (2 * step), jnp.linalg.norm(gradient), rtol=1e-3)


def test_parameters_and_dtypes():
    attention = DynamicMaskAttention(WIDTH, HEADS, num_kv_heads=KV_HEADS, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert attention.keys_to_keep == 2048
    assert attention.A[...].shape == (KV_HEADS,)
    assert 0 < float(jnp.abs(attention.A[...]).max()) < 0.1
    assert attention.dt_proj.kernel[...].shape == (KV_HEADS * HEAD_DIM, KV_HEADS)
    assert forward(attention, inputs()).dtype == jnp.bfloat16


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="keys_to_keep=0 must be positive"):
        module(keys_to_keep=0)
    with pytest.raises(TypeError, match=r"keys_to_keep=2\.0 must be an int"):
        module(keys_to_keep=2.0)
    with pytest.raises(ValueError, match="mask: got 4 heads, want 1 or num_kv_heads=2"):
        module()(inputs(), mask=jnp.ones((1, HEADS, LENGTH, LENGTH), bool))
    short = jnp.ones((1, 1, LENGTH, LENGTH - 1), bool)
    want = rf"^mask: got shape \(1, 1, {LENGTH}, {LENGTH - 1}\), want a shape broadcastable to "
    for arguments in ({}, {"segment_ids": jnp.zeros((BATCH, LENGTH), jnp.int32)}):
        with pytest.raises(ValueError, match=want):
            module()(inputs(), mask=short, **arguments)


def test_sharded_tokens_raise():
    attention = module(sequence_axis="sequence")
    heads = jnp.zeros((BATCH, 8, 4, 8))
    with pytest.raises(NotImplementedError, match=r"^sequence_axis: got tokens sharded along 'sequence'"):
        attention._attend_over_devices(heads, heads, heads, None)


def exported(*sizes):
    """(the module's forward, its export for x of these sizes), each from the parameters and x."""
    graphdef, state = nnx.split(module())
    leaves, structure = jax.tree.flatten(state)
    run = lambda leaves, x: nnx.merge(graphdef, jax.tree.unflatten(structure, leaves))(x)
    given = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    shape = jax.export.symbolic_shape(", ".join(map(str, sizes)))
    program = jax.export.export(jax.jit(run))(given, jax.ShapeDtypeStruct(shape, jnp.float32))
    return functools.partial(run, leaves), functools.partial(program.call, leaves)


@pytest.mark.slow
def test_exports_with_a_symbolic_batch():
    run, call = exported("batch", LENGTH, WIDTH)
    for rows in (1, BATCH):
        x = inputs()[:rows]
        np.testing.assert_allclose(call(x), run(x), atol=1e-6)


def test_export_needs_a_known_length():
    with pytest.raises(ValueError, match="x: got the symbolic length t, want an int"):
        exported(BATCH, "t", WIDTH)
