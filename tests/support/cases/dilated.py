"""Patterns of dilated attention, and random results of their attention calls."""

import jax.numpy as jnp
import numpy as np

from jax_kernels.ops.dilated import branches as dilated_views
from jax_kernels.ops.dilated.pieces import pieces_of

# segment_lengths, dilation_rates, heads, key heads, length, and whether heads are in groups.
PATTERNS = {
    "longnet": ((4, 8, 16), (1, 2, 4), 4, 4, 32, False),
    "grouped_heads": ((8, 16, 16), (1, 2, 1), 4, 2, 16, False),
    "divides_nothing": ((10, 24), (3, 5), 6, 6, 37, False),
    "more_classes_than_heads": ((6, 24), (5, 7), 3, 3, 24, False),
    "groups": ((8, 12), (2, 3), 5, 5, 24, True),
    "classes_within_groups": ((8, 16, 24), (1, 2, 5), 8, 2, 24, False),
    "groups_within_groups": ((8, 12), (2, 3), 6, 2, 24, True),
    # Not causal: heads of one class are separate entries, under a mask.
    "masked": ((10, 24), (3, 5), 12, 6, 37, False),
    "masked_groups": ((8, 12), (3, 5), 6, 2, 24, True),
    # Tokens in another order; all classes of a segment in one entry, with or without ids.
    "hilbert": ((16, 24), (2, 3), 4, 2, 37, False),
    "partition": ((8, 12, 12), (2, 3, 5), 4, 2, 37, False),
    "masked_partition": ((8, 12), (3, 4), 4, 2, 24, False),
    "hilbert_partition": ((16, 16), (2, 4), 4, 4, 40, False),
}


def calls_of(name):
    lengths, rates, heads, kv_heads, length, in_groups = PATTERNS[name]
    branches, served = tuple(zip(lengths, rates, strict=True)), "groups" if in_groups else "all"
    order = "hilbert" if "hilbert" in name else None
    layout = "partition" if "partition" in name else "overlap"
    pieces = pieces_of(length, heads, branches, heads=served, layout=layout, order=order)
    is_causal = not name.startswith("masked")
    calls = dilated_views.calls_of(pieces, heads, kv_heads, is_causal=is_causal, has_segment_ids=False)
    assert is_causal or any(call.is_masked for call in calls)
    return calls, heads, kv_heads, length


def random_results(calls, heads, per_entry, head_dim):
    """Random outs [entries, rows, heads, head_dim] and lses [entries, heads, rows] of each call."""
    random = np.random.default_rng(0)
    outs, lses = [], []
    for call in calls:
        shape = call.entries(2, heads), call.rows, getattr(call, per_entry)
        outs.append(jnp.asarray(random.standard_normal((*shape, head_dim)), jnp.float32))
        lses.append(jnp.asarray(random.standard_normal(shape), jnp.float32).swapaxes(1, 2))
    return outs, lses
