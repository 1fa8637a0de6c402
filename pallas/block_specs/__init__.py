"""Per-GPU block specs: one file of literal rows per compute capability, and the look-up of rows."""

from jax_kernels.pallas.block_specs import sm80, sm86, sm89, sm90, sm100, sm120
from jax_kernels.pallas.block_specs.matmul_specs import MatmulCall, MatmulLowBitRow, MatmulRow
from jax_kernels.pallas.block_specs.specs import (
    AttentionDecodeRow,
    AttentionDquerySm90,
    AttentionFp8Row,
    AttentionRow,
    DilatedLaunches,
    NormRow,
    RingRow,
)

_FILES = {80: sm80, 86: sm86, 89: sm89, 90: sm90, 100: sm100, 120: sm120}


def nearest(compute_capability: tuple[int, int]):
    """(the block spec file, True) of a compute capability, or (the nearest older file, False) if it has none."""
    number = compute_capability[0] * 10 + compute_capability[1]
    known = max((key for key in _FILES if key <= number), default=80)
    return _FILES[known], known == number


def attention_order(compute_capability: tuple[int, int] | None) -> tuple[str, ...]:
    """The implementations of attention on this GPU, the fastest first; only "xla" without a GPU."""
    if compute_capability is None or compute_capability < (8, 0):
        return ("xla",)
    return nearest(compute_capability)[0].ATTENTION_ORDER


def attention_row(
    compute_capability: tuple[int, int] | None,
    implementation: str,
    *,
    head_dim: int,
    bits: int,
    is_causal: bool,
    is_limited: bool = False,
    has_segments: bool = False,
    dense_bits: int = 0,
    has_lists: bool = False,
    kv_length: int = 1 << 31,
) -> tuple[AttentionRow, str]:
    """The row for this attention, and its source ("block spec", or "heuristic" for a row of an older GPU).

    Without a GPU (interpret mode) the rows of sm_80 and sm_90 are used. Raises LookupError if no row matches.
    """
    file, own = _file(compute_capability, implementation)
    for row in file.ATTENTION:
        if (
            row.implementation == implementation
            and head_dim <= row.head_dim
            and bits == row.bits
            and row.is_causal in (None, is_causal)
            and row.is_limited in (None, is_limited)
            and row.has_segments in (None, has_segments)
            and row.has_lists == has_lists
            and (row.dense_bits is None or 0 < dense_bits <= row.dense_bits)
            and (row.up_to is None or kv_length <= row.up_to)
        ):
            return row, "block spec" if own else "heuristic"
    raise LookupError(f"no {implementation} row for head_dim={head_dim}, {bits} bits")


def decode_row(
    compute_capability: tuple[int, int] | None, implementation: str, *, head_dim: int
) -> tuple[AttentionDecodeRow, str]:
    """The row for decoding, and its source as in attention_row."""
    file, own = _file(compute_capability, implementation)
    for row in file.ATTENTION_DECODE:
        if row.implementation == implementation and head_dim <= row.head_dim:
            return row, "block spec" if own else "heuristic"
    raise LookupError(f"no {implementation} row for decoding with head_dim={head_dim}")


def fp8_row(
    compute_capability: tuple[int, int] | None, implementation: str, *, head_dim: int, is_causal: bool
) -> tuple[AttentionFp8Row, str]:
    """The row for 8-bit attention, and its source as in attention_row. Only Hopper has such rows."""
    file, own = _file(compute_capability, implementation)
    for row in file.ATTENTION_FP8:
        if (
            row.implementation == implementation
            and head_dim <= row.head_dim
            and row.is_causal in (None, is_causal)
        ):  # fmt: skip
            return row, "block spec" if own else "heuristic"
    raise LookupError(f"no {implementation} row for 8-bit attention with head_dim={head_dim}")


def dquery_blocks(*, head_dim: int, bias_bits: int) -> AttentionDquerySm90:
    """The blocks of a deterministic dquery. Only Hopper has them."""
    return next(row.blocks for row in sm90.ATTENTION_DQUERY if head_dim <= row.head_dim and bias_bits <= row.bias_bits)


def dilated_launches(compute_capability: tuple[int, int] | None) -> DilatedLaunches:
    """The costs of launches and gathers of dilated attention. Measured on Hopper, and used for all GPUs."""
    return getattr(_file(compute_capability, "mosaic_gpu")[0], "DILATED_LAUNCHES", sm90.DILATED_LAUNCHES)


def ring_row(compute_capability: tuple[int, int] | None, *, tokens: int, is_windowed: bool) -> RingRow:
    """The row for a ring with `tokens` on each device. Measured on Hopper, and used for all GPUs."""
    rows = getattr(_file(compute_capability, "mosaic_gpu")[0], "RING", sm90.RING)
    return next(
        row for row in rows if (row.up_to is None or tokens <= row.up_to) and row.is_windowed in (None, is_windowed)
    )


def matmul_order(compute_capability: tuple[int, int] | None, *, rows: int, columns: int) -> tuple[str, ...]:
    """The implementations of a matmul with these rows of x and columns of w on this GPU, the fastest first."""
    if compute_capability is None or compute_capability < (8, 0):
        return ("xla",)
    return next(row.names for row in nearest(compute_capability)[0].MATMUL_ORDER if row.serves(rows, columns))


def matmul_row(
    compute_capability: tuple[int, int] | None, implementation: str, call: MatmulCall
) -> tuple[MatmulRow, str]:
    """The row for a matmul, and its source as in attention_row."""
    file, own = _file(compute_capability, implementation)
    for row in file.MATMUL:
        if row.implementation == implementation and row.serves(call):
            return row, "block spec" if own else "heuristic"
    raise LookupError(f"no {implementation} row for matmul with {call}")


def low_bit_order(compute_capability: tuple[int, int] | None, rows: int) -> tuple[str, ...]:
    """The implementations of a matmul with low-bit weights, the fastest first."""
    if compute_capability is None or compute_capability < (8, 0):
        return ("xla",)
    orders = getattr(nearest(compute_capability)[0], "LOW_BIT_ORDER", sm80.LOW_BIT_ORDER)
    return next(order.names for order in orders if order.rows is None or rows <= order.rows)


def low_bit_row(
    compute_capability: tuple[int, int] | None, implementation: str, *, rows: int, bits: int, weight_bits: int
) -> tuple[MatmulLowBitRow, str]:
    """The row for a matmul with low-bit weights, and its source as in attention_row.

    GPUs without such rows use sm_80's.
    """
    file, own = _file(compute_capability, implementation)
    for row in getattr(file, "MATMUL_LOW_BIT", sm80.MATMUL_LOW_BIT):
        if (
            row.implementation == implementation
            and row.bits == bits
            and (row.rows is None or rows <= row.rows)
            and row.weight_bits in (None, weight_bits)
        ):
            return row, "block spec" if own else "heuristic"
    raise LookupError(f"no {implementation} row for matmul with weights of {weight_bits} bits, x of {bits}")


def norm_order(compute_capability: tuple[int, int] | None, *, columns: int) -> tuple[str, ...]:
    """The implementations of layer_norm and rms_norm on this GPU, the fastest first; only "xla" without a GPU."""
    if compute_capability is None or compute_capability < (8, 0):
        return ("xla",)
    rows = nearest(compute_capability)[0].NORM_ORDER
    return next(row.names for row in rows if row.columns is None or columns <= row.columns)


def norm_row(compute_capability: tuple[int, int] | None, implementation: str, *, columns: int) -> tuple[NormRow, str]:
    """The row for a normalisation, and its source as in attention_row."""
    file, own = _file(compute_capability, implementation)
    for row in file.NORM:
        if row.implementation == implementation and (row.columns is None or columns <= row.columns):
            return row, "block spec" if own else "heuristic"
    raise LookupError(f"no {implementation} row for normalisation with columns={columns}")


def _file(compute_capability: tuple[int, int] | None, implementation: str):
    """nearest() with a GPU; without one the file for interpret mode."""
    if compute_capability is None:
        compute_capability = (9, 0) if implementation == "mosaic_gpu" else (8, 0)
    return nearest(compute_capability)
