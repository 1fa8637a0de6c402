"""ring_attention compiled for absent H200s: sends overlap with kernels, and no kernel spills."""

import json

import pytest

from tests.tools import compile_case


# Each step sends keys and values. The backward also sends their gradients, which end at their own device. With two
# sends ahead, all sends except the first overlap with two kernels. A halo of both sides has two sends; the device's own
# kernel hides one of them.
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("devices", "mode", "words", "overlaps"),
    [
        pytest.param(2, "fwd", (), [1], marks=pytest.mark.slow),
        pytest.param(4, "fwd", ("2",), [1, 2, 2], marks=pytest.mark.slow),
        pytest.param(2, "both", ("check_vma",), [1] * 3, marks=pytest.mark.slow),
        pytest.param(4, "both", (), [1] * 9, marks=pytest.mark.slow),
        pytest.param(4, "both", ("halo",), [1] * 2, marks=pytest.mark.slow),
        pytest.param(4, "both", ("halo", "sides"), [0, 2, 1, 1], marks=pytest.mark.slow),
        pytest.param(2, "both", ("masked",), [1] * 3, marks=pytest.mark.slow),
        pytest.param(2, "both", ("documents",), [1] * 3, marks=pytest.mark.slow),
        pytest.param(4, "both", ("2",), [1, 2, 2, 1, 2, 2, 1, 1, 1], marks=pytest.mark.slow),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, tuple) else None,
)
def test_sends_overlap_kernels(devices, mode, words, overlaps):
    compiled = compile_case.compile_script(
        compile_case.__file__.replace("compile_case.py", "compile_ring.py"), str(devices), mode, *words
    )
    found = json.loads(compiled.printed.splitlines()[-1])
    assert found["overlaps"] == overlaps
    assert not found["detached"]
    assert set(compiled.mosaic) >= {"attention_forward_sm90_mosaic_gpu_kernel"}
    most = 32 if "documents" in words else 0  # four addresses of a backward with segment ids
    for name, figures in compiled.mosaic.items():
        assert max(figures["spill_stores"], figures["spill_loads"]) <= most, name
        assert not figures["notes"], name
