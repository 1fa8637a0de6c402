"""Arrays of 8 bits and low-bit weights: `quantize`, `dequantize`, and the formats of their values and scales."""

from jax_kernels.quantization.arrays import FORMATS as FORMATS
from jax_kernels.quantization.arrays import QuantizedArray as QuantizedArray
from jax_kernels.quantization.arrays import dequantize as dequantize
from jax_kernels.quantization.arrays import quantize as quantize
from jax_kernels.quantization.arrays import quantize_blocks as quantize_blocks
from jax_kernels.quantization.arrays import quantize_columns as quantize_columns
from jax_kernels.quantization.arrays import quantize_fp8 as quantize_fp8
from jax_kernels.quantization.scales import SCALINGS as SCALINGS
from jax_kernels.quantization.scales import check_scaling as check_scaling
from jax_kernels.quantization.scales import checked_scale as checked_scale
from jax_kernels.quantization.scales import quantization_scale as quantization_scale
from jax_kernels.quantization.scales import scale_shape as scale_shape
