"""flash_attn_with_kvcache against a loop over sequences in float64."""

import inspect

import pytest
import torch

from jax_kernels import bridge

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0])
LENGTHS, ROOM, HEADS, KV_HEADS, SIZE = (5, 0, 19), 32, 4, 2, 16
CASES = {
    "no new keys": {"new": 0},
    "one token": {},
    "int length": {"cache_seqlens": 7},
    "tensor length": {"cache_seqlens": torch.tensor(7)},
    "whole cache": {"new": 0, "cache_seqlens": None},
    "causal": {"queries": 3, "new": 3, "causal": True},
    "causal, more queries": {"queries": 4, "new": 2, "causal": True},
    "full": {"queries": 3, "new": 2},
    "window": {"queries": 3, "new": 3, "window_size": (4, 1)},
    "window of a tensor": {"queries": 2, "new": 2, "causal": True, "window_size": torch.tensor([3, -1])},
    "long causal": {"queries": 20, "new": 1, "causal": True, "softcap": 2.0},
    "capped alibi": {"queries": 2, "new": 2, "causal": True, "softcap": 1.5, "alibi_slopes": SLOPES},
    "full capped alibi": {"queries": 3, "new": 3, "softcap": 1.5, "alibi_slopes": SLOPES.flip(0).repeat(3, 1)},
    "scale": {"softmax_scale": torch.tensor(0.3), "num_splits": 4},
    "rotary": {"rotary": 8, "queries": 2, "new": 2, "causal": True},
    "rotary halves": {"rotary": 16, "queries": 2, "new": 2, "window_size": (5, 0), "rotary_interleaved": False},
    "rotary of one position": {"rotary": 16, "queries": 3, "new": 1},
    "rows": {"rows": (3, 1, 4)},
    "rows, full": {"rows": (3, 1, 4), "queries": 2, "new": 2},
    "left padding": {"leftpad": (2, 0, 19), "queries": 2, "new": 2, "causal": True, "alibi_slopes": SLOPES},
    "left padding of rows": {"leftpad": (2, 0, 7), "rows": (3, 1, 4)},
    "pages": {"page": 16, "queries": 2, "new": 2, "causal": True},
    "pages of 8": {"page": 8},
    "pages, full, rotary": {"page": 16, "queries": 3, "new": 3, "rotary": 16},
    "padded pages": {"page": 16, "leftpad": (2, 0, 7)},
}


def rotated(x, positions, cos, sin, is_interleaved):
    """x [T, heads, D] by complex numbers."""
    size = 2 * cos.shape[1]
    turn = torch.complex(cos.double(), sin.double())[positions][:, None]
    part = x[..., :size].double()
    pairs = part.unflatten(-1, (-1, 2)) if is_interleaved else part.unflatten(-1, (2, -1)).mT
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    turned = turned.flatten(-2) if is_interleaved else turned.mT.flatten(-2)
    return torch.cat([turned.to(x.dtype), x[..., size:]], dim=-1)


def wanted(reference, q, keys, values, k, v, lengths, leftpads, tables, options):
    """(outs, lses) in float64. Writes to keys and values [B, S, Hkv, D]."""
    causal, window = options.get("causal", False), tuple(map(int, options.get("window_size", (-1, -1))))
    queries, outs, lses = q.shape[1], [], []
    for b, length in enumerate(lengths):
        of_q, new = q[b], 0 if k is None else k.shape[1]
        if new:
            of_k = k[b]
            if tables is not None:
                is_interleaved = options.get("rotary_interleaved", True)
                is_moving = causal or window != (-1, -1)
                of_q = rotated(of_q, length + torch.arange(queries) * is_moving, *tables, is_interleaved)
                of_k = rotated(of_k, length + torch.arange(new), *tables, is_interleaved)
            keys[b, length : length + new], values[b, length : length + new] = of_k, v[b]
        own_keys, own_values = (x[b, leftpads[b] : length + new][None] for x in (keys, values))
        offset, bias = own_keys.shape[1] - queries, None
        slopes = options.get("alibi_slopes")
        if slopes is not None:
            distance = torch.arange(queries)[:, None] + offset - torch.arange(own_keys.shape[1])
            bias = -(slopes if slopes.ndim == 1 else slopes[b])[:, None, None] * distance.abs()
        sides = tuple(None if side < 0 else side for side in window)
        out, lse = reference(
            *(of_q[None], own_keys, own_values),
            bias=bias,
            is_causal=causal,
            window=None if sides == (None, None) else sides,
            q_offset=offset,
            softcap=options.get("softcap") or None,
            scale=options.get("softmax_scale"),
        )
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


@pytest.mark.parametrize("case", CASES)
def test_matches_a_loop(case, reference):
    options = dict(CASES[case])
    queries, new, size, rotary = (options.pop(name, x) for name, x in (
        ("queries", 1), ("new", 1), ("page", None), ("rotary", None),
    ))  # fmt: skip
    rows, leftpads = options.pop("rows", None), options.pop("leftpad", None)
    generator = torch.Generator().manual_seed(0)
    rand = lambda *shape: torch.randn(shape, generator=generator)
    batch = len(LENGTHS)
    q = rand(batch, queries, HEADS, SIZE)
    k, v = (rand(batch, new, KV_HEADS, SIZE) if new else None for _ in range(2))
    given = options.pop("cache_seqlens", torch.tensor(LENGTHS, dtype=torch.int32))
    lengths = (
        LENGTHS if given is not None and getattr(given, "shape", ()) else [ROOM if given is None else int(given)] * 3
    )
    whole_k, whole_v = (rand(6, ROOM, KV_HEADS, SIZE) for _ in range(2))
    own_rows = list(rows or range(batch))
    keys, values = whole_k[own_rows], whole_v[own_rows]
    for b, length in enumerate(lengths):  # values outside of all sequences have no effect
        for x, y in ((whole_k, keys), (whole_v, values)):
            x[own_rows[b], length:] = torch.nan
            x[own_rows[b], : 0 if leftpads is None else leftpads[b]] = torch.nan
            y[b] = x[own_rows[b]]
    tables = None
    if rotary:
        angles = torch.arange(40)[:, None] / 10.0 ** torch.arange(rotary // 2)
        tables = angles.cos(), angles.sin()
        options |= {"rotary_cos": tables[0], "rotary_sin": tables[1]}
    table, caches = None, [whole_k, whole_v]
    if size:
        count = ROOM // size
        table = torch.randperm(batch * count, generator=generator).reshape(batch, count).int()
        caches = [torch.full((batch * count + 1, size, KV_HEADS, SIZE), torch.nan) for _ in range(2)]
        for x, y in zip(caches, (keys, values), strict=True):
            x[table.long()] = y.unflatten(1, (count, size))
    names = {name: None if x is None else torch.tensor(x, dtype=torch.int32) for name, x in (
        ("cache_batch_idx", rows), ("cache_leftpad", leftpads),
    )}  # fmt: skip
    addresses = [x.data_ptr() for x in caches]
    out, lse = bridge.flash_attn_with_kvcache(
        q, *caches, k, v, cache_seqlens=given, block_table=table, return_softmax_lse=True, **names, **options
    )
    want, want_lse = wanted(reference, q, keys, values, k, v, lengths, leftpads or [0] * 3, tables, options)
    torch.testing.assert_close(out.double(), want, atol=3e-6, rtol=0)
    torch.testing.assert_close(lse.double(), want_lse, atol=5e-6, rtol=0)
    stored = [x[table.long()].flatten(1, 2) if size else x[own_rows] for x in caches]
    for x, y in zip(stored, (keys, values), strict=True):
        torch.testing.assert_close(x, y, atol=1e-6, rtol=0, equal_nan=True)
    assert [x.data_ptr() for x in caches] == addresses


def test_signature():
    names = (
        "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad block_table "
        "softmax_scale causal window_size softcap rotary_interleaved alibi_slopes num_splits return_softmax_lse"
    )
    assert " ".join(inspect.signature(bridge.flash_attn_with_kvcache).parameters) == names


def int32(*x):
    return torch.tensor(x, dtype=torch.int32)


Q, CACHE, NEW = torch.zeros(2, 1, 4, 16), torch.zeros(2, 32, 2, 16), torch.zeros(2, 1, 2, 16)
COS = torch.ones(40, 8)
ERRORS = {
    "k alone": ({"k": NEW, "cache_seqlens": 3}, ValueError, "^v: got None with k"),
    "no lengths": ({"k": NEW, "v": NEW}, ValueError, "^cache_seqlens: got None with k"),
    "full": ({"k": NEW, "v": NEW, "cache_seqlens": 32}, ValueError, "^cache_seqlens: got 32 to 32 with 1 new"),
    "expanded": (
        {"k": NEW, "v": NEW, "cache_seqlens": 3, "k_cache": CACHE[:1].expand(2, -1, -1, -1)},
        *(ValueError, "^k_cache: got a tensor that expand made along axis 0"),
    ),
    "expanded values": (
        {"k": NEW, "v": NEW, "cache_seqlens": 3, "v_cache": CACHE[:, :1].expand(-1, 32, -1, -1)},
        *(ValueError, "^v_cache: got a tensor that expand made along axis 1"),
    ),
    "long": ({"cache_seqlens": int32(3, 33)}, ValueError, "^cache_seqlens: got 3 to 33, want 0 to 32"),
    "int64": ({"cache_seqlens": int32(3, 3).long()}, ValueError, r"^cache_seqlens: got torch\.int64 \(2,\)"),
    "float": ({"cache_seqlens": 3.0}, TypeError, "^cache_seqlens: got float, want an int"),
    "rotary": ({"rotary_cos": COS, "rotary_sin": COS}, ValueError, "^rotary_cos: got one without k"),
    "sin": (
        {"k": NEW, "v": NEW, "cache_seqlens": 3, "rotary_cos": COS},
        *(ValueError, "^rotary_sin: got None, want both"),
    ),
    "positions": (
        {"k": NEW, "v": NEW, "cache_seqlens": 5, "rotary_cos": COS[:5], "rotary_sin": COS[:5]},
        *(ValueError, "^rotary_cos: got 5 positions, want 6 or more"),
    ),
    "rows": ({"cache_batch_idx": int32(0, 2)}, ValueError, "^cache_batch_idx: got 0 to 2, want indices"),
    "rows and pages": (
        {"cache_batch_idx": int32(0, 1), "block_table": int32(0, 1)[:, None]},
        *(ValueError, "^cache_batch_idx: got one with block_table"),
    ),
    "page": ({"block_table": int32(0, 9)[:, None]}, ValueError, "^block_table: got 0 to 9, want indices"),
    "leftpad": ({"cache_leftpad": int32(0)}, ValueError, "^cache_leftpad: got"),
    "slopes": ({"alibi_slopes": SLOPES[:3]}, ValueError, "^alibi_slopes: got"),
    "causal": ({"causal": "no"}, TypeError, "^causal: got str, want a bool"),
    "scale": ({"softmax_scale": "x"}, TypeError, "^softmax_scale: got str, want a number"),
    "splits": ({"num_splits": -1}, ValueError, "^num_splits: got -1"),
    "dtype": ({"k_cache": CACHE.half()}, TypeError, r"^k_cache: got dtype torch\.float16, want q's dtype"),
    "heads": ({"k_cache": CACHE[:, :, :, :8]}, ValueError, "^k_cache: got shape .* want a divisor of q's 4 heads"),
    "values": ({"v_cache": CACHE[:, :9]}, ValueError, "^v_cache: got shape"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    options, error, message = ERRORS[case]
    arguments = {"q": Q, "k_cache": CACHE.clone(), "v_cache": CACHE.clone()} | options
    with pytest.raises(error, match=message):
        bridge.flash_attn_with_kvcache(**arguments)


GRADIENTS = {
    "q": {},
    "k_cache": {},
    "v_cache": {},
    "k": {"k": NEW, "v": NEW},
    "v": {"k": NEW, "v": NEW},
    "rotary_cos": {"k": NEW, "v": NEW, "rotary_cos": COS, "rotary_sin": COS},
    "rotary_sin": {"k": NEW, "v": NEW, "rotary_cos": COS, "rotary_sin": COS},
    "softmax_scale": {"softmax_scale": torch.tensor(0.3)},
    "alibi_slopes": {"alibi_slopes": SLOPES},
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_not_dropped(name):
    arguments = {"q": Q, "k_cache": CACHE, "v_cache": CACHE, "cache_seqlens": 3} | GRADIENTS[name]
    arguments = {key: x.clone() if isinstance(x, torch.Tensor) else x for key, x in arguments.items()}
    arguments[name].requires_grad_()
    with pytest.raises(NotImplementedError, match=rf"^{name}: got a tensor that requires a gradient"):
        bridge.flash_attn_with_kvcache(**arguments)
    with torch.no_grad():
        assert bridge.flash_attn_with_kvcache(**arguments).shape == Q.shape
