"""Single-line faults, drawn at random, and whether the nearest quick tests detect them.

    python tests/tools/mutate.py list                          # the 60 faults of seed 1 (SEED)
    python tests/tools/mutate.py run --out faults.json          # each in a copy of the tree, with its nearest tests
    python tests/tools/mutate.py table --out faults.json       # as Markdown, with the reasons of equivalents.json

A fault changes one expression: another comparison or operator, a constant that is off by one, a negated condition,
exchanged arguments or branches, a missing keyword argument or tuple entry.
`nearest` maps a file to tests. They run in turn until a test fails or the time is over. `equivalents.json` names the
faults that change no result, each with its reason; the table strikes them out. The indices of a seed are stable as long
as the library's files do not change.
"""

import argparse
import ast
import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
EQUIVALENTS = Path(__file__).parent / "equivalents.json"
SEED = 1
# Faults of each folder, roughly proportional to the square root of its size.
SHARES = {
    "jax_kernels/ops": 13,
    "jax_kernels/masks": 8,
    "pallas": 13,
    "jax_kernels/reference": 5,
    "bridge": 13,
    "models": 8,
}
# Files of figures alone, which change speed and no result.
LEFT_OUT = (
    "pallas/block_specs/",
    "bridge/ops/explain.py",
    "bridge/jax_functions/flops.py",
    "jax_kernels/masks/plots.py",
)

COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
OPERATORS = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//",
    ast.BitAnd: "|", ast.BitOr: "&", ast.LShift: ">>", ast.RShift: "<<",
}  # fmt: skip
OPPOSITES = {"min": "max", "minimum": "maximum", "any": "all", "zeros": "ones", "zeros_like": "ones_like"}
OPPOSITES |= {new: old for old, new in OPPOSITES.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """A change of one line. start, end: the bytes of the file that `new` replaces."""

    path: str
    line: int
    kind: str
    start: int
    end: int
    old: str
    new: str


class Source:
    """A file, its syntax tree, and the text of nodes."""

    def __init__(self, path: Path) -> None:
        self.path = str(path.relative_to(ROOT))
        self.bytes = path.read_bytes()
        self.tree = ast.parse(self.bytes)
        self.offsets = [0]
        for line in self.bytes.splitlines(keepends=True):
            self.offsets.append(self.offsets[-1] + len(line))

    def span(self, node) -> tuple[int, int]:
        return (
            self.offsets[node.lineno - 1] + node.col_offset,
            self.offsets[node.end_lineno - 1] + node.end_col_offset,
        )

    def text(self, node) -> str:
        start, end = self.span(node)
        return self.bytes[start:end].decode()

    def fault(self, node, kind: str, new: str) -> Fault:
        start, end = self.span(node)
        return Fault(path=self.path, line=node.lineno, kind=kind, start=start, end=end, old=self.text(node), new=new)


def computing(node) -> Iterator[ast.AST]:
    """The descendants of a node that compute: no annotations, texts, error messages, imports or lists of names."""
    if isinstance(node, ast.Raise | ast.Import | ast.ImportFrom | ast.JoinedStr | ast.Assert):
        return
    if isinstance(node, ast.Assign) and any(getattr(t, "id", "").startswith("__") for t in node.targets):
        return
    yield node
    left_out = []
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        left_out = [node.returns, *node.decorator_list]
    if isinstance(node, ast.arg | ast.AnnAssign):
        left_out = [node.annotation]
    if isinstance(node, ast.ClassDef):
        left_out = [*node.bases, *node.decorator_list]
    for child in ast.iter_child_nodes(node):
        if child not in left_out:
            yield from computing(child)


def faults_of_node(source: Source, node) -> Iterator[Fault]:
    text = source.text
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARISONS:
            yield source.fault(node, "comparison", f"{text(left)} {COMPARISONS[type(op)]} {text(right)}")
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            yield source.fault(node, "operator", f"({text(left)}) {OPERATORS[type(op)]} ({text(right)})")
        case ast.AugAssign(target=target, op=op, value=value) if type(op) in OPERATORS:
            yield source.fault(node, "operator", f"{text(target)} {OPERATORS[type(op)]}= {text(value)}")
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert(), operand=operand):
            yield source.fault(node, "drop sign", f"({text(operand)})")
        case ast.BoolOp(op=op, values=[first, second, *rest]):
            word = "or" if isinstance(op, ast.And) else "and"
            joined = f" {word} ".join(f"({text(x)})" for x in (first, second, *rest))
            yield source.fault(node, "and/or", f"({joined})")
            yield source.fault(node, "drop operand", f"({text(first if not rest else second)})")
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield source.fault(node, "swap branches", f"{text(orelse)} if {text(test)} else {text(body)}")
        case ast.If(test=test) | ast.While(test=test):
            yield source.fault(test, "negate condition", f"not ({text(test)})")
        case ast.Constant(value=bool() as value):
            yield source.fault(node, "constant", str(not value))
        case ast.Constant(value=int() as value):
            yield source.fault(node, "constant", str(value + 1))
        case ast.Constant(value=float() as value):
            yield source.fault(node, "constant", repr(2 * value or 1.0))
        case ast.Tuple(elts=[_, _, _, *_], ctx=ast.Load()):
            start, _ = source.span(node)
            _, end = source.span(node.elts[-2])
            closing = ")" if source.bytes[start : start + 1] == b"(" else ""
            new = source.bytes[start:end].decode() + closing
            yield source.fault(node, "drop entry", new)
        case ast.Expr(value=ast.Call()):
            yield source.fault(node, "drop statement", "pass")
        case ast.Name(id=name) | ast.Attribute(attr=name) if name in OPPOSITES:
            yield source.fault(node, "opposite", text(node)[: -len(name)] + OPPOSITES[name])
        case _:
            pass
    if isinstance(node, ast.Call):
        yield from faults_of_call(source, node)


def faults_of_call(source: Source, node: ast.Call) -> Iterator[Fault]:
    text = source.text
    arguments = [*node.args, *node.keywords]
    name = text(node.func)
    # Arguments that look alike. Other exchanges fail at once.
    if len(node.args) >= 2 and all(isinstance(x, ast.Name) for x in node.args[:2]):
        first, second, *rest = map(text, arguments)
        yield source.fault(node, "swap arguments", f"{name}({', '.join([second, first, *rest])})")
    for keyword in node.keywords:
        if keyword.arg is not None:
            rest = [text(x) for x in arguments if x is not keyword]
            fault = source.fault(node, "drop keyword", f"{name}({', '.join(rest)})")
            yield dataclasses.replace(fault, line=keyword.value.lineno)


def faults_of(path: Path) -> list[Fault]:
    """The faults of a file; some of them are not valid Python."""
    source = Source(path)
    return [fault for node in computing(source.tree) for fault in faults_of_node(source, node)]


def is_python(fault: Fault) -> bool:
    before = (ROOT / fault.path).read_bytes()
    try:
        ast.parse(before[: fault.start] + fault.new.encode() + before[fault.end :])
    except SyntaxError:
        return False
    return True


def draw(seed: int) -> list[Fault]:
    """The faults of a seed. Lines are drawn first, then one fault of each line, however many faults the line has."""
    generator = random.Random(seed)
    drawn = []
    for folder, count in SHARES.items():
        paths = sorted((ROOT / folder).rglob("*.py"))
        lines: dict[tuple[str, int], list[Fault]] = {}
        for path in paths:
            if not str(path.relative_to(ROOT)).startswith(LEFT_OUT):
                for fault in faults_of(path):
                    lines.setdefault((fault.path, fault.line), []).append(fault)
        keys = sorted(lines)
        generator.shuffle(keys)
        for key in keys[:count]:
            drawn.append(generator.choice([fault for fault in lines[key] if is_python(fault)]))
    generator.shuffle(drawn)
    return drawn


# The tests of files whose path has this prefix. The longest prefix comes first, then shorter ones.
NEAREST = json.loads((Path(__file__).parent / "nearest.json").read_text())


def nearest(path: str) -> list[str]:
    """The tests of a file, nearest first: in order of the length of the matching prefix."""
    beginnings = sorted((x for x in NEAREST if path.startswith(x)), key=len, reverse=True)
    tests = []
    for beginning in beginnings[:2]:
        tests += [test for test in NEAREST[beginning] if test not in tests]
    return tests


def copy_tree(folder: Path) -> Path:
    """A copy of the tree without its environment."""
    ignored = shutil.ignore_patterns(".git", ".venv*", "results", "__pycache__", ".*_cache")
    return Path(shutil.copytree(ROOT, folder / "tree", symlinks=True, ignore=ignored))


def run_fault(tree: Path, fault: Fault, seconds: float) -> dict:
    """Puts a fault in, runs the nearest tests, takes it out. Returns the table's row."""
    file = tree / fault.path
    before = file.read_bytes()
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    start = time.monotonic()
    result, by, log = "survived", "", ""
    try:
        file.write_bytes(before[: fault.start] + fault.new.encode() + before[fault.end :])
        for tests in nearest(fault.path):
            left = seconds - (time.monotonic() - start)
            if left < 1:
                result = "out of time"
                break
            command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider"]
            command += ["-m", "not slow and not gpu", "--tb=line", *tests.split()]
            try:
                ran = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=left)
            except subprocess.TimeoutExpired:
                result, by = "out of time", tests
                break
            if ran.returncode not in (0, 5):
                log = ran.stdout[-1500:] + ran.stderr[-500:]
                lines = [x for x in ran.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))]
                result, by = "caught", (lines or [tests])[0][:200]
                break
    finally:
        file.write_bytes(before)
    return {"result": result, "by": by, "seconds": round(time.monotonic() - start), "log": log}


def indices_of(texts: list[str]) -> list[int]:
    indices = []
    for text in texts:
        first, _, last = text.partition("-")
        indices += range(int(first), int(last or first) + 1)
    return indices


def run(options: argparse.Namespace) -> None:
    drawn = draw(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_tree(Path(folder))
        for index in indices_of(options.faults):
            fault = drawn[index]
            row = {"seed": options.seed, "index": index, **dataclasses.asdict(fault)}
            row |= run_fault(tree, fault, options.seconds)
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(index, fault.path, fault.line, row["result"], row["by"], row["seconds"], flush=True)


def table(options: argparse.Namespace) -> None:
    """The newest row of each fault; equivalents are struck out and not counted."""
    reasons = json.loads(EQUIVALENTS.read_text())
    rows = {}
    for line in options.out.read_text().splitlines():
        row = json.loads(line)
        rows[row["seed"], row["index"]] = row
    print("| fault | line | kind | was | put in | result |\n|---|---|---|---|---|---|")
    caught = counted = 0
    for (seed, index), row in sorted(rows.items()):
        reason = reasons.get(f"{seed}:{index}")
        counted += reason is None
        caught += reason is None and row["result"] == "caught"
        old, new = (f"`{' '.join(row[x].split())[:70]}`".replace("|", "\\|") for x in ("old", "new"))
        result = f"equivalent: {reason}" if reason else f"{row['result']} {row['by'].replace('FAILED ', '')[:100]}"
        print(f"| {seed}:{index} | {row['path']}:{row['line']} | {row['kind']} | {old} | {new} | {result} |")
    print(f"\n{caught} of {counted} caught; {len(rows) - counted} equivalent.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["list", "run", "table"])
    parser.add_argument("--faults", nargs="*", default=["0-59"], help="indices, such as 0-9 14")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--out", type=Path, default=Path("faults.json"), help="a JSON line for each fault that ran")
    parser.add_argument("--seconds", type=float, default=200.0, help="the time limit of a fault's tests")
    options = parser.parse_args()
    if options.action == "list":
        for index, fault in enumerate(draw(options.seed)):
            new = " ".join(fault.new.split())
            print(f"{index}: {fault.path}:{fault.line} [{fault.kind}] {' '.join(fault.old.split())} -> {new}")
    else:
        {"run": run, "table": table}[options.action](options)


if __name__ == "__main__":
    main()
