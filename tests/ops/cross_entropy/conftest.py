"""Small tiles and chunks of linear_cross_entropy."""

import pytest

from jax_kernels.inputs import linear_cross_entropy as loss_inputs
from tests.support.oracles.plain_loss import VOCABULARY


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 3 tokens, and chunks of 8 entries of the vocabulary."""
    monkeypatch.setattr(loss_inputs, "LOGITS_BYTES", 3 * 4 * VOCABULARY)
    monkeypatch.setattr(loss_inputs, "LEAST_CHUNK", 8)
