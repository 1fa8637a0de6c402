"""Linear and GatedMLP as nnx modules, by this library's matmul."""

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx
from jax import lax

from jax_kernels.models.config import check_fp8_scaling, check_scaling, check_size
from jax_kernels.models.layers.delayed_scaling import (
    copy_history,
    delayed_scale,
    empty_history,
    is_recording,
    record,
)
from jax_kernels.models.layers.inputs import check_features, check_promotion, checked_residual
from jax_kernels.ops.matmul import fp8_shared
from jax_kernels.ops.matmul import matmul as ops
from jax_kernels.ops.matmul import mlp as mlp_op
from jax_kernels.ops.matmul.checks import PRECISIONS, checked_activation
from jax_kernels.plain_numbers import plain_arguments
from jax_kernels.tracing.derivatives import in_both_modes

__all__ = ["GatedMLP", "Linear", "computes_its_kernel", "shared_projections"]


class Linear(nnx.Linear):
    """nnx.Linear by jax_kernels.matmul, with an activation and a residual in the same pass.

    It has nnx.Linear's arguments, parameters and results, except that a float32 bias is used in float32. Calls with the
    caller's dot_general, preferred_element_type or out_sharding run as in nnx, without activation, residual and "fp8".

    Args:
      activation: the name of a function, such as "silu", or an elementwise jnp function; None for none.
      precision: with float32, "fp32" or "tf32"; with any dtype, "fp8" for 8-bit matmuls, or "bf16" or "fp16", to which
        x and the kernel are rounded; or any precision of nnx.Linear, which runs as in nnx.
      scaling: with "fp8", the values that share a scale: "tensor", "row" or "block", as in matmul; None for "tensor".
      fp8_scaling: with "fp8", the source of the scales of x and the kernel. "dynamic": their own largest magnitudes.
        "delayed": the largest magnitudes of previous calls, which the module keeps in x_history and kernel_history,
        AmaxHistories. Larger values are then clipped to the largest e4m3 value. The first call uses its own scales.
        Each forward records its own largest finite magnitudes. The scales of cotangents stay dynamic, and scaling must
        be "tensor" or None.
      amax_history_length: with "delayed", the number of calls in the history; None for 16.
      implementation: of the op. The other arguments are nnx.Linear's.

    Raises:
      TypeError: amax_history_length is not an int, or activation is neither a name nor a function.
      ValueError: activation is unknown, or combines several values; scaling or fp8_scaling is unknown, or given without
        "fp8"; scaling is by rows or blocks with "delayed"; amax_history_length is below 1, or given with "dynamic".

    Raises, when called:
      ValueError: an activation, a residual or "fp8" is combined with an option that runs as in nnx; or as matmul.
      TypeError: dtype, or the promoted dtype of x and the parameters, has 8 bits; x has 8 bits, and dtype is None;
        or residual is no array of floats.
      NotImplementedError: as matmul.

    Sources of delayed scaling: Micikevicius et al., "FP8 Formats for Deep Learning" (2022), arXiv:2209.05433; the
    recipe DelayedScaling of NVIDIA's Transformer Engine, with the history's maximum and no margin.
    """

    @plain_arguments
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        activation: Any = None,
        scaling: str | None = None,
        fp8_scaling: str = "dynamic",
        amax_history_length: int | None = None,
        implementation: str | None = None,
        **options: Any,
    ) -> None:
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            check_size(name, size)
        checked_activation(activation)
        check_scaling("", options.get("precision"), scaling)
        check_fp8_scaling("", fp8_scaling, amax_history_length, options.get("precision"), scaling)
        super().__init__(in_features, out_features, **options)
        self.activation = activation
        self.scaling = scaling
        self.fp8_scaling = fp8_scaling
        if fp8_scaling == "delayed":
            self.x_history = empty_history(amax_history_length)
            self.kernel_history = empty_history(amax_history_length)
        self.implementation = implementation

    def __call__(self, inputs: jax.Array, out_sharding: Any = None, *, residual: jax.Array | None = None) -> jax.Array:
        """activation(inputs @ kernel + bias) + residual: [..., out_features].

        inputs: [..., in_features]. residual: [..., out_features], or None.

        The result has the dtype of the computation. If the module has no dtype of its own, the result has the promoted
        dtype of the computation and residual.
        """
        if not self._is_plain or out_sharding is not None or self.precision not in (None, *PRECISIONS):
            if self.precision == "fp8":
                raise ValueError(
                    "precision: got 'fp8' with an option of nnx's (dot_general, preferred_element_type, "
                    "out_sharding), want none of these"
                )
            if self.activation is not None or residual is not None:
                raise ValueError(
                    "activation, residual: got one with an option of nnx's (precision, dot_general, "
                    "preferred_element_type, out_sharding), want None"
                )
            return super().__call__(inputs, out_sharding)
        bias = None if self.bias is None else self.bias[...]
        x, kernel, _ = _promoted(self, inputs, self.kernel[...], bias, name="inputs")
        residual = _residual(self, residual, x, self.out_features)
        if bias is not None and bias.dtype != jax.numpy.float32:
            bias = bias.astype(x.dtype)
        options: dict[str, Any] = {"bias": bias, "activation": self.activation, "residual": residual}
        options["out_dtype"] = x.dtype if residual is None else residual.dtype
        if self.fp8_scaling == "delayed":
            if (outs := _recorded((self,), fp8_shared.delayed_matmul, x, kernel, **options)) is not None:
                return outs[0]
            options["x_scale"] = delayed_scale(self.x_history, x)
            options["w_scale"] = delayed_scale(self.kernel_history, kernel)
        return ops.matmul(
            x, kernel, precision=self.precision, scaling=self.scaling, implementation=self.implementation, **options
        )

    @property
    def _is_plain(self) -> bool:
        """Whether the module has no option of nnx.Linear that this library's matmul lacks."""
        return self.dot_general is lax.dot_general and self.preferred_element_type is None

    @property
    def _is_bare_fp8(self) -> bool:
        """Whether the module is an 8-bit matmul without a bias and an activation."""
        return self.precision == "fp8" and self.bias is None and self.activation is None and self._is_plain


def computes_its_kernel(layer: Any) -> bool:
    """Whether a call of the layer is only a matmul with layer.kernel, so that the call may be left out.

    False with a bias, an activation or an option of nnx's, and for other modules, such as nnx.LoRALinear.
    """
    if type(layer).__call__ is not Linear.__call__:
        return False
    return layer.bias is None and layer.activation is None and layer._is_plain


def shared_projections(modules: Sequence[nnx.Linear], x: jax.Array) -> tuple[jax.Array, ...]:
    """(module(x) for each module), where x is rounded to 8 bits once for modules of one kind.

    With fp8_scaling="delayed" the first module's history of x is used for all of them, and copied to the others.
    """
    first = modules[0]
    alike = lambda module: (module.scaling, module.fp8_scaling, module.implementation, module.dtype)
    if not all(type(module) is Linear and module._is_bare_fp8 and alike(module) == alike(first) for module in modules):
        return tuple(module(x) for module, x in zip(modules, _copies(x, len(modules)), strict=True))
    x, *kernels = _promoted(first, x, *(module.kernel[...] for module in modules))
    scales: dict[str, Any] = {}
    if first.fp8_scaling == "delayed":
        if (outs := _recorded(modules, fp8_shared.delayed_matmuls, x, kernels)) is not None:
            return outs
        scales["x_scale"] = delayed_scale(first.x_history, x)
        histories = [module.kernel_history for module in modules]
        scales["w_scales"] = [delayed_scale(of, kernel) for of, kernel in zip(histories, kernels, strict=True)]
        for module in modules[1:]:
            copy_history(first.x_history, module.x_history)
    return fp8_shared.shared_matmuls(x, kernels, scaling=first.scaling, implementation=first.implementation, **scales)


def _recorded(modules: Sequence[Any], run: Any, x: jax.Array, *weights: Any, **options: Any) -> Any:
    """The results of delayed_matmul or delayed_matmuls, whose magnitudes it adds to the modules' histories; None if the
    function has no kernel for the call.

    modules: the Linears, in the order of the weights, all with the same x.
    """
    first, records = modules[0], is_recording()
    histories = {"x_history": first.x_history[...], "w_histories": [of.kernel_history[...] for of in modules]}
    found = run(x, *weights, records=records, implementation=first.implementation, **histories, **options)
    if found is None or not records:
        return None if found is None else found.outs
    of_x, *of_weights = found.largest
    record(first.x_history, of_x)
    for module, of_weight in zip(modules, of_weights, strict=True):
        record(module.kernel_history, of_weight)
        if module is not first:
            copy_history(first.x_history, module.x_history)
    return found.outs


def _copies(x: jax.Array, count: int) -> tuple[jax.Array, ...]:
    """x, `count` times. The cotangents are added such that XLA does it in the epilogues of matmuls.

    XLA adds the second operand of a sum in the matmul that computes the first, but not in a matmul that adds already.
    """
    copies = []
    for _ in range(count - 1):
        own, x = _twice(None, x)
        copies.append(own)
    return (*copies, x)


_twice = in_both_modes(
    lambda _, x: (x, x), lambda _, x: ((x, x), ()), lambda _, kept, cotangents: (cotangents[0] + cotangents[1],)
)


def _residual(module: nnx.Linear, residual: Any, x: jax.Array, width: int) -> Any:
    """The residual, cast to the dtype of the module's result, to which it is added; None for None.

    x: in the dtype of the computation. The result has this dtype if the module has a dtype of its own, else the
    promoted dtype of it and the residual. width: of the result. Raises TypeError or ValueError for a residual of wrong
    dtype or shape.
    """
    if residual is None:
        return None
    residual = checked_residual(residual, (*x.shape[:-1], width), "the result's")
    wide = x.dtype if module.dtype is not None else jax.numpy.promote_types(x.dtype, residual.dtype)
    return residual.astype(wide)


def _promoted(module: nnx.Linear, x: jax.Array, *others: Any, name: str = "x") -> Any:
    """(x, *others), all in the dtype of the module's computation. Raises TypeError if this dtype, or x, has 8 bits, and
    ValueError unless x has the features of the first of `others`, a kernel.

    name: of x, for the error.
    """
    check_features(name, x, others[0].shape[0])
    check_promotion(module.dtype, param_dtype=others[0].dtype, **{name: x})
    x, *others = module.promote_dtype((x, *others), dtype=module.dtype)
    if x.dtype.itemsize == 1:
        raise TypeError(f"dtype: got {x.dtype} for the computation, want 16 or 32 bits, also with precision='fp8'")
    return x, *others


def _check_options(options: dict[str, Any], precision: Any) -> None:
    """Raises ValueError for options of nnx.Linear, or a precision, that a GatedMLP does not support."""
    if options.get("use_bias"):
        raise ValueError("use_bias: got True, want False: a GatedMLP has no biases")
    for name in ("dot_general", "preferred_element_type"):
        if options.get(name) not in (None, lax.dot_general):
            raise ValueError(f"{name}: got one, want None: this library's matmuls have no such option")
    if precision not in (None, *PRECISIONS):
        raise ValueError(f"precision: got {precision!r}, want {', '.join(map(repr, PRECISIONS))} or None")


class GatedMLP(nnx.Module):
    """down_proj(activation(gate_proj(x)) * up_proj(x)), by the op mlp, or by gated_matmul and matmul.

    The op mlp runs with precision None, "fp32" and "tf32". A projection that was replaced by another module, such as an
    nnx.LoRA, or that was given a bias, is called by itself.

    Parameters: gate_proj.kernel and up_proj.kernel [in_features, hidden_features], down_proj.kernel [hidden_features,
    in_features].

    Args:
      activation: the name of a function, such as "silu", or an elementwise jnp function.
      precision, scaling, fp8_scaling, amax_history_length, implementation: as in Linear, of all three matmuls. With
        fp8_scaling="delayed", gate_proj's history of x is used for up_proj too, and copied to it: both have the same x.
      options: of nnx.Linear, such as dtype, param_dtype, kernel_init and rngs, except use_bias, dot_general and
        preferred_element_type.

    Raises:
      TypeError, ValueError: as Linear; or an option that this module lacks.
    """

    @plain_arguments
    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        activation: Any = "silu",
        precision: str | None = None,
        scaling: str | None = None,
        fp8_scaling: str = "dynamic",
        amax_history_length: int | None = None,
        implementation: str | None = None,
        **options: Any,
    ) -> None:
        for name, size in (("in_features", in_features), ("hidden_features", hidden_features)):
            check_size(name, size)
        if activation is None:
            raise TypeError("activation: got None, want a name or a function")
        check_scaling("", precision, scaling)
        _check_options(options, precision)
        checked_activation(activation)
        options |= {"use_bias": False, "precision": precision, "scaling": scaling, "implementation": implementation}
        options |= {"fp8_scaling": fp8_scaling, "amax_history_length": amax_history_length}
        self.gate_proj = Linear(in_features, hidden_features, **options)
        self.up_proj = Linear(in_features, hidden_features, **options)
        self.down_proj = Linear(hidden_features, in_features, **options)
        self.activation = activation

    def __call__(self, x: jax.Array, *, residual: jax.Array | None = None) -> jax.Array:
        """down_proj(activation(gate_proj(x)) * up_proj(x)) + residual: [..., in_features].

        x: [..., in_features]. residual: like x, or None. The result has the dtype of the computation. If the module has
        no dtype of its own, the result has the promoted dtype of the computation and residual.
        """
        of, down = self.gate_proj, self.down_proj
        if not self._has_one_kind(self.gate_proj, self.up_proj):
            return self._after(self._gated(x), residual)
        weights = self.gate_proj.kernel[...], self.up_proj.kernel[...]
        x, gate, up = _promoted(of, x, *weights)
        if self.is_one_op:
            residual = _residual(of, residual, x, down.out_features)
            wide = residual if residual is not None and residual.dtype != x.dtype else None  # mlp has no out_dtype
            out = mlp_op.mlp(
                x,
                up,
                down.kernel[...].astype(x.dtype),
                w_gate=gate,
                activation=self.activation,
                residual=residual if wide is None else None,
                precision=of.precision,
                implementation=of.implementation,
            )
            return out if wide is None else wide + out
        scales: dict[str, Any] = {}
        if of.fp8_scaling == "delayed":
            options = {"activation": self.activation}
            outs = _recorded((of, self.up_proj), fp8_shared.delayed_matmul, x, gate, up, **options)
            if outs is not None:
                return self._after(outs[0], residual)
            scales["x_scale"] = delayed_scale(of.x_history, x)
            scales["w_gate_scale"] = delayed_scale(of.kernel_history, gate)
            scales["w_up_scale"] = delayed_scale(self.up_proj.kernel_history, up)
            copy_history(of.x_history, self.up_proj.x_history)
        hidden = ops.gated_matmul(
            x,
            gate,
            up,
            self.activation,
            precision=of.precision,
            scaling=of.scaling,
            implementation=of.implementation,
            **scales,
        )
        return self._after(hidden, residual)

    @property
    def is_one_op(self) -> bool:
        """Whether the module calls the op mlp with the three kernels, and calls no projection."""
        layers = self.gate_proj, self.up_proj, self.down_proj
        return self._has_one_kind(*layers) and self.gate_proj.precision in mlp_op.PRECISIONS

    @staticmethod
    def _has_one_kind(*layers: Any) -> bool:
        """Whether the layers' kernels may be read instead of calling the layers, with equal options."""
        options = lambda of: (of.precision, of.scaling, of.fp8_scaling, of.implementation, of.dtype)
        return all(computes_its_kernel(layer) and options(layer) == options(layers[0]) for layer in layers)

    def _gated(self, x: jax.Array) -> jax.Array:
        """activation(gate_proj(x)) * up_proj(x), in the wider dtype of the two."""
        activation = checked_activation(self.activation)
        assert activation is not None
        gate, up = activation(self.gate_proj(x)), self.up_proj(x)
        wide = jax.numpy.promote_types(gate.dtype, up.dtype)
        return gate.astype(wide) * up.astype(wide)

    def _after(self, hidden: jax.Array, residual: jax.Array | None) -> jax.Array:
        """down_proj(hidden) + residual."""
        if residual is None or isinstance(self.down_proj, Linear):
            return self.down_proj(hidden) if residual is None else self.down_proj(hidden, residual=residual)
        out = self.down_proj(hidden)
        residual = checked_residual(residual, out.shape, "the result's")
        wide = jax.numpy.promote_types(out.dtype, residual.dtype)
        return out.astype(wide) + residual.astype(wide)
