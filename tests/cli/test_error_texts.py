"""The texts of the library's errors in `jax-kernels train`: options instead of arguments. Sizes beyond the memory."""

import jax
import pytest
from flax import nnx

from jax_kernels.cli import train_run
from jax_kernels.models import LongNet, LongNetConfig, Transformer, TransformerConfig


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            "config: got a model that differs from the checkpoint's, which has combine=None, dilation_rates=None, "
            "heads=None, layer_norm=None, layout=None, num_layers=3, segment_lengths=None",
            "--out: got a model that differs from the checkpoint's, which has --layers 3, --attention dense",
        ),
        (
            "config: got a model that differs from the checkpoint's, which has combine='lse', segment_lengths=[4, 8]",
            "--out: got a model that differs from the checkpoint's, which has --attention dilated",
        ),
        (
            "config: got a model that differs from the checkpoint's, which has segment_lengths=[4, 8]",
            "--out: got a model that differs from the checkpoint's, which has another --seq-len",
        ),
        (
            "num_processes, process_id: got None and 1, want both",
            "--num-processes, --process-id: got None and 1, want both",
        ),
        (
            "window: got 4 with strategy='halo', want 2",
            "--sequence-strategy: window: got 4 with strategy='halo', want 2",
        ),
        (
            "folder: it is bad; restore(step=2) takes an older one",
            "--out: it is bad; the checkpoint of step 2 is older",
        ),
        ("other: got 1", "other: got 1"),
    ],
)
def test_texts_of_errors_in_options(text, wanted):
    assert train_run.in_options(text) == wanted


@pytest.mark.parametrize("words", ["--layers 100000000000000", "--width 2000000000000 --heads 1000000000000"])
def test_a_model_that_memory_cannot_hold_is_not_built(run, tmp_path, monkeypatch, words):
    monkeypatch.setattr(train_run, "Trainer", lambda *_, **options: pytest.fail("it was built"))
    code, out, err = run("train", *words.split(), "--text", __file__, "--out", str(tmp_path / "out"))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("jax-kernels: --layers, --width: got ")
    assert "GB, want at most the " in err


def test_the_number_of_parameters():
    fields = {"vocab_size": 256, "model_dim": 24, "num_heads": 4, "num_kv_heads": 2}
    dense = TransformerConfig(**fields, num_layers=3)
    dilated = LongNetConfig(**fields, num_layers=2, segment_lengths=(4, 8), dilation_rates=(1, 2))
    for kind, config in ((Transformer, dense), (LongNet, dilated)):
        model = nnx.eval_shape(lambda kind=kind, config=config: kind(config, rngs=nnx.Rngs(0)))
        assert train_run.parameter_count(config) == sum(x.size for x in jax.tree.leaves(nnx.state(model)))
