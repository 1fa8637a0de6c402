"""Linear and GatedMLP with low-bit weights, and quantize_weights, which puts them into a model."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from jax import lax

from jax_kernels.models.layers.inputs import check_features, check_promotion, checked_residual
from jax_kernels.models.layers.linear import GatedMLP, Linear
from jax_kernels.models.layers.mixture_of_experts import MixtureOfExperts
from jax_kernels.models.layers.quantized_experts import QuantizedMixtureOfExperts, QuantizedWeight
from jax_kernels.ops.matmul import matmul as ops
from jax_kernels.quantization import QuantizedArray, formats, quantize

__all__ = ["QuantizedGatedMLP", "QuantizedLinear", "QuantizedWeight", "quantize_weights"]


class QuantizedLinear(nnx.Module):
    """A Linear whose weights have 4 or 8 bits, by jax_kernels.matmul. x keeps its 16 or 32 bits.

    Equivalent to the following JAX code, in float32 from the matmul on::

        out = activation(x @ dequantize(kernel) + bias) + residual

    Variables: values and scale, QuantizedWeights with the fields of the QuantizedArray; bias [out_features], an
    nnx.Param, or None. `kernel` is the QuantizedArray [in_features, out_features]. The gradients of x, the bias and the
    residual equal the gradients with dequantised weights. Gradients of the weights raise an error.

    Args:
      kernel: quantize(w, format) of w [in_features, out_features], in a low-bit format, along axis -2.
      bias: [out_features], an array, or an nnx.Param, which is then shared; None for none.
      activation, implementation: as in matmul.
      dtype: of the computation and the result; None for the promoted dtype of x, param_dtype and bias, as in
        nnx.Linear.
      param_dtype: the weights' dtype for that promotion.
      precision: with float32 "fp32" or "tf32"; else None.
      promote_dtype: as in nnx.Linear.

    Raises:
      TypeError: kernel is not a low-bit QuantizedArray.
      ValueError: kernel does not have two axes or is not quantized along axis -2; bias has a wrong shape; precision is
        another name.

    Raises, when called:
      TypeError, ValueError, NotImplementedError: as matmul.
    """

    def __init__(
        self,
        kernel: QuantizedArray,
        *,
        bias: Any = None,
        activation: str | Callable[[jax.Array], jax.Array] | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: str | None = None,
        implementation: str | None = None,
        promote_dtype: Any = dtypes.promote_dtype,
    ) -> None:
        if not isinstance(kernel, QuantizedArray) or kernel.layout is None:
            got = f"one of {kernel.dtype}" if isinstance(kernel, QuantizedArray) else type(kernel).__name__
            raise TypeError(f"kernel: got {got}, want a QuantizedArray of {_formats()}")
        if kernel.ndim != 2 or kernel.axis != -2:
            raise ValueError(
                f"kernel: got shape {kernel.shape}, quantized along axis {kernel.axis}, want two axes and axis -2"
            )
        _check_precision("precision", precision)
        self.in_features, self.out_features = kernel.shape
        if bias is not None and bias.shape != (self.out_features,):
            raise ValueError(f"bias: got shape {bias.shape}, want ({self.out_features},)")
        self.values = QuantizedWeight(kernel.values)
        self.scale = QuantizedWeight(kernel.scale)
        self.scaling = kernel.scaling
        self.layout = kernel.layout
        self.bias = nnx.data(bias if bias is None or isinstance(bias, nnx.Variable) else nnx.Param(bias))
        self.activation = activation
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.implementation = implementation
        self.promote_dtype = promote_dtype

    @classmethod
    def from_linear(
        cls,
        linear: nnx.Linear,
        format: str = "int4",
        *,
        scaling: str | None = None,
        group_size: int | None = None,
        scale_dtype: Any = None,
    ) -> "QuantizedLinear":
        """A QuantizedLinear with the quantized weights of a Linear or an nnx.Linear, and with its bias and other
        options.

        Args:
          linear: a models.Linear or an nnx.Linear. The bias is shared.
          format: "int8", "int4", "mxfp8" or "mxfp4". scaling, group_size, scale_dtype: as in quantize.

        Raises:
          TypeError: linear is another module.
          ValueError: an option of quantize is wrong, or linear has a precision, a dot_general or a
            preferred_element_type that low-bit matmuls do not support.
        """
        _check_format(format)
        _check_linear("linear", linear)
        found = quantize(
            linear.kernel[...], format, scaling=scaling, axis=-2, group_size=group_size, scale_dtype=scale_dtype
        )
        return cls(
            found,
            bias=linear.bias,
            activation=getattr(linear, "activation", None),
            dtype=linear.dtype,
            param_dtype=linear.kernel.dtype,
            precision=linear.precision,
            implementation=getattr(linear, "implementation", None),
            promote_dtype=linear.promote_dtype,
        )

    @property
    def kernel(self) -> Any:
        """The weights [in_features, out_features], a QuantizedArray."""
        return QuantizedArray(
            values=self.values[...],
            scale=self.scale[...],
            scaling=self.scaling,
            axis=-2,
            layout=self.layout,
            length=self.in_features,
        )

    def promoted(self, x: jax.Array) -> jax.Array:
        """x in the dtype of the computation. x: [..., in_features].

        Raises TypeError if that dtype has 8 bits, ValueError for another number of features.
        """
        check_features("x", x, self.in_features)
        bias = None if self.bias is None else self.bias[...]
        check_promotion(self.dtype, x=x, param_dtype=self.param_dtype)
        x, *_ = self.promote_dtype((jnp.asarray(x), jnp.zeros((), self.param_dtype), bias), dtype=self.dtype)
        if x.dtype.itemsize == 1:
            raise TypeError(f"dtype: got {x.dtype} for the computation, want 16 or 32 bits")
        return x

    def __call__(self, x: jax.Array, *, residual: jax.Array | None = None) -> jax.Array:
        """activation(x @ dequantize(kernel) + bias) + residual: [..., out_features], in the dtype of the computation.

        x: [..., in_features]. residual: [..., out_features], or None.
        """
        x = self.promoted(x)
        if residual is not None:
            shape = (*x.shape[:-1], self.out_features)
            residual = checked_residual(residual, shape, "the result's").astype(x.dtype)
        bias = None if self.bias is None else self.bias[...]
        if bias is not None and bias.dtype != jnp.float32:
            bias = bias.astype(x.dtype)
        return ops.matmul(
            x,
            self.kernel,
            bias=bias,
            activation=self.activation,
            residual=residual,
            precision=self.precision,
            implementation=self.implementation,
        )


class QuantizedGatedMLP(nnx.Module):
    """A GatedMLP whose weights have 4 or 8 bits, by gated_matmul and matmul.

    Equivalent to the following JAX code::

        down_proj(activation(gate_proj(x)) * up_proj(x)) + residual

    Args:
      gate_proj, up_proj: QuantizedLinears [in_features, hidden_features] without bias and activation, with the same
        layout and the same dtype of scales. The dtype, precision and implementation are gate_proj's.
      down_proj: a QuantizedLinear or a Linear [hidden_features, in_features].
      activation: as in gated_matmul.

    Raises:
      TypeError: gate_proj or up_proj is not a QuantizedLinear.
      ValueError: gate_proj or up_proj has a bias or an activation.

    Raises, when called:
      TypeError, ValueError, NotImplementedError: as gated_matmul and matmul.
    """

    def __init__(
        self, gate_proj: QuantizedLinear, up_proj: QuantizedLinear, down_proj: Any, *, activation: Any = "silu"
    ) -> None:
        for name, projection in (("gate_proj", gate_proj), ("up_proj", up_proj)):
            if not isinstance(projection, QuantizedLinear):
                raise TypeError(f"{name}: got {type(projection).__name__}, want a QuantizedLinear")
            if projection.bias is not None or projection.activation is not None:
                raise ValueError(f"{name}: got one with a bias or an activation, want neither")
        self.gate_proj = gate_proj
        self.up_proj = up_proj
        self.down_proj = down_proj
        self.activation = activation

    @classmethod
    def from_mlp(cls, mlp: GatedMLP, format: str = "int4", *, quantize_down: bool = True, **options: Any) -> Any:
        """A QuantizedGatedMLP with the quantized weights of a GatedMLP.

        Args:
          format, options: as in QuantizedLinear.from_linear.
          quantize_down: whether to quantize down_proj as well; otherwise the GatedMLP's own down_proj is used.

        Raises:
          TypeError, ValueError: as QuantizedLinear.from_linear; mlp is not a GatedMLP.
        """
        if not isinstance(mlp, GatedMLP):
            raise TypeError(f"mlp: got {type(mlp).__name__}, want a GatedMLP")
        of = lambda projection: QuantizedLinear.from_linear(projection, format, **options)
        down = of(mlp.down_proj) if quantize_down else mlp.down_proj
        return cls(of(mlp.gate_proj), of(mlp.up_proj), down, activation=mlp.activation)

    def __call__(self, x: jax.Array, *, residual: jax.Array | None = None) -> jax.Array:
        """down_proj(activation(gate_proj(x)) * up_proj(x)) + residual: [..., in_features].

        x: [..., in_features]. residual: like the result, or None.
        """
        of = self.gate_proj
        hidden = ops.gated_matmul(
            of.promoted(x),
            of.kernel,
            self.up_proj.kernel,
            self.activation,
            precision=of.precision,
            implementation=of.implementation,
        )
        return self.down_proj(hidden, residual=residual)


def quantize_weights(
    model: nnx.Module,
    format: str = "int4",
    *,
    scaling: str | None = None,
    group_size: int | None = None,
    scale_dtype: Any = None,
    skip: str | Sequence[str] | None = None,
) -> Any:
    """Rounds the weights of a model's matmuls to 4 or 8 bits, in the model itself.

    Each models.Linear and nnx.Linear becomes a QuantizedLinear, each GatedMLP a QuantizedGatedMLP. In a Transformer
    these are the attention's projections, the MLP and the head, if it has one. Each MixtureOfExperts becomes a
    QuantizedMixtureOfExperts. Embeddings, norms, biases, convolutions, routers and low-bit weights do not change. A
    second call with another format can therefore quantize the modules that the first call skipped.

    Args:
      model: an nnx.Module that has such modules as attributes, or in nnx.Lists and nnx.Dicts.
      format: "int8", "int4", "mxfp8" or "mxfp4". scaling, group_size, scale_dtype: as in quantize.
      skip: names of modules that do not change, with all modules inside them: parts of a dotted name such as "head",
        "mlp.down_proj", "layers.0"; a string is one name. None skips "head" if the model has one.

    Returns:
      The model.

    Raises, and changes nothing:
      TypeError: model is not an nnx.Module, or is itself a Linear, a GatedMLP or a MixtureOfExperts; skip has other
        values than strings; or a module is of another subclass of nnx.Linear.
      ValueError: an option is wrong, a module has an option that QuantizedLinear lacks, a name in skip matches no
        module, skip names a part of a GatedMLP other than down_proj, or there is no module to replace.
    """
    _check_format(format)
    if not isinstance(model, nnx.Module) or isinstance(model, _QUANTIZED):
        want = (
            "an nnx.Module that has Linears; for a Linear, a GatedMLP or a MixtureOfExperts itself use "
            "QuantizedLinear.from_linear, QuantizedGatedMLP.from_mlp or QuantizedMixtureOfExperts"
        )
        raise TypeError(f"model: got {type(model).__name__}, want {want}")
    options = {"format": format, "scaling": scaling, "group_size": group_size, "scale_dtype": scale_dtype}
    quantize(jnp.zeros((2, 2)), **options)  # raises if an option is wrong, before any module is replaced
    found = list(_modules(model, (), set()))
    kept = _Skipped(skip, [path for path, *_ in found])
    conversions = []
    for path, parent, name, module in found:
        if kept.has(path) or not isinstance(module, _QUANTIZED) or isinstance(parent, GatedMLP):
            continue
        if isinstance(module, QuantizedMixtureOfExperts):
            continue
        make = next(make for kind, make in _MAKERS.items() if isinstance(module, kind))
        converted = make(path, module, kept, options)
        if converted is not None:
            conversions.append((parent, name, module, converted))
    _check_all_found(model, found)
    if not conversions:
        raise ValueError("model: got no Linear or GatedMLP outside skip, want at least one")
    done: dict[int, Any] = {}  # a shared module stays shared
    for parent, name, module, convert in reversed(conversions):  # a module after the modules inside it
        if id(module) not in done:
            done[id(module)] = convert()
        setattr(parent, name, done[id(module)])
    return model


class _Skipped:
    """The modules that quantize_weights leaves unchanged, by the names in its argument `skip`.

    names: the argument skip, None for "head". paths: the paths of all modules of the model. Raises TypeError or
    ValueError for names that are no strings or match no module.
    """

    def __init__(self, names: str | Sequence[str] | None, paths: Sequence[tuple[str, ...]]) -> None:
        names = (names,) if isinstance(names, str) else names
        if names is not None and not all(isinstance(name, str) for name in names):
            raise TypeError(f"skip: got {names!r}, want a name, a sequence of names, or None")
        self.names = [tuple(name.split(".")) for name in (("head",) if names is None else names)]
        for name in [] if names is None else self.names:
            if not any(_is_part(name, path) for path in paths):
                raise ValueError(f"skip: got {'.'.join(name)!r}, want names of modules of the model")

    def has(self, path: tuple[str, ...]) -> bool:
        """Whether quantize_weights skips the module at this path: `skip` names it, or a module that contains it."""
        return any(_is_part(name, path) for name in self.names)


def _is_part(name: tuple[str, ...], path: tuple[str, ...]) -> bool:
    """Whether the parts of a dotted name appear one after the other in a path."""
    return any(path[i : i + len(name)] == name for i in range(len(path) - len(name) + 1))


def _of_linear(path: tuple[str, ...], linear: Any, kept: _Skipped, options: dict[str, Any]) -> Callable[[], Any]:
    """Returns a function that makes the QuantizedLinear for a Linear.

    path: of the Linear in the model, for errors. kept: not used. options: of QuantizedLinear.from_linear. Raises
    TypeError or ValueError, before anything is made, if low-bit weights do not support the module or its options.
    """
    _check_linear(".".join(path), linear)
    return lambda: QuantizedLinear.from_linear(linear, **options)


def _of_mlp(path: tuple[str, ...], mlp: GatedMLP, kept: _Skipped, options: dict[str, Any]) -> Callable[[], Any] | None:
    """A function that makes the QuantizedGatedMLP for a GatedMLP; None if skip names all its projections.

    path: of the GatedMLP in the model. kept: the modules that skip names. Raises ValueError if skip names gate_proj or
    up_proj alone.
    """
    gate, up, down = (not kept.has((*path, name)) for name in ("gate_proj", "up_proj", "down_proj"))
    if not (gate or up or down):
        return None
    if not (gate and up):
        raise ValueError(f"skip: got names of a part of {'.'.join(path)}, want names of all of it or of down_proj only")
    for name in ("gate_proj", "up_proj", "down_proj"):
        _check_linear(".".join((*path, name)), getattr(mlp, name))
    return lambda: QuantizedGatedMLP.from_mlp(mlp, quantize_down=down, **options)


def _of_experts(
    path: tuple[str, ...], experts: MixtureOfExperts, kept: _Skipped, options: dict[str, Any]
) -> Callable[[], Any]:
    """A function that makes the QuantizedMixtureOfExperts for a MixtureOfExperts. path, kept: not used."""
    return lambda: QuantizedMixtureOfExperts(experts, **options)


_MAKERS: dict[Any, Callable[..., Any]] = {GatedMLP: _of_mlp, MixtureOfExperts: _of_experts, nnx.Linear: _of_linear}
_QUANTIZED = tuple(_MAKERS)


def _modules(
    node: nnx.Module, path: tuple[str, ...], seen: set[int]
) -> Iterator[tuple[tuple[str, ...], Any, str, Any]]:
    """Yields (path, parent, attribute name in the parent, module) for all modules inside `node`, at any depth.

    A shared module is yielded once for each parent, its contents once. path: of `node`. seen: the ids of visited
    modules.
    """
    seen.add(id(node))
    for name, child in list(vars(node).items()):
        if isinstance(child, nnx.Module):
            yield (*path, name), node, name, child
            if id(child) not in seen:
                yield from _modules(child, (*path, name), seen)


def _check_all_found(model: nnx.Module, found: Sequence[Any]) -> None:
    """Raises ValueError if a Linear or GatedMLP of the model is missing in `found`, as in a plain list or dict.

    found: the entries that _modules yields for the model.
    """
    known = {id(module) for *_, module in found}
    for path, module in nnx.iter_modules(model):
        if isinstance(module, _QUANTIZED) and id(module) not in known:
            raise ValueError(f"model: got {'.'.join(map(str, path))} in a list or dict, want an nnx.List or nnx.Dict")


def _check_linear(name: str, linear: Any) -> None:
    """Raises TypeError or ValueError unless a module is a Linear whose options low-bit matmuls support. name: for the
    error.
    """
    if type(linear) not in (Linear, nnx.Linear):
        raise TypeError(f"{name}: got {type(linear).__name__}, want a models.Linear or an nnx.Linear")
    _check_precision(f"{name}.precision", linear.precision)
    if linear.dot_general is not lax.dot_general or linear.preferred_element_type is not None:
        raise ValueError(f"{name}: got a dot_general or a preferred_element_type, want none with low-bit weights")


def _check_precision(name: str, precision: Any) -> None:
    if precision not in (None, "fp32", "tf32"):
        raise ValueError(
            f"{name}: got {precision!r} with low-bit weights, want None, 'fp32' or 'tf32'; a model with "
            "precision='fp8' has the same parameters as a model without it"
        )


def _check_format(format: Any) -> None:
    if format not in formats.FORMATS:
        raise ValueError(f"format: got {format!r}, want one of {_formats()}")


def _formats() -> str:
    return ", ".join(map(repr, formats.FORMATS))
