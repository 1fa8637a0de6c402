"""ring_attention compiled for H200s that are not there: sends run beside kernels, and no kernel spills."""

import json

import pytest

from tests.tools import compile_case


# A send of keys and values a step; in the backward one more for each of their gradients, which then come home. Sent two
# steps ahead, all but the first have the time of two kernels. A halo of both sides is two sends, of which the device's
# own kernel hides one.
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("devices", "mode", "words", "beside"),
    [
        pytest.param(2, "fwd", (), [1], marks=pytest.mark.slow),
        pytest.param(4, "fwd", ("2",), [1, 2, 2], marks=pytest.mark.slow),
        pytest.param(2, "both", ("check_vma",), [1] * 3, marks=pytest.mark.slow),
        pytest.param(4, "both", (), [1] * 9, marks=pytest.mark.slow),
        pytest.param(4, "both", ("halo",), [1] * 2, marks=pytest.mark.slow),
        pytest.param(4, "both", ("halo", "sides"), [0, 2, 1, 1], marks=pytest.mark.slow),
        pytest.param(2, "both", ("masked",), [1] * 3, marks=pytest.mark.slow),
        pytest.param(4, "both", ("2",), [1, 2, 2, 1, 2, 1, 1, 1, 1], marks=pytest.mark.slow),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, tuple) else None,
)
def test_sends_run_beside_kernels(devices, mode, words, beside):
    compiled = compile_case.compile_script(
        compile_case.__file__.replace("compile_case.py", "compile_ring.py"), str(devices), mode, *words
    )
    found = json.loads(compiled.printed.splitlines()[-1])
    assert found["beside"] == beside
    assert not found["detached"]
    assert set(compiled.mosaic) >= {"attention_forward_sm90_mosaic_gpu_kernel"}
    for name, figures in compiled.mosaic.items():
        assert figures["spill_stores"] == figures["spill_loads"] == 0, name
        assert not figures["notes"], name
