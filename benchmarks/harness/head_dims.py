"""The block specs that sweep_attention.py tries for head_dims between 64, 128 and 256."""

import dataclasses
import itertools
from typing import Any

# Fields that replace fields of the row, by direction and (head_dim, value_head_dim).
CHANGES: dict[str, dict[tuple[int, int], tuple[dict[str, Any], ...]]] = {
    "fwd": {
        (80, 80): (
            {"atom": 32},
            {"stages": 4},
            {"stages": 2},
            {"block_kv": 192, "stages": 2},
            {"compute_warpgroups": 3, "stages": 2, "early_q": False},
            {"compute_warpgroups": 3, "block_kv": 96, "stages": 4, "early_q": False},
            {"compute_warpgroups": 3, "block_kv": 112, "stages": 3, "early_q": False},
        ),
        (96, 96): (
            {"stages": 2},
            {"stages": 4, "share_q_out": True, "early_q": False},
            {"block_kv": 160, "stages": 2},
            {"block_kv": 192, "stages": 2, "share_q_out": True, "early_q": False},
            {"compute_warpgroups": 3, "block_kv": 96, "stages": 3, "early_q": False},
            {"compute_warpgroups": 3, "block_kv": 96, "stages": 4, "share_q_out": True, "early_q": False},
            {"compute_warpgroups": 3, "block_kv": 64, "stages": 4, "early_q": False},
        ),
        (112, 112): (
            {"atom": 64},
            {"stages": 3, "share_q_out": True, "early_q": False},
            {"block_kv": 160, "stages": 2, "share_q_out": True, "early_q": False},
            {"block_kv": 96, "stages": 3},
            {"block_kv": 64, "stages": 4},
        ),
        (160, 160): (
            {"block_kv": 96, "share_q_out": False, "early_q": True},
            {"block_kv": 96, "stages": 3},
            {"block_kv": 64, "stages": 4},
            {"block_kv": 64, "stages": 3, "share_q_out": False, "early_q": True},
        ),
        (192, 128): (
            {"block_kv": 96, "share_q_out": False, "atom": 32},
            {"block_kv": 64, "stages": 4},
            {"block_kv": 64, "stages": 3, "share_q_out": False},
            {"block_kv": 64, "share_q_out": False},
        ),
        (192, 192): (
            {"block_kv": 96, "atom": 32, "stages": 2},
            {"stages": 2, "share_q_out": False, "early_q": True},
            {"stages": 2},
            {"block_kv": 112, "atom": 16, "stages": 2},
        ),
    },
    "bwd": {
        (80, 80): (
            {"do_stages": 1},
            {"exit_after_smem_read": False},
            {"block_q": 64, "early_dv": True},
            {"block_q": 64, "q_stages": 3, "early_dv": True},
        ),
        (96, 96): (
            {"do_stages": 2},
            {"exit_after_smem_read": False},
            {"block_q": 64, "do_stages": 2, "early_dv": True},
            {"block_q": 64, "do_stages": 2},
            {"block_q": 64, "q_stages": 3, "do_stages": 3, "early_dv": True},
            {"block_q": 64, "do_stages": 2, "persistent": True},
        ),
        (112, 112): ({"early_dv": True}, {"early_dv": False}, {"persistent": True}),
        (160, 160): ({"do_stages": 1}, {"q_stages": 1, "do_stages": 1}, {"exit_after_smem_read": False}),
        (192, 128): ({"do_stages": 1}, {"q_stages": 1, "do_stages": 1}, {"exit_after_smem_read": False}),
        (192, 192): (
            {"do_stages": 2},
            {"do_stages": 2, "late_do": False},
            {"early_dv": True},
            {"late_do": False},
        ),
    },
}
HEAD_GROUPS, STAGGERS = (1, 2, 4, 8, 16), (0, 3, 5, 7)


def configs(blocks: Any, direction: str, causal: bool, head_dims: tuple[int, int]) -> list[Any] | None:
    """The configs to try for (head_dim, value_head_dim), each with other fields than `blocks`, the
    row's; None if the table has none.
    """
    if head_dims not in CHANGES[direction]:
        return None
    orders: list[dict[str, Any]] = [{"head_group": heads} for heads in HEAD_GROUPS] if causal else []
    if direction == "fwd":
        orders += [{"pingpong": False}, *([] if causal else [{"dynamic": True, "head_group": 8}])]
    elif not causal:
        orders += [{"q_loop_stagger": stagger} for stagger in STAGGERS]
    changes = itertools.chain(CHANGES[direction][head_dims], orders)
    return [dataclasses.replace(blocks, **fields) for fields in changes]
