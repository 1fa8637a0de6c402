"""Fixtures of attention's tests."""

import numpy as np
import pytest

from tests.support.oracles.attention import live


@pytest.fixture(scope="session")
def check_dead():
    """Checks that queries without a key and keys without a query have exact zeros, and lse = -inf or the sink's."""

    def check(case, got):
        keep = live(case)
        queries = ~keep.any(axis=3)
        keys = ~keep.reshape(case.batch, case.kv_heads, -1, case.kv_length).any(axis=2).swapaxes(1, 2)
        rows = queries.swapaxes(1, 2)
        for name, dead in (("out", rows), ("dq", rows), ("dk", keys), ("dv", keys)):
            assert not np.asarray(got[name])[dead].any(), f"{name} is not 0 where nothing attends"
        if "lse" in got and not case.sinks:
            np.testing.assert_array_equal(np.isneginf(got["lse"]), queries)
        elif "lse" in got:
            sinks = np.broadcast_to(case.arguments["sinks"][:, None], queries.shape)
            np.testing.assert_allclose(np.asarray(got["lse"])[queries], sinks[queries], rtol=1e-6)
        if case.bias == "bhts":
            assert not np.asarray(got["dbias"])[~keep].any(), "dbias is not 0 where nothing attends"

    return check
