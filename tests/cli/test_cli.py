"""The jax-kernels command: info, check, explain, and its messages for wrong use."""

import ast
import itertools
import json
import sys
import types

import pytest
from rich.table import Column, Table

import jax_kernels
from jax_kernels import cli, dispatch
from jax_kernels.cli import check, info
from jax_kernels.cli.check import suites
from jax_kernels.cli.ops import OPS
from jax_kernels.cli.outputs import print_table
from jax_kernels.ops.attention.implementations import IMPLEMENTATIONS
from tests.support.processes.python import done_by

pytestmark = pytest.mark.usefixtures("no_interpret")


def assert_one_line(result, *words):
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.startswith("jax-kernels: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err


HELP = """
import sys
from jax_kernels import cli
try:
    cli.main(["--help"])
finally:
    print(sorted(sys.modules))
"""


def test_help_imports_no_op():
    """The commands' lines equal the first lines of their own help."""
    for name, module in {"info": info, "check": check}.items():
        assert cli.COMMANDS[name] == getattr(module, name).__doc__.splitlines()[0]
    done = done_by("-c", HELP)
    assert all(name in done.stdout for name in (*cli.COMMANDS, *cli.FLAX_COMMANDS))
    assert not {"jax", "jax_kernels.ops"} & set(ast.literal_eval(done.stdout.splitlines()[-1]))


@pytest.mark.triton
def test_info_for_a_named_gpu(run):
    code, out, err = run("info", "--device", "h200")
    assert (code, err) == (0, "")
    for text in ("NVIDIA H200", "Hopper", "9.0", "141 GB", "4800 GB/s, by the data sheet", "227 KiB", "bfloat16"):
        assert text in out
    assert out.count("\n") <= 40  # one screen
    ops = {words[0]: words[1:] for words in map(str.split, out.split("\n\n")[1].splitlines()) if words}
    assert ops["op"] == list(IMPLEMENTATIONS)
    assert ops["flash_attention"] == ["yes"] * len(IMPLEMENTATIONS)
    assert set(OPS) <= ops.keys()
    _, out, _ = run("info", "--device", "h200", "--reasons")
    rows = [[cell.strip() for cell in line.split("│")[1:4]] for line in out.splitlines() if line.startswith("│")]
    assert [row for row in rows if row[0] == "flash_attention"] == [
        ["flash_attention", name, "yes"] for name in IMPLEMENTATIONS
    ]
    assert {op for op, *_ in rows} == set(OPS)
    assert ["decode_attention", "mosaic_gpu", "yes"] in rows
    assert ["dynamic_mask_attention", "triton", "yes"] in rows


@pytest.mark.triton
def test_info_gives_the_reason_for_no_support(run):
    _, out, _ = run("info", "--device", "cpu")
    assert "jax-kernels info --reasons shows why" in out
    _, out, _ = run("info", "--device", "cpu", "--reasons")
    rows = [[cell.strip() for cell in line.split("│")[1:4]] for line in out.splitlines() if line.startswith("│")]
    assert len(rows) == sum(len(op.implementations) for op in OPS.values())
    for op, name, verdict in rows:
        of_op = op in ("flash_attention", "flash_attention_fp8", "decode_attention", "dilated_attention")
        reason = "no: it needs an NVIDIA GPU, and this runs on CPU" if of_op else "no: "
        assert verdict.startswith("yes" if name == "xla" else reason), (op, name)


def test_info_lists_every_op_and_implementation():
    assert set(OPS) == {name for name in dir(jax_kernels) if hasattr(getattr(jax_kernels, name), "plan")}
    for name, op in OPS.items():
        with pytest.raises(ValueError, match=r"^implementation: got .* for ") as raised, dispatch.on_device("h200"):
            op.plan("bfloat16", "nobody's")
        known = str(raised.value).partition("want one of ")[2]
        assert known == ", ".join(map(repr, op.implementations)), name


def test_info_json(run):
    code, out, _ = run("info", "--device", "Tesla T4", "--json")
    report = json.loads(out)
    assert code == 0
    assert (report["device"]["compute_capability"], report["device"]["optimal_dtype"]) == ([7, 5], "float16")
    assert report["ops"]["flash_attention"]["xla"] is None
    assert report["ops"]["flash_attention"]["mosaic_gpu"].startswith("it needs Hopper")
    assert report["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert report["versions"]["jax-kernels"]


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_narrow_and_dumb_terminals_cut_nothing_off(run, monkeypatch, capsys, term):
    for name, value in {"TERM": term, "COLUMNS": "40", "FORCE_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    print_table(Table(*(Column(f"column {i}", no_wrap=True) for i in range(30))))
    out, _ = capsys.readouterr()
    assert all(f"column {i}" in out for i in range(30))
    for words in (("info",), ("info", "--reasons")):
        code, out, _ = run(*words, "--device", "h200")
        assert code == 0
        assert "\N{HORIZONTAL ELLIPSIS}" not in out


SMI = """\
#!/bin/sh
echo "NVIDIA H200, 580.82.07, 140000, 143771"
echo "NVIDIA H200, 580.82.07, [N/A], 143771"
"""


def test_info_has_the_driver_and_the_gpus(run, tmp_path, monkeypatch):
    path = tmp_path / "nvidia-smi"
    path.write_text(SMI)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    _, out, _ = run("info")
    text = " ".join(out.split())
    for words in ("driver 580.82.07", "GPUs 2, JAX sees 0", "free memory 146.8 of 151, 0.0 of 151 GB, by nvidia-smi"):
        assert words in text
    report = json.loads(run("info", "--json")[1])
    assert [gpu["free_bytes"] for gpu in report["gpus"]] == [140000 << 20, 0]
    path.write_text("#!/bin/sh\nexit 9\n")  # a driver that does not answer
    assert "no NVIDIA driver" in run("info")[1]


def test_version(run):
    assert run("--version") == (0, f"jax-kernels {jax_kernels.__version__}\n", "")
    done = done_by("-m", "jax_kernels", "--version")
    assert done.stdout == f"jax-kernels {jax_kernels.__version__}\n"


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("jax-kernels ch", {"check"}),
        ("jax-kernels ge", {"generate"}),
        ("jax-kernels check --impl", {"--implementation"}),
        ("jax-kernels explain matmul --wo", set()),
        ("jax-kernels train --se", {"--seq-len", "--sequence-strategy", "--seed"}),
        ("jax-kernels eval --ch", {"--checkpoint"}),
    ],
)
def test_shells_complete_commands_and_options(run, monkeypatch, line, wanted):
    monkeypatch.setenv("_JAX_KERNELS_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))
    code, out, _ = run()
    assert (code, set(out.split())) == (0, wanted)


def test_info_without_a_package(monkeypatch):
    monkeypatch.setattr(info, "PACKAGES", ("numpy", "a-package-that-nobody-has"))
    versions = info.versions()
    assert versions["a-package-that-nobody-has"] is None
    assert versions["numpy"]


@pytest.mark.triton
def test_explain(run):
    code, out, _ = run("explain", "attention", "--shape", "1,4096,16,128", "--return-lse", "--device", "a100")
    assert code == 0
    first, device, blocks, *others = out.splitlines()
    order = "triton, cudnn, xla; sm_80's order, not measured"
    assert first == f"flash_attention: triton (first in this GPU's order that serves the call: {order})"
    assert device == "  device: NVIDIA A100-SXM4-80GB"
    assert "AttentionForwardTriton(" in blocks
    assert blocks.endswith("from sm_80's rows, not measured on sm_80, only on NVIDIA H200")
    assert others == [
        "  not mosaic_gpu: it needs Hopper (compute capability 9.0), and NVIDIA A100-SXM4-80GB is Ampere",
        "  not cudnn: it comes after triton in the order",
        "  not xla: it comes after triton in the order",
    ]
    _, out, _ = run("explain", "attention", "--shape", "1,4096,16,128", "--return-lse", "--device", "b200")
    assert out.splitlines()[3] == "  not cudnn: its backward takes no gradient of the log-sum-exp"
    assert "fastest" not in out


@pytest.mark.parametrize(
    ("options", "implementation"),
    [
        ("--device h200 --causal", "mosaic_gpu"),
        pytest.param("--device h200 --dtype fp32 --precision tf32", "triton", marks=pytest.mark.triton),
        ("--device h200 --deterministic", "mosaic_gpu"),
        ("--device h200 --no-deterministic", "mosaic_gpu"),
        pytest.param("--device a100 --mask 1,1,4096,4096", "triton", marks=pytest.mark.triton),
        ("--device b200 --kv-lengths --kv-shape 2,512,4,64", "cudnn"),
        pytest.param("--device a100 --q-offset 7", "triton", marks=pytest.mark.triton),
        pytest.param("--device a100 --v-head-dim 32", "triton", marks=pytest.mark.triton),
        ("--device h200 --implementation xla", "xla"),
        ("--device cpu", "xla"),
    ],
)
def test_explain_takes_op_arguments(run, options, implementation):
    code, out, err = run("explain", "attention", "--shape", "2,4096,16,64", "--json", *options.split())
    assert (code, err) == (0, "")
    assert json.loads(out)["implementation"] == implementation


@pytest.mark.parametrize("op", ["matmul", "gated_matmul"])
@pytest.mark.parametrize("options", ["", "--precision fp8", "--precision fp8 --scaling row", "--dtype float8_e4m3fn"])
def test_explain_matmuls(run, op, options):
    arguments = ("explain", op, "--shape", "1024,4096", "--columns", "4096", *options.split(), "--device")
    code, out, err = run(*arguments, "h200", "--implementation", "mosaic_gpu")
    assert (code, err) == (0, "")
    assert out.startswith(f"{op}: mosaic_gpu (asked for by name)\n  device: NVIDIA H200\n  blocks: ")
    if options:
        message = "precision: got 8 bits on NVIDIA A100-SXM4-80GB, which has no 8-bit matmuls, want an Ada"
        assert_one_line(run(*arguments, "a100"), message)


@pytest.mark.parametrize(
    ("arguments", "first_line"),
    [
        ("flash_attention --shape 2,4096,16,64", "flash_attention: mosaic_gpu"),
        ("--shape 2,4096,16,64", "flash_attention: mosaic_gpu"),
        ("flash_attention_fp8 --shape 2,4096,16,64 --causal --kv-lengths", "flash_attention_fp8: mosaic_gpu"),
        ("decode_attention --shape 2,1,16,64 --kv-shape 2,4096,4,64 --window 256,0", "decode_attention: mosaic_gpu"),
        pytest.param(
            "decode_attention --shape 2,1,16,64 --kv-shape 2,4095,4,64",
            "decode_attention: triton",
            marks=pytest.mark.triton,
        ),
        ("decode_attention --shape 2,1,16,64 --kv-shape 99,64,4,64 --pages 8", "decode_attention: mosaic_gpu"),
        (
            "dilated_attention --shape 2,4096,16,64 --segment-lengths 1024,4096 --dilation-rates 1,4 --causal",
            "dilated_attention: mosaic_gpu",
        ),
        pytest.param(
            "dilated_attention --shape 2,4096,16,64 --segment-lengths 1024 --dilation-rates 2 --dtype fp32",
            "dilated_attention: triton",
            marks=pytest.mark.triton,
        ),
        ("dynamic_mask_attention --shape 2,4096,16,64 --mask 1,1,4096,4096", "flash_attention: mosaic_gpu"),
        (
            "dynamic_mask_attention --shape 2,512,16,64 --kv-shape 2,512,4,64 --mask 2,4,512,512 --bias 2,4,1,512",
            "flash_attention: mosaic_gpu",
        ),
        ("ring_attention --shape 1,4096,16,128 --devices 8 --causal", "ring_attention: mosaic_gpu"),
        ("ring_attention --shape 1,4096,16,128 --devices 1 --strategy ring --sinks", "ring_attention: mosaic_gpu"),
        (
            "ring_attention --shape 1,512,16,128 --devices 2 --segment-ids --bias 1,16,512,1024",
            "ring_attention: mosaic_gpu",
        ),
        (
            "sequence_parallel_dilated_attention --shape 1,4096,16,64 --devices 8 --segment-lengths 2048,16384 "
            "--dilation-rates 1,4 --segment-ids",
            "sequence_parallel_dilated_attention: mosaic_gpu",
        ),
        ("dynamic_mask_attention --shape 2,512,16,64 --mask 512 --window 64,0", "flash_attention: mosaic_gpu"),
        ("mlp --shape 8192,1024 --hidden 4096 --columns 1024 --gated --bias-down --residual", "mlp: mosaic_gpu"),
        ("matmul --shape 8192,4096 --columns 4096 --bias --residual --activation gelu", "matmul: mosaic_gpu"),
        pytest.param(
            "layer_norm --shape 512,256 --scale --bias --residual --eps 1e-5",
            "layer_norm: triton",
            marks=pytest.mark.triton,
        ),
        pytest.param("rms_norm --shape 512,256 --scale --quantize e4m3", "rms_norm: triton", marks=pytest.mark.triton),
        ("block_sparse_attention --shape 2,4096,16,64", "flash_attention: mosaic_gpu"),
        ("block_sparse_attention --shape 2,1000,16,64 --block-size 128,64 --sinks", "flash_attention: mosaic_gpu"),
    ],
)
def test_explain_every_op(run, arguments, first_line):
    code, out, err = run("explain", *arguments.split(), "--device", "h200")
    assert (code, err) == (0, "")
    assert out.startswith(f"{first_line} (first in this GPU's order that serves the call: ")
    measured = "not measured" if "_norm" in first_line else "measured on NVIDIA H200"
    assert f"; sm_90's order, {measured})\n  device: NVIDIA H200\n" in out
    code, out, _ = run("explain", *arguments.split(), "--device", "h200", "--json")
    assert code == 0
    plan = json.loads(out)
    assert f"{plan['op']}: {plan['implementation']}" == first_line


def test_explain_without_arguments_lists_ops(run):
    for arguments in ((), ("--help",)):
        _, out, err = run("explain", *arguments)
        for op in OPS:
            assert op in out
        assert err == ""


@pytest.mark.parametrize(
    ("words", "other"),
    [("help", "--help"), ("-h", "--help"), ("help info", "info --help"), ("info -h", "info --help")],
)
def test_other_ways_to_ask_for_help(run, words, other):
    assert run(*words.split()) == run(*other.split())
    assert run()[1].strip() == run("--help")[1].strip()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("info --device h300", ("device: got 'h300'", "h200")),
        ("info --devise h200", ("No such option", "--devise", "; jax-kernels info --help lists the options")),
        ("helo", ("No such command 'helo'", "; jax-kernels --help lists the commands")),
        ("train text.txt", ("unexpected extra argument", "text.txt", "; jax-kernels train --help lists the options")),
        ("profile a.py --steps 3", ("No such option: --steps", "come after --, as in jax-kernels profile train.py --")),
        ("profile", ("Missing argument 'script'; jax-kernels profile --help lists the options",)),
        (
            "tune --from a.py -- --steps 2",
            ("--from: got the arguments '--steps 2' behind it, want --arguments '--steps 2'",),
        ),
        ("explain --shape 1,8,4,64 --mask causal", ("--mask: got 'causal', want whole", "a causal one by --causal")),
        ("nonsense", ("nonsense",)),
        ("explain attention", ("--shape", "; jax-kernels explain attention --help lists the options")),
        ("explain --causal", ("--shape", "; jax-kernels explain attention --help lists the options")),
        ("explain mlp --shap 1", ("--shap", "; jax-kernels explain mlp --help lists the options")),
        ("tune rms_norm", ("--shapes", "; jax-kernels tune rms_norm --help lists the options")),
        ("tune --lis", ("--lis", "; jax-kernels tune --help lists the options")),
        ("explain nope --shape 1,8,4,64", ("op: got 'nope', want one of attention, flash_attention, ",)),
        ("explain sequence_parallel_dilated_attention", ("--shape",)),
        ("explain ring_attention --shape 1,8,4,64", ("--devices",)),
        ("explain ring_attention --shape 1,8,4,64 --devices 0", ("'--devices': ", ", got '0'")),
        (
            "explain ring_attention --shape 1,7,4,64 --devices 2 --causal",
            ("--shape: query: got 7 tokens on each device with layout='zigzag', want an even number",),
        ),
        (
            "explain ring_attention --shape 1,8,4,64 --devices 2 --strategy rings",
            ("--strategy: got 'rings', want one",),
        ),
        (
            "explain ring_attention --shape 1,8,3,64 --devices 2 --strategy all_to_all",
            ("--shape: query: got 3 heads on 2 devices with strategy='all_to_all'",),
        ),
        ("explain block_sparse_attention --shape 1,8,4,64 --mask 1,1,8,8", ("No such option", "--mask")),
        ("explain --shape 1,x", ("--shape: got '1,x', want whole numbers above 0",)),
        ("explain attention --shape 1,8,4,64 --pages 3", ("No such option", "--pages")),
        ("explain attention --shape 1,8,4,64 --window 1,x", ("--window: got '1,x', want left,right",)),
        ("explain decode_attention --shape 1,1,4,64", ("--kv-shape",)),
        ("explain decode_attention --shape 1,64,4,64 --kv-shape 1,64,4,64", ("query: got 64 queries per sequence",)),
        ("explain dilated_attention --shape 1,8,4,64", ("--segment-lengths",)),
        (
            "explain dilated_attention --shape 1,8,4,64 --segment-lengths 4,8 --dilation-rates 1",
            ("--dilation-rates: got 1 of them for 2 segment_lengths",),
        ),
        (
            "explain dynamic_mask_attention --shape 1,8,4,64 --mask 1,3,8,8",
            ("mask: got shape (1, 3, 8, 8), want a shape broadcastable to",),
        ),
        ("explain block_sparse_attention --shape 8", ("query: got shape (8,), want 4 axes",)),
        (
            "explain block_sparse_attention --shape 1,8,4,64 --block-size 1,2,3",
            ("--block-size: got '1,2,3', want queries,keys",),
        ),
        ("explain attention --shape 1,x", ("--shape: got '1,x', want whole numbers above 0",)),
        ("explain attention --shape 1,2,0,4", ("--shape: got '1,2,0,4'",)),
        ("explain attention --shape 1,2,3", ("query: got shape (1, 2, 3), want 4 axes",)),
        ("explain attention --shape 1,8,4,64 --kv-shape 1,8,3,64", ("key: got 3 heads, want a divisor of query's 4",)),
        ("explain attention --shape 1,8,4,64 --dtype int8", ("--dtype: got 'int8', want one of bfloat16",)),
        ("explain attention --shape 1,8,4,64 --precision tf32", ("precision: got 'tf32' with bfloat16 inputs",)),
        ("explain attention --shape 1,8,4,64 --implementation x", ("implementation: got 'x' for ",)),
        (
            "explain attention --shape 1,8,4,64 --device t4 --implementation triton",
            ("it needs compute capability 8.0",),
        ),
        ("explain attention --shape 1,8,4,64 --device nope", ("device: got 'nope'",)),
        ("explain matmul --shape 8,64 --columns 8 --scaling row", ("scaling: got one without precision='fp8'",)),
        (
            "explain matmul --shape 8,64 --columns 8 --precision fp8 --scaling x --device h200",
            ("scaling: got 'x', want 'tensor', 'row' or 'block'",),
        ),
        ("check --implementation nope", ("--implementation: got 'nope', want one of mosaic_gpu, triton",)),
        ("check nope", ("op: got 'nope', want one of flash_attention, flash_attention_fp8",)),
        ("check --op nope", ("op: got 'nope', want one of flash_attention, flash_attention_fp8",)),
        (
            "check --op rms_norm --implementation cudnn",
            ("--implementation: got 'cudnn', want one of triton, mosaic_gpu, xla",),
        ),
        ("check --json /no/such/folder/x.json", ("--json: got '/no/such/folder/x.json', want a file in a folder",)),
        ("check --json /tmp", ("--json: got '/tmp', want a file in a folder that exists",)),
        ("check --op flash_atention", ("op: got 'flash_atention', want one of", "did you mean 'flash_attention'?")),
        ("info --device h10", ("--device: got 'h10', want cpu or the name of a GPU", "did you mean 'h100'?")),
        ("explain matmul --shape 8,64 --columns 0", ("'--columns': ", ", got '0'")),
        ("explain gated_matmul --shape 8,64 --columns -1", ("'--columns': ", ", got '-1'")),
        ("explain mlp --shape 8,64 --columns 8 --hidden 0", ("'--hidden': ", ", got '0'")),
        ("explain attention --shape 1,8,4,64 --v-head-dim 0", ("'--v-head-dim': ", ", got '0'")),
        ("explain attention --shape 1,8,4,64 --softcap 0", ("--softcap: got 0.0, want a number above 0",)),
        ("explain attention --shape 1,8,4,64 --window 1,2,3", ("--window: got (1, 2, 3), want an int",)),
        ("explain attention --shape 1,8,4,64 --dtype bfloat", ("did you mean 'bfloat16'?",)),
        ("explain attention --shape 1,8,4,64 --implementation trition", ("did you mean 'triton'?",)),
        ("explain attenton --shape 1,8,4,64", ("op: got 'attenton'", "did you mean 'attention'?")),
        ("explain attention --shape 1,8,4,64 --mask 3,1,8,8", ("--mask: got shape (3, 1, 8, 8), want",)),
        ("explain attention --shape 1,2,3", ("--shape: query: got shape (1, 2, 3), want 4 axes",)),
    ],
)
def test_bad_input_is_one_line(run, arguments, words):
    assert_one_line(run(*arguments.split()), *words)


COMMANDS_THAT_PLAN = (
    "info",
    "explain rms_norm --shape 4,128",
    "tune --list",
    "tune rms_norm --shapes 4,128",
    "tune --from SCRIPT",
    "bench rms_norm --seconds 0.001",
    "check --op rms_norm",
    "profile SCRIPT",
)


WRONG = {
    "JAX_KERNELS_TUNED": "2",
    "JAX_KERNELS_INTERPRET": "maybe",
    "JAX_KERNELS_CACHE": "~a-user-that-nobody-has/cache",
}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        (name, arguments)
        for name, arguments in itertools.product(WRONG, COMMANDS_THAT_PLAN)
        if (name, arguments) != ("JAX_KERNELS_INTERPRET", "tune --list")  # it lists files alone
    ],
)
def test_a_wrong_environment_is_one_line(run, monkeypatch, tmp_path, arguments, name):
    """Each command names the variable, and no command shows a traceback."""
    script = tmp_path / "script.py"
    script.write_text("import jax.numpy as jnp, jax_kernels\njax_kernels.rms_norm(jnp.ones((4, 128)))\n")
    monkeypatch.delenv("JAX_KERNELS_TUNED", raising=False)
    monkeypatch.setenv(name, WRONG[name])
    assert_one_line(run(*arguments.replace("SCRIPT", str(script)).split()), f"{name}: got {WRONG[name]!r}, want ")


def test_check_with_an_unavailable_implementation(run, monkeypatch):
    monkeypatch.setattr(suites, "why_not", lambda case, name: f"{name} needs a moon")
    assert_one_line(run("check", "--op", "flash_attention", "--implementation", "triton"), "triton needs a moon")


def fake_demo(monkeypatch, function):
    monkeypatch.setitem(sys.modules, "jax_kernels.cli.demo", types.SimpleNamespace(demo=function))


def test_demo_gets_its_options(run, monkeypatch):
    given = []
    fake_demo(monkeypatch, lambda steps: given.append(steps))
    demo = sys.modules["jax_kernels.cli.demo"].demo
    demo.__annotations__ = {"steps": int}
    assert run("demo", "7")[0] == 0
    assert given == [7]
    assert_one_line(run("demo", "many"), "steps")
    code, out, _ = run("demo", "--help")
    assert code == 0
    assert "jax-kernels demo" in out


def test_missing_package_names_the_extra(run, monkeypatch):
    def demo() -> None:
        import flax  # noqa: F401

    fake_demo(monkeypatch, demo)
    monkeypatch.setitem(sys.modules, "flax", None)
    assert_one_line(run("demo"), "this needs the package flax: pip install 'jax-kernels[flax]'")
    assert run("info")[0] == 0


def test_missing_cli_extra(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "typer", None)
    assert_one_line(run("info"), "this needs the package typer: pip install 'jax-kernels[cli]'")


def test_internal_error_keeps_its_traceback(monkeypatch):
    def demo() -> None:
        import a_module_that_nobody_has  # noqa: F401

    fake_demo(monkeypatch, demo)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_nobody_has"):
        cli.main(["demo"])


def test_console_script():
    """The installed command, in a process of its own, where neither torch nor flax can be imported."""
    code = "import sys; sys.modules['torch'] = sys.modules['flax'] = None; from jax_kernels.cli import main; main()"
    done = done_by("-c", code, "info", "--json", JAX_PLATFORMS="cpu")
    assert json.loads(done.stdout)["device"]["architecture"] == "CPU"


@pytest.mark.parametrize("words", [("explain", "attention"), ("tune", "attention"), ("tune", "matmul")], ids="_".join)
def test_help_at_80_columns_has_whole_names(run, monkeypatch, words):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run(*words, "--help")
    assert code == 0
    for text in ("--implementation ", "<int> [x>=1]", "16,128" if words[0] == "explain" else "in quotes"):
        assert text in out
