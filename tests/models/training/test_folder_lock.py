"""One run at a time writes a folder of checkpoints. The lock ends with its process. Disks may be full or read-only.

As a script it is a run that locks FOLDER, says so, and waits until it is killed.
"""

import asyncio
import json
import os
import platform
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import optax
import pytest

from jax_kernels.files import write_whole
from jax_kernels.models import Trainer, TransformerConfig
from jax_kernels.models.training import checkpoints, folder_lock
from jax_kernels.models.training.folder_lock import FolderInUse, FolderLock

CONFIG = TransformerConfig(vocab_size=64, model_dim=16, num_layers=1, num_heads=2, mlp_dim=32)
BATCH = (np.arange(32, dtype=np.int32).reshape(2, 16),) * 2


def trainer(folder, optimizer=None):
    return Trainer(CONFIG, optax.sgd(1e-2) if optimizer is None else optimizer, folder=folder)


def steps_in(folder):
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


@pytest.mark.slow
def test_second_process_is_refused_while_the_first_lives(tmp_path):
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, __file__, str(tmp_path)]
    first = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    one = trainer(tmp_path)
    try:
        assert first.stdout.readline() == "has it\n"
        since = time.monotonic()
        who = rf"which process {first.pid} on {platform.node()} writes since 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC"
        for write in (one.lock_folder, one.save, lambda: one.fit([BATCH], 1, save_every=1)):
            with pytest.raises(ValueError, match=f"folder: got {tmp_path}, {who}, want another folder, or wait until"):
                write()
        assert time.monotonic() - since < 60
        assert one.step == 0
        assert steps_in(tmp_path) == []
        with pytest.raises(FileNotFoundError, match=f"folder: got {tmp_path} with no checkpoint, want one that save"):
            one.restore()  # reading needs no lock
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    assert (tmp_path / ".lock.json").exists()
    one.fit([BATCH] * 2, 2, save_every=1)
    assert json.loads((tmp_path / ".lock.json").read_text())["pid"] == os.getpid()
    assert steps_in(tmp_path) == [1, 2]
    one.close()
    assert not (tmp_path / ".lock.json").exists()


@pytest.mark.slow
def test_trainers_in_one_process_take_turns(tmp_path):
    first, second = trainer(tmp_path), trainer(tmp_path)
    first.fit([BATCH] * 2, 1, save_every=1)
    message = "another Trainer of this process writes since .+, want another folder, or close\\(\\) the other"
    second.restore()
    second.train(BATCH)
    with pytest.raises(FolderInUse, match=message):
        second.save()
    first.train(BATCH)
    first.save()
    first.close()
    # Steps that the first wrote since the second was made count.
    with pytest.raises(ValueError, match="folder: got a checkpoint of step 2 with a state of step 2"):
        second.save()
    second.restore(1, remove_later=True)
    second.fit([BATCH] * 2, 2, save_every=1)
    with pytest.raises(FolderInUse, match=message):
        trainer(tmp_path).restore(1, remove_later=True)
    assert steps_in(tmp_path) == [1, 2]
    # A run that ends with an error, and a trainer that is garbage collected, release the lock.
    with pytest.raises(RuntimeError, match="mine"):
        second.fit([BATCH] * 3, 3, save_every=1, on_step=lambda *_: (_ for _ in ()).throw(RuntimeError("mine")))
    third = trainer(tmp_path)
    third.restore()
    third.fit([BATCH] * 3, 3, save_every=3)
    del third
    FolderLock(tmp_path).take()


@pytest.mark.parametrize("process", [0, 1])
def test_first_process_locks_for_all(tmp_path, monkeypatch, process):
    """The other processes learn from the first, by `gathered`, whether it has the lock."""
    monkeypatch.setattr("jax.process_count", lambda: 2)
    monkeypatch.setattr("jax.process_index", lambda: process)
    told = []
    monkeypatch.setattr(folder_lock, "gathered", lambda text: told.append(text) or [text, "{}"])
    lock = FolderLock(tmp_path)
    lock.take()
    assert (tmp_path / ".lock.json").exists() == (process == 0)
    lock.take()  # no second collective
    assert told == ["{}"]
    lock.release()
    lock.check_free()
    assert told == ["{}", "{}"]
    assert not (tmp_path / ".lock.json").exists()
    monkeypatch.setattr(folder_lock, "gathered", lambda text: ['{"in_use": true, "text": "folder: taken"}', "{}"])
    with pytest.raises(FolderInUse, match="folder: taken"):
        FolderLock(tmp_path).take()


@pytest.fixture
def no_locks(monkeypatch):
    """The file system has no locks."""
    import errno

    import filelock

    def acquire(*given, **options):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(filelock.FileLock, "acquire", acquire)


@pytest.mark.usefixtures("no_locks")
def test_file_system_without_locks_warns(tmp_path):
    with pytest.warns(UserWarning, match="is on a file system without locks .+ a second run could write"):
        FolderLock(tmp_path).take()


@pytest.fixture
def unfinished(tmp_path):
    """The files that a killed run left: it was saving step 7."""
    folder = tmp_path / "7.orbax-checkpoint-tmp"
    (folder / "state").mkdir(parents=True)
    return folder


def test_files_of_a_killed_save_are_removed_with_the_lock(tmp_path, unfinished):
    one = trainer(tmp_path)
    assert unfinished.exists()  # another run may be writing them
    one.lock_folder()
    assert not unfinished.exists()
    one.close()


@pytest.mark.filterwarnings("ignore:.*without locks")
@pytest.mark.usefixtures("no_locks")
def test_files_stay_without_locks(tmp_path, unfinished):
    one = trainer(tmp_path)
    one.lock_folder()
    assert unfinished.exists()


@pytest.fixture
def full_after(tmp_path, monkeypatch):
    """Makes the disk full: from a call on, orbax's writes of arrays fail like tensorstore's."""

    def fill(one):
        save = one._manager.save

        def failing(step, **given):
            partial = tmp_path / f"{step}.orbax-checkpoint-tmp"
            partial.mkdir()
            (partial / "data").write_bytes(b"x")
            raise ValueError("RESOURCE_EXHAUSTED: Error writing \"params\": long text [os_error_code='28']")

        monkeypatch.setattr(one._manager, "save", failing)
        return lambda: monkeypatch.setattr(one._manager, "save", save)

    return fill


def test_full_disk_error_names_the_newest_checkpoint(tmp_path, full_after):
    one = trainer(tmp_path)
    one.fit([BATCH] * 3, 1, save_every=1)
    freed = full_after(one)
    message = (
        rf"folder: the checkpoint of step 2 in {tmp_path} cannot be written \(No space left on device\); the newest "
    )
    with pytest.raises(OSError, match=message + "checkpoint is of step 1"):
        one.fit([BATCH] * 3, 3, save_every=1)
    assert not list(tmp_path.glob("*tmp*"))
    freed()
    one.save()
    one.close()
    assert trainer(tmp_path).latest == 2


def test_only_late_writes_are_hidden(monkeypatch):
    """After the first error, orbax closes the event loop of the other arrays' writes, whose errors Python prints."""
    shown = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: shown.append(str(unraisable.exc_value)))
    checkpoints._hide_late_writes.__wrapped__()

    def end(error, of=None):
        loop = asyncio.new_event_loop()
        loop.close()
        trace = None
        try:
            loop.call_soon_threadsafe(print)
        except RuntimeError as closed:
            trace = closed.__traceback__
        sys.unraisablehook(types.SimpleNamespace(exc_value=error, exc_traceback=trace.tb_next, object=of))
        return trace

    closed = RuntimeError("Event loop is closed")
    end(closed)  # the first frame is asyncio's: native code called it
    assert shown == []
    own = end(RuntimeError("another"))
    end(OSError("Event loop is closed"))
    end(closed, of=print)
    sys.unraisablehook(types.SimpleNamespace(exc_value=closed, exc_traceback=own, object=None))  # a function of Python
    sys.unraisablehook(types.SimpleNamespace(exc_value=closed, exc_traceback=None, object=None))
    assert shown == ["another"] + 4 * ["Event loop is closed"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
def test_full_disk(tmp_path, capfd):
    """A real disk of 400 kB: it has room for two checkpoints, and orbax prints nothing."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", tmp_path], check=False).returncode:
        pytest.skip("cannot mount a disk")
    try:
        one = trainer(tmp_path / "run", optax.adam(1e-2))
        with pytest.raises(OSError, match=r"cannot be written \(No space left on device\); the newest checkpoint is"):
            one.fit([BATCH] * 30, 30, save_every=1)
        one.close()
        again = trainer(tmp_path / "run", optax.adam(1e-2))
        again.restore()
        assert again.step == one.step - 1 > 0
        again.close()
        assert "Traceback" not in capfd.readouterr().err
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=False)


def test_unwritable_folder_is_named(tmp_path, monkeypatch):
    with pytest.raises(checkpoints.NotWritten, match=r"folder: /proc/none/run cannot be made \(No such file"):
        trainer("/proc/none/run")
    one = trainer(tmp_path)
    one.fit([BATCH], 1, save_every=1)
    one.close()

    def refused(*given, **options):
        raise PermissionError(13, "Permission denied", str(tmp_path / ".lock"))

    monkeypatch.setattr("filelock.FileLock.acquire", refused)
    again = trainer(tmp_path)
    again.restore()  # reading works
    again.train(BATCH)
    with pytest.raises(OSError, match=rf"folder: {tmp_path} cannot be written \(Permission denied: {tmp_path}/.lock\)"):
        again.save()


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_non_finite_parameters_are_not_saved(tmp_path, bad):
    one = trainer(tmp_path)
    one.fit([BATCH], 1, save_every=1)
    one.train(BATCH)
    one.state["params"]["final_norm"]["scale"][...] = one.state["params"]["final_norm"]["scale"][...].at[3].set(bad)
    message = r"step 2: got parameters that are not finite, .+ \(final_norm.scale\), want finite values: try a smaller "
    for end in (one.save, one.check_finite):
        with pytest.raises(FloatingPointError, match=message + "learning rate; the newest checkpoint is of step 1"):
            end()
    assert steps_in(tmp_path) == [1]
    one.close()


def test_last_parameters_are_checked():
    one = trainer(None, optax.sgd(np.inf))
    with pytest.raises(
        FloatingPointError, match=r"step 1: got parameters that are not finite, .+ \(embed and 10 more\)"
    ):
        one.fit([BATCH], 1)
    one = trainer(None)
    one.fit([BATCH], 1)


def test_file_writes_are_atomic(tmp_path, monkeypatch):
    path, link = tmp_path / "a.json", tmp_path / "link"
    write_whole(path, "old")
    link.symlink_to(path)
    write_whole(link, b"new")
    assert (path.read_text(), link.is_symlink()) == ("new", True)
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "cut")
    assert path.read_text() == "new"
    assert sorted(x.name for x in tmp_path.iterdir()) == ["a.json", "link"]
    write_whole(Path("/dev/null"), "anything")
    assert Path("/dev/null").is_char_device()


if __name__ == "__main__":
    lock = FolderLock(Path(sys.argv[1]))
    lock.take()
    print("has it", flush=True)
    time.sleep(100)
