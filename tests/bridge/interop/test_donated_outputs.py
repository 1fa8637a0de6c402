"""JAX arrays that do not keep their tensors alive, and programs that write results to PyTorch's memory."""

import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_kernels import bridge
from jax_kernels.bridge import masks
from jax_kernels.bridge.direct import route
from jax_kernels.bridge.interop import dlpack, dlpack_capsule, donated_outputs, keyed_cache

CPU = torch.device("cpu")
DTYPES = [
    *(torch.bfloat16, torch.float16, torch.float32, torch.bool, torch.int8, torch.int16, torch.int32),
    *(torch.uint8, torch.uint16, torch.uint32, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2),
]
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(300),
]


@pytest.fixture
def lender():
    return dlpack.lender(CPU)


@pytest.fixture
def programs(monkeypatch):
    """The programs that a test makes, by function."""
    found, own = {}, donated_outputs._program
    monkeypatch.setattr(donated_outputs, "_program", lambda function: found.setdefault(function, own(function)))
    return found


def run(function, *tensors):
    arguments = donated_outputs.FlatArguments((), tensors, (False,) * len(tensors))
    device = tensors[0].device
    return donated_outputs.run(function, arguments, device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_array_aliases_its_tensor(lender, dtype):
    tensor = torch.arange(256, dtype=torch.uint8).remainder(2).repeat(8).view(dtype).view(2, -1)
    array = lender.over(tensor)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    assert array.dtype == dlpack.jax_dtype(dtype)
    assert array.shape == tuple(tensor.shape)
    assert np.asarray(array).tobytes() == tensor.view(torch.uint8).numpy().tobytes()


def test_scalars_and_parameters_are_lent(lender):
    assert float(lender.over(torch.tensor(3.5))) == 3.5
    assert np.asarray(lender.over(torch.nn.Parameter(torch.ones(3)))).tolist() == [1, 1, 1]


def test_array_does_not_keep_its_tensor_alive(lender):
    tensor = torch.zeros(64)
    alive = weakref.ref(tensor)
    arrays = lender.over(tensor), lender.kept(tensor)
    del tensor
    assert alive() is None
    del arrays


def test_arrays_are_cached_by_address_shape_dtype(lender):
    tensor = torch.arange(64.0)
    array = lender.kept(tensor)
    assert lender.kept(tensor.detach()) is array
    assert lender.kept(tensor.view(8, 8)).shape == (8, 8)
    assert lender.kept(tensor.view(torch.int32)).dtype == jnp.int32
    assert lender.kept(tensor[32:]).unsafe_buffer_pointer() == tensor[32:].data_ptr()
    tensor += 1
    assert np.asarray(jax.jit(lambda x: x * 1)(lender.kept(tensor))).tolist() == tensor.tolist()


def test_deleted_array_is_rebuilt(lender):
    tensor = torch.arange(64.0)
    lender.kept(tensor).delete()
    assert np.asarray(lender.kept(tensor)).tolist() == tensor.tolist()


def test_array_cache_is_bounded(lender, monkeypatch):
    monkeypatch.setattr(dlpack_capsule, "_MOST", 3)
    tensors = [torch.zeros(size, 16) for size in range(1, 6)]
    arrays = [lender.kept(x) for x in tensors]
    assert len(lender._kept) == len(lender._forms) == 3
    assert lender.kept(tensors[-1]) is arrays[-1]
    assert lender.kept(tensors[0]) is not arrays[0]


FORMS = {
    "computed": (lambda x: [x + 1, x.sum(0), x.max() > 0], [(8, 16), (16,), ()]),
    "alike": (lambda x: [x + 1, x + 2], [(8, 16), (8, 16)]),
    "a constant": (lambda x: [x + 1, jnp.zeros(3)], [(8, 16), (3,)]),
    "an argument": (lambda x: [x + 1, x], [(8, 16), (8, 16)]),
    "the same twice": (lambda x: [x + 1] * 2, [(8, 16), (8, 16)]),
    "without elements": (lambda x: [x + 1, x[:0]], None),
    "of no dtype of PyTorch's": (lambda x: [x.astype(jnp.int4)], None),
    "none": (lambda x: [], None),
}


@pytest.mark.parametrize("case", FORMS)
@pytest.mark.filterwarnings("error")  # JAX warns if a result does not fit the memory that it is given
def test_xla_writes_results_to_arguments(case):
    function, want = FORMS[case]
    program = donated_outputs._DonatingJit(jax.jit(function, keep_unused=True))
    x = torch.ones(8, 16)
    forms = program.forms("key", donated_outputs.FlatArguments((), [x], (False,)))
    assert (forms and [form.shape for form in forms]) == want
    if forms is not None:
        assert all(torch.empty(form.shape).stride() == form.strides for form in forms)
        results = [jax.ShapeDtypeStruct(form.shape, dlpack.jax_dtype(form.dtype)) for form in forms]
        text = program.jitted.lower(results, jax.ShapeDtypeStruct((8, 16), jnp.float32)).as_text()
        for index in range(len(forms)):
            assert text.count(f"tf.aliasing_output = {index} ") == 1


def test_empty_tensors_are_not_donated(programs):
    assert run(jax.jit(lambda x: [x.sum()]), torch.zeros(0, 3)) is None


def test_results_not_written_in_place_are_copied(programs):
    """On a CPU JAX takes the arguments, and writes its results elsewhere."""
    x = torch.arange(64.0)
    function = jax.jit(lambda x: [x * 2, x.sum()])
    double, total = run(function, x)
    assert torch.equal(double, x * 2)
    assert total.item() == x.sum().item()
    assert run(function, x) is None
    assert run(function, x[:32]) is not None  # nothing is known about other arguments


def test_needs_private_jaxlib_functions(programs, monkeypatch):
    monkeypatch.setattr(dlpack, "_PRIVATE", None)
    assert run(jax.jit(lambda x: [x * 2]), torch.ones(3)) is None


def test_error_is_raised_after_jax_finishes(programs, monkeypatch):
    settled = []
    monkeypatch.setattr(donated_outputs, "_synchronize", settled.append)

    def fail(*given):
        raise KeyboardInterrupt

    function = jax.jit(lambda x: [x * 2])
    monkeypatch.setattr(dlpack, "export_arrays", fail)
    with pytest.raises(KeyboardInterrupt):
        run(function, torch.ones(3))
    assert settled == [CPU]


def test_each_thread_has_its_events():
    """If two threads recorded one event, a thread could wait for the other thread's stream."""
    found = [dlpack._READY.events]
    thread = threading.Thread(target=lambda: found.append(dlpack._READY.events))
    thread.start()
    thread.join()
    assert found[0] is not found[1]


def test_absent_arguments_are_part_of_the_key(programs):
    function = jax.jit(lambda x, y: [x + 1] if y is None else [jnp.concatenate([y, y])])
    tensor = torch.arange(3.0)
    found = [
        donated_outputs.run(function, donated_outputs.FlatArguments((), [tensor], absent), CPU)
        for absent in ((False, True), (True, False))
    ]
    assert [[x.tolist() for x in results] for results in found] == [[[1, 2, 3]], [[0, 1, 2, 0, 1, 2]]]


def test_keys_per_program_are_bounded(programs, monkeypatch):
    monkeypatch.setattr(donated_outputs, "_MOST", 3)
    function = jax.jit(lambda x: [x + 1])
    for length in (1, 2, 3, 4, 5, 1):
        (found,) = run(function, torch.arange(float(length)))
        assert found.tolist() == [x + 1 for x in range(length)]
    assert len(programs[function].results) == 3


def test_programs_are_dropped():
    program = weakref.ref(donated_outputs._program(jax.jit(lambda x: [x])))
    keyed_cache.clear()
    gc.collect()
    assert program() is None


class TestOnAGpu:
    pytestmark = gpu

    @pytest.fixture(autouse=True)
    def without_the_direct_route(self):
        with route.disabled():
            yield

    @pytest.fixture(autouse=True)
    def all_in_place(self, programs, monkeypatch):
        """Fails where a call was not in place."""
        found, own = [], donated_outputs.run

        def run(*given):
            results = own(*given)
            found.append(results is not None)
            return results

        monkeypatch.setattr(donated_outputs, "run", run)
        yield
        assert found
        assert all(found)
        assert all(forms is not None for program in programs.values() for forms in program.results.values())

    def test_results_are_written_in_place(self, programs):
        function = bridge.from_jax(lambda x, y: (x + y, x.sum(), (x > 0).astype(jnp.int8)))
        x, y = (torch.randn(64, 64, device="cuda").round() for _ in range(2))
        for _ in range(3):
            both, total, is_positive = function(x, y)
            assert torch.equal(both, x + y)
            assert total.item() == x.sum().item()
            assert torch.equal(is_positive, (x > 0).to(torch.int8))
            x = x + 1

    def test_attention_and_gradients_are_written_in_place(self, programs, reference):
        inputs = [torch.randn(2, 128, 4, 64, device="cuda", requires_grad=True) for _ in range(3)]
        exact = [x.detach().double().requires_grad_() for x in inputs]
        mask = masks.block_sparse(torch.tensor([[True, False], [True, True]], device="cuda"), 64)
        dense = torch.from_dlpack(mask.to_dense(128, 128)).clone()
        for given, wanted in (({"is_causal": True}, {"is_causal": True}), ({"mask": mask}, {"mask": dense})):
            want, _ = reference(*exact, **wanted)
            want_gradients = torch.autograd.grad(want.square().sum(), exact)
            for _ in range(2):
                out = bridge.flash_attention(*inputs, **given)
                gradients = torch.autograd.grad(out.square().sum(), inputs)
            for ours, theirs in zip((out, *gradients), (want, *want_gradients), strict=True):
                torch.testing.assert_close(ours.double(), theirs, atol=3e-2, rtol=3e-2)

    def test_returned_argument_is_copied(self, programs):
        x = torch.arange(64.0, device="cuda")
        function = bridge.from_jax(lambda x: (x, x * 2))
        for _ in range(2):
            same, double = function(x)
            assert same.data_ptr() != x.data_ptr()
            assert torch.equal(same, x)
            assert torch.equal(double, x * 2)

    def test_freed_inputs_are_read_before_reuse(self, programs):
        """The tensors die when the call returns, and PyTorch overwrites their memory next. Powers of 2 are exact."""
        function = bridge.from_jax(lambda x: jax.lax.fori_loop(0, 20, lambda _, y: y @ x / 2048, x))
        function(torch.ones(2048, 2048, device="cuda"))
        for number in (0.5, 1.0, 2.0, 4.0) * 2:
            x = torch.full((2048, 2048), number, device="cuda")
            want = number**21
            got = function(x)
            del x
            torch.full((2048, 2048), float("nan"), device="cuda")
            assert torch.equal(got, torch.full_like(got, want))

    def test_threads_with_separate_streams(self, programs):
        function = bridge.from_jax(lambda x: x * 2 + 1)
        function(torch.ones(1 << 20, device="cuda"))
        wrong = []

        def work(seed):
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for step in range(50):
                    x = torch.zeros(1 << 20, device="cuda")
                    torch.cuda._sleep(200_000)
                    x += seed * 1000 + step
                    got = function(x)
                    if not torch.equal(got, x * 2 + 1):
                        wrong.append((seed, step))

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
