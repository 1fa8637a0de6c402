"""Runs the PTX of a kernel on the CPU: up to two warpgroups, with mma.sync and cp.async, without clusters.

JAX's interpreter runs the operations of a kernel on whole tiles. It sees neither the addresses of copies, nor the
registers of an mma, nor the barriers between warps. This interpreter runs the instructions that ptxas gets. It raises
an AssertionError

    for an access outside the arrays in device memory,
    for a read of shared memory that a copy in flight may still write,
    if two warps access the same byte of shared memory without a barrier in between, and one of them writes.
"""

import collections
import re
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

THREADS, WARPS = 256, 8  # at most
_THREAD = np.arange(THREADS)
_WARP, _LANE = np.divmod(_THREAD, 32)
_GROUP, _PAIR = np.divmod(_LANE, 4)  # a thread's row and pair of columns in an 8 x 8 matrix
_SHARED_BYTES = 1 << 18
_DTYPES: dict[str, Any] = {
    "b16": np.uint16, "u16": np.uint16, "s16": np.int16, "b32": np.uint32, "u32": np.uint32, "s32": np.int32,
    "b64": np.uint64, "u64": np.uint64, "s64": np.int64, "f32": np.float32, "pred": np.uint8,
}  # fmt: skip
_REGISTER = re.compile(r"%\w+|0f\w+")
_HALVES: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
_COMPARISONS = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip
_FUNCTIONS = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "min": np.minimum, "max": np.maximum, "neg": np.negative,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert, "shl": np.left_shift,
    "shr": np.right_shift, "ex2": np.exp2, "lg2": np.log2, "rcp": np.reciprocal, "rem": np.remainder,
    "cvta": lambda a: a,
    "mad": lambda a, b, c: a * b + c,
    "fma": lambda a, b, c: (a.astype(np.float64) * b + c).astype(np.float32),
    "bfe": lambda a, first, count: (a >> first) & ((1 << count) - 1),
}  # fmt: skip


class Kernel:
    """A kernel, parsed from PTX. opcodes: the number of instructions by opcode. exists: which threads a CTA has."""

    def __init__(self, text: str):
        text = re.sub(r"//.*", "", text)
        threads = re.search(r"\.(?:max|req)ntid (\d+)", text)
        assert threads, "no number of threads"
        self.exists = np.arange(THREADS) < int(threads[1])
        body = text[text.index("\n{") + 2 : text.index("\n}")]
        self.instructions: list[tuple[str, list[str], list[str]]] = []  # guard, parts of the opcode, operands
        self.labels: dict[str, int] = {}
        body = re.sub(r"^\s*\..*$", "", body, flags=re.MULTILINE)
        for statement in re.findall(r"\$\w+:|[^;:]+(?:::[^;:]+)*;", body):
            if statement.endswith(":"):
                self.labels[statement[:-1]] = len(self.instructions)
                continue
            found = re.fullmatch(r"\s*(?:@(!?%p\d+)\s+)?([\w.:]+)\s*(.*);", statement, re.DOTALL)
            assert found, statement
            operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", found[3])
            self.instructions.append((found[1] or "", found[2].replace("::", ".").split("."), operands))
        self.opcodes = collections.Counter(".".join(opcode) for _, opcode, _ in self.instructions)

    def run(self, arrays: Sequence[np.ndarray], ctas: int) -> None:
        """Runs all CTAs. arrays: the arrays of the kernel's parameters, C-contiguous. It writes the results' arrays."""
        flat = [x.reshape(-1).view(np.uint8) for x in arrays]
        ends = np.cumsum([x.size for x in flat])
        gmem = np.concatenate(flat)
        for cta in range(ctas):
            _Cta(self, gmem, ends, cta).run()
        for x, part in zip(flat, np.split(gmem, ends[:-1]), strict=True):
            x[:] = part


class _Cta:
    """A CTA. gmem: the bytes of all arrays. ends: of each array in gmem."""

    def __init__(self, kernel: Kernel, gmem: np.ndarray, ends: np.ndarray, cta: int):
        self.kernel, self.gmem, self.ends, self.cta = kernel, gmem, ends, cta
        self.registers: dict[str, np.ndarray] = {}
        self.smem = np.full(_SHARED_BYTES, 0xFF, np.uint8)  # NaNs
        # For each byte: the warp that wrote it since the last barrier, whether each warp read it, copies in flight.
        self.writer = np.full(_SHARED_BYTES, -1, np.int8)
        self.readers = np.zeros((WARPS, _SHARED_BYTES), bool)
        self.in_flight = np.zeros(_SHARED_BYTES, np.int8)
        # Groups of copies by warp; the last group of each is not committed.
        self.groups: list[list[list[tuple]]] = [[[]] for _ in range(WARPS)]
        self.waiting = np.zeros(THREADS, bool)  # at a barrier
        self.active = np.ones(THREADS, bool)

    def run(self) -> None:
        """Runs the threads at the earliest instruction, until all threads have ended."""
        count = len(self.kernel.instructions)
        counter = np.where(self.kernel.exists, 0, count)
        while (counter < count).any():
            now = counter[~self.waiting].min()
            assert now < count, "threads end while others wait at a barrier"
            guard, (name, *parts), operands = self.kernel.instructions[now]
            self.active = (counter == now) & ~self.waiting
            counter[self.active] += 1
            if guard:
                self.active &= (self.registers[guard.lstrip("!")] != 0) != guard.startswith("!")
            if name == "ret":
                counter[self.active] = count
            elif name == "bra":
                counter[self.active] = self.kernel.labels[operands[0]]
            else:
                with np.errstate(all="ignore"):
                    special = getattr(self, f"_{name}", None)
                    special(parts, operands) if special else self._compute(name, parts, operands)

    def read(self, operand: str, dtype: Any) -> np.ndarray:
        """The operand of each thread."""
        if operand in self.registers:
            return self.registers[operand].astype(f"u{np.dtype(dtype).itemsize}").view(dtype)
        special = {"%tid.x": _THREAD, "%ctaid.x": self.cta, "__dynamic_shmem__0": 0}
        if operand in special:
            return np.broadcast_to(special[operand], THREADS).astype(dtype)
        if operand.startswith("0f"):
            return np.full(THREADS, int(operand[2:], 16), np.uint32).view(dtype)
        return np.full(THREADS, int(operand, 0)).astype(dtype)

    def write(self, operand: str, values: np.ndarray) -> None:
        bits = np.ascontiguousarray(values)
        bits = bits.view(f"u{bits.dtype.itemsize}").astype(np.uint64)
        register = self.registers.setdefault(operand, np.zeros(THREADS, np.uint64))
        register[self.active] = bits[self.active]

    def _mov(self, parts: list[str], operands: list[str]) -> None:
        """Also joins two 32-bit registers, or splits a 64-bit register into two."""
        target, source = operands
        if target.startswith("{"):
            halves = self.read(source, np.uint64)[:, None].view(np.uint32)
            for i, name in enumerate(_REGISTER.findall(target)):
                self.write(name, halves[:, i])
        elif source.startswith("{"):
            halves = np.stack([self.read(name, np.uint32) for name in _REGISTER.findall(source)], axis=1)
            self.write(target, halves.view(np.uint64)[:, 0])
        else:
            self.write(target, self.read(source, _DTYPES[parts[-1]]))

    def _compute(self, name: str, parts: list[str], operands: list[str]) -> None:
        if parts[-1] == "f32x2":
            pairs = [self.read(operand, np.uint64)[:, None].view(np.float32) for operand in operands[1:]]
            self.write(operands[0], _FUNCTIONS[name](*pairs).view(np.uint64)[:, 0])
            return
        dtype = _DTYPES[parts[-1]]
        function = np.fmax if name == "max" and dtype == np.float32 and "NaN" not in parts else _FUNCTIONS[name]
        values = [self.read(operand, dtype) for operand in operands[1:]]
        if "wide" in parts:
            values = [x.astype(np.int64 if dtype == np.int32 else np.uint64) for x in values]
        self.write(operands[0], function(*values))

    def _setp(self, parts: list[str], operands: list[str]) -> None:
        a, b = (self.read(x, _DTYPES[parts[-1]]) for x in operands[1:])
        self.write(operands[0], _COMPARISONS[parts[0]](a, b).astype(np.uint8))

    def _selp(self, parts: list[str], operands: list[str]) -> None:
        a, b = (self.read(x, _DTYPES[parts[-1]]) for x in operands[1:3])
        self.write(operands[0], np.where(self.registers[operands[3]] != 0, a, b))

    def _cvt(self, parts: list[str], operands: list[str]) -> None:
        if parts[-2].endswith("x2"):  # the first operand becomes the upper half
            upper, lower = (self.read(x, np.float32).astype(_HALVES[parts[-2][:-2]]) for x in operands[1:])
            self.write(operands[0], np.stack([lower, upper], 1).view(np.uint32)[:, 0])
        else:
            self.write(operands[0], self.read(operands[1], _DTYPES[parts[-1]]).astype(_DTYPES[parts[-2]]))

    def _shfl(self, parts: list[str], operands: list[str]) -> None:
        assert ".".join(parts[:2]) in ("sync.bfly", "sync.idx")
        self.active_warps()
        lane = _LANE ^ int(operands[2]) if parts[1] == "bfly" else int(operands[2])
        self.write(operands[0], self.read(operands[1], np.uint32)[32 * _WARP + lane])

    def _fence(self, parts: list[str], operands: list[str]) -> None:
        """Nothing: all accesses of a CTA are in order."""

    def _elect(self, parts: list[str], operands: list[str]) -> None:
        lane, is_elected = operands[0].split("|")
        self.write(lane, np.zeros(THREADS, np.uint32))
        self.write(is_elected, (_LANE == 0).astype(np.uint8))

    def _bar(self, parts: list[str], operands: list[str]) -> None:
        assert parts == ["sync"]
        assert len(operands) == 1 or int(operands[1]) == self.kernel.exists.sum()
        self.waiting |= self.active
        if (self.waiting == self.kernel.exists).all():
            self.waiting[:] = False
            self.writer[:], self.readers[:] = -1, False

    def active_warps(self) -> list[int]:
        """The warps at this instruction, all of whose threads are at it."""
        warps = sorted(set(_WARP[self.active].tolist()))
        assert self.active.sum() == 32 * len(warps), "a warp diverges"
        return warps

    def address(self, operand: str) -> np.ndarray:
        base, _, offset = operand[1:-1].partition("+")
        return self.read(base, np.int64) + int(offset or 0)

    def bytes_of_gmem(self, address: np.ndarray, width: int, threads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(the bytes of all arrays, indices [threads, width]) of the accesses of some threads."""
        array, index = (address[threads] >> 40) - 1, (address[threads] & ((1 << 40) - 1))[:, None] + np.arange(width)
        index += (self.ends - np.diff(self.ends, prepend=0))[array][:, None]
        assert (index < self.ends[array][:, None]).all(), "access outside the arrays"
        assert not (address[threads] % width).any(), "unaligned access"
        return self.gmem, index

    def read_smem(self, address: np.ndarray, width: int) -> np.ndarray:
        """uint8 [threads, width], for all threads."""
        index = address[:, None] + np.arange(width)
        mine, warp = self.active, _WARP[self.active, None]
        assert not self.in_flight[index[mine]].any(), "read of a copy in flight"
        writer = self.writer[index[mine]]
        assert ((writer == -1) | (writer == warp)).all(), "read of another warp's value before a barrier"
        self.readers[warp, index[mine]] = True
        return self.smem[index]

    def mark_written(self, index: np.ndarray, warp: np.ndarray) -> None:
        """Records that warps write bytes of shared memory. index: [n, width]. warp: [n]."""
        writer = self.writer[index]
        assert ((writer == -1) | (writer == warp[:, None])).all(), "two warps write the same bytes"
        others = self.readers[:, index] & (np.arange(WARPS)[:, None, None] != warp[:, None])
        assert not others.any(), "write of bytes that another warp reads"
        self.writer[index] = warp[:, None]

    def _ld(self, parts: list[str], operands: list[str]) -> None:
        if parts[0] == "param":
            number = int(re.search(r"param_(\d+)\]", operands[1])[1])
            self.write(operands[0], np.full(THREADS, (number + 1) << 40, np.uint64))
            return
        targets = _REGISTER.findall(operands[0])
        width, address = _width(parts), self.address(operands[1])
        if parts[0] == "shared":
            values = self.read_smem(np.where(self.active, address, 0), width * len(targets))
        else:
            array, index = self.bytes_of_gmem(address, width * len(targets), self.active)
            values = np.zeros((THREADS, width * len(targets)), np.uint8)
            values[self.active] = array[index]
        for i, target in enumerate(targets):
            part = np.ascontiguousarray(values[:, i * width : (i + 1) * width])
            self.write(target, part.view(_DTYPES[parts[-1]])[:, 0])

    def _st(self, parts: list[str], operands: list[str]) -> None:
        if not self.active.any():
            return
        sources = _REGISTER.findall(operands[1])
        values = [self.read(x, _DTYPES[parts[-1]])[:, None].view(np.uint8) for x in sources]
        given, mine = np.concatenate(values, axis=1), self.active
        if parts[0] == "shared":
            index = self.address(operands[0])[mine, None] + np.arange(given.shape[1])
            assert not self.in_flight[index].any(), "write of a copy in flight"
            self.mark_written(index, _WARP[mine])
            self.smem[index] = given[mine]
        else:
            array, index = self.bytes_of_gmem(self.address(operands[0]), given.shape[1], mine)
            array[index] = given[mine]

    def _cp(self, parts: list[str], operands: list[str]) -> None:
        assert parts[0] == "async"
        mine = self.active
        if parts[1] == "commit_group":
            for warp in self.active_warps():
                self.groups[warp].append([])
        elif parts[1] == "wait_group":
            for warp in self.active_warps():
                while len(self.groups[warp]) - 1 > int(operands[0]):
                    for index, values in self.groups[warp].pop(0):
                        self.in_flight[index] -= 1
                        self.mark_written(index, np.full(len(index), warp))
                        self.smem[index] = values
        else:
            width, size = int(operands[2]), self.read(operands[3] if len(operands) > 3 else operands[2], np.int64)
            index, values = self.address(operands[0])[:, None] + np.arange(width), np.zeros((THREADS, width), np.uint8)
            assert np.isin(size, [0, width]).all()
            assert not (index[:, 0] % width).any()
            if (loads := mine & (size > 0)).any():
                array, source = self.bytes_of_gmem(self.address(operands[1]), width, loads)
                values[loads] = array[source]
            for warp in set(_WARP[mine].tolist()):
                of_warp = mine & (warp == _WARP)
                self.mark_written(index[of_warp], _WARP[of_warp])
                self.in_flight[index[of_warp]] += 1
                self.groups[warp][-1].append((index[of_warp], values[of_warp]))

    def _ldmatrix(self, parts: list[str], operands: list[str]) -> None:
        self.active_warps()
        assert "m8n8" in parts
        targets = _REGISTER.findall(operands[0])
        assert len(targets) == 4  # each group of 8 threads has the addresses of the rows of one matrix
        rows = self.read_smem(self.address(operands[1]), 16).view(np.uint16).reshape(WARPS, 4, 8, 8)
        for i, target in enumerate(targets):
            matrix = rows[:, i].swapaxes(1, 2) if "trans" in parts else rows[:, i]
            pair = np.stack([matrix[_WARP, _GROUP, 2 * _PAIR + element] for element in range(2)], axis=1)
            self.write(target, pair.view(np.uint32)[:, 0])

    def _stmatrix(self, parts: list[str], operands: list[str]) -> None:
        self.active_warps()
        assert "m8n8" in parts
        assert "trans" not in parts
        sources = _REGISTER.findall(operands[1])
        rows = np.zeros((WARPS, len(sources), 8, 8), np.uint16)
        for i, source in enumerate(sources):
            for element in range(2):
                halves = self.read(source, np.uint32)[:, None].view(np.uint16)
                rows[_WARP, i, _GROUP, 2 * _PAIR + element] = halves[:, element]
        has_row = self.active & (len(sources) * 8 > _LANE)
        index = self.address(operands[0])[has_row, None] + np.arange(16)
        assert not self.in_flight[index].any(), "write of a copy in flight"
        self.mark_written(index, _WARP[has_row])
        of_thread = has_row[len(sources) * 8 > _LANE]
        self.smem[index] = rows.reshape(-1, 8).view(np.uint8)[of_thread]

    def _mma(self, parts: list[str], operands: list[str]) -> None:
        assert parts[:5] == ["sync", "aligned", "m16n8k16", "row", "col"]
        self.active_warps()
        names = [_REGISTER.findall(operand) for operand in operands]
        half = _HALVES[parts[6]]
        halves = lambda name: self.read(name, np.uint32)[:, None].view(half).astype(np.float32)  # [threads, 2]
        a, b = np.zeros((WARPS, 16, 16), np.float32), np.zeros((WARPS, 16, 8), np.float32)
        acc = np.zeros((WARPS, 16, 8), np.float32)
        for i, name in enumerate(names[1]):
            for element in range(2):
                a[_WARP, _GROUP + 8 * (i % 2), 2 * _PAIR + element + 8 * (i // 2)] = halves(name)[:, element]
        for i, name in enumerate(names[2]):
            for element in range(2):
                b[_WARP, 2 * _PAIR + element + 8 * i, _GROUP] = halves(name)[:, element]
        for i, name in enumerate(names[3]):
            acc[_WARP, _GROUP + 8 * (i // 2), 2 * _PAIR + i % 2] = self.read(name, np.float32)
        acc = acc + a @ b
        for i, name in enumerate(names[0]):
            self.write(name, acc[_WARP, _GROUP + 8 * (i // 2), 2 * _PAIR + i % 2])


def _width(parts: list[str]) -> int:
    return np.dtype(_DTYPES[parts[-1]]).itemsize
