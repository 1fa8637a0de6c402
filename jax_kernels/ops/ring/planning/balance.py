"""Deals the documents of one packed sequence out to the devices of a ring, so that all have equally many pairs."""

import dataclasses

import numpy as np

__all__ = ["Dealt", "deal"]

ROUNDS = 200  # of the search for the early shares; a round takes about 30 us for a few documents
CLOSE = 1.01  # the busiest device's pairs over the mean, from which on no further documents are cut


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dealt:
    """The tokens that each of n devices has of each document, and its pairs of a query and a key.

    early, late: int [documents, n]. A document is cut into 2 n consecutive pieces, which may be empty: device 0 has the
    first early[0] tokens, device 1 the next early[1], ..., then device n - 1 the next late[n - 1], ..., device 0 the
    last late[0]. A document that is whole on a device is all early there. padding: int [n]. pairs: float [n].
    """

    early: np.ndarray
    late: np.ndarray
    padding: np.ndarray
    pairs: np.ndarray

    @property
    def cut(self) -> np.ndarray:
        """bool [documents]: whether several devices have tokens of a document."""
        return np.count_nonzero(self.early + self.late, axis=1) > 1

    def pairs_of_step(self, step: int, is_causal: bool) -> np.ndarray:
        """float [n]: each device's pairs of its queries and the keys of the device that is `step` before it."""
        tokens = (self.early + self.late).astype(float)
        if step == 0:
            return _of_rows(tokens, 0, is_causal).sum(0)
        of_source = lambda x: np.roll(x, step, axis=1)
        if not is_causal:
            return (tokens * of_source(tokens)).sum(0)
        is_later = np.arange(tokens.shape[1]) >= step  # than the source
        return np.where(is_later, tokens * of_source(self.early), self.late * of_source(tokens)).sum(0)


def deal(lengths: np.ndarray, padding: int, devices: int, *, is_causal: bool, step_pairs: float) -> Dealt:
    """Deals out documents of these lengths, and padding. All devices get equally many tokens.

    The longest documents are cut, each over all devices, and the others are whole on a device. The number of cut
    documents is the smallest with the least cost: the pairs of the busiest device, and step_pairs for each step of a
    ring in which a device needs another device's keys. is_causal: whether a query sees only the earlier keys of its
    document.

    lengths: int [documents], each 1 or more. The sum of lengths and padding is a multiple of `devices`.
    """
    longest_first = np.argsort(-lengths, kind="stable")
    mean = _of_rows(lengths, np.zeros_like(lengths), is_causal).sum() / devices
    best, least = None, np.inf
    for count in _counts(len(lengths), devices):
        found = _with_cut(lengths, longest_first[:count], longest_first[count:], padding, devices, is_causal)
        if found is None:
            continue
        cost = found.pairs.max() + (step_pairs * (devices - 1) if found.cut.any() else 0)
        if cost < least * (1 - 1e-9):
            best, least = found, cost
        if found.pairs.max() <= CLOSE * mean:
            break
    assert best is not None, "documents that are all cut fit any devices"
    return best


def _counts(documents: int, devices: int) -> list[int]:
    """The numbers of cut documents that `deal` tries, ascending: the small numbers, and then powers of 2."""
    few = min(documents, 4 * devices)
    larger = [2**power for power in range(documents.bit_length()) if few < 2**power < documents]
    return [*range(few + 1), *larger, *([documents] if documents > few else [])]


def _with_cut(
    lengths: np.ndarray, cut: np.ndarray, whole: np.ndarray, padding: int, devices: int, is_causal: bool
) -> Dealt | None:
    """The documents `cut` on all devices, and the documents `whole` on one device each; None if they do not fit.

    cut, whole: indices into lengths, the longest document first.
    """
    size = (int(lengths.sum()) + padding) // devices
    early = np.zeros((len(lengths), devices), int)
    of_whole, room = np.zeros(devices), np.full(devices, size)
    for index in whole:
        fits = room >= lengths[index]
        if not fits.any():
            return None
        device = int(np.argmin(np.where(fits, of_whole, np.inf)))
        early[index, device] = lengths[index]
        of_whole[device] += _of_rows(lengths[index], 0, is_causal)
        room[device] -= lengths[index]
    of_cut = _of_rows(lengths[cut], np.zeros(len(cut)), is_causal).sum()
    missing = np.maximum((of_whole.sum() + of_cut) / devices - of_whole, 0)
    quota = _filled(room, missing, int(lengths[cut].sum()))
    sizes = _split(lengths[cut], quota)
    firsts = _early_of(sizes, of_whole, is_causal)
    late = np.zeros_like(early)
    early[cut], late[cut] = firsts, sizes - firsts
    pairs = of_whole + _pairs_of_devices(firsts, sizes - firsts, is_causal)
    return Dealt(early=early, late=late, padding=room - quota, pairs=pairs)


def _of_rows(rows: np.ndarray, first: np.ndarray | int, is_causal: bool) -> np.ndarray:
    """The pairs of `rows` queries from position `first` of their document on; without is_causal, of a whole document.

    Float64.
    """
    rows = np.asarray(rows, float)
    return rows * (first + (rows + 1) / 2) if is_causal else rows * rows


def _filled(room: np.ndarray, missing: np.ndarray, total: int) -> np.ndarray:
    """int [n] with the sum `total`: as proportional to `missing` as is possible with at most `room` in each entry."""
    weights = np.where(room > 0, np.maximum(missing, 1e-9), 0)
    low, high = 0.0, float(total + 1) / max(weights[weights > 0].min(initial=np.inf), 1e-9) if total else 0.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(room, middle * weights).sum() < total else (low, middle)
    exact = np.minimum(room, high * weights)
    found = np.floor(exact + 1e-6).astype(int)
    order = np.argsort(found - exact, kind="stable")
    while (left := total - found.sum()) > 0:  # rounding, a token for each device at a time
        free = [i for i in order if found[i] < room[i]][:left]
        found[free] += 1
    return found


def _split(lengths: np.ndarray, quota: np.ndarray) -> np.ndarray:
    """int [documents, n]: the tokens of each document on each device, with these sums of rows and of columns.

    All documents are split in the same proportions, except for rounding.
    """
    left, found = quota.copy(), np.zeros((len(lengths), len(quota)), int)
    for row, length in enumerate(lengths):
        exact = length * left / max(1, left.sum())
        found[row] = np.floor(exact)
        more = np.argsort(found[row] - exact, kind="stable")[: length - found[row].sum()]
        found[row, more] += 1
        left -= found[row]
    return found


def _pairs_of_devices(early: np.ndarray, late: np.ndarray, is_causal: bool) -> np.ndarray:
    """float [n]: the pairs of each device's queries in documents that are cut. early, late: int [documents, n]."""
    length = (early + late).sum(1, keepdims=True)
    if not is_causal:
        return ((early + late) * length.astype(float)).sum(0)
    before_early = np.cumsum(early, 1) - early
    before_late = length - np.cumsum(late, 1)
    return (_of_rows(early, before_early, True) + _of_rows(late, before_late, True)).sum(0)


def _early_of(sizes: np.ndarray, of_whole: np.ndarray, is_causal: bool) -> np.ndarray:
    """int [documents, n]: the early tokens of each device, for the least pairs on the busiest device.

    sizes: int [documents, n], the early and late tokens. of_whole: float [n], the pairs of documents that are not cut.

    A device's early tokens have fewer keys than its late tokens. In each round a device with more pairs than the mean
    takes more of its tokens early.
    """
    if not is_causal or not sizes.size:
        return sizes.copy()
    share = np.full(sizes.shape[1], 0.5)
    scale = np.maximum((sizes * sizes.sum(1, keepdims=True).astype(float)).sum(0), 1.0)
    best, least = sizes // 2, np.inf
    for _ in range(ROUNDS):
        early = np.rint(sizes * share).astype(int)
        pairs = of_whole + _pairs_of_devices(early, sizes - early, True)
        if pairs.max() < least:
            best, least = early, pairs.max()
        if least <= 1.0005 * pairs.mean():
            break
        share = np.clip(share + 0.7 * (pairs - pairs.mean()) / scale, 0, 1)
    return best
