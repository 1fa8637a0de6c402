"""Dictionaries of bounded size that several threads fill."""

import concurrent.futures
import sys

from jax_kernels.bridge.interop.bounded_dict import drop_oldest


def test_newest_entries_stay():
    entries = dict.fromkeys(range(9))
    drop_oldest(entries, 3)
    assert list(entries) == [6, 7, 8]
    drop_oldest(entries, 3)
    assert list(entries) == [6, 7, 8]


def test_threads_drop_entries_concurrently():
    entries = {}

    def fill(thread):
        for i in range(20_000):
            entries[thread, i] = i
            drop_oldest(entries, 5)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(fill, range(4)))
    finally:
        sys.setswitchinterval(before)
    assert len(entries) <= 5
