"""The search for block specs, on fake kernels and a host clock."""

import json
import types

import pytest
import sweep_attention as sweep
from harness import cases


@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 160, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "triton"])
def test_grids_are_unique_and_fit(implementation, causal, head_dim):
    from jax_kernels.pallas.block_specs import attention_row

    row, _ = attention_row((9, 0), implementation, head_dim=head_dim, bits=16, is_causal=causal)
    for direction, standing in (("fwd", row.forward), ("bwd", row.backward)):
        grid = sweep.grid(implementation, direction, head_dim, causal)
        assert grid[0] == standing
        assert len(set(grid)) == len(grid) >= 4
        assert {type(config) for config in grid} == {sweep.KERNELS[implementation, direction].config}
    if implementation == "mosaic_gpu":
        used = [sweep.forward_sm90_bytes(c, head_dim) for c in sweep.grid(implementation, "fwd", head_dim, causal)]
        assert max(used) <= 227 * 1024


@pytest.mark.parametrize("causal", [False, True])
def test_grids_of_narrower_values(causal):
    grids = {direction: sweep.grid("mosaic_gpu", direction, 192, causal, 128) for direction in ("fwd", "bwd")}
    for direction, grid in grids.items():
        assert grid != sweep.grid("mosaic_gpu", direction, 192, causal)
        assert len(set(grid)) == len(grid) >= 4


def test_sweep_of_narrower_values():
    argv = ["--output", "x.json", "--shape", "2,8192,16,192/128", "--control", "fa4", "--query-scale", "8"]
    args = sweep.arguments(argv)
    assert (args.case.head_dim, args.case.value_head_dim, args.control) == (192, 128, "fa4")
    assert args.query_scale == 8
    assert args.configs == sweep.grid("mosaic_gpu", "fwd", 192, False, 128)


def test_sweep_arguments(capsys):
    argv = ["--output", "x.json", "--head-dim", "64", "--configs", "2,128,3;3,128,2,True,False"]
    args = sweep.arguments(argv)
    assert args.case == cases.Case(2, 8192, 32, 64, 32, "bf16", False, "fwd")
    assert args.configs == [
        sweep.AttentionForwardSm90(2, 128, 3),
        sweep.AttentionForwardSm90(3, 128, 2, share_q_out=True, pingpong=False),
    ]
    with pytest.raises(SystemExit):
        sweep.arguments(["--output", "x.json", "--configs", "7,128,3"])
    assert "compute_warpgroups=7 must be 2 or 3" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        sweep.arguments(["--output", "x.json", "--control-every", "0"])
    assert "--control-every: got 0, want a positive number" in capsys.readouterr().err


def test_sweep(tmp_path, monkeypatch, capsys, without_gpu):
    """A right config, a wrong config and a broken config. The reference replaces the kernel."""

    def kernel(inputs, options, *, out_dtype, config, core_count, interpret):
        assert not any(x is not None for x in inputs[3:])
        assert (options.q_offset, core_count) == (0, 1)
        if config.block_q == 32:
            raise ValueError("does not fit\nin any way")
        out, lse = sweep.chunked_attention.forward(inputs, options, out_dtype=out_dtype)
        return (out * 2 if config.block_q == 16 else out), lse

    monkeypatch.setitem(sweep.KERNELS, ("triton", "fwd"), sweep.Kernel(kernel, sweep.AttentionForwardTriton))
    monkeypatch.setattr(sweep, "prepare_process", lambda: None)
    output = tmp_path / "sweep.json"
    argv = [
        "--implementation", "triton", "--shape", "1,64,2,16", "--causal", "yes", "--timer", "host", "--seconds", "0.01",
        "--query-scale", "8", "--configs", "64,64,4,2;32,32,4,2;16,16,4,2;128,64,4,2",
        "--rounds", "2", "--control-every", "2",
        "--worker-until", str(sweep.time.time() + 60), "--output", str(output),
    ]  # fmt: skip
    assert sweep.main(argv) == 0
    results = json.loads(output.read_text())
    assert [row["status"] for row in results["rows"]] == ["ok", "failed", "wrong", "ok"]
    assert results["rows"][1]["reason"] == "ValueError: does not fit"
    assert results["rows"][2]["error"] == pytest.approx(1, abs=0.01)
    assert results["rows"][0]["fields"] == {"block_q": 64, "block_kv": 64, "num_warps": 4, "num_stages": 2}
    assert len(results["control"]) == 2
    assert [entry["name"][:6] for entry in results["finals"]] == ["xla", "Attent", "Attent"]
    assert results["finals"][0]["ratio"] == 1
    capsys.readouterr()
    assert sweep.main(argv) == 0  # configs in the file are not tried again
    assert len(json.loads(output.read_text())["rows"]) == 4


@pytest.mark.parametrize("mask", sweep.MASKS)
def test_masks_are_swept(mask, tmp_path, monkeypatch, without_gpu):
    """The kernels read block lists of the config's blocks, and return the control's gradients."""
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    monkeypatch.setattr(sweep, "prepare_process", lambda: None)
    output = tmp_path / "sweep.json"
    argv = [
        "--implementation", "triton", "--shape", "1,256,1,16", "--direction", "bwd", "--mask", mask, "--timer", "host",
        "--seconds", "0.01", "--configs", "64,64,64,64,4,2;32,64,64,32,4,2,64,True", "--rounds", "1",
        "--worker-until", str(sweep.time.time() + 60), "--output", str(output),
    ]  # fmt: skip
    assert sweep.main(argv) == 0
    results = json.loads(output.read_text())
    assert [row["status"] for row in results["rows"]] == ["ok", "ok"]
    assert results["mask"] == mask


@pytest.mark.parametrize(("head_dim", "count"), [(64, 10), (128, 9)])
def test_configs_of_mma(head_dim, count):
    assert len(sweep.grid("sm80", "fwd", head_dim, True)) == count
    argv = ["--output", "x.json", "--implementation", "sm80", "--configs", "block_q=128, block_kv=32, q_in_smem=True"]
    assert sweep.arguments(argv).configs == [
        sweep.forward_sm80.AttentionForwardSm80(block_q=128, block_kv=32, q_in_smem=True)
    ]


def test_masks_are_for_triton(capsys):
    with pytest.raises(SystemExit):
        sweep.arguments(["--output", "x.json", "--mask", "blocks"])
    assert "mask: got blocks, want none except for --implementation triton" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        sweep.arguments(
            ["--output", "x.json", "--implementation", "triton", "--mask", "blocks", "--control", "torch-flex"]
        )
    assert "control: got torch-flex, want one of mosaic_gpu, triton" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_hanging_config_is_abandoned(tmp_path, run_script):
    output = tmp_path / "sweep.json"
    done = run_script(
        "sweep_attention.py", "--implementation", "triton", "--shape", "1,64,2,16", "--timer", "host",
        "--configs", "32,32,4,1;64,32,4,1", "--limit", "0.0001", "--budget", "120", "--output", str(output),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(output.read_text())["rows"]
    assert [row["status"] for row in rows] == ["timeout", "timeout"]
    assert rows[0]["reason"] == "it did not come back within 0 s"


def test_crashing_config_is_not_retried(tmp_path, monkeypatch):
    """A fake process dies during the first config, then during the set-up of the next config."""
    output, statuses = tmp_path / "sweep.json", []

    def process(command, check, timeout):
        assert command[-2] == "--worker-until"
        assert timeout <= 30
        if not statuses:
            output.write_text(json.dumps({"rows": [{"config": "a", "status": "crashed"}]}))
        statuses.append(-6)
        return types.SimpleNamespace(returncode=-6)

    monkeypatch.setattr(sweep, "prepare_process", lambda: None)
    monkeypatch.setattr(sweep.subprocess, "run", process)
    assert sweep.main(["--output", str(output), "--budget", "30"]) == 6
    assert len(statuses) == 2
