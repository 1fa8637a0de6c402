"""The config of bridge.nn.Transformer: a TransformerConfig or LongNetConfig of models, or a mapping with its fields."""

import math
import types
from collections.abc import Mapping
from typing import Any, Protocol

import torch

__all__ = ["PATTERN", "Config", "shape_of"]


class Config(Protocol):
    """The fields that a config of Transformer must have, for type checkers. Its other fields are optional."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def model_dim(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...


_REQUIRED = ("vocab_size", "model_dim", "num_layers", "num_heads")
_DEFAULTS = {
    "num_kv_heads": None,
    "head_dim": None,
    "mlp_dim": None,
    "rope_theta": 10000.0,
    "norm_eps": 1e-6,
    "tie_embeddings": True,
    "dtype": "float32",
    "param_dtype": "float32",
    "remat": False,
    "implementation": None,
    "precision": None,
    "scaling": None,
    "fp8_scaling": "dynamic",
    "logit_softcap": None,
    "qk_norm": False,
    "experts": None,
}
# The fields that a LongNetConfig adds.
PATTERN = {
    "segment_lengths": None,
    "dilation_rates": None,
    "heads": "all",
    "combine": "lse",
    "layout": "overlap",
    "order": None,
}
_DEFAULTS |= PATTERN | {"layer_norm": False, "gamma": None}
# The fields of an ExpertsConfig.
_EXPERTS = {
    "num_experts": None,
    "experts_per_token": 2,
    "mlp_dim": None,
    "layers": None,
    "scores": "softmax",
    "renormalize": True,
    "weight_scale": 1.0,
    "shared_experts": 0,
    "balance_loss": 0.01,
    "bias_rate": None,
    "exchange": "gather",
    "implementation": None,
}


def shape_of(config: Config | Mapping[str, Any]) -> types.SimpleNamespace:
    """Returns a config as a namespace of all fields, with defaults for the missing ones and dtypes as torch.dtypes.

    Raises ValueError for a missing or unknown field, or for values that do not fit together.
    """
    if isinstance(config, Mapping):
        unknown = sorted(config.keys() - {*_REQUIRED, *_DEFAULTS})
        if unknown:
            raise ValueError(f"config: got unknown fields {unknown}, want fields of TransformerConfig or LongNetConfig")
        given = dict(config)
    else:
        given = {name: getattr(config, name) for name in (*_REQUIRED, *_DEFAULTS) if hasattr(config, name)}
    missing = [name for name in _REQUIRED if name not in given]
    if missing:
        raise ValueError(f"config: got no {', '.join(missing)}, want at least {', '.join(_REQUIRED)}")
    shape = types.SimpleNamespace(**{**_DEFAULTS, **given})
    if shape.num_kv_heads is None:
        shape.num_kv_heads = shape.num_heads
    if shape.head_dim is None:
        if shape.model_dim % shape.num_heads:
            raise ValueError(f"config: got num_heads={shape.num_heads}, want a divisor of model_dim={shape.model_dim}")
        shape.head_dim = shape.model_dim // shape.num_heads
    if shape.mlp_dim is None:
        shape.mlp_dim = math.ceil(shape.model_dim * 8 / 3 / 64) * 64
    if shape.num_heads % shape.num_kv_heads:
        raise ValueError(
            f"config: got num_kv_heads={shape.num_kv_heads}, want a divisor of num_heads={shape.num_heads}"
        )
    if (shape.segment_lengths is None) != (shape.dilation_rates is None):
        raise ValueError("config: got one of segment_lengths and dilation_rates, want both or neither")
    if shape.segment_lengths is None and (shape.layer_norm or shape.gamma is not None):
        raise ValueError("config: got layer_norm or gamma without segment_lengths, want them with dilated attention")
    if shape.precision not in (None, "fp8"):
        raise ValueError(f"config: got precision={shape.precision!r}, want 'fp8' or None")
    if shape.fp8_scaling != "dynamic":
        raise ValueError(f"config: got fp8_scaling={shape.fp8_scaling!r}, want 'dynamic': PyTorch keeps no histories")
    if shape.scaling not in (None, "tensor", "row", "block") or (shape.scaling is not None and shape.precision is None):
        raise ValueError(
            f"config: got scaling={shape.scaling!r} with precision={shape.precision!r}, want None, or 'tensor', 'row' "
            "or 'block' with 'fp8'"
        )
    if shape.logit_softcap is not None and not shape.logit_softcap > 0:
        raise ValueError(f"config: got logit_softcap={shape.logit_softcap!r}, want a positive number or None")
    shape.experts = _checked_experts(shape)
    for name in ("dtype", "param_dtype"):
        if getattr(shape, name) not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"config: got {name}={getattr(shape, name)!r}, want 'float32', 'bfloat16' or 'float16'")
        setattr(shape, name, getattr(torch, getattr(shape, name)))
    return shape


def _checked_experts(shape: types.SimpleNamespace) -> types.SimpleNamespace | None:
    """Returns the config's experts as a namespace of the fields of models.ExpertsConfig; None without experts.

    Raises ValueError for unknown fields, and if other fields of the config do not fit.
    """
    if shape.experts is None:
        return None
    given = shape.experts
    if not isinstance(given, Mapping):
        given = {name: getattr(given, name) for name in _EXPERTS if hasattr(given, name)}
    if unknown := sorted(given.keys() - _EXPERTS):
        raise ValueError(f"config: got unknown fields {unknown} of experts, want fields of ExpertsConfig")
    if "num_experts" not in given:
        raise ValueError("config: got experts without num_experts, want the number of experts")
    if shape.dtype != shape.param_dtype:
        raise ValueError(
            f"config: got experts with dtype={shape.dtype!r} and param_dtype={shape.param_dtype!r}, want equal dtypes"
        )
    return types.SimpleNamespace(**{**_EXPERTS, **given})
