"""The operations of attention and of matmuls, by formula. A multiplication with its addition counts as two."""

import numpy as np

__all__ = ["attention_flops", "live_pairs", "matmul_flops"]


def attention_flops(pairs: float, head_dim: int, v_head_dim: int, *, backward: bool) -> float:
    """The operations of attention's matmuls. pairs: of queries and keys, over batch and heads.

    The forward has one matmul over each head_dim. The backward recomputes the scores, and has the gradients of the
    softmax, query, key and value: three matmuls over head_dim, and two over v_head_dim.
    """
    of_query, of_value = (3, 2) if backward else (1, 1)
    return 2 * pairs * (of_query * head_dim + of_value * v_head_dim)


def matmul_flops(m: float, n: float, k: float) -> float:
    """The operations of a matmul [m, k] @ [k, n]."""
    return 2 * m * n * k


def live_pairs(
    q_length: int, kv_length: int, *, is_causal: bool, window: tuple[int, int] | None, q_offset: int = 0
) -> float:
    """The number of pairs of a query and a key that a causal mask and a window leave, for one head.

    window: (left, right), -1 for no limit; with is_causal, right is 0. q_offset: the position of query 0.
    """
    positions = np.arange(q_length, dtype=np.int64) + q_offset
    left, right = (-1, -1) if window is None else window
    right = 0 if is_causal else right
    first = np.zeros_like(positions) if left < 0 else np.clip(positions - left, 0, kv_length)
    end = np.full_like(positions, kv_length) if right < 0 else np.clip(positions + right + 1, 0, kv_length)
    return float(np.maximum(end - first, 0).sum())
