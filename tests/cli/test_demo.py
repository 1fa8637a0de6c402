"""`jax-kernels demo` end to end with a tiny model: its output, exact resumption, and its errors."""

import dataclasses
import json
import re

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import typer
from typer.testing import CliRunner

import jax_kernels
from jax_kernels import device_info
from jax_kernels.cli.demo import compare as demo_compare
from jax_kernels.cli.demo import demo
from jax_kernels.cli.demo import run as demo_run
from jax_kernels.cli.demo.data import CorpusError, read_corpus, unigram_entropy
from jax_kernels.cli.demo.training import Checkpoints, Settings, Trainer
from jax_kernels.models import TransformerConfig

SEQ_LEN = 48
NEED = 10 * 8 * (SEQ_LEN + 1)
MODEL = TransformerConfig(vocab_size=256, model_dim=32, num_layers=1, num_heads=2, num_kv_heads=1)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    tiny = demo_run.Preset(MODEL, seq_len=SEQ_LEN, batch_size=4, learning_rate=1e-2, steps=150)
    monkeypatch.setattr(demo_run, "preset", lambda device: tiny)


@pytest.fixture
def text(tmp_path):
    """Lines that a model can learn and a table of byte frequencies cannot."""
    rng = np.random.default_rng(0)
    words = ["alpha", "beta", "gamma", "delta", "epsilon"]
    path = tmp_path / "text.txt"
    path.write_text("".join(f"the word is {words[i]};\n" for i in rng.integers(5, size=400)))
    return path


@pytest.fixture
def invoke():
    app = typer.Typer()
    app.command()(demo)
    # So wide that no message is wrapped.
    return lambda *args: CliRunner(env={"COLUMNS": "400", "NO_COLOR": "1"}).invoke(app, [str(arg) for arg in args])


@pytest.fixture
def only_training(monkeypatch):
    """Skips everything after training, for tests of training only."""
    monkeypatch.setattr(demo_run, "sample", lambda *args: b"")
    monkeypatch.setattr(demo_compare, "compare", lambda *args: demo_compare.Comparison(True, "left out", {}))
    monkeypatch.setattr(demo_run, "LEARNED", 10.0)


def record_of(folder):
    return json.loads((folder / "run.json").read_text())


@pytest.mark.timeout(300)
def test_trains_samples_compares_and_writes(invoke, text, tmp_path):
    out = tmp_path / "out"
    result = invoke("--text", text, "--out", out)
    assert result.exit_code == 0, result.output
    record = record_of(out)
    assert record["passed"] is True
    assert record["steps"] == len(record["losses_nats_per_byte"]) == 150
    assert record["final_held_out_bits_per_byte"] < 0.5 * record["unigram_entropy_bits_per_byte"]
    assert record["held_out_bits_per_byte"][-1][0] == 150
    assert record["tokens_per_second"] == pytest.approx(4 * SEQ_LEN / record["step_seconds"])
    assert record["attention_plan"]["implementation"] == "xla"
    assert record["config"]["model"]["num_kv_heads"] == 1
    assert record["versions"]["jax"] == jax.__version__
    assert len(record["sample"]) == SEQ_LEN - SEQ_LEN // 4
    assert re.search(r"\w;\nthe word is ", record["sample"])
    for name in ("logits", "input_gradients"):
        # Two frameworks have two orders of summation: the values are close, but hardly ever the same bits.
        assert 0 <= record["torch"][name]["difference"] <= 1e-4 * record["torch"][name]["largest"]
        assert record["torch"][name]["largest"] > 0
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    for message in ("bits per byte", "tokens/s", "Sample", "logits differ by", "input gradients differ by", "150/150"):
        assert message in result.output


@pytest.mark.parametrize("written", [{"losses": [1.0], "lr": 0.1}, [1, 2]], ids=["object", "list"])
@pytest.mark.parametrize("arguments", [(), ("--resume",)], ids=["new", "resume"])
def test_checkpoints_of_another_program_stay(invoke, text, tmp_path, arguments, written):
    """As of `jax-kernels train`, which writes into the same subfolder."""
    folder = tmp_path / "checkpoint"
    with ocp.CheckpointManager(folder) as manager:
        manager.save(3, args=ocp.args.Composite(run=ocp.args.JsonSave(written)))
    result = invoke("--out", tmp_path, "--text", text, *arguments)
    assert result.exit_code == 2
    assert f"--out: another program wrote the checkpoint in {tmp_path}" in " ".join(result.output.split())
    assert [path.name for path in folder.iterdir() if path.is_dir()] == ["3"]


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("only_training")
@pytest.mark.slow
def test_resumed_run_equals_uninterrupted_run(invoke, text, tmp_path):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    for args in (
        ("--out", whole, "--text", text, "--steps", 8),
        ("--out", halves, "--text", text, "--steps", 4, "--decay-steps", 8),
        ("--out", halves, "--resume"),
    ):
        result = invoke(*args)
        assert result.exit_code == 0, result.output
    assert record_of(halves)["steps"] == 8
    assert len(record_of(whole)["losses_nats_per_byte"]) == 8
    assert record_of(halves)["losses_nats_per_byte"] == record_of(whole)["losses_nats_per_byte"]
    assert record_of(halves)["final_held_out_bits_per_byte"] == record_of(whole)["final_held_out_bits_per_byte"]
    states = []
    for out in (whole, halves):
        checkpoints = Checkpoints(out / "checkpoint", replace=False)
        trainer = Trainer(Settings.from_json(checkpoints.load_run()["settings"]))
        checkpoints.load_state(trainer)
        checkpoints.close()
        states.append(jax.tree.map(np.asarray, trainer.state))
    jax.tree.map(np.testing.assert_array_equal, *states)
    counts = [x for x in jax.tree.leaves(states[0]) if x.dtype == np.int32]
    assert {int(count) for count in counts} == {8}

    # A finished run trains no more. A run without --resume starts again in the same folder.
    assert "nothing left to train" in invoke("--out", halves, "--resume").output
    for args, message in [
        (("--steps", 7), "got 7, but the checkpoint is at step 8 already"),
        (("--seed", 1), "got 1, but the checkpoint was trained with 0"),
        (("--batch-size", 8), "got 8, but the checkpoint was trained with 4"),
        (("--implementation", "xla"), "got xla, but the checkpoint was trained with None"),
    ]:
        result = invoke("--out", halves, "--resume", *args)
        assert result.exit_code == 2
        assert message in result.output
    text.write_text(text.read_text().upper())
    result = invoke("--out", halves, "--resume")
    assert result.exit_code == 2
    assert "does not have the bytes that the checkpoint was trained on" in result.output
    assert invoke("--out", halves, "--text", text, "--steps", 3).exit_code == 0
    assert record_of(halves)["steps"] == 3


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_dilated_attention(invoke, text, tmp_path, monkeypatch):
    monkeypatch.setattr(demo_run, "LEARNED", 1.0)
    out = tmp_path / "out"
    result = invoke("--text", text, "--out", out, "--attention", "dilated", "--steps", 30)
    assert result.exit_code == 0, result.output
    record = record_of(out)
    assert record["config"]["model"]["segment_lengths"] == [12, 24, 48]
    assert record["config"]["model"]["dilation_rates"] == [1, 2, 4]
    assert "segments of 24 at rate 2: xla" in record["attention_plan"]["text"]
    assert len(record["sample"]) == SEQ_LEN - SEQ_LEN // 4
    for name in ("logits", "input_gradients"):
        assert 0 <= record["torch"][name]["difference"] <= 1e-4 * record["torch"][name]["largest"]
    result = invoke("--out", out, "--resume", "--attention", "dense")
    assert result.exit_code == 2
    assert "--attention: got dense, but the checkpoint was trained with dilated" in result.output


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("only_training")
@pytest.mark.slow
def test_fp8_matmuls(invoke, text, tmp_path, monkeypatch):
    out = tmp_path / "out"
    result = invoke("--text", text, "--out", out, "--precision", "fp8", "--steps", 40)
    assert result.exit_code == 0, result.output
    assert "float32, 8-bit matmuls in its blocks; " in result.output
    record = record_of(out)
    assert record["config"]["model"]["precision"] == "fp8"
    assert record["final_held_out_bits_per_byte"] < 0.5 * record["unigram_entropy_bits_per_byte"]

    result = invoke("--out", out, "--resume", "--precision", "none")
    assert result.exit_code == 2
    assert "--precision: got none, but the checkpoint was trained with fp8" in result.output
    monkeypatch.setattr(jax_kernels, "device_info", lambda: device_info("a100"))
    for args in (("--out", tmp_path / "no", "--text", text, "--precision", "fp8"), ("--out", out, "--resume")):
        result = invoke(*args)
        assert result.exit_code == 2
        assert re.search("--precision: got fp8 on .*A100.* has no 8-bit matmuls, want an Ada .* GPU", result.output)


def test_settings_without_precision_fields():
    settings = dataclasses.asdict(Settings(MODEL, SEQ_LEN, 4, 1e-2, 8, 0, None, ""))
    del settings["model"]["precision"], settings["model"]["scaling"]
    assert Settings.from_json(settings).model == MODEL


def test_pytorch_comparison_skips_fp8(monkeypatch):
    seen = []
    for name in ("_flax", "_torch"):
        monkeypatch.setattr(demo_compare, name, lambda *args: seen.extend(args) or (np.ones(1), np.ones(1)))
    model = dataclasses.replace(MODEL, precision="fp8", scaling="row")
    trainer = Trainer(Settings(model, SEQ_LEN, 4, 1e-2, 8, 0, None, ""))
    assert demo_compare.compare(trainer, np.zeros((2, SEQ_LEN + 1), np.uint8)).passed
    assert [x for x in seen if isinstance(x, TransformerConfig)] == [MODEL, MODEL]


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_untrained_model_fails(invoke, text, tmp_path, monkeypatch):
    monkeypatch.setattr(demo_compare, "HAS_TORCH", False)
    result = invoke("--text", text, "--out", tmp_path / "out", "--steps", 1)
    assert result.exit_code == 1
    assert "not below it: the model did not learn enough; train longer (--steps)" in result.output
    assert "comparison left out: torch is not installed" in result.output
    record = record_of(tmp_path / "out")
    assert record["passed"] is False
    assert record["torch"] == {"left_out": "torch is not installed"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("wrong", ["logits", "input gradients", "nan"])
def test_difference_from_pytorch_fails(wrong, monkeypatch):
    logits, gradients = np.ones((2, 3, 4)), np.full((2, 3, 5), 1e-3)
    theirs = [logits.copy(), gradients.copy()]
    theirs[0 if wrong != "input gradients" else 1][0, 0, 0] *= np.nan if wrong == "nan" else 1 + 2e-4
    monkeypatch.setattr(demo_compare, "_flax", lambda *args: (logits, gradients))
    monkeypatch.setattr(demo_compare, "_torch", lambda *args: theirs)
    trainer = Trainer(Settings(MODEL, SEQ_LEN, 4, 1e-2, 8, 0, None, ""))
    comparison = demo_compare.compare(trainer, np.zeros((2, SEQ_LEN + 1), np.uint8))
    assert not comparison.passed
    assert comparison.text.count("too far") == 1
    theirs[:] = logits, gradients * (1 + 5e-5)
    assert demo_compare.compare(trainer, np.zeros((2, SEQ_LEN + 1), np.uint8)).passed


def test_wrong_options_are_named(invoke, text, tmp_path):
    short = tmp_path / "short.txt"
    short.write_bytes(b"x" * (NEED - 1))
    binary = tmp_path / "binary"
    binary.write_bytes(b"\0" * NEED)
    out = tmp_path / "out"
    for args, message in [
        (("--text", tmp_path / "absent"), "--text: .*absent is neither a file nor a folder"),
        (("--text", short), f"--text: .*short.txt has {NEED - 1} bytes of text, want at least {NEED} for --seq-len 48"),
        (("--text", text, "--seq-len", 4096), "has .* bytes of text, want at least 327760 for --seq-len 4096"),
        (("--text", binary), "--text: .*binary is not text: it has NUL bytes"),
        (("--text", text, "--implementation", "fast"), "--implementation: got 'fast' for "),
        (("--text", text, "--implementation", "cudnn"), "--implementation: .*cannot serve .* needs an NVIDIA GPU"),
        (("--text", text, "--batch-size", 10**11), "--batch-size: got 100000000000 sequences of 48 bytes, want fewer"),
        (("--text", text, "--steps", 10**11), "'--steps'"),
        (("--text", text, "--precision", "tf32"), "--precision: got 'tf32', want fp8, or no --precision"),
        (("--text", text, "--mesh", "data=64"), r"--mesh: got \{'data': 64\} for \d+ devices?"),
        (("--text", text, "--attention", "sparse"), "--attention: got 'sparse', want dense or dilated"),
        (("--resume",), "--resume: there is no checkpoint in "),
        (("--steps", 0), "'--steps'"),
        (("--out", text), "--out: .* is not a folder"),
    ]:
        result = invoke("--out", out, *args)
        assert result.exit_code == 2, result.output
        assert re.search(message, result.output), result.output
    assert not out.exists()


@pytest.mark.parametrize("saved", [False, True])
def test_ctrl_c_names_the_newest_checkpoint(invoke, text, tmp_path, monkeypatch, saved):
    def train(console, trainer, corpus, steps, checkpoints, history):
        if saved:
            trainer.step = 3
            checkpoints.save(trainer, {"settings": {}})
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_run, "train", train)
    result = invoke("--text", text, "--out", tmp_path / "out")
    way = f"jax-kernels demo --resume --out {tmp_path / 'out'} goes on from there"
    newest = f"the newest checkpoint is of step 3; {way}" if saved else "there is no checkpoint"
    assert result.exit_code == 130
    assert result.output.endswith(f"jax-kernels: Ctrl-C: {newest}\n")


def test_held_out_blocks_are_never_trained_on(tmp_path):
    path = tmp_path / "text"
    blocks = 20
    # Every block repeats its own byte, so that a window shows its origin.
    path.write_bytes(b"".join(bytes([65 + i]) * (8 * (SEQ_LEN + 1)) for i in range(blocks)) + b"rest")
    corpus = read_corpus(path, SEQ_LEN)
    assert set(np.unique(corpus.held_out)) == {65 + 9, 65 + 19}
    windows = np.concatenate([corpus.batch(64, 0, step) for step in range(20)])
    assert windows.shape == (20 * 64, SEQ_LEN + 1)
    assert set(np.unique(windows)) == set(range(65, 65 + blocks)) - {65 + 9, 65 + 19}
    assert (windows == windows[:, :1]).all()
    assert corpus.held_out_batches(4, 2).shape == (2, 4, SEQ_LEN + 1)
    assert corpus.held_out_batches(12, 9).shape == (1, 12, SEQ_LEN + 1)
    assert corpus.held_out_batches(100, 9).shape == (1, 16, SEQ_LEN + 1)


def test_batches_depend_only_on_seed_and_step(text):
    one, two = read_corpus(text, SEQ_LEN), read_corpus(text, SEQ_LEN)
    one.batch(4, 0, 0)
    np.testing.assert_array_equal(one.batch(4, 3, 7), two.batch(4, 3, 7))
    assert (one.batch(4, 3, 7) != one.batch(4, 3, 8)).any()
    assert (one.batch(4, 3, 7) != one.batch(4, 4, 7)).any()


def test_folder_is_read_in_order_without_binaries(tmp_path):
    folder = tmp_path / "folder"
    (folder / "b").mkdir(parents=True)
    (folder / "b" / "one.py").write_bytes(b"1" * NEED)
    (folder / "a.txt").write_bytes(b"0" * NEED)
    (folder / "c.bin").write_bytes(b"\0" * NEED)
    (folder / ".hidden").write_bytes(b"2" * NEED)
    corpus = read_corpus(folder, SEQ_LEN)
    assert corpus.size == 2 * NEED
    assert bytes(corpus.train[0, :4]) == b"0000"
    assert bytes(corpus.train[-1, -4:]) == b"1111"
    (tmp_path / "empty").mkdir()
    with pytest.raises(CorpusError, match="has 0 bytes of text"):
        read_corpus(tmp_path / "empty", SEQ_LEN)


def test_default_text_is_the_standard_library():
    corpus = read_corpus(None, 128)
    assert 4e6 < corpus.size <= 16e6
    assert 4 < unigram_entropy(corpus.held_out) < 5.5
    assert corpus.sha256 == read_corpus(None, 64).sha256


def test_unigram_entropy():
    assert unigram_entropy(np.arange(256, dtype=np.uint8)) == 8
    assert unigram_entropy(np.zeros(9, np.uint8)) == 0
    assert unigram_entropy(np.array([1, 1, 1, 2], np.uint8)) == pytest.approx(2 - 0.75 * np.log2(3))
