"""Writes the README's table of speeds from checked-in results.

    PYTHONPATH=. python benchmarks/readme_table.py           # replaces the table in README.md
    PYTHONPATH=. python benchmarks/readme_table.py --check   # exit status 1 if the README has another table

`make report` runs it, and benchmarks/picture.py. Ratios are of the medians of one run; for attention, the median of the
ratios of its turns, which the results have.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = "benchmarks/results"
HEADING = "| call | shape | measured | speed | |"

type Values = dict[str, float | str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """A row of the table.

    call, shape: its first cells. measured, speed: formats of the next two, with the names of values. file: of the
    results. values(rows of the file): the values by name.
    """

    call: str
    shape: str
    measured: str
    speed: str
    file: str
    values: Callable[[Sequence[dict[str, Any]]], Values]

    def markdown(self) -> str:
        """The row as a line of the README."""
        rows = _rows(self.file)
        values = self.values(rows)
        measured, speed = (text.format(**values) for text in (self.measured, self.speed))
        cells = (self.call, self.shape, measured, speed, f"[results]({RESULTS}/{self.file})")
        return "".join(f"| {cell} " if cell else "| " for cell in cells) + "|"


@functools.cache
def _rows(file: str) -> list[dict[str, Any]]:
    return json.loads((ROOT / RESULTS / file).read_text())["rows"]


def one(rows: Sequence[dict[str, Any]], /, **wanted: Any) -> dict[str, Any]:
    """The only row with these values. Raises ValueError if there is none, or more than one."""
    found = [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]
    if len(found) != 1:
        raise ValueError(f"got {len(found)} rows with {wanted}, want one")
    return found[0]


PEERS = {"fa4": "FlashAttention-4's", "torch-cudnn": "cuDNN's"}


def attention(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> Values:
    """TFLOP/s of rows of the table of attention, and their speed over the faster peer, which is named."""
    found = [one(rows, name=name) for name in names]
    speeds = [
        f"{'; '.join(f'{row["ratio"]:.2f}' for row in of_peer)} times {PEERS[peer]}"
        for peer, of_peer in itertools.groupby(found, key=lambda row: row["best_peer"])
    ]
    rates = "; ".join(f"{row['contenders']['ours']['tflops']:.0f}" for row in found)
    return {"rates": rates, "speed": ", ".join(speeds)}


def sparse(rows: Sequence[dict[str, Any]]) -> Values:
    """The forward under the sparsest random blocks: ms, its speed over dense, and FlexAttention's."""
    block = [row for row in rows if row["pattern"] == "block" and row["mode"] == "fwd"]
    least = min(row["live_blocks"] for row in block)
    ours, flex = (one(block, live_blocks=least, contender=name) for name in ("prepared-mask", "torch-flex"))
    return {
        "live": least,
        "ms": ours["median_ms"],
        "over_dense": ours["faster_than_dense_by"],
        "flex_over_dense": flex["faster_than_dense_by"],
        "ratio": flex["median_ms"] / ours["median_ms"],
    }


def dilated(rows: Sequence[dict[str, Any]]) -> Values:
    """The forward's ms, and its speed over dense causal attention."""
    case = "1x32768 16x128 bf16 causal fwd"
    ours, dense = (one(rows, case=case, contender=name)["median_ms"] for name in ("ours", "dense"))
    return {"ms": ours, "ratio": dense / ours}


def decode(rows: Sequence[dict[str, Any]]) -> Values:
    """TB/s of a contiguous cache, and its ratio to cuDNN's."""
    of_case = [row for row in rows if row["shape"] == [64, 1, 32, 128, 8] and row["kv_length"] == 16384]
    ours, cudnn = (
        next(row["terabytes_per_second"] for row in of_case if row["contender"] == name)
        for name in ("mosaic_gpu", "cudnn")
    )
    return {"tb": ours, "ratio": ours / cudnn}


def ring(rows: Sequence[dict[str, Any]], devices: int, mode: str) -> Values:
    """TFLOP/s a GPU, and the speed over the faster form of PyTorch's context_parallel."""
    case = {"devices": devices, "tokens": 65536, "causal": True, "mode": mode}
    names = ("ring", "torch alltoall", "torch allgather")
    ours, *torch = (one(rows, **case, contender=name)["tflops"] for name in names)
    return {"tflops": ours, "ratio": ours / max(torch)}


def fp8(rows: Sequence[dict[str, Any]]) -> Values:
    """The speed of full attention in 8 bits over bf16."""
    return {"ratio": one(rows, shape=[2, 8192, 8, 256], causal=False)["speed_ratio"]}


def contenders(rows: Sequence[dict[str, Any]], /, **case: Any) -> dict[str, dict[str, Any]]:
    """The contenders of a case by name."""
    return {contender["name"]: contender for contender in one(rows, **case)["contenders"]}


def layer_norm(rows: Sequence[dict[str, Any]]) -> Values:
    """TB/s of the backward, over the rate of a copy of x, and over QuACK's."""
    size = {"rows": 32768, "columns": 4096}
    found = contenders(rows, op="layer_norm", mode="bwd", **size)
    ours, copied = found["mosaic_gpu"], 2 * 2 * size["rows"] * size["columns"] / found["copy"]["median_ms"] / 1e9
    return {
        "tb": ours["gigabytes_per_second"] / 1e3,
        "copy": ours["gigabytes_per_second"] / 1e3 / copied,
        "quack": found["quack"]["median_ms"] / ours["median_ms"],
    }


def matmul(rows: Sequence[dict[str, Any]], ours: str, **case: Any) -> Values:
    """TFLOP/s, and the speed over each other contender, named without dots and a leading underscore."""
    found = contenders(rows, **case)
    ms = found[ours]["median_ms"]
    ratios = {name.strip("_").replace(".", "_"): x["median_ms"] / ms for name, x in found.items()}
    return {"tflops": found[ours]["tflops"]} | ratios


def training(rows: Sequence[dict[str, Any]]) -> Values:
    """MFU, and tokens/s over Hugging Face's Llama."""
    ours, llama = (one(rows, contender=name) for name in ("products", "llama"))
    return {"mfu": ours["mfu"], "ratio": ours["tokens_per_s"] / llama["tokens_per_s"]}


def attention_line(call: str, shape: str, *names: str) -> Line:
    """A line of attention-table-h200.json. names: of its rows, each of which gives a rate and a ratio."""
    return Line(
        call=call,
        shape=shape,
        measured="{rates} TFLOP/s",
        speed="{speed}",
        file="attention-table-h200.json",
        values=functools.partial(attention, names=names),
    )


_SHAPE = "2 x 8192 tokens, 16 heads of 128"
_CASES = ("64", "128", "192/128", "256")
_HEADS = "2 x 8192 tokens, 32 heads of 64; 16 of 128; 16 of 192, values of 128; 8 of 256"
_CONTEXT = "{ratio:.2f} times PyTorch's `context_parallel`"
LINES = (
    attention_line("forward; backward", _SHAPE, "128 full fwd", "128 full bwd"),
    attention_line("causal forward, by head_dim", _HEADS, *(f"{case} causal fwd" for case in _CASES)),
    attention_line("causal backward, by head_dim", "the same", *(f"{case} causal bwd" for case in _CASES)),
    attention_line("8 causal documents, forward; backward", _SHAPE, "8 documents causal fwd", "8 documents causal bwd"),
    attention_line(
        "grouped heads, causal forward; backward",
        "2 x 4096 tokens, 32 heads of 128, 8 kv heads",
        "GQA 32/8, 4096 causal fwd",
        "GQA 32/8, 4096 causal bwd",
    ),
    Line(
        call="forward with a mask that keeps 0.09 of the blocks",
        shape=_SHAPE,
        measured="",
        speed="{over_dense:.2f} times the speed without a mask; FlexAttention: {flex_over_dense:.2f}",
        file="sparse-h200.json",
        values=sparse,
    ),
    Line(
        call="the same by the Triton kernels of other GPUs, 0.11 of the blocks, on one H100",
        shape="the same",
        measured="{ms:.3f} ms",
        speed="{ratio:.2f} times FlexAttention's",
        file="sparse-triton-h100.json",
        values=sparse,
    ),
    Line(
        call="dilated attention, forward",
        shape="32,768 causal tokens, 16 heads of 128",
        measured="{ms:.2f} ms",
        speed="{ratio:.1f} times dense causal attention's",
        file="dilated-h200.json",
        values=dilated,
    ),
    Line(
        call="decoding",
        shape="64 sequences, 16,384 keys each",
        measured="{tb:.1f} TB/s",
        speed="{ratio:.2f} times cuDNN's",
        file="decode-h200.json",
        values=decode,
    ),
    Line(
        call="ring attention, causal forward, on two H200s",
        shape="65,536 tokens, 16 heads of 128",
        measured="{tflops:.0f} TFLOP/s each, by the wall clock",
        speed=_CONTEXT,
        file="ring-h200-x2.json",
        values=functools.partial(ring, devices=2, mode="fwd"),
    ),
    Line(
        call="the same, forward + backward, on four H100s",
        shape="65,536 tokens",
        measured="{tflops:.0f} TFLOP/s each, by the wall clock",
        speed=_CONTEXT,
        file="ring-h100-x4.json",
        values=functools.partial(ring, devices=4, mode="fwdbwd"),
    ),
    Line(
        call="forward in 8 bits",
        shape="2 x 8192 tokens, 8 heads of 256",
        measured="",
        speed="{ratio:.2f} times bf16's",
        file="fp8-h200.json",
        values=fp8,
    ),
    Line(
        call="layer norm, backward",
        shape="32,768 rows of 4096",
        measured="{tb:.1f} TB/s",
        speed="{copy:.2f} times a copy's, {quack:.2f} times QuACK's",
        file="normalization-peers-h200.json",
        values=layer_norm,
    ),
    Line(
        call="matmul with bias and gelu",
        shape="16384 x 4096 x 4096",
        measured="{tflops:.0f} TFLOP/s",
        speed="{torch_compile:.2f} times `torch.compile`'s, {quack:.2f} times QuACK's",
        file="matmul-wide-h200.json",
        values=functools.partial(matmul, ours="row", kind="epilogue", m=16384, n=4096, k=4096),
    ),
    Line(
        call="gated unit, `silu(x Wg) * (x Wu)`",
        shape="8192 x 4096 to 2 x 14336",
        measured="{tflops:.0f} TFLOP/s",
        speed="{torch_compile:.2f} times `torch.compile`'s, {quack:.2f} times QuACK's",
        file="matmul-gated-quack-h200.json",
        values=functools.partial(matmul, ours="mosaic_gpu", kind="gated", m=8192, n=14336, k=4096),
    ),
    Line(
        call="matmul in 8 bits",
        shape="4096 x 4096 x 4096",
        measured="{tflops:.0f} TFLOP/s",
        speed="{scaled_mm:.2f} times `torch._scaled_mm`'s",
        file="matmul-fp8-tensor-h200.json",
        values=functools.partial(matmul, ours="mosaic_gpu", kind="plain", m=4096, n=4096, k=4096, scaling="tensor"),
    ),
    Line(
        call="training step of 1.0 billion parameters",
        shape="2 x 8192 tokens",
        measured="MFU {mfu:.3f}, by the wall clock",
        speed="{ratio:.2f} times Hugging Face's Llama with SDPA",
        file="train-h200.json",
        values=training,
    ),
)


def table() -> str:
    """The table of the README, without a line break at the end."""
    return "\n".join((HEADING, "|---|---|---|---|---|", *(line.markdown() for line in LINES)))


def with_table(readme: str) -> str:
    """The README's text with the table of today's results. Raises ValueError if it has no such table."""
    before, found, after = readme.partition(f"{HEADING}\n")
    if not found:
        raise ValueError(f"README.md: got no table with the heading {HEADING}")
    _, rest = after.split("\n\n", 1)
    return f"{before}{table()}\n\n{rest}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readme", type=pathlib.Path, default=ROOT / "README.md")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if the table differs")
    args = parser.parse_args(argv)
    text = args.readme.read_text()
    new = with_table(text)
    if args.check:
        return int(new != text)
    args.readme.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
