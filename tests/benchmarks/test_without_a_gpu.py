"""Each script without a GPU prints one line: the requirement, or for each contender the reason that it cannot run."""

import importlib
import json
import sys
import types

import pytest

# The arguments that a script requires in addition to --timer.
ARGUMENTS = {
    "attention": "",
    "cross_entropy": "",
    "decode": "--kv-length 64",
    "dilated": "",
    "features": "--shape 1,8,2,16",
    "fp8": "",
    "grouped": "",
    "mask_building": "",
    "matmul": "",
    "normalization": "",
    "sparse": "",
    "sweep_attention": "--worker-until 1e10 --output {folder}/sweep.json",
    "versions": "--base {folder}",
    "window_growth": "",
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_device_timer_is_refused(name, tmp_path, monkeypatch, capsys, without_gpu):
    script = importlib.import_module(name)
    (tmp_path / "jax_kernels_base").mkdir()
    monkeypatch.setitem(sys.modules, "jax_kernels_base", types.ModuleType("jax_kernels_base"))
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.setattr(script, "prepare_process", lambda: None)
    with pytest.raises(SystemExit) as ended:
        script.main(ARGUMENTS[name].format(folder=tmp_path).split())
    assert ended.value.code == 2
    assert "want a GPU, or --timer host" in capsys.readouterr().err


@pytest.mark.slow
def test_error_is_one_line(run_script):
    done = run_script("sparse.py", "--seq-len", "64")
    told = "sparse.py: error: --timer cupti reads a GPU, and JAX runs on cpu: want a GPU, or --timer host\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", told)


@pytest.mark.slow
def test_sweep_exits_at_once(tmp_path, run_script):
    done = run_script("sweep_attention.py", "--shape", "1,64,2,16", "--output", str(tmp_path / "sweep.json"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("want a GPU, or --timer host\n")
    assert "Traceback" not in done.stderr


def test_one_token(tmp_path, run_script):
    """Its gradients of query and key are zeros, which is no error."""
    output = tmp_path / "attention.json"
    words = "--shapes 1,1,1,1 --implementations xla --peers= --mode fwd,bwd,fwdbwd --causal no --timer host --rounds 1"
    done = run_script("attention.py", *words.split(), "--seconds", "0.001", "--output", str(output))
    assert done.returncode == 0, done.stderr + done.stdout
    assert [row["status"] for row in json.loads(output.read_text())["rows"]] == ["ok"] * 3


@pytest.mark.slow
def test_accuracy_without_a_gpu(run_script):
    done = run_script("accuracy.py", "--lengths", "16", "--head-dims", "16")
    assert (done.returncode, done.stdout.count("cudnn unavailable: ")) == (0, 6), done.stderr
