"""`jax-kernels train`: on a mesh, in two processes on one machine's CPUs, again after a stop, and its errors."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import orbax.checkpoint as ocp
import pytest
import typer

from jax_kernels.cli import main, train_run
from jax_kernels.cli.train import CHOICES, MESH_AXES, parse_mesh
from jax_kernels.models import Trainer, TransformerConfig
from jax_kernels.models.parallel import sharding
from jax_kernels.models.parallel.distributed import initialize_distributed, scheduler
from jax_kernels.models.training.folder_lock import FolderLock
from jax_kernels.models.training.remat import REMAT
from jax_kernels.ops.ring.ring_attention import STRATEGIES
from tests.support.processes import forked
from tests.support.processes.ranks import free_port

MODEL = "--seq-len 32 --batch-size 4 --layers 1 --width 32 --heads 2 --dtype float32 --save-every 2"
MAIN = "from jax_kernels.cli import main; main()"
HEADS = "want a divisor of the width that gives heads of an even size, up to 256"


def start(*words, devices=4, command="train", script=MAIN):
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {forked.QUICK_COMPILES}",
    }
    options = MODEL.split() if command == "train" else ()
    arguments = [sys.executable, "-c", script, command, *options, *map(str, words)]
    return subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(process, code=0, limit=120):
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == code, err[-3000:] + out
    return out + err


def pair(*words, first=(), second=()):
    """Two processes with two devices each, connected at a free port. first, second: words of one of them."""
    joint = ("--coordinator", f"localhost:{free_port()}", "--num-processes", 2)
    return [start(*joint, *words, *own, "--process-id", i, devices=2) for i, own in enumerate((first, second))]


def losses(folder):
    return json.loads((folder / "train.json").read_text())["losses"]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"the word is {word};\n" for word in ["alpha", "beta", "gamma"] * 200))
    return path


@pytest.fixture
def folder(text):
    """The text in many files, some shorter and some longer than a window."""
    data = text.read_bytes()
    parts = np.split(np.frombuffer(data, np.uint8), range(50, len(data), 70))
    (text.parent / "files").mkdir()
    for i, part in enumerate(parts):
        (text.parent / "files" / f"{i:04}").write_bytes(part[: 10 + i])
    return text.parent / "files"


@pytest.mark.timeout(300)
def test_two_processes_train_as_one(tmp_path, folder, capsys):
    words = ("--mesh", "data=2,sequence=2", "--text", folder, "--documents", "files")
    alone = start(*words, "--steps", 4, "--out", tmp_path / "alone", "--sequence-strategy", "all_to_all")
    outs = [end(process) for process in pair(*words, "--steps", 4, "--out", tmp_path / "pair")]
    end(alone)
    assert "4 devices, 2 processes, mesh {'data': 2, 'sequence': 2}" in outs[0]
    assert "bits a byte" not in outs[1]
    np.testing.assert_allclose(losses(tmp_path / "pair"), losses(tmp_path / "alone"), rtol=1e-5)
    # A run of two processes continues in one process, on another mesh.
    settings = json.loads((tmp_path / "pair" / "train.json").read_text())["settings"]
    given = {"attention": "dense", "processes": {}, "settings": settings}
    given["model"] = {"num_layers": 1, "model_dim": 32, "num_heads": 2}
    train_run.run({"data": 1}, folder, tmp_path / "pair", **given)
    out = capsys.readouterr().out
    assert f"nothing to train: the run in {tmp_path / 'pair'} has had its 4 steps" in out
    assert f"{tmp_path / 'pair' / 'train.json'} has its losses, " in out
    given["settings"] = settings | {"steps": 5}
    message = "--out: the checkpoint there was trained with --steps 4; give another folder: --steps sets the schedule"
    with pytest.raises(ValueError, match=message):
        train_run.run({"data": 1}, folder, tmp_path / "pair", **given)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_differing_processes_name_the_difference(tmp_path, text):
    words = ("--text", text, "--out", tmp_path / "out")
    axes = ("--mesh", "data=4"), ("--mesh", "data=2,sequence=2", "--seed", 1)
    differing, partial = pair(*words, first=axes[0], second=axes[1]), pair(*words, "--mesh", "data=2")
    for process in differing:
        told = end(process, 2)
        assert "--seed: got 0 in process 0 and 1 in process 1, want the same in all processes" in told
        assert "--mesh: got {'data': 4} in process 0 and {'data': 2, 'sequence': 2} in process 1" in told
    for process in partial:
        assert "mesh: got 2 of 4 devices, none of them of process 1, want devices of each" in end(process, 2)


def small(settings):
    settings = {"seq_len": 16, "batch_size": 2, "accumulate": 1, "learning_rate": 1e-3, "seed": 0} | settings
    model = {"num_layers": 1, "model_dim": 16, "num_heads": 1}
    return {"attention": "dense", "processes": {}, "settings": settings, "model": model}


@pytest.fixture
def handlers():
    """Python's handlers of both signals. A shell's background job ignores Ctrl-C, as would its tests."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl-C")])
def test_signals_save_and_the_run_resumes(tmp_path, text, capsys, monkeypatch, handlers, number, name):
    given = small({"steps": 4, "save_every": 100})
    of_model, steps = Trainer.train, []

    def train(self, batch):
        steps.append(self.step)
        if len(steps) == 2:
            os.kill(os.getpid(), number)
        return of_model(self, batch)

    monkeypatch.setattr(Trainer, "train", train)
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as ended:
        train_run.run({"data": 1}, text, tmp_path / "out", **given)
    assert ended.value.code == 128 + number
    assert signal.getsignal(number) is before
    assert f"{name}: saved step 2" in capsys.readouterr().out
    train_run.run({"data": 1}, text, tmp_path / "out", **given)
    assert "goes on from step 2" in capsys.readouterr().out
    assert steps == [0, 1, 2, 3]
    assert len(losses(tmp_path / "out")) == 4


@pytest.mark.parametrize(
    ("at", "newest"), [(1, "there is no checkpoint\n"), (2, "the newest checkpoint is of step 1; ")]
)
def test_a_second_ctrl_c_ends_the_run_at_once(tmp_path, text, capsys, monkeypatch, handlers, at, newest):
    of_model = Trainer.train

    def train(self, batch):
        for _ in range(2 if self.step == at - 1 else 0):
            os.kill(os.getpid(), signal.SIGINT)
        return of_model(self, batch)

    monkeypatch.setattr(Trainer, "train", train)
    with pytest.raises(SystemExit) as ended:
        train_run.run({"data": 1}, text, tmp_path / "out", **small({"steps": 4, "save_every": 1}))
    assert ended.value.code == 130
    assert f"jax-kernels: Ctrl-C: {newest}" in capsys.readouterr().err


def test_another_dtype_does_not_continue_a_run(tmp_path, text, capsys):
    """Another remat does, since it changes no result."""
    words = ("--text", text, "--out", tmp_path / "out", "--steps", 1)
    assert ended(capsys, *words)[0] == 0
    code, _, err = ended(capsys, *words, "--dtype", "bfloat16")
    message = "--out: the checkpoint there was trained with --dtype float32; give another folder"
    assert (code, err) == (2, f"jax-kernels: {message}\n")
    code, out, _ = ended(capsys, *words, "--remat", "all")
    assert (code, "nothing to train" in out) == (0, True)


def test_unrunnable_and_unresumable_runs_are_named(tmp_path, text, capsys, monkeypatch):
    options = ["--text", str(text), "--out", str(tmp_path / "none"), "--mesh", "data=1", *MODEL.split()]
    with pytest.raises(SystemExit) as ended:
        main(["train", *options, "--implementation", "mosaic_gpu"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("jax-kernels: --implementation 'mosaic_gpu' cannot serve this flash_attention")
    given = small({"steps": 1, "save_every": 1})
    config = TransformerConfig(vocab_size=256, num_layers=1, model_dim=16, num_heads=1)
    trainer = Trainer(config, train_run.make_optimizer(1, 1e-3), folder=tmp_path / "checkpoint")
    trainer.save()
    trainer.close()
    with pytest.raises(ValueError, match="--out: another program wrote the checkpoint there, without losses"):
        train_run.run({"data": 1}, text, tmp_path, **given)
    # A process without the text reports this to the other processes.
    compared = []
    monkeypatch.setattr(train_run, "check_agreement", compared.append)
    with pytest.raises(FileNotFoundError):
        train_run.run({"data": 1}, tmp_path / "nowhere", tmp_path, **given)
    assert compared[0]["--mesh"] == {"data": 1}
    assert "nowhere is neither a file nor a folder" in compared[1]["--text"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--learning-rate", "inf"), "--learning-rate: got inf, want a finite number"),
        (("--attention", "dilated", "--seq-len", "3"), "--seq-len: got 3 with --attention dilated, want 4 or more"),
        (("--out", "FILE"), "--out: FILE is not a folder"),
        (("--out", "FILE/sub"), "--out: FILE is not a folder"),
        (
            ("--mesh", "dta=1"),
            "--mesh: got 'dta=1', want axes of pipeline, data, fsdp, expert, sequence, tensor; did you mean 'data'?",
        ),
        (
            ("--mesh", "data=0"),
            "--mesh: got 'data=0', want a positive number of devices for each axis, or -1 for one axis",
        ),
        (("--dtype", "half"), "--dtype: got 'half', want bfloat16, float16 or float32"),
        (
            ("--remat", "product"),
            "--remat: got 'product', want none, all, attention or products; did you mean 'products'?",
        ),
        (("--heads", "5"), f"--heads: got 5 with --width 768, {HEADS}"),
        (("--heads", "2"), f"--heads: got 2 with --width 768, {HEADS}"),
        (("--kv-heads", "4"), "--kv-heads: got 4, want a divisor of --heads 6"),
    ],
)
def test_bad_options_are_named(words, message, text, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", *(word.replace("FILE", str(text)) for word in words)])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"jax-kernels: Invalid value for {message.replace('FILE', str(text))}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--seed 4294967296", "Invalid value for '--seed': "),
        ("--mesh data=64 --text TEXT", "--mesh: got {'data': 64} for "),
        ("--text TEXT/none", "--text: TEXT/none is neither a file nor a folder"),
        ("--text TEXT --seq-len 99999", "--text: got "),
        ("--text TEXT --accumulate 3", "--batch-size: got 2 rows, want a multiple of --accumulate 3"),
        ("--coordinator foo --num-processes 2 --process-id 0", "--coordinator: got 'foo', want host:port"),
        (
            "--coordinator a:99999 --num-processes 2 --process-id 1",
            "--coordinator: got 'a:99999', want host:port, with ",
        ),
        (
            "--coordinator localhost:1 --num-processes 2 --process-id 1 --timeout 1",
            "--coordinator: got 'localhost:1', where no process answers in 1 seconds (Connection refused), want",
        ),
        ("--text TEXT --batch-size 99999999999", "--batch-size: got 99999999999 windows of 16 tokens, want fewer than"),
        ("--steps 100000000000", "Invalid value for '--steps': "),
        ("--coordinator a:1 --num-processes 2 --process-id 2", "--process-id: got 2 of 2 processes, want 0 to 1"),
        (
            "--text TEXT --implementation mosaic",
            "--implementation: got 'mosaic' for flash_attention, want one of",
        ),
    ],
)
def test_library_errors_name_the_option(words, message, text, tmp_path, capsys):
    code, _, err = ended(capsys, *words.replace("TEXT", str(text)).split(), "--out", tmp_path / "out")
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(f"jax-kernels: {message.replace('TEXT', str(text))}")


def test_choices_match_the_library():
    assert MESH_AXES == sharding.MESH_AXES
    assert {*CHOICES["--sequence-strategy"]} == {*STRATEGIES}
    assert {*CHOICES["--remat"]} == {*REMAT, "none", "all"}


def test_non_finite_loss_ends_the_run_unsaved(tmp_path, text):
    settings = {"steps": 20, "save_every": 1, "learning_rate": 1e38}
    message = "step 2: got parameters that are not finite, .+ --learning-rate; the newest checkpoint is of step 1"
    with pytest.raises(SystemExit, match=message):
        train_run.run({"data": 1}, text, tmp_path / "out", **small(settings))
    assert not (tmp_path / "out" / "train.json").exists()
    assert (tmp_path / "out" / "checkpoint" / "1").is_dir()
    # Between checkpoints the gradient shows the fault, a step later.
    message = r"step 3: got a loss of \S+ and a gradient norm of nan, want finite values, .+; there is no checkpoint"
    with pytest.raises(SystemExit, match=message):
        train_run.run({"data": 1}, text, tmp_path / "other", **small(settings | {"save_every": 10}))


SIZES = "--mesh data=1 --seq-len 16 --batch-size 2 --layers 1 --width 16 --heads 1 --dtype float32"


def ended(capsys, *words):
    """(the exit code, the output, the error) of `jax-kernels train` with a small model."""
    with pytest.raises(SystemExit) as exited:
        main(["train", *SIZES.split(), *map(str, words)])
    captured = capsys.readouterr()
    is_text = isinstance(exited.value.code, str)  # Python prints it, with exit code 1
    return (1 if is_text else exited.value.code or 0), captured.out, exited.value.code if is_text else captured.err


def test_last_step_is_checked_and_a_finished_run_reported(tmp_path, text, capsys):
    out = tmp_path / "out"
    code, _, err = ended(capsys, "--text", text, "--steps", 2, "--out", out, "--learning-rate", "1e30")
    assert code == 1
    assert re.match(r"jax-kernels: step 2: got parameters that are not finite, .+; there is no check", err)
    assert not (out / "train.json").exists()
    words = ("--text", text, "--steps", 2, "--out", out)
    code, said, _ = ended(capsys, *words)
    assert code == 0
    assert (
        f"wrote {out / 'train.json'}, {out / 'loss.png'}, and the checkpoint of step 2 to {out / 'checkpoint'}" in said
    )
    first = (out / "train.json").read_bytes()
    for cut in (None, b'{"losses": ['):  # unchanged, and cut off by a kill during a write
        if cut is not None:
            (out / "train.json").write_bytes(cut)
        code, said, _ = ended(capsys, *words)
        assert code == 0
        assert f"nothing to train: the run in {out} has had its 2 steps" in said
        assert ("wrote" in said) == (cut is not None)
        assert (out / "train.json").read_bytes() == first
    (out / "loss.png").unlink()
    code, said, _ = ended(capsys, *words)
    assert (code, "wrote" in said) == (0, True)
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_kill_between_the_files_leaves_no_old_plot(tmp_path, monkeypatch):
    """train.json is written after the plot, so that a run without it plots the losses again."""
    written = []
    monkeypatch.setattr(train_run, "plot_losses", lambda path, losses: written.append(path.name))
    monkeypatch.setattr(train_run, "write_whole", lambda path, data: written.append(path.name))
    train_run.write_record(tmp_path / "train.json", {"losses": [1.0]}, None)
    assert written == ["loss.png", "train.json"]


def test_locked_folder_and_failing_disks(tmp_path, text, capsys, monkeypatch):
    out = tmp_path / "out"
    words = ("--text", text, "--steps", 2, "--save-every", 1, "--out", out)
    holder = FolderLock(out / "checkpoint")
    holder.take()
    code, _, err = ended(capsys, *words)
    holder.release()
    assert code == 2
    assert err.startswith(f"jax-kernels: --out: got {out / 'checkpoint'}, which another Trainer of this process writes")

    save = ocp.CheckpointManager.save

    def full(self, step, *given, **options):
        if step == 2:
            raise OSError(28, "No space left on device")
        return save(self, step, *given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(ocp.CheckpointManager, "save", full)
        result = ended(capsys, *words)
    why = "cannot be written (No space left on device); the newest checkpoint is of step 1"
    assert (result[0], result[2]) == (
        1,
        f"jax-kernels: --out: the checkpoint of step 2 in {out / 'checkpoint'} {why}\n",
    )

    def refused(path, data):
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(train_run, "write_whole", refused)
        result = ended(capsys, *words)
    why = "cannot be written (Read-only file system); the newest checkpoint is of step 2"
    assert (result[0], result[2]) == (1, f"jax-kernels: --out: {out / 'train.json'} {why}\n")
    code, _, err = ended(capsys, *words[:-1], "/proc/none")
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith("jax-kernels: --out: /proc/none/checkpoint cannot be made (No such file or directory")


def test_damaged_checkpoint_is_a_user_error(tmp_path, text, capsys):
    train_run.run({"data": 1}, text, tmp_path / "out", **small({"steps": 2, "save_every": 1}))
    shutil.rmtree(tmp_path / "out" / "checkpoint" / "2" / "state")
    sizes = "--seq-len 16 --batch-size 2 --learning-rate 1e-3 --layers 1 --width 16 --heads 1 --dtype float32 --steps 2"
    with pytest.raises(SystemExit) as ended:
        main(["train", "--mesh", "data=1", "--text", str(text), "--out", str(tmp_path / "out"), *sizes.split()])
    assert ended.value.code == 2
    assert "jax-kernels: --out: the checkpoint of step 2 in" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sigterm_to_one_process_ends_both_at_one_step(tmp_path, text):
    out = tmp_path / "out"
    words = ("--mesh", "data=4", "--text", text, "--out", out, "--steps", 100_000)
    first, second = pair(*words)
    try:
        while not any((out / "checkpoint").glob("[0-9]*")):
            assert first.poll() is None
            time.sleep(0.2)
        second.send_signal(signal.SIGTERM)
        told = end(first, 143)
        end(second, 143)
    finally:
        first.kill()
        second.kill()
    assert re.search(r"SIGTERM: saved step \d+", told)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_demo_runs_on_a_mesh(tmp_path, text):
    """As a script, to have four devices. Its model is as small as the tests' model."""
    text.write_text(text.read_text() * 8)
    tiny = "TransformerConfig(vocab_size=256, model_dim=32, num_layers=1, num_heads=2)"
    preset = f"demo_run.Preset({tiny}, seq_len=48, batch_size=4, learning_rate=1e-2, steps=150)"
    script = (
        "from jax_kernels.cli import main; from jax_kernels.cli.demo import run as demo_run; "
        "from jax_kernels.models import TransformerConfig; "
        f"demo_run.preset = lambda device: {preset}; main()"
    )
    found = {}
    for mesh in ("data=1", "data=2,sequence=2"):
        words = ("--mesh", mesh, "--text", text, "--out", tmp_path / mesh)
        assert "PyTorch" in end(start(*words, command="demo", script=script), limit=250)
        found[mesh] = json.loads((tmp_path / mesh / "run.json").read_text())["losses_nats_per_byte"]
    one, four = found.values()
    np.testing.assert_allclose(four[:5], one[:5], rtol=1e-4)
    assert four[-1] < 0.5 * four[0]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_dying_process_ends_the_others_with_a_message(tmp_path, text):
    first, second = pair("--mesh", "data=4", "--text", text, "--steps", 10**6, "--out", tmp_path, "--timeout", 15)
    try:
        assert any(line.startswith("step 1") for line in iter(first.stdout.readline, ""))
        second.kill()
        _, told = first.communicate(timeout=120)
    finally:
        for process in (first, second):
            process.kill()
    assert first.returncode != 0
    assert any(word in told for word in ("died", "UNAVAILABLE", "heartbeat", "Connection")), told[-3000:]


@pytest.mark.slow
def test_missing_process_times_out(tmp_path):
    joint = ("--coordinator", f"localhost:{free_port()}", "--num-processes", 2, "--process-id", 0, "--timeout", 2)
    process = start(*joint, "--out", tmp_path)
    out, err = process.communicate(timeout=100)
    assert process.returncode != 0
    assert "DEADLINE_EXCEEDED" in out + err, (out + err)[-3000:]


@pytest.mark.parametrize("text", ["data", "data=x", "data=--2", "=2", "data=2,data=2", ""])
def test_bad_meshes_are_named(text):
    with pytest.raises(typer.BadParameter, match="want axes such as data=2,sequence=2"):
        parse_mesh(text)
    assert parse_mesh("data=2, sequence=-1") == {"data": 2, "sequence": -1}


def test_scheduler_is_read_from_the_environment(monkeypatch):
    assert scheduler({}) is None
    assert scheduler({"SLURM_NTASKS": "1", "OMPI_COMM_WORLD_SIZE": "1"}) is None
    assert scheduler({"SLURM_NTASKS": "8"}) == "Slurm"
    assert scheduler({"OMPI_COMM_WORLD_SIZE": "2"}) == "Open MPI"
    assert scheduler({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}) == "Kubernetes"
    for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    assert initialize_distributed() is False


def test_incomplete_process_arguments_raise():
    for arguments, message in [
        ((None, 2, 0), "coordinator: got None with num_processes=2 and process_id=0"),
        (("host:1", 2, None), "num_processes, process_id: got 2 and None, want both with a coordinator"),
        (("foo", 2, 0), "coordinator: got 'foo', want host:port"),
        (("host:1", 2, 2), "process_id: got 2 of 2 processes, want 0 to 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            initialize_distributed(*arguments)
    with pytest.raises(ValueError, match="timeout: got 0, want 1 second or more"):
        initialize_distributed(timeout=0)
