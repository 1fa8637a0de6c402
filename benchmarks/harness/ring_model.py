"""The expected efficiency of a ring of many devices, from a measured step and a link's bandwidth.

A ring of n devices takes n steps of `step_ms`. During each step of a forward except the last, keys and values move to
the next device. During each step of a backward except the first, the float32 gradients of keys and values move too, and
once more to return to their device. If a step's send takes longer than the step, the ring waits for the difference:

    ring_ms = n * step_ms + (n - 1) * max(0, send_ms - step_ms),    efficiency = n * step_ms / ring_ms
"""

from typing import Any

__all__ = ["DEVICES", "bytes_of_step", "efficiency", "expected"]

DEVICES = 8, 64, 512
NETWORK = 50.0  # GB/s in one direction: a link of 400 Gb/s for each GPU


def bytes_of_step(local_tokens: int, heads: int, head_dim: int, *, backward: bool) -> int:
    """The bytes that a device sends in a step: 16-bit keys and values, in a backward with their float32 gradients."""
    return 2 * local_tokens * heads * head_dim * (2 + 4 * backward)


def efficiency(devices: int, step_ms: float, send_ms: float) -> float:
    ring_ms = devices * step_ms + (devices - 1) * max(0.0, send_ms - step_ms)
    return devices * step_ms / ring_ms


def expected(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The expected efficiency of each causal case of a ring over two devices, for each of DEVICES and each link.

    A step is half of the time of the ring over two devices, for the forward or for the backward. The backward's time is
    "fwdbwd" minus the forward. The links are the measured link (only the forward's communication) and NETWORK.
    """
    times = {
        (row["local_tokens"], row["mode"], row["contender"]): row
        for row in rows
        if row["devices"] == 2 and row["causal"] and "median_ms" in row and row["strategy"] == "ring"
        if not row.get("window") and not row.get("documents")
    }
    found = []
    for (tokens, mode, contender), row in times.items():
        both, sends = times.get((tokens, "fwdbwd", "ring")), times.get((tokens, "fwd", "communication"))
        if mode != "fwd" or contender != "ring" or both is None or sends is None:
            continue
        sizes = tokens, row["heads"], row["head_dim"]
        measured = bytes_of_step(*sizes, backward=False) / sends["median_ms"] / 1e6
        for name, whole_ms in (("forward", row["median_ms"]), ("backward", both["median_ms"] - row["median_ms"])):
            step_ms, size = whole_ms / 2, bytes_of_step(*sizes, backward=name == "backward")
            for link, bandwidth in (("NVLink", measured), ("400 Gb/s", NETWORK)):
                send_ms = size / bandwidth / 1e6
                fields = {"local_tokens": tokens, "direction": name, "link": link, "gigabytes_per_s": bandwidth}
                fields |= {"step_ms": step_ms, "send_ms": send_ms}
                found.append(fields | {str(n): efficiency(n, step_ms, send_ms) for n in DEVICES})
    return found
