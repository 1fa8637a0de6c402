"""JAX's Mosaic GPU interpreter, with features that it lacks and the Hopper attention kernels need.

The stock interpreter (jax 0.11) has no mma, no wgmma with its first operand in registers, and no adding stores. Run as
a script it checks cases and prints a line of JSON for each. It is a script because a kernel that deadlocks hangs its
process, and a process can be killed.

    python tests/support/interpreters/mosaic.py '{"batch": 1, ..., "races": true, "deterministic": true}' ...
"""

import dataclasses
import functools
import json
import os
import sys
import threading

os.environ.setdefault("NPROC", "32")  # the interpreter's thread pool: kernels with many waiting threads starve it
os.environ["JAX_KERNELS_INTERPRET"] = "1"

import jax
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu import primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as callbacks
from jax._src.pallas.mosaic_gpu.interpret import jaxpr_interpret, shared_memory
from jax._src.state import types as state_types
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels import flash_attention, prepare_mask
from jax_kernels.pallas import block_specs
from jax_kernels.pallas.attention.sm90.backward import kernel as backward_kernel
from jax_kernels.pallas.attention.sm90.features import block_lists
from jax_kernels.pallas.block_specs.sm90 import SM90
from jax_kernels.pallas.mosaic import split_tail
from jax_kernels.testing import attention as testing
from tests.support.oracles import attention as attention_oracle

_PARAMS, _SPLIT = plgpu.InterpretGPUParams, split_tail.SplitTail.of
_BUILT, _MOST_BITS, _KEYS_PAY = block_lists._built, block_lists.MOST_BITS, block_lists.KEYS_PAY
_KEY_GRADIENTS = backward_kernel.key_gradients
_ADDING = threading.Lock()
_RACES: list = []  # of every kernel: the interpreter keeps only the last kernel's races


class AddingStore(callbacks.AsyncCopySmemToGmemTask):
    """A TMA store with reduction_op="add". Two adding stores to one address are no race."""

    def __call__(self, tma_thread_id):
        memory = callbacks._get_shared_memory()
        self.pre_read(tma_thread_id, memory)
        read = lambda key, access: memory.get_buffer_content(
            key, access, self.thread, increment_clock=False, logging_info=self.logging_info
        )[0]
        value = read(self.src_allocation_key, self.src_access)
        if memory.detect_races:
            self.clock.inc(tma_thread_id)
            self.write_clock = self.clock.copy()
        shape = tuple(memory.buffer_shape_and_dtype(self.dst_allocation_key).shape)
        clipped = callbacks._clip_store_to_shape(self.dst_access, value, shape)
        if clipped is not None:
            access, value = clipped
            with _ADDING:
                total = read(self.dst_allocation_key, access) + value
                memory.store_buffer_content(
                    self.dst_allocation_key, access, total, self.thread, logging_info=self.logging_info
                )
        self.post_write(tma_thread_id, memory)


def _copy_smem_to_gmem(original):
    @callbacks.fail_on_exception
    def copy(*, reduction_op, **kwargs):
        if reduction_op is None:
            return original(reduction_op=None, **kwargs)
        assert reduction_op == "add", reduction_op
        task = callbacks.AsyncCopySmemToGmemTask
        callbacks.AsyncCopySmemToGmemTask = AddingStore
        try:
            return original(reduction_op=None, **kwargs)
        finally:
            callbacks.AsyncCopySmemToGmemTask = task

    def locked(**kwargs):
        with _PATCHING:
            return copy(**kwargs)

    return locked


_PATCHING = threading.RLock()


def _wgmma(original):
    """Copies a register operand into a buffer for the duration of the matmul."""

    def wgmma(self, eqn, token, get_invals):
        if isinstance(eqn.invars[1].aval, state_types.AbstractRef):
            return original(self, eqn, token, get_invals)
        invals = list(get_invals())
        token, request = callbacks.call_make_allocation_request_array(
            token=token,
            compute_unit=self.thread,
            memory_space_id=shared_memory.get_memory_space_idx(gpu_core.MemorySpace.REGS),
            initial_ref_count=1,
        )
        token, invals[1] = callbacks.call_allocate_buffer(
            token=token,
            mesh_location=self.mesh_location,
            thread=self.thread,
            allocation_request_as_array=request,
            value=invals[1],
            source_info=eqn.source_info,
        )
        token, out = original(self, eqn, token, lambda: invals)
        token = callbacks.call_deallocate_buffer(
            token=token,
            mesh_location=self.mesh_location,
            thread=self.thread,
            allocation_key_as_array=invals[1],
            source_info=eqn.source_info,
        )
        return token, out

    return wgmma


def _arithmetic(original):
    """Adds mma to the primitives on registers."""

    def compute(self, eqn, get_invals):
        if eqn.primitive is not primitives.mma_p:
            return original(self, eqn, get_invals)
        acc, a, b = get_invals()
        return acc + jax.numpy.matmul(a, b, preferred_element_type=acc.dtype)

    return compute


class _Primitives:
    """The interpreter's view of the primitives' module: it replaces TMEM's store by an accumulator's store."""

    def __getattr__(self, name):
        return getattr(primitives, "wgmma_accumulator_store_p" if name == "async_store_tmem_p" else name)


def _accumulator_store(self, eqn, token, accumulator, value, **_):
    token, _ = callbacks.call_swap(
        token=token,
        result_shape_and_dtype=eqn.invars[1].aval,
        mesh_location=self.mesh_location,
        thread=self.thread,
        allocation_key_as_array=accumulator,
        transforms=(),
        val=value,
        mask=None,
        source_info=eqn.source_info,
    )
    return token, [value]


def install() -> None:
    from jax_kernels.pallas.mosaic import interpreter

    interpreter.INTERPRETED = True
    interpreter = jaxpr_interpret.JaxprInterpreter
    jaxpr_interpret.gpu_primitives = _Primitives()
    interpreter._interpret_async_store_tmem_p = _accumulator_store
    interpreter._interpret_arithmetic_primitive = _arithmetic(interpreter._interpret_arithmetic_primitive)
    interpreter._interpret_wgmma_ref_p = _wgmma(interpreter._interpret_wgmma_ref_p)
    callbacks.copy_smem_to_gmem = _copy_smem_to_gmem(callbacks.copy_smem_to_gmem)
    races_of_kernel = callbacks.GPURaceDetectionState

    def recorded(**kwargs):
        _RACES.append(races_of_kernel(**kwargs))
        return _RACES[-1]

    callbacks.GPURaceDetectionState = recorded
    deallocate = shared_memory.Barrier.deallocate

    def tolerant(self):  # kernels end without waiting for a barrier's last phase, which hardware allows
        try:
            deallocate(self)
        except ValueError as error:
            if "was deallocated, thread" not in str(error):
                raise

    shared_memory.Barrier.deallocate = tolerant


def races_found() -> bool:
    """Whether a kernel had races since the last call of this function."""
    found = any(of_kernel.races_found for of_kernel in _RACES)
    _RACES.clear()
    return found


def _persistent(fields: dict, *arguments, config, core_count: int, **rest):
    """The backward with persistent CTAs. fields: fields of its blocks, and the number of CTAs ("ctas")."""
    config = dataclasses.replace(config, persistent=True, **{name: x for name, x in fields.items() if name != "ctas"})
    return _KEY_GRADIENTS(*arguments, config=config, core_count=fields["ctas"], **rest)


def set_bounded(bounded: bool) -> None:
    """If bounded, bounds the scores beforehand for any number of keys. Otherwise follows the block specs."""
    always = {"bounded_from": 0, "bounded_from_limited": 0, "bounded_from_lists": 0}
    of_row = lambda row: dataclasses.replace(row, forward=dataclasses.replace(row.forward, **always))
    rows = (of_row(row) if bounded and row.implementation == "mosaic_gpu" else row for row in SM90.attention)
    block_specs.BLOCK_SPECS[9, 0] = dataclasses.replace(SM90, attention=tuple(rows))


def run(case: dict) -> dict:
    """Errors of one case's forward and backward against float64, and the races found."""
    jax.clear_caches()  # the settings below are in no cache's key
    races = case.pop("races", False)
    deterministic = case.pop("deterministic", False)
    bounded = case.pop("bounded", False)  # short lists of keys do without bounds
    set_bounded(bounded)
    cores = case.pop("cores", 1)  # with more SMs than tiles, the backward splits tiles
    split_tail.SplitTail.of = lambda tiles, steps, core_count: _SPLIT(tiles, steps, cores)
    persistent = case.pop("persistent", None)
    backward_kernel.key_gradients = functools.partial(_persistent, persistent) if persistent else _KEY_GRADIENTS
    rising, has_lists = case.pop("rising", False), "pattern" in case
    out_only = case.pop("out_only", False)  # for cases whose gradients overflow
    without_lse = case.pop("without_lse", False)  # out a second time, by a kernel that writes no lse
    block_lists._built, is_prepared = _BUILT, case.pop("prepared", False)
    block_lists.MOST_BITS = -1 if case.pop("predicate", False) else _MOST_BITS
    block_lists.KEYS_PAY = 0 if case.pop("skips_keys", False) else _KEYS_PAY
    case = {name: tuple(x) if isinstance(x, list) else x for name, x in case.items()}
    case = testing.AttentionCase(name="interpreted", **case)
    # Not force_gpu_interpret_mode, which would also interpret the Triton kernel of a bias's gradient.
    plgpu.InterpretGPUParams = functools.partial(_PARAMS, detect_races=races)
    query, key, *others = testing.attention_inputs(case, seed=0)
    if rising:  # the last visited keys have scores that exceed the first block's by hundreds
        factors = jax.numpy.linspace(*((0, 120) if has_lists else (40, 0)), case.kv_length)
        key *= factors[:, None, None].astype(key.dtype)
    arrays = query, key, *others
    given = {}
    if is_prepared:
        limits = {name: case.arguments[name] for name in ("is_causal", "window", "q_offset", "bias")}
        limits |= {"deterministic": deterministic, "implementation": "mosaic_gpu"}
        given["mask"] = prepare_mask(case.arguments["mask"], *arrays[:3], **limits)
        block_lists._built = None  # a call must not need it
    got = testing.run_attention(case, arrays, "mosaic_gpu", deterministic=deterministic, **given)
    got = {name: jax.block_until_ready(x) for name, x in got.items()}
    found = races_found()
    if without_lse:
        primals = testing._primals(case, *arrays[:3])
        out = flash_attention(**case.arguments | {"return_lse": False, "implementation": "mosaic_gpu"} | primals)
        differs = not jax.numpy.array_equal(out, got["out"])
    want = attention_oracle.attention(case, *arrays)
    errors = {name: testing.rms_error(got[name], x) for name, x in want._asdict().items()}
    bounds = testing.tolerance(case) if rising else testing.tolerance_of(case, arrays, want)
    if rising or out_only:  # only the forward has a running maximum; its bounds are the wider bounds of unscaled keys
        errors = {name: errors[name] for name in ("out", "lse")}
    if without_lse:
        errors["without_lse"], bounds["without_lse"] = float(differs), 0.0
    return {"errors": errors, "bounds": bounds, "races": found}


if __name__ == "__main__":
    install()
    for argument in sys.argv[1:]:
        print(json.dumps(run(json.loads(argument))), flush=True)
