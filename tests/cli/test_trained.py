"""The progress and the plot of `jax-kernels train`, float16, and the commands that use its model: generate and eval."""

import io
import json
import math
import re
import shutil
import types

import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

from jax_kernels.cli import train_progress, train_run
from jax_kernels.cli.demo.training import Checkpoints
from jax_kernels.cli.trained.checkpoint import trained_model
from jax_kernels.cli.trained.evaluate import windows
from jax_kernels.models import LongNet, Trainer
from jax_kernels.models.training import checkpoints

TEXT = "".join(f"the word is {word};\n" for word in ["alpha", "beta", "gamma"] * 100)


def trained(folder, **changes):
    """Trains 40 steps of a small model into the folder, and returns the text's path."""
    text = folder / "text.txt"
    text.write_text(TEXT)
    settings = {"seq_len": 32, "batch_size": 4, "accumulate": 1, "learning_rate": 3e-3, "seed": 0, "documents": "none"}
    model = {"num_layers": 1, "model_dim": 32, "num_heads": 2, "dtype": changes.pop("dtype", "float32")}
    attention = changes.pop("attention", "dense")
    settings |= {"steps": 40, "save_every": 20} | changes
    train_run.run({"data": 1}, text, folder, attention=attention, settings=settings, model=model, processes={})
    return text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    trained(folder)
    return folder


def test_eval_has_the_loss_of_each_byte(run, folder):
    """The mean over batches of windows equals the mean over windows one by one."""
    text = folder / "text.txt"
    code, out, err = run("eval", str(text), "--checkpoint", str(folder), "--json", "--seq-len", "48")
    assert (code, err) == (0, "")
    found = json.loads(out)
    data = np.frombuffer(TEXT.encode(), np.uint8).astype(np.int32)
    assert found["predicted_bytes"] == len(data) - 1
    trainer = trained_model(folder).trainer
    pieces = [data[i : i + 49] for i in range(0, len(data) - 1, 48)]
    sums = [trainer.evaluate((x[None, :-1], x[None, 1:])) * (len(x) - 1) for x in pieces]
    mean = sum(sums) / (len(data) - 1)
    np.testing.assert_allclose(found["loss"], mean, rtol=1e-5)
    np.testing.assert_allclose(found["perplexity"], math.exp(mean), rtol=1e-5)
    np.testing.assert_allclose(found["bits_per_byte"], mean / math.log(2), rtol=1e-5)
    assert found["bits_per_byte"] < 2.5
    assert (found["seq_len"], found["step"]) == (48, 40)
    _, out, _ = run("eval", str(text), "--checkpoint", str(folder), "--step", "20", "--max-bytes", "100")
    assert re.search(r"bits a byte, loss .* nats, perplexity .*: 99 bytes of .* in windows of 32, .* of step 20", out)
    # Windows are as long as the text allows, and a batch has as many as there are.
    sizes = ("--max-bytes", "10", "--seq-len", "100", "--batch-size", str(10**12))
    _, out, _ = run("eval", str(text), "--checkpoint", str(folder), "--json", *sizes)
    assert (json.loads(out)["seq_len"], json.loads(out)["predicted_bytes"]) == (9, 9)


def test_a_perplexity_beyond_float64_is_null(run, folder, monkeypatch):
    monkeypatch.setattr(Trainer, "evaluate", lambda *_: 800.0)
    words = ("eval", str(folder / "text.txt"), "--checkpoint", str(folder), "--max-bytes", "20")
    found = json.loads(run(*words, "--json")[1], parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (found["loss"], found["perplexity"]) == (800, None)
    assert "perplexity inf" in run(*words)[1]


@pytest.mark.parametrize(("size", "length", "rows"), [(2, 8, 1), (9, 8, 2), (10, 8, 1), (70, 8, 4)])
def test_windows_have_each_byte_once(size, length, rows):
    data = np.arange(1, size + 1, dtype=np.uint8)
    found = []
    for tokens, targets in windows(data, length, rows):
        assert tokens.shape == targets.shape == (rows, length)
        assert ((tokens < 0) == (targets < 0)).all()
        kept = targets >= 0
        np.testing.assert_array_equal(targets[kept], tokens[kept] + 1)
        found += targets[kept].tolist()
    assert found == list(range(2, size + 1))


def test_generate_continues_a_text(run, folder, monkeypatch):
    code, out, err = run("generate", "the word is", "--checkpoint", str(folder), "--tokens", "12", "--temperature", "0")
    assert (code, err) == (0, "")
    assert out.startswith("the word is")
    assert len(out.encode()) == 11 + 12 + 1
    model = trained_model(folder).trainer.model
    ids = np.frombuffer(b"the word is", np.uint8).astype(np.int32)[None]
    assert out[:-1] == "the word is" + bytes(np.asarray(model.generate(ids, 12, 0.0))[0].tolist()).decode()
    drawn = [run("generate", "a", "--checkpoint", str(folder), "--seed", seed)[1] for seed in ("1", "1", "2")]
    assert drawn[0] == drawn[1] != drawn[2]
    _, out, _ = run("generate", "--checkpoint", str(folder), "--tokens", "1", "--", "--help")
    assert out.startswith("--help")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("thé".encode())))
    _, out, _ = run("generate", "-", "--checkpoint", str(folder), "--tokens", "1", "--top-k", "1")
    assert out.startswith("thé")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("generate", "a", "--checkpoint", "NONE"), "--checkpoint: got 'NONE', want a folder that `jax-kernels train"),
        (("generate", "", "--checkpoint", "HERE"), "PROMPT: got an empty text, want one byte or more"),
        (("generate", "a", "--checkpoint", "HERE", "--step", "7"), "--step: got 7, want one of the checkpoints 20, 40"),
        (("generate", "a", "--checkpoint", "HERE", "--tokens", str(10**12)), "--tokens: got 1000000000000, want 1 to"),
        (
            ("generate", "a", "--checkpoint", "HERE", "--implementation", "fast"),
            "jax-kernels: --implementation: got 'fast'",
        ),
        (("generate", "a", "--temperature", "inf"), "--temperature: got inf, want a finite number"),
        (("generate", "a", "--checkpoint", "HERE", "--implementation", "cudnn"), "cannot serve this"),
        (("eval", "NONE", "--checkpoint", "HERE"), "TEXT: NONE is neither a file nor a folder"),
        (("eval", "HERE/text.txt", "--checkpoint", "HERE", "--implementation", "fast"), "implementation"),
    ],
)
def test_bad_options_of_trained_models(run, folder, tmp_path, words, message):
    names = {"HERE": str(folder), "NONE": str(tmp_path / "none")}
    replaced = lambda text: re.sub("HERE|NONE", lambda found: names[found[0]], text)
    code, out, err = run(*map(replaced, words))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert replaced(message) in err


def test_a_checkpoint_of_another_program_is_named(run, tmp_path):
    trained(tmp_path, steps=1)
    config = trained_model(tmp_path).trainer.config
    trainer = Trainer(config, train_run.make_optimizer(1, 1e-3), folder=tmp_path / "other" / "checkpoint")
    trainer.save()
    trainer.close()
    code, _, err = run("generate", "a", "--checkpoint", str(tmp_path / "other"))
    assert code == 2
    assert "which jax-kernels demo or another program wrote, want the --out of jax-kernels train" in err
    # A checkpoint of the demo.
    demo = Checkpoints(tmp_path / "demo" / "checkpoint", replace=True)
    demo.save(types.SimpleNamespace(step=1, state={"x": np.ones(2)}), {"settings": {}})
    demo.close()
    code, _, err = run("eval", str(tmp_path / "text.txt"), "--checkpoint", str(tmp_path / "demo"))
    assert code == 2
    assert "which jax-kernels demo or another program wrote" in err


def test_checkpoints_that_cannot_be_read(run, folder, tmp_path, monkeypatch):
    shutil.copytree(folder / "checkpoint", tmp_path / "checkpoint")
    shutil.rmtree(tmp_path / "checkpoint" / "40" / "state")
    code, _, err = run("generate", "a", "--checkpoint", str(tmp_path))
    assert (code, "; --step 20 takes an older one" in err) == (2, True)

    def refuse(path, keep):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(checkpoints, "manager", refuse)
    code, _, err = run("generate", "a", "--checkpoint", str(tmp_path))
    assert (code, err.count("\n")) == (2, 1)
    assert f"--checkpoint: {tmp_path / 'checkpoint'} cannot be read (Permission denied: " in err


@pytest.mark.slow
def test_a_longnet_is_read_again(run, tmp_path):
    text = trained(tmp_path, attention="dilated", steps=2)
    assert isinstance(trained_model(tmp_path).trainer.model, LongNet)
    assert run("eval", str(text), "--checkpoint", str(tmp_path), "--max-bytes", "200")[0] == 0
    assert run("generate", "the", "--checkpoint", str(tmp_path), "--tokens", "3")[0] == 0


@pytest.mark.parametrize("scale", [None, 2.0**24])
def test_float16_scales_the_loss_and_skips_steps(tmp_path, capsys, monkeypatch, scale):
    """A first scale that overflows costs a few steps, whose losses are null in train.json."""
    made = Trainer.__init__
    monkeypatch.setattr(Trainer, "__init__", lambda self, *args, **more: made(self, *args, **more, loss_scale=scale))
    trained(tmp_path, dtype="float16")
    losses = json.loads((tmp_path / "train.json").read_text())["losses"]
    skipped = [i for i, x in enumerate(losses) if x is None]
    assert len(losses) == 40
    assert bool(skipped) == (scale is not None)
    assert skipped == list(range(len(skipped)))
    assert losses[-1] < 0.6 * next(x for x in losses if x is not None)
    message = f"skipped {len(skipped)} of 40 steps, whose gradients were not finite in float16"
    assert (message in capsys.readouterr().out) == bool(skipped)


def test_progress_of_a_file_has_rate_and_time(folder, tmp_path, capsys):
    trained(tmp_path, steps=2)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert re.fullmatch(r"step 1: \d\.\d{4} bits a byte, [\d,]+ tokens/s, \d:\d\d:\d\d left", lines[0])
    assert re.fullmatch(r"step 2: \d\.\d{4} bits a byte, [\d,]+ tokens/s", lines[1])
    image = imread(tmp_path / "loss.png")
    assert image.shape[:2] == (600, 960)
    assert image[..., :3].std() > 0.01


def test_progress_of_a_terminal_is_a_bar(monkeypatch):
    out = io.StringIO()
    terminal = Console(file=out, force_terminal=True, width=120)
    monkeypatch.setattr(train_progress, "Console", lambda: terminal)
    with train_progress.progress(2, 4, 1000) as report:
        report(3, math.log(2))
        report(4, 2 * math.log(2))
    assert "4/4" in out.getvalue()
    assert "2.0000 bits a byte" in out.getvalue()
    assert "tokens/s" in out.getvalue()


def test_the_rate_leaves_compilation_out(monkeypatch):
    """The first step has its own time; later rates count from its end."""
    times = iter([0.0, 20.0, 21.0, 22.0])
    monkeypatch.setattr(train_progress.time, "monotonic", lambda: next(times))
    clock = train_progress._Clock(5)
    assert [clock.rate(step) for step in (6, 7, 8)] == [1 / 20, 1.0, 1.0]


def test_plots_with_skipped_steps(tmp_path):
    path = tmp_path / "loss.png"
    train_progress.plot_losses(path, [None, *np.linspace(5, 1, 200).tolist(), None])
    assert imread(path).ndim == 3
