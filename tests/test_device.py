"""device_info of real and named devices."""

import dataclasses
import types

import jax
import pytest

from jax_kernels.device import ARCHITECTURES, DeviceInfo, device_info, device_names
from jax_kernels.pallas import block_specs

# The driver's name, a short name, and the data sheet's figures.
GPUS = (
    ("NVIDIA H100 80GB HBM3", "h100", "Hopper", (9, 0), 132, 80e9),
    ("NVIDIA H100 PCIe", "h100 pcie", "Hopper", (9, 0), 114, 80e9),
    ("NVIDIA H200", "h200", "Hopper", (9, 0), 132, 141e9),
    ("NVIDIA GH200 480GB", "gh200", "Hopper", (9, 0), 132, 96e9),
    ("NVIDIA A100-SXM4-40GB", "a100 40gb", "Ampere", (8, 0), 108, 40e9),
    ("NVIDIA A100-SXM4-80GB", "a100", "Ampere", (8, 0), 108, 80e9),
    ("NVIDIA RTX A6000", "a6000", "Ampere", (8, 6), 84, 48 * 2**30),
    ("NVIDIA GeForce RTX 3090", "rtx3090", "Ampere", (8, 6), 82, 24 * 2**30),
    ("NVIDIA GeForce RTX 4090", "4090", "Ada", (8, 9), 128, 24 * 2**30),
    ("NVIDIA GeForce RTX 4070", "rtx 4070", "Ada", (8, 9), 46, 12 * 2**30),
    ("NVIDIA GeForce RTX 3060", "rtx 3060", "Ampere", (8, 6), 28, 12 * 2**30),
    ("NVIDIA GeForce RTX 2080", "rtx 2080", "Turing", (7, 5), 46, 8 * 2**30),
    ("NVIDIA GeForce RTX 2060", "rtx 2060", "Turing", (7, 5), 30, 6 * 2**30),
    ("NVIDIA GeForce GTX 1080", "gtx 1080", "Pascal", (6, 1), 20, 8 * 2**30),
    ("NVIDIA L4", "l4", "Ada", (8, 9), 58, 24e9),
    ("NVIDIA L40S", "L40S", "Ada", (8, 9), 142, 48e9),
    ("NVIDIA RTX 6000 Ada Generation", "rtx 6000 ada", "Ada", (8, 9), 142, 48 * 2**30),
    ("NVIDIA B200", "b200", "Blackwell", (10, 0), 148, 180e9),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx pro 6000", "Blackwell", (12, 0), 188, 96 * 2**30),
    ("NVIDIA GeForce RTX 5090", "rtx 5090", "Blackwell", (12, 0), 170, 32 * 2**30),
    ("Tesla T4", "t4", "Turing", (7, 5), 40, 16e9),
    ("Tesla V100-SXM2-16GB", "v100", "Volta", (7, 0), 80, 16e9),
    ("Tesla P100-PCIE-16GB", "p100", "Pascal", (6, 0), 56, 16e9),
)


def fake_gpu(name="NVIDIA H200", capability="9.0", **attributes):
    fields = {"platform": "gpu", "device_kind": name, "compute_capability": capability, "core_count": 132}
    return types.SimpleNamespace(memory_stats=lambda: {"bytes_limit": 7}, **(fields | attributes))


@pytest.mark.parametrize("gpu", GPUS, ids=[gpu[1] for gpu in GPUS])
def test_known_gpu(gpu):
    driver_name, short, architecture, capability, cores, memory = gpu
    info = device_info(driver_name)
    assert info == device_info(short)
    got = (info.name, info.architecture, info.compute_capability, info.core_count, info.total_memory_bytes)
    assert got == (driver_name, architecture, capability, cores, memory)
    assert info.memory_bandwidth > 1e11


def test_abilities_follow_the_generation():
    t4, a100, l4, h100, b200 = (device_info(name) for name in ("t4", "a100", "l4", "h100", "b200"))
    assert [x.supports_bf16 for x in (t4, a100, l4, h100, b200)] == [False, True, True, True, True]
    assert [x.supports_fp8 for x in (t4, a100, l4, h100, b200)] == [False, False, True, True, True]
    assert [x.has_tensor_cores for x in (device_info("p100"), device_info("v100"), t4)] == [False, True, True]
    assert [x.optimal_dtype for x in (device_info("p100"), t4, a100)] == ["float32", "float16", "bfloat16"]
    assert (a100.shared_memory_per_block, h100.shared_memory_per_block) == (163 * 1024, 227 * 1024)


@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_implementations_match_dispatch(capability):
    info = device_info(fake_gpu("A GPU of tomorrow", f"{capability[0]}.{capability[1]}"))
    order, _ = block_specs.attention_order(capability)
    assert info.implementations == order
    assert info.architecture == ARCHITECTURES[capability].name


@pytest.mark.parametrize("name", device_names())
def test_named_device(name):
    info = device_info(name)
    order, _ = block_specs.attention_order(info.compute_capability)
    assert info.implementations == order
    if name != "cpu":
        assert info.architecture == ARCHITECTURES[info.compute_capability].name
        assert info.memory_bandwidth > 1e11
        assert info.total_memory_bytes > 1e9


@pytest.mark.parametrize("specs", block_specs.BLOCK_SPECS.values(), ids=lambda specs: specs.name)
def test_block_specs_have_a_gpu(specs):
    assert specs.capability in ARCHITECTURES, "jax_kernels/device.py: ARCHITECTURES lacks the capability"
    gpu = ARCHITECTURES[specs.capability].gpu
    assert gpu is not None, "jax_kernels/device.py: the row in ARCHITECTURES has no gpu"
    assert device_info(gpu).compute_capability == specs.capability


def test_real_gpu_is_described_by_itself():
    info = device_info(fake_gpu(core_count=66, shared_memory_per_block_optin=1000))
    assert (info.core_count, info.shared_memory_per_block, info.total_memory_bytes) == (66, 1000, 141e9)


def test_unlisted_gpu_is_described_by_its_capability():
    # A slice and a laptop's GPU have a card's name, but not its memory.
    for name in ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H100 of tomorrow"):
        info = device_info(fake_gpu(name, "9.9"))
        assert (info.name, info.architecture, info.total_memory_bytes) == (name, "Hopper", 7)
        assert info.memory_bandwidth is None
    assert device_info(fake_gpu("old", "3.5")).architecture == "Pascal"
    assert device_info(fake_gpu("new", "13.7")).architecture == "Blackwell"


def test_without_a_gpu():
    cpu = jax.devices("cpu")[0]
    info = device_info(cpu)
    assert info == device_info("cpu") == device_info("CPU")
    assert (info.architecture, info.compute_capability, info.total_memory_bytes) == ("CPU", None, None)
    assert (info.implementations, info.optimal_dtype) == (("xla",), "float32")
    with jax.default_device(cpu):
        assert device_info() == info


def test_other_accelerators_have_no_kernels():
    for attributes in ({"platform": "tpu"}, {"platform": "rocm", "compute_capability": "gfx942"}):
        device = fake_gpu(**({"compute_capability": None} | attributes))
        info = device_info(device)
        assert (info.name, info.compute_capability, info.implementations) == (device.device_kind, None, ("xla",))


def test_missing_backend_counts_as_cpu(monkeypatch):
    def fail(**_):
        raise RuntimeError("Unable to initialize backend")

    monkeypatch.setattr(jax, "local_devices", fail)
    assert device_info().architecture == "CPU"


@pytest.mark.parametrize("name", ["", "h3000", "rtx 4090 laptop gpu", "3080 ti", "100", "nvidia"])
def test_unknown_name(name):
    with pytest.raises(ValueError, match=r"device: got .*, want cpu or the name of a GPU: .*h200.* 4090,"):
        device_info(name)


def test_names():
    names = device_names()
    assert {"cpu", "h200", "a100", "4090", "v100", "t4"} <= set(names)
    assert len(set(names)) == len(names) == len({device_info(name).name for name in names})


@pytest.mark.parametrize(("name", "near"), [("h20O", "h20"), ("RTX 4091", "4090"), ("NVIDIA A1000", "a100")])
def test_misspelt_name(name, near):
    with pytest.raises(ValueError, match=f"; did you mean '{near}'"):
        device_info(name)


def test_memory_in_gigabytes():
    assert device_info("h200").total_memory_gb == 141
    assert device_info("rtx 4090").total_memory_gb == pytest.approx(24 * 1.073741824)
    assert device_info("cpu").total_memory_gb is None


def test_wrong_type():
    with pytest.raises(TypeError, match=r"device: got int, want a jax\.Device, a name or None"):
        device_info(0)


def test_device_info_passes_through_and_is_hashable():
    info = device_info("h200")
    assert isinstance(info, DeviceInfo)
    assert device_info(info) is info
    assert hash(info) == hash(dataclasses.replace(info))


@pytest.mark.gpu
def test_this_gpu():
    device = jax.local_devices(backend="gpu")[0]
    info = device_info()
    assert info.name == device.device_kind
    assert info.compute_capability == tuple(int(x) for x in device.compute_capability.split("."))
    assert info.core_count == device.core_count > 1
    assert info.total_memory_bytes > 1e9
