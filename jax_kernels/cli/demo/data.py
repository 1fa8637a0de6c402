"""The demo's text: bytes read in a fixed order, split into train and held-out blocks, batches drawn by step."""

import dataclasses
import hashlib
import sysconfig
from pathlib import Path

import numpy as np

from jax_kernels.files import files_below

__all__ = ["Corpus", "CorpusError", "read_corpus", "standard_library", "standard_library_files", "unigram_entropy"]

MAX_BYTES = 16 * 10**6
# A block holds this many training windows, and every HELD_OUT_EVERY-th block is held out.
WINDOWS_PER_BLOCK = 8
HELD_OUT_EVERY = 10


class CorpusError(ValueError):
    """Raised for a text that cannot be trained on; the message says why."""


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The bytes of a text, cut into blocks of consecutive bytes: some for training, the others held out.

    train, held_out: uint8 [blocks, block_length]. A window is seq_len + 1 consecutive bytes: inputs, and targets
    shifted by one. Windows do not cross blocks, so no held-out byte is trained on. source: the path of the text.
    sha256: of all bytes.
    """

    train: np.ndarray
    held_out: np.ndarray
    seq_len: int
    source: str
    sha256: str

    @property
    def size(self) -> int:
        return self.train.size + self.held_out.size

    def batch(self, batch_size: int, seed: int, step: int) -> np.ndarray:
        """The windows of one training step, uint8 [batch_size, seq_len + 1], drawn at random from the training blocks.

        They depend only on the text, the batch size, the seed and the step.
        """
        rng = np.random.default_rng((seed, step))
        block = rng.integers(len(self.train), size=batch_size)
        start = rng.integers(self.train.shape[1] - self.seq_len, size=batch_size)
        return self.train[block[:, None], start[:, None] + np.arange(self.seq_len + 1)]

    def held_out_batches(self, batch_size: int, limit: int) -> np.ndarray:
        """Up to `limit` batches of windows, evenly spread over the held-out blocks: uint8 [batches, windows, seq_len +
        1].

        A batch has batch_size windows, or all held-out windows if these are fewer.
        """
        windows = self.held_out.reshape(-1, self.seq_len + 1)
        size = min(batch_size, len(windows))
        count = min(limit, len(windows) // size)
        chosen = np.linspace(0, len(windows) - 1, count * size).astype(int)
        return windows[chosen].reshape(count, size, -1)


def standard_library() -> Path:
    """The folder of Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def standard_library_files() -> list[Path]:
    """The paths of the .py files of Python's standard library, without its tests, sorted.

    site-packages is not the standard library, and the tests are half of the rest.
    """
    skip = {"site-packages", "test", "tests", "idle_test"}
    return [file for file in files_below(standard_library(), skip=skip) if file.suffix == ".py"]


def read_corpus(path: Path | None, seq_len: int) -> Corpus:
    """The Corpus of a file, of every text file of a folder, or for None of the .py source of Python's standard library.

    Files are taken in the order of their paths, up to MAX_BYTES. Files with a NUL byte, which are no text, and hidden
    files are skipped. Raises CorpusError if there is too little text or nothing to read.
    """
    if path is None:
        files, source = standard_library_files(), f"{standard_library()}/**/*.py"
    elif path.is_dir():
        try:
            files, source = files_below(path), str(path)
        except OSError as error:
            raise CorpusError(f"cannot read {error.filename}: {error.strerror}") from error
    elif path.is_file():
        files, source = [path], str(path)
    else:
        raise CorpusError(f"{path} is neither a file nor a folder")

    parts, size = [], 0
    for file in files:
        try:
            part = file.read_bytes()
        except OSError as error:
            raise CorpusError(f"cannot read {file}: {error.strerror}") from error
        if b"\0" in part:
            if file == path:
                raise CorpusError(f"{path} is not text: it has NUL bytes")
            continue
        parts.append(part)
        size += len(part)
        if size >= MAX_BYTES:
            break
    data = np.frombuffer(b"".join(parts)[:MAX_BYTES], np.uint8)

    block_length = WINDOWS_PER_BLOCK * (seq_len + 1)
    need = HELD_OUT_EVERY * block_length
    if len(data) < need:
        raise CorpusError(f"{source} has {len(data)} bytes of text, want at least {need} for --seq-len {seq_len}")
    blocks = data[: len(data) // block_length * block_length].reshape(-1, block_length)
    held_out = np.arange(len(blocks)) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    return Corpus(blocks[~held_out], blocks[held_out], seq_len, source, hashlib.sha256(data.tobytes()).hexdigest())


def unigram_entropy(data: np.ndarray) -> float:
    """The entropy of the frequencies of bytes, in bits per byte: the least loss of a model without context."""
    counts = np.bincount(data.ravel(), minlength=256)
    frequencies = counts[counts > 0] / data.size
    return float(-(frequencies * np.log2(frequencies)).sum())
