"""jax-kernels profile: the ops that a script runs, in JAX and in PyTorch, and messages for wrong use."""

import json
import os

import pytest

from jax_kernels import cli

JAX_SCRIPT = """
import sys
import jax, jax.numpy as jnp
from jax_kernels import flash_attention, rms_norm

@jax.jit
def step(x):
    loss = lambda x: jax.lax.scan(lambda y, _: (flash_attention(y, y, y), None), x, length=3)[0].sum()
    return jax.grad(loss)(x)

x = jnp.ones((1, 32, 2, 16))
for _ in range(int(sys.argv[1])):
    x = step(x)
rms_norm(x)
sys.exit(0)
"""
TORCH_SCRIPT = """
import torch
from jax_kernels import bridge

x = torch.randn(1, 32, 2, 16, requires_grad=True)
for _ in range(3):
    bridge.flash_attention(x, x, x).sum().backward()
"""


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "script.py"
        path.write_text(text)
        return str(path)

    return write


def test_runs_of_a_jax_script(run, script):
    """Each run of a compiled function counts, in its scan too."""
    code, out, _ = run("profile", script(JAX_SCRIPT), "4", "--json", "--measure")
    assert code == 0
    found = json.loads(out)
    uses = {use["op"]: (use["forward"], use["backward"]) for use in found["uses"]}
    assert uses == {"flash_attention": (12, 12), "rms_norm": (1, 0)}
    assert sum(use["share"] for use in found["uses"]) == pytest.approx(1)


def test_json_is_alone_in_stdout(script, capfd):
    """A script and the processes that it starts print to stderr."""
    printing = 'import os\nprint("printed")\nos.system("echo echoed")\n'
    with pytest.raises(SystemExit):
        cli.main(["profile", script(printing + JAX_SCRIPT), "1", "--json"])
    out, err = capfd.readouterr()
    assert json.loads(out)["uses"]
    assert {"printed", "echoed"} <= {*err.splitlines()}
    os.write(1, b"again stdout")
    assert capfd.readouterr().out == "again stdout"


def test_runs_of_a_torch_script(run, script):
    code, out, _ = run("profile", script(TORCH_SCRIPT), "--device", "h200")
    assert code == 0
    assert "3 + 3 backward" in out
    (head,) = (line for line in out.splitlines() if "implementation" in line)  # it is not cut off
    assert "roofline" not in head  # nothing is measured
    assert "NVIDIA H200; times are bounds" in out
    assert "advice: flash_attention (1x32x2x16 float32)" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing.py"], "script: got 'nothing.py', want a Python script"),
        (["SCRIPT", "--device", "nope"], "--device: got 'nope'"),
        (["SCRIPT", "--device", "h200", "--check"], "--device: got 'h200' with --measure or --check"),
        (["SCRIPT"], "which runs no op of jax_kernels"),
    ],
)
def test_wrong_use(run, script, words, message):
    path = script("pass")
    code, _, err = run("profile", *(path if word == "SCRIPT" else word for word in words))
    assert code == 2
    assert message in err
