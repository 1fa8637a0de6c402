"""The texts of the library's errors in `jax-kernels train`: options instead of arguments."""

import pytest

from jax_kernels.cli import train_run


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
