"""Ids of parametrised tests: a case shows its shapes, and an argument its name and value.

An attention call is `B2-T450-S70-H4/2-D64`: batch, query tokens, key tokens, heads of query / key, and head_dim, with
`D192/128` if value has another head_dim. A matmul is `M5x7-K64-N48`: the rows of x, the summed axis and the columns; an
mlp `M5-K64-F96-N48`, with its hidden features. A normalization has the shape of x.
"""

import dataclasses
import numbers
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

# Arguments that are one size of a call.
SIZES = {"batch": "B", "q_length": "T", "kv_length": "S", "heads": "H", "head_dim": "D", "m": "M", "n": "N"}
SHAPES = ("shape", "shapes", "sizes", "blocks")
MOST = 100  # Longer texts leave the argument to pytest's own id, such as `options0`.


def attention_shape(case: Any) -> str:
    """The shapes of a case of attention."""
    heads = f"{case.heads}/{case.kv_heads}" if case.kv_heads != case.heads else f"{case.heads}"
    v_head_dim = getattr(case, "v_head_dim", 0) or case.head_dim
    head_dim = f"{case.head_dim}/{v_head_dim}" if v_head_dim != case.head_dim else f"{case.head_dim}"
    return f"B{case.batch}-T{case.q_length}-S{case.kv_length}-H{heads}-D{head_dim}"


def sizes(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def shape_of(case: Any) -> str | None:
    """The shapes of a case, or None if it has none."""
    if dataclasses.is_dataclass(case) and hasattr(case, "call") and not callable(case.call):
        return shape_of(case.call)  # with the blocks of its kernel
    if hasattr(case, "q_length") and hasattr(case, "kv_heads"):
        return attention_shape(case)
    if isinstance(case, tuple) and len(case) == 2:
        sizes_of_matmul, options = case
        if isinstance(sizes_of_matmul, str):
            return shape_of(options)
        if isinstance(options, dict) and isinstance(sizes_of_matmul, tuple) and len(sizes_of_matmul) == 3:
            rows, depth, columns = sizes_of_matmul
            return f"M{rows}-K{depth}-N{columns}"
    if isinstance(case, str | type) or not isinstance(shape := getattr(case, "shape", None), tuple):
        return None
    if not hasattr(case, "columns"):
        return sizes(shape)
    hidden = f"-F{case.hidden}" if hasattr(case, "hidden") else ""
    return f"M{sizes(shape[:-1])}-K{shape[-1]}{hidden}-N{case.columns}"


def case_id(name: Any, case: Any) -> str:
    """The name of a case, with its shapes."""
    shape = None if isinstance(case, np.ndarray | np.generic) else shape_of(case)
    return f"{name}-{shape}" if shape and shape not in f"{name}" else f"{name}"


def word(value: Any) -> str:
    """A value as a part of an id: shapes as their sizes, and dtypes by their names."""
    if isinstance(value, tuple) and value:
        if all(isinstance(x, int) and x >= 0 for x in value):
            return sizes(value)
        if all(isinstance(x, tuple) for x in value):
            return ",".join(map(word, value))
    return _dtype(value) or f"{value}"


def named(cases: Mapping[str, Any]) -> list[Any]:
    """The names of cases as parameters of a test, whose ids also have the cases' shapes."""
    return [pytest.param(name, id=case_id(name, case)) for name, case in cases.items()]


def _text(value: Any, separator: str = ",") -> str | None:
    """A value in a few characters, or None if it has no short text."""
    if value is None or isinstance(value, bool | numbers.Number | np.generic | str):
        return f"{value}"
    if (dtype := _dtype(value)) is not None:
        return dtype
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{_dtype(value.dtype)}({sizes(tuple(value.shape))})"
    if isinstance(value, tuple | list):
        nested = any(isinstance(x, tuple | list) for x in value)
        texts = [_text(x, separator) for x in value]
        return None if None in texts else (";" if nested else separator).join(texts)
    if type(value).__module__.startswith("jax_kernels.masks"):
        return f"{value}"
    if isinstance(value, dict):
        texts = {name: _text(x) for name, x in value.items()}
        return None if None in texts.values() else ",".join(f"{name}={text}" for name, text in texts.items())
    return None


def _dtype(value: Any) -> str | None:
    """The name of a dtype of NumPy, JAX or PyTorch; None for other values."""
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return np.dtype(value).name
    return getattr(value, "dtype", value).name if type(value).__name__ == "_ScalarMeta" else None


def argument_id(value: Any, name: str) -> str | None:
    """The id of one argument of a parametrised test. None leaves it to pytest, which shows strings and functions."""
    if isinstance(value, str):
        return None
    if (dtype := _dtype(value)) is not None:
        return dtype
    if dataclasses.is_dataclass(value) and (shape := shape_of(value)) is not None:
        return case_id(value, value) if type(value).__str__ is not object.__str__ else shape
    if isinstance(value, numbers.Integral) and not isinstance(value, bool) and name in SIZES:
        return f"{SIZES[name]}{value}"
    is_shape = name in SHAPES and isinstance(value, tuple)
    if isinstance(value, dict | tuple | list) and not value:
        return f"no {name}"
    text = _text(value, "x" if is_shape else ",")
    if text is None or len(text) > MOST:
        return None
    return text if is_shape else f"{name}={text}"
