"""Each exported op is complete: a plan, a check suite, a command, a reference, a docs page, a bridge function."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import jax_kernels
from jax_kernels import Plan, dispatch
from jax_kernels.cli import check, explain_options
from jax_kernels.cli.explain import COMMANDS
from jax_kernels.cli.ops import OPS

ROOT = Path(__file__).parents[1]
# Exported functions that are no ops, with the reason.
NOT_OPS = {
    "analyze": "lists the ops of a function",
    "benchmark_implementations": "times calls",
    "compile_attention": "prepares a mask and plans flash_attention for it",
    "compile_kernels": "compiles a function",
    "compiler_options": "options of XLA",
    "dequantize": "plain JAX",
    "device_info": "describes a device",
    "device_names": "lists devices",
    "explain": "returns plans",
    "hilbert_order": "NumPy",
    "invert_order": "NumPy",
    "memory_limit": "limits the memory of calls",
    "prepare_mask": "makes the block lists of a mask",
    "quantize": "plain JAX",
    "quantize_fp8": "plain JAX",
    "shard_sequence": "moves an array",
    "tune": "times calls",
    "unshard_sequence": "moves an array",
    "validate": "compares two functions",
}
# Ops without a function of the bridge, with the reason.
NOT_IN_THE_BRIDGE: dict[str, str] = {}

FUNCTIONS = {
    name for name in dir(jax_kernels) if inspect.isfunction(getattr(jax_kernels, name)) and not name.startswith("_")
}
EXPORTED = sorted(FUNCTIONS - NOT_OPS.keys())


def exports_of(path: Path) -> set[str]:
    """The names that a module imports to export them."""
    imports = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom))
    return {alias.asname for node in imports for alias in node.names if alias.asname}


def test_the_tables_name_exported_functions():
    assert EXPORTED
    assert set(NOT_OPS) <= FUNCTIONS
    assert set(NOT_IN_THE_BRIDGE) <= set(EXPORTED)
    assert not set(NOT_IN_THE_BRIDGE) & exports_of(ROOT / "bridge" / "__init__.py")


@pytest.mark.parametrize("op", EXPORTED)
def test_a_plan_through_explain(op, no_interpret):
    """OPS has a typical call; explain returns the plan of a named implementation for it."""
    assert OPS[op].function is getattr(jax_kernels, op)
    with dispatch.on_device("cpu"):
        plan = OPS[op].plan("bfloat16", "xla")
    assert isinstance(plan, Plan)
    assert (plan.implementation, plan.why) == ("xla", "asked for by name")


@pytest.mark.parametrize("op", EXPORTED)
def test_a_suite_in_check(op):
    """The suite has quick cases, and cases for a GPU."""
    suite = check.SUITES[op]
    assert "xla" in suite.implementations
    assert suite.gpu_cases
    assert check.QUICK[op]


@pytest.mark.parametrize("op", EXPORTED)
def test_a_command_with_an_option_for_each_argument(op):
    """Arguments without an option have a reason in explain_options.NOT_OPTIONS."""
    given = explain_options.sizes_of(op).keys() | inspect.signature(COMMANDS[op]).parameters.keys()
    arguments = explain_options.arguments_of(op)
    arrays = {name for name, x in arguments.items() if x.default is inspect.Parameter.empty} & {
        *("query", "key", "value", "x", "w", "w_gate", "w_up", "w_down")  # made of the sizes
    }
    reasons = {name for name in arguments if {name, f"{op}.{name}"} & explain_options.NOT_OPTIONS.keys()}
    missing = arguments.keys() - given - arrays - reasons
    assert not missing


def test_a_number_needs_no_entry_in_the_options(monkeypatch):
    monkeypatch.delitem(explain_options.OPTIONS, "eps")
    option = explain_options.option_of("layer_norm", "eps")
    assert (option.type, option.help) == (float, "added to the variance; 0 or more.")
    assert explain_options.option_of("ring_attention", "axis_name") is None


def test_every_option_is_of_an_argument():
    arguments = {op: explain_options.arguments_of(op) for op in EXPORTED}
    every = {name for found in arguments.values() for name in found}
    for key in explain_options.OPTIONS.keys() | explain_options.NOT_OPTIONS:
        op, dot, name = key.rpartition(".")
        assert name in (arguments[op] if dot else every), key


@pytest.mark.parametrize("op", EXPORTED)
def test_a_reference(op):
    """The architecture names the op's plain form, a file with public functions."""
    table = (ROOT / "docs" / "develop" / "architecture.md").read_text()
    path = re.search(rf"^\| `{op}` \| `(jax_kernels/reference/\w+\.py)`", table, re.MULTILINE)[1]
    assert re.search(r"^def [a-z]", (ROOT / path).read_text(), re.MULTILINE)


@pytest.mark.parametrize("op", EXPORTED)
def test_a_page_of_the_docs(op):
    name = re.compile(rf"\b{op}\b")
    assert any(name.search(page.read_text()) for page in (ROOT / "docs").rglob("*.md"))


@pytest.mark.parametrize("op", EXPORTED)
def test_a_function_of_the_bridge(op):
    assert op in exports_of(ROOT / "bridge" / "__init__.py") | NOT_IN_THE_BRIDGE.keys()
