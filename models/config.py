"""TransformerConfig: the shape of a decoder, checked when it is made."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_kernels import quantization
from jax_kernels.models.training.remat import REMAT
from jax_kernels.ops.ring.layouts import LAYOUTS
from jax_kernels.ops.ring.ring_attention import STRATEGIES
from jax_kernels.plain_numbers import plain, plain_of

__all__ = [
    "ExpertsConfig",
    "TransformerConfig",
    "check_choices",
    "check_fp8_scaling",
    "check_heads",
    "check_precision",
    "check_scaling",
    "check_sequence",
]

DTYPES = ("float32", "bfloat16", "float16")
SCORES = ("softmax", "sigmoid")  # of a router
EXCHANGES = ("gather", "all_to_all")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """The experts of a Transformer: the field `experts` of a TransformerConfig.

    num_experts, experts_per_token, scores, renormalize, weight_scale, shared_experts, exchange, implementation: as in
      MixtureOfExperts.
    mlp_dim: width of an expert (None: the TransformerConfig's mlp_dim).
    layers: the indices of the blocks that have experts (None: all blocks). Others have a gated MLP.
    balance_loss: the factor of the load-balancing loss, which next_token_loss adds for each block; 0 for none.
    bias_rate: the rate at which Trainer moves each expert_bias after a step; None for no expert_bias.

    A bad field raises ValueError or TypeError, which names it.
    """

    num_experts: int
    experts_per_token: int = 2
    mlp_dim: int | None = None
    layers: tuple[int, ...] | None = None
    scores: str = "softmax"
    renormalize: bool = True
    weight_scale: float = 1.0
    shared_experts: int = 0
    balance_loss: float = 0.01
    bias_rate: float | None = None
    exchange: str = "gather"
    implementation: str | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, plain(getattr(self, field.name)))
        prefix = "ExpertsConfig."
        check_choices(
            prefix, self.num_experts, self.experts_per_token, self.scores, self.weight_scale, self.shared_experts
        )
        if self.mlp_dim is not None:
            positive(f"{prefix}mlp_dim", self.mlp_dim)
        if self.layers is not None:
            if not isinstance(self.layers, tuple | list) or not self.layers:
                raise TypeError(f"{prefix}layers={self.layers!r} must be a tuple of indices of blocks, or None")
            for layer in self.layers:
                check_size(f"{prefix}layers", layer)
            object.__setattr__(self, "layers", tuple(sorted(set(self.layers))))
        check_kind(f"{prefix}renormalize", self.renormalize, bool, "a bool")
        check_exchange(prefix, self.exchange)
        check_kind(f"{prefix}implementation", self.implementation, str | None, "a name or None")
        if self.balance_loss != 0:
            positive_number(f"{prefix}balance_loss", self.balance_loss)
        if self.bias_rate is not None:
            positive_number(f"{prefix}bias_rate", self.bias_rate)


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """The shape of a decoder-only Transformer.

    vocab_size: number of token ids; 256 for bytes.
    model_dim: width of the residual stream.
    num_layers: number of blocks.
    num_heads: number of query heads. num_kv_heads: number of key and value heads, which divides num_heads (None:
      num_heads).
    head_dim: per head, even, up to 256 (None: model_dim / num_heads).
    mlp_dim: width of the gated MLP (None: 8/3 of model_dim, rounded up to a multiple of 64).
    rope_theta: base of the rotary frequencies. norm_eps: epsilon of the RMSNorms.
    tie_embeddings: the head is the transposed token embedding instead of a separate matrix.
    dtype: dtype of the computation, by name; train in bfloat16 on GPUs. param_dtype: of the parameters.
    remat: the values of each block that the backward rematerialises: False for none, True for all. "attention" keeps
      attention's out and log-sum-exp; "products" also keeps the results of matmuls and norms, the weights in dtype, and
      with "fp8" the 8-bit operands of the backward.
    scan_layers: run the blocks as a loop (jax.lax.scan), which compiles faster. The parameters are the same.
    implementation: of the attention, as in flash_attention. mlp_implementation: of the gated MLP, as in mlp, and with
      "fp8" as in gated_matmul. projection_implementation: of the attention's q, k, v and out, as in matmul; None
      without "fp8" is XLA's matmul. With "xla" for all three, "fp8" also runs on GPUs without 8-bit matmuls.
    precision: "fp8" for 8-bit matmuls in the blocks (q, k, v, out, gate, up and down), as in matmul; None for matmuls
      in dtype. The parameters are the same. scaling: with "fp8", as in matmul; "row" gives each token its own scale, so
      that no token depends on a later token. fp8_scaling, amax_history_length: with "fp8", as in Linear; with "delayed"
      only the calls of `losses` record magnitudes. Experts always have the scales of "row", from their own arrays.
    sequence_axis: a mesh axis that shards the tokens, if the mesh of jax.set_mesh has it; None to not shard them.
    sequence_strategy: with sharded tokens, as ring_attention's strategy; a LongNet has "auto".
    sequence_layout: with sharded tokens, as ring_attention's layout; None for "zigzag", or for "contiguous" in a
      LongNet and with sequence_strategy="all_to_all".
    microbatches: parts of a device's rows, if a mesh axis has stages of the blocks; None for the number of stages.
    qk_norm: whether an RMSNorm of each query and each key comes before the rotation, as in Qwen3.
    logit_softcap: caps the head's logits smoothly to (-logit_softcap, logit_softcap), as Gemma 2 does; None for no cap.
    experts: an ExpertsConfig, or its fields by name, for blocks with a mixture of experts instead of the gated MLP;
      None for no such blocks. The experts run without stages; scan_layers needs them in all blocks.

    A size that is None is replaced by its default. A bad field raises ValueError or TypeError, which names it.
    """

    vocab_size: int
    model_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    mlp_dim: int | None = None
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    tie_embeddings: bool = True
    dtype: str = "float32"
    param_dtype: str = "float32"
    remat: bool | str = False
    scan_layers: bool = False
    implementation: str | None = None
    mlp_implementation: str | None = None
    projection_implementation: str | None = None
    precision: str | None = None
    scaling: str | None = None
    sequence_axis: str | None = "sequence"
    sequence_strategy: str = "auto"
    sequence_layout: str | None = None
    microbatches: int | None = None
    experts: ExpertsConfig | None = None
    logit_softcap: float | None = None
    qk_norm: bool = False
    fp8_scaling: str = "dynamic"
    amax_history_length: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, plain_of(field.name, getattr(self, field.name)))
        for name in ("vocab_size", "model_dim", "num_layers"):
            positive(f"TransformerConfig.{name}", getattr(self, name))
        kv_heads, head_dim = check_heads(
            "TransformerConfig.", self.model_dim, self.num_heads, self.num_kv_heads, self.head_dim
        )
        if head_dim % 2:
            raise ValueError(f"TransformerConfig.head_dim={head_dim} must be even: rotary embedding rotates pairs")
        mlp_dim = math.ceil(self.model_dim * 8 / 3 / 64) * 64 if self.mlp_dim is None else self.mlp_dim
        positive("TransformerConfig.mlp_dim", mlp_dim)
        for name in ("rope_theta", "norm_eps"):
            object.__setattr__(self, name, positive_number(f"TransformerConfig.{name}", getattr(self, name)))
        if self.microbatches is not None:
            positive("TransformerConfig.microbatches", self.microbatches)
        if self.logit_softcap is not None:
            positive_number("TransformerConfig.logit_softcap", self.logit_softcap)
        for name in ("tie_embeddings", "scan_layers", "qk_norm"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"TransformerConfig.{name}={getattr(self, name)!r} must be a bool")
        if not isinstance(self.remat, bool) and self.remat not in REMAT:
            names = ", ".join(map(repr, REMAT))
            raise (ValueError if isinstance(self.remat, str) else TypeError)(
                f"TransformerConfig.remat={self.remat!r} must be a bool or one of {names}"
            )
        for name in ("dtype", "param_dtype"):
            object.__setattr__(self, name, dtype_name(f"TransformerConfig.{name}", getattr(self, name)))
        for name in ("implementation", "mlp_implementation", "projection_implementation"):
            if getattr(self, name) is not None and not isinstance(getattr(self, name), str):
                raise TypeError(f"TransformerConfig.{name}={getattr(self, name)!r} must be a name or None")
        check_precision("TransformerConfig.", self.precision, self.scaling)
        check_fp8_scaling(
            "TransformerConfig.", self.fp8_scaling, self.amax_history_length, self.precision, self.scaling
        )
        check_sequence("TransformerConfig.", self.sequence_axis, self.sequence_strategy, self.sequence_layout)
        self._check_experts()
        object.__setattr__(self, "num_kv_heads", kv_heads)
        object.__setattr__(self, "head_dim", head_dim)
        object.__setattr__(self, "mlp_dim", mlp_dim)

    def _check_experts(self) -> None:
        """Makes an ExpertsConfig of the field `experts`. Raises TypeError or ValueError if other fields do not fit."""
        if isinstance(self.experts, Mapping):  # of a checkpoint
            object.__setattr__(self, "experts", ExpertsConfig(**self.experts))
        if self.experts is None:
            return
        check_kind("TransformerConfig.experts", self.experts, ExpertsConfig, "an ExpertsConfig, a mapping or None")
        layers = self.expert_layers
        if layers[-1] >= self.num_layers:
            raise ValueError(f"ExpertsConfig.layers={self.experts.layers} must be below num_layers={self.num_layers}")
        if self.scan_layers and len(layers) < self.num_layers:
            raise ValueError(f"ExpertsConfig.layers={self.experts.layers} must be all blocks with scan_layers")

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """The indices of the blocks that have experts, in order."""
        if self.experts is None:
            return ()
        return tuple(range(self.num_layers)) if self.experts.layers is None else self.experts.layers


def check_choices(
    prefix: str, num_experts: Any, experts_per_token: Any, scores: Any, weight_scale: Any, shared_experts: Any
) -> None:
    """Raises TypeError or ValueError for a wrong argument of a router, or number of experts.

    prefix: comes before the argument's name in an error.
    """
    check_size(f"{prefix}num_experts", num_experts, 1)
    check_size(f"{prefix}experts_per_token", experts_per_token, 1, num_experts)
    check_size(f"{prefix}shared_experts", shared_experts)
    if scores not in SCORES:
        raise ValueError(f"{prefix}scores={scores!r} must be {' or '.join(map(repr, SCORES))}")
    positive_number(f"{prefix}weight_scale", weight_scale)


def check_exchange(prefix: str, exchange: object) -> None:
    """Raises ValueError for an unknown exchange of tokens. prefix: comes before its name in an error."""
    if exchange not in EXCHANGES:
        raise ValueError(f"{prefix}exchange={exchange!r} must be {' or '.join(map(repr, EXCHANGES))}")


def check_heads(
    prefix: str, model_dim: int, num_heads: int, num_kv_heads: int | None, head_dim: int | None
) -> tuple[int, int]:
    """(num_kv_heads, head_dim), with defaults for None. Raises ValueError or TypeError for heads that do not fit.

    prefix: comes before the argument's name in an error.
    """
    positive(f"{prefix}num_heads", num_heads)
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    positive(f"{prefix}num_kv_heads", kv_heads)
    if num_heads % kv_heads:
        raise ValueError(f"{prefix}num_kv_heads={kv_heads} must divide num_heads={num_heads}")
    if head_dim is None:
        if model_dim % num_heads:
            raise ValueError(f"{prefix}num_heads={num_heads} must divide model_dim={model_dim}, or give head_dim")
        head_dim = model_dim // num_heads
    positive(f"{prefix}head_dim", head_dim)
    if head_dim > 256:
        raise ValueError(f"{prefix}head_dim={head_dim} must be at most 256")
    return kv_heads, head_dim


def check_precision(prefix: str, precision: object, scaling: object) -> None:
    """Raises ValueError unless precision is "fp8" or None, and scaling fits it.

    prefix: comes before the argument's name in an error.
    """
    if precision not in (None, "fp8"):
        raise ValueError(f"{prefix}precision={precision!r} must be 'fp8' or None")
    check_scaling(prefix, precision, scaling)


def check_scaling(prefix: str, precision: object, scaling: object) -> None:
    """Raises ValueError unless scaling is None, or a known name with precision="fp8".

    prefix: comes before the argument's name in an error.
    """
    if scaling is None:
        return
    if scaling not in quantization.SCALINGS:
        raise ValueError(f"{prefix}scaling={scaling!r} must be 'tensor', 'row', 'block' or None")
    if precision != "fp8":
        raise ValueError(f"{prefix}scaling={scaling!r} must be None with precision={precision!r}: it is for 'fp8'")


def check_fp8_scaling(prefix: str, fp8_scaling: Any, length: Any, precision: Any, scaling: Any) -> None:
    """Raises ValueError or TypeError, naming the argument, unless fp8_scaling fits the other options.

    prefix: comes before the argument's name in an error. length: the argument amax_history_length.
    """
    if fp8_scaling not in ("dynamic", "delayed"):
        raise ValueError(f"{prefix}fp8_scaling={fp8_scaling!r} must be 'dynamic' or 'delayed'")
    if fp8_scaling == "dynamic":
        if length is not None:
            raise ValueError(f"{prefix}amax_history_length={length!r} must be None with fp8_scaling='dynamic'")
        return
    if precision != "fp8":
        raise ValueError(
            f"{prefix}fp8_scaling='delayed' must be 'dynamic' with precision={precision!r}: it is for 'fp8'"
        )
    if scaling not in (None, "tensor"):
        raise ValueError(f"{prefix}scaling={scaling!r} must be 'tensor' or None with fp8_scaling='delayed'")
    if length is not None:
        positive(f"{prefix}amax_history_length", length)


def check_sequence(prefix: str, axis: object, strategy: object, layout: object) -> None:
    """Raises TypeError or ValueError for a wrong sequence_axis, sequence_strategy or sequence_layout.

    prefix: comes before the argument's name in an error.
    """
    if axis is not None and not isinstance(axis, str):
        raise TypeError(f"{prefix}sequence_axis={axis!r} must be the name of a mesh axis, or None")
    if strategy not in STRATEGIES:
        raise ValueError(f"{prefix}sequence_strategy={strategy!r} must be one of {', '.join(map(repr, STRATEGIES))}")
    if layout is not None and layout not in LAYOUTS:
        raise ValueError(f"{prefix}sequence_layout={layout!r} must be one of {', '.join(map(repr, LAYOUTS))}")


def positive(name: str, value: object) -> None:
    """Raises TypeError unless value is an int, ValueError unless it is 1 or more. name: for the error."""
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} must be an int")
    if value < 1:
        raise ValueError(f"{name}={value} must be positive")


def check_kind(name: str, x: object, kinds: Any, want: str) -> None:
    """Raises TypeError unless x is an instance of `kinds`. name, want: the argument and the wanted value, for the
    error.
    """
    if not isinstance(x, kinds):
        raise TypeError(f"{name}: got {type(x).__name__}, want {want}")


def check_size(name: str, x: object, least: int = 0, most: int | None = None) -> None:
    """Raises TypeError unless x is an int, ValueError unless least <= x <= most. name: for the error."""
    if isinstance(x, bool) or not isinstance(x, int | np.integer):
        raise TypeError(f"{name}: got {x!r}, want an int")
    if x < least or (most is not None and x > most):
        raise ValueError(f"{name}: got {x}, want {least} {'or more' if most is None else f'to {most}'}")


def positive_number(name: str, value: object) -> int | float:
    """The value as a Python number. Raises TypeError if it is no number, ValueError unless it is positive and
    finite.
    """
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r} must be a number")
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name}={value} must be positive and finite")
    return value


def dtype_name(name: str, dtype: Any, wanted: tuple[str, ...] = DTYPES) -> str:
    """The name of a dtype, such as "bfloat16". Raises ValueError unless it is one of `wanted`. name: for the error."""
    try:
        found = str(dtype) if dtype is None else jnp.dtype(dtype).name  # NumPy would turn None into float64
    except TypeError:
        found = str(dtype)
    if found not in wanted:
        raise ValueError(f"{name}={dtype!r} must be one of {', '.join(wanted)}")
    return found
