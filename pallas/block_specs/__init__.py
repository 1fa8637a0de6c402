"""Per-GPU block specs: a file with one record of literal rows per compute capability, and the look-up of rows."""

from jax_kernels.pallas.block_specs.lookup import BLOCK_SPECS as BLOCK_SPECS
from jax_kernels.pallas.block_specs.lookup import attention_order as attention_order
from jax_kernels.pallas.block_specs.lookup import attention_row as attention_row
from jax_kernels.pallas.block_specs.lookup import decode_row as decode_row
from jax_kernels.pallas.block_specs.lookup import dilated_launches as dilated_launches
from jax_kernels.pallas.block_specs.lookup import dquery_blocks as dquery_blocks
from jax_kernels.pallas.block_specs.lookup import fp8_row as fp8_row
from jax_kernels.pallas.block_specs.lookup import grouped_order as grouped_order
from jax_kernels.pallas.block_specs.lookup import grouped_row as grouped_row
from jax_kernels.pallas.block_specs.lookup import low_bit_order as low_bit_order
from jax_kernels.pallas.block_specs.lookup import low_bit_row as low_bit_row
from jax_kernels.pallas.block_specs.lookup import matmul_order as matmul_order
from jax_kernels.pallas.block_specs.lookup import matmul_row as matmul_row
from jax_kernels.pallas.block_specs.lookup import nearest as nearest
from jax_kernels.pallas.block_specs.lookup import norm_order as norm_order
from jax_kernels.pallas.block_specs.lookup import norm_row as norm_row
from jax_kernels.pallas.block_specs.lookup import replaced_tables as replaced_tables
from jax_kernels.pallas.block_specs.lookup import ring_row as ring_row
from jax_kernels.pallas.block_specs.record import BlockSpecs as BlockSpecs
