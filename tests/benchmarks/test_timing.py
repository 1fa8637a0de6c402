"""The timers and the alternation, with fake timers and a fake CUPTI."""

import ctypes
import os
import pathlib
import subprocess
import sys

import pytest
from harness import device_activity, report, side_by_side, timers, timing


class FakeTimer:
    """Records its calls, and returns the given times."""

    def __init__(self, ms, launches=None):
        self.ms, self.launches, self.turns = ms, launches, []

    def __call__(self, call, calls, framework):
        name = call(0)
        self.turns.append((name, calls, framework))
        if name == "broken" and len(self.turns) > 3:
            raise RuntimeError("out of luck\nand more")
        return timing.Reading(self.ms[name], {}, self.launches)


def named(name, framework="jax"):
    made = timing.Contender(name, framework, call=lambda index: name)
    made.reading = timing.Reading(1.0)
    return made


def test_contenders_take_turns():
    timer = FakeTimer({"a": 1.0, "b": 2.0, "c": 4.0})
    made = [named("a"), named("b", "torch"), named("c")]
    timing.alternate(made, timer, rounds=3, seconds=0.02)
    rounds = ["".join(turn[0] for turn in timer.turns[first : first + 3]) for first in (0, 3, 6)]
    assert rounds[0] == "abc"
    assert {"".join(sorted(order)) for order in rounds} == {"abc"}
    assert len(set(rounds)) > 1  # no contender always follows the same contender
    assert [turn[2] for turn in timer.turns[:3]] == ["jax", "torch", "jax"]
    # Every turn is 20 ms long, once the first round has measured the time of a call.
    assert {turn[0]: turn[1] for turn in timer.turns[3:6]} == {"a": 20, "b": 10, "c": 5}
    assert made[1].times == [2.0, 2.0, 2.0]


def test_failing_contender_ends_no_other():
    timer = FakeTimer({"a": 1.0, "broken": 2.0, "c": 4.0})
    made, said = [named("a"), named("broken"), named("c")], []
    timing.alternate(made, timer, rounds=3, seconds=0.02, say=said.append)
    assert sorted(turn[0] for turn in timer.turns) == ["a"] * 3 + ["broken"] * 2 + ["c"] * 3
    assert (made[1].status, made[1].reason) == ("failed", "RuntimeError: out of luck")
    assert said[0] == "  broken: failed: RuntimeError: out of luck"
    assert made[0].times == [1.0] * 3


@pytest.fixture
def processes(tmp_path, monkeypatch):
    """start(what, locked=True): a process that enters `what` and prints when it has. This process has the lock, too."""
    lock = str(tmp_path / "lock")
    monkeypatch.setenv("BENCHMARK_LOCK", lock)
    here = {name: x for name, x in os.environ.items() if name != "BENCHMARK_LOCK"}
    here["PYTHONPATH"] = str(pathlib.Path(timing.__file__).parents[1])

    def start(what, locked=True):
        source = f"from harness.side_by_side import *\nwith {what}: print('its turn')"
        environment = here | {"BENCHMARK_LOCK": lock} if locked else here
        return subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, env=environment)

    return start


def has_its_turn(process):
    return process.communicate(timeout=60)[0] == "its turn\n"


def test_processes_take_turns(processes):
    with side_by_side.gpu_alone(), side_by_side.gpu_alone(), side_by_side.gpu_among_others():
        waiting = [processes("gpu_alone(), gpu_alone()"), processes("gpu_among_others()")]
        assert has_its_turn(processes("gpu_alone()", locked=False))
        for process in waiting:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(timeout=1)
    assert all(map(has_its_turn, waiting))


def test_untimed_process_blocks_exclusive_turns(processes):
    with side_by_side.gpu_among_others():
        waiting = processes("gpu_alone()")
        assert has_its_turn(processes("gpu_among_others()"))
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(timeout=1)
        with side_by_side.gpu_alone():
            late = processes("gpu_among_others()")
            with pytest.raises(subprocess.TimeoutExpired):
                late.wait(timeout=1)
        assert has_its_turn(late)
        assert waiting.poll() is None
    assert has_its_turn(waiting)


def test_spent_budget_skips_contenders(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(timing.time, "monotonic", lambda: next(clock))
    made, said = [named("a"), named("b"), named("c")], []
    timing.alternate(made, FakeTimer(dict.fromkeys("abc", 1.0)), rounds=3, seconds=0.5, deadline=2, say=said.append)
    assert [c.status for c in made] == ["ok", "ok", "skipped"]
    assert made[2].reason == "the time budget was spent before its first turn"
    assert said == ["  the time budget is spent: stopped in round 1 of 3"]


def test_odd_launch_count_is_noted():
    made = named("a")
    timing.alternate([made], FakeTimer({"a": 1.0}, launches=2.5), rounds=1, seconds=0.01)
    assert made.note == "2.50 device activities a call: not a whole number"


def test_wrong_contender_is_dropped():
    right, wrong, poisoned = named("a"), named("b"), named("c")
    right.judge(0.02, "float32")
    wrong.judge(0.05, "float32", tolerance=0.04)
    poisoned.judge(float("nan"), "cuDNN")
    assert (right.status, right.error, right.call is None) == ("ok", 0.02, False)
    assert (wrong.status, wrong.error, wrong.call) == ("wrong", 0.05, None)
    assert (poisoned.status, poisoned.call) == ("wrong", None)
    assert poisoned.reason == "relative error nan against cuDNN, want at most 0.02"


def test_timers_without_a_gpu(without_gpu):
    assert timers.make_timer("host") is timing.host_timer
    for name in ("cupti", "events", "profilers"):
        with pytest.raises(RuntimeError, match=f"timer='{name}' reads a GPU, and JAX runs on cpu"):
            timers.make_timer(name)
    with pytest.raises(ValueError, match="timer: got 'sundial'"):
        timers.make_timer("sundial")


def test_failing_device_timer_falls_back_to_events(monkeypatch, capsys, without_gpu):
    def broken(call, calls, framework):
        raise RuntimeError("CUPTI saw no device activity")

    events = lambda *_: timing.Reading(1.0)
    monkeypatch.setattr(timers, "make_timer", {"cupti": broken, "events": events}.get)
    monkeypatch.setattr(timers.jax, "default_backend", lambda: "gpu")
    assert timers.choose_timer("cupti", ["jax"]) == ("events", events)
    assert "timing by CUDA events instead" in capsys.readouterr().out


@pytest.mark.parametrize("name", [None, "events", "profilers"])
def test_device_timer_without_a_gpu_exits(name, capsys, without_gpu):
    with pytest.raises(SystemExit) as ended:
        timers.choose_timer(name, ["jax"])
    assert ended.value.code == 2
    told = f"--timer {name or 'cupti'} reads a GPU, and JAX runs on cpu: want a GPU, or --timer host\n"
    assert capsys.readouterr().err.endswith(told)
    assert timers.choose_timer("host", ["jax"]) == ("host", timing.host_timer)


def test_profiler_sums_activities_per_call():
    reading = timers.summed([("kernel", 1.0), ("memset", 0.25)] * 4, 4)
    assert (reading.ms, reading.launches) == (1.25, 2.0)
    assert reading.kernels == {"kernel": 1.0, "memset": 0.25}
    with pytest.raises(RuntimeError, match="no device activity"):
        timers.summed([], 4)


class FakeCupti:
    """Passes each queued record to the library's own callbacks, in the layout of cupti_activity.h."""

    def __init__(self):
        self.waiting, self.enabled, self.dropped, self.result = [], [], 0, 0
        self.names = []

    def add(self, kind, start, end, name=b"", device=0):
        record = ctypes.create_string_buffer(b"\xee" * 160, 160)
        ctypes.c_uint32.from_buffer(record, 0).value = kind
        ctypes.c_uint64.from_buffer(record, 16).value = start
        ctypes.c_uint64.from_buffer(record, 24).value = end
        ctypes.c_uint32.from_buffer(record, 40 if name else 32).value = device
        if name:
            self.names.append(ctypes.create_string_buffer(name))
            ctypes.c_uint64.from_buffer(record, 104).value = ctypes.addressof(self.names[-1])
        self.waiting.append(bytes(record))

    def cuptiActivityRegisterCallbacks(self, requested, completed):
        self.requested, self.completed = requested, completed
        return self.result

    def cuptiActivityEnable(self, kind):
        self.enabled.append(kind.value)
        return 0

    def cuptiActivityDisable(self, kind):
        self.enabled.remove(kind.value)
        return 0

    def cuptiGetResultString(self, result, words):
        words._obj.value = b"CUPTI_ERROR_NOT_INITIALIZED"

    def cuptiActivityGetNumDroppedRecords(self, context, stream, dropped):
        dropped._obj.value = self.dropped
        return 0

    def cuptiActivityFlushAll(self, flag):
        assert flag.value == 1
        if self.waiting:
            buffer = ctypes.POINTER(ctypes.c_uint8)()
            size, most = ctypes.c_size_t(), ctypes.c_size_t(7)
            self.requested(ctypes.pointer(buffer), ctypes.pointer(size), ctypes.pointer(most))
            self.start = ctypes.addressof(buffer.contents)
            assert (self.start % 8, most.value) == (0, 0)
            content = b"".join(self.waiting)
            assert size.value >= len(content)
            ctypes.memmove(buffer, content, len(content))
            self.waiting = []
            self.completed(None, 0, buffer, size, len(content))
        return 0

    def cuptiActivityGetNextRecord(self, buffer, valid, record):
        following = record._obj.value + 160 if record._obj.value else self.start
        if following >= self.start + valid.value:
            return 12
        record._obj.value = following
        return 0


def test_cupti_counts_kernels_memsets_and_copies():
    cupti = FakeCupti()
    timer = device_activity.DeviceActivity(cupti)
    assert cupti.enabled == [10, 2, 1, 22]
    cupti.add(10, 1, 10**9, b"before")  # work before the turn does not count

    def call(index):
        start = (index + 1) * 10_000_000
        cupti.add(2, start, start + 500_000)
        cupti.add(10, start + 500_000, start + 2_000_000, b"attention")
        cupti.add(1, start + 1_500_000, start + 2_250_000)  # overlaps the kernel by 0.5 ms
        cupti.add(43, start, start + 9_000_000)  # a kind that the timer did not enable
        return ()

    reading = timer(call, 4, "jax")
    assert reading.ms == pytest.approx(2.25)
    assert reading.kernels == pytest.approx({"[memset]": 0.5, "attention": 1.5, "[copy]": 0.75})
    assert reading.launches == 3
    assert timer._lent == {}
    with timer.paused():
        assert cupti.enabled == []
    assert cupti.enabled == [10, 2, 1, 22]
    timer.close()
    assert cupti.enabled == []


def test_profile_reads_the_first_gpu():
    """Sends that overlap with a kernel are counted separately from sends alone."""
    cupti = FakeCupti()
    timer = device_activity.DeviceActivity(cupti)

    def work():
        for step in range(2):
            start = step * 10_000_000
            cupti.add(10, start, start + 4_000_000, b"matmul_1")
            cupti.add(10, start + 3_000_000, start + 6_000_000, b"ncclDevKernel_AllReduce")
            cupti.add(10, start + 5_000_000, start + 5_500_000, b"matmul.12")
            cupti.add(10, start, start + 9_000_000, b"matmul_1", device=1)
            cupti.add(1, start, start + 9_000_000)

    found = timer.profile(work, 2)
    assert found["kernels"] == [
        {"name": "matmul", "ms": 4.5, "launches": 2},
        {"name": "ncclDevKernel_AllReduce", "ms": 3, "launches": 1},
    ]
    assert {name: x for name, x in found.items() if name != "kernels"} == {
        "span": 8, "busy": 6, "sends": 3, "sends_alone": 1.5,
    }  # fmt: skip
    assert device_activity.profile([], 2)["kernels"] == []


def test_timeline_has_all_gpus_and_copies():
    cupti = FakeCupti()
    timer = device_activity.DeviceActivity(cupti)

    def work():
        cupti.add(10, 7_000, 9_000, b"matmul", device=1)
        cupti.add(22, 5_000, 8_000, device=1)
        cupti.add(2, 5_500, 5_600)

    assert device_activity.timeline(timer.of(work)) == [
        {"device": 1, "name": "[copy between GPUs]", "start": 0, "end": 3},
        {"device": 0, "name": "[memset]", "start": 0.5, "end": 0.6},
        {"device": 1, "name": "matmul", "start": 2, "end": 4},
    ]
    assert device_activity.timeline([]) == []


def test_cupti_failure_is_reported():
    cupti = FakeCupti()
    timer = device_activity.DeviceActivity(cupti)
    with pytest.raises(RuntimeError, match="CUPTI saw no device activity"):
        timer(lambda index: (), 3, "jax")
    with pytest.raises(RuntimeError, match="had not finished"):
        timer(lambda index: cupti.add(10, 5, 0, b"late") or (), 3, "jax")
    cupti.dropped = 2
    with pytest.raises(RuntimeError, match="dropped 2 records"):
        timer(lambda index: cupti.add(10, 5, 6, b"k") or (), 3, "jax")
    broken = FakeCupti()
    broken.result = 15
    with pytest.raises(RuntimeError, match=r"cuptiActivityRegisterCallbacks: CUPTI_ERROR_NOT_INITIALIZED \(15\)"):
        device_activity.DeviceActivity(broken)


def test_each_attempt_has_a_status():
    """Unavailable and failed are different statuses. Neither ends the run. A started contender has a call."""

    def ended(action):
        contender = timing.Contender("x", "jax")
        with contender.attempt():
            action(contender)
        return contender.status, contender.reason, contender.call, contender.plan

    def fail(error):
        def act(contender):
            contender.call = id
            raise error

        return act

    assert ended(fail(NotImplementedError("no such\nkernel"))) == ("unavailable", "no such", None, "")
    assert ended(fail(ImportError("no"))) == ("failed", "ImportError: no", None, "")
    calls = []
    status, _, call, plan = ended(lambda contender: contender.start(calls.append, "blocks"))
    assert (status, plan, calls) == ("ok", "blocks", [0])
    assert call is not None
    with pytest.raises(KeyboardInterrupt):
        ended(fail(KeyboardInterrupt()))


def test_slow_rates_have_digits():
    assert [report.figure(x) for x in (719.6, 99.96, 4.253, 0.00123)] == ["720", "100", "4.25", "0.00123"]


def test_exit_status():
    assert report.exit_status(["ok", "unavailable"]) == 0
    for status in ("failed", "wrong", "skipped"):
        assert report.exit_status(["ok", status, "ok"]) == 1


def test_busy_time_is_a_union_of_intervals():
    assert device_activity.busy([(0, 10), (2, 5), (8, 12), (20, 25)]) == 17
    assert device_activity.busy([]) == 0
