"""Batches of windows of a text. Each process reads only the rows of its own devices."""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jax_kernels.files import files_below
from jax_kernels.models.config import check_size
from jax_kernels.models.parallel.sharding import ShardingRules, batch_sharding
from jax_kernels.plain_numbers import plain_arguments

__all__ = ["TokenBatches", "read_documents", "read_text"]


def read_documents(paths: str | Path | Iterable[str | Path]) -> tuple[np.ndarray, np.ndarray]:
    """(the bytes of text files, the index of each file's first byte): uint8 [bytes], int64 [files].

    Pass the second array to TokenBatches as `documents`, so that each file is a document. paths, errors: as in
    read_text.
    """
    files = _files(paths)
    sizes = [file.stat().st_size for file in files]
    return _text(files), np.cumsum([0, *sizes[:-1]])


def read_text(paths: str | Path | Iterable[str | Path]) -> np.ndarray:
    """The bytes of text files, one after the other: uint8 [bytes]. A single file is memory-mapped, not read.

    Args:
      paths: a file, a folder, or several files and folders. A folder gives all its files that are not hidden, in the
        order of their names.

    Raises:
      FileNotFoundError: a path is neither a file nor a folder.
      OSError: a file, or a subfolder of a folder, cannot be read; the error names it.
      ValueError: there are no bytes.
      TypeError: paths is neither a path nor an iterable.
    """
    return _text(_files(paths))


def _files(paths: str | Path | Iterable[str | Path]) -> list[Path]:
    """The files at the paths that have bytes, in order; a folder's files that are not hidden are sorted by name.

    Raises TypeError, FileNotFoundError, OSError if a folder cannot be read, or ValueError if there are none.
    """
    files: list[Path] = []
    if not isinstance(paths, str | Path | Iterable):
        raise TypeError(f"paths: got {type(paths).__name__}, want a file, a folder, or several of these")
    for path in [paths] if isinstance(paths, str | Path) else paths:
        path = Path(path)
        if path.is_dir():
            with _reading():
                files += files_below(path)
        elif path.is_file():
            files.append(path)
        else:
            raise FileNotFoundError(f"paths: {path} is neither a file nor a folder")
    files = [file for file in files if file.stat().st_size]
    if not files:
        raise ValueError("paths: got no bytes of text, want a file that is not empty")
    return files


def _text(files: list[Path]) -> np.ndarray:
    """The bytes of the files, one after the other: uint8 [bytes]. A single file is memory-mapped.

    Raises OSError, which names a file that cannot be read.
    """
    with _reading():
        if len(files) == 1:
            return np.memmap(files[0], np.uint8, mode="r")
        return np.concatenate([np.fromfile(file, np.uint8) for file in files])


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """A context manager that turns the operating system's errors inside it into OSErrors with the path and the
    reason in words.
    """
    try:
        yield
    except OSError as error:
        raise OSError(f"paths: {error.filename or 'a file'} cannot be read ({error.strerror or error})") from error


class TokenBatches:
    """Batches of windows of a sequence of tokens. batches[step] depends only on the seed and the step.

    A window has seq_len + 1 tokens, and its first token is the last token of the previous window. An epoch has each
    window once, in an order that grain shuffles for each epoch. A step's batch does not depend on devices or processes,
    so that a run can resume at any step, on any mesh.

    Args:
      tokens: integers [n], for example from read_text, or a np.memmap of token ids.
      seq_len: the number of tokens of a window that have a target, which is the next token. batch_size: the number of
        windows of a batch, over all devices.
      seed: of the order.
      documents: the index of the first token of each document, integers [documents], ascending from 0, for example from
        read_documents or document_starts. A batch then also has segment_ids, and a target in another document is -1.
        None if all tokens are one document. The end of a window cuts the document there.
      mesh, rules: the sharding of the batches, as in shard_batch. mesh: None for the default device.

    Raises:
      ValueError: a number is out of range, tokens are not integers [n] or fewer than a window, documents do not ascend
        from 0 within the tokens, a batch has 2**31 tokens or more, or the number of devices does not divide the batch.
        On taking a batch: a token does not fit int32.
      TypeError: tokens is not an array, or a number is not an int.
    """

    @plain_arguments
    def __init__(
        self,
        tokens: np.ndarray,
        seq_len: int,
        batch_size: int,
        *,
        seed: int = 0,
        documents: np.ndarray | None = None,
        mesh: Mesh | None = None,
        rules: ShardingRules | None = None,
    ) -> None:
        check_size("seq_len", seq_len, 1)
        check_size("batch_size", batch_size, 1)
        check_size("seed", seed, most=2**32 - 1)
        if not isinstance(tokens, np.ndarray | jax.Array):
            raise TypeError(f"tokens: got {type(tokens).__name__}, want an array of integers [n]")
        if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError(f"tokens: got {tokens.dtype} {tokens.shape}, want integers [n]")
        count = (len(tokens) - 1) // seq_len
        if count < 1:
            raise ValueError(f"tokens: got {len(tokens)}, want at least {seq_len + 1} for seq_len={seq_len}")
        if batch_size * seq_len >= 2**31:
            raise ValueError(f"batch: got {batch_size} windows of {seq_len} tokens, want fewer than 2**31 tokens")
        if documents is not None:
            documents = _checked_documents(np.asarray(documents), len(tokens))
        import grain  # the import takes a second

        self.tokens = tokens
        self.documents = documents
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.windows = count
        self._order = grain.MapDataset.range(count).shuffle(seed=seed).repeat()
        shape = (batch_size, seq_len)
        self._sharding = None if mesh is None else batch_sharding(shape, mesh, rules)

    def __getitem__(self, step: int) -> tuple[jax.Array, ...]:
        """(tokens, targets) of a step, int32 [batch_size, seq_len]. The targets are the next tokens.

        With `documents`: (tokens, targets, segment_ids). Ids count from 0 in each window, and a target in another
        document is -1.

        Raises TypeError or ValueError unless step is an int of 0 or more.
        """
        check_size("step", step)
        step = int(step)
        sharding = self._sharding
        if sharding is None:
            rows = self._rows(step, range(self.batch_size))
            return tuple(jax.numpy.asarray(rows[:, field]) for field in range(rows.shape[1]))
        shape = (self.batch_size, self.seq_len)
        read: dict[int, np.ndarray] = {}

        def part(field: int) -> Any:
            def of(index: Any) -> np.ndarray:
                numbers = range(*index[0].indices(self.batch_size))
                read.update({number: self._rows(step, [number])[0] for number in numbers if number not in read})
                return np.stack([read[number][field] for number in numbers])[:, index[1]]

            return jax.make_array_from_callback(shape, sharding, of)

        return tuple(part(field) for field in range(2 if self.documents is None else 3))

    def _rows(self, step: int, numbers: Sequence[int]) -> np.ndarray:
        """Rows of a step's batch: int32 [n, 2, seq_len] (tokens, targets), or [n, 3, seq_len] with segment_ids.

        numbers: the indices of the n rows in the batch.
        """
        starts = [self._order[step * self.batch_size + number] * self.seq_len for number in numbers]
        return np.stack([self._window(start) for start in starts])

    def _window(self, start: int) -> np.ndarray:
        """The window that begins at token `start`: int32 [2, seq_len] (tokens, targets), or [3, seq_len] with
        segment_ids.
        """
        read = np.asarray(self.tokens[start : start + self.seq_len + 1])
        tokens = read.astype(np.int32)
        if (tokens != read).any():
            raise ValueError(f"tokens: got ids from {read.min()} to {read.max()}, want int32")
        if self.documents is None:
            return np.stack([tokens[:-1], tokens[1:]])
        ids = np.searchsorted(self.documents, np.arange(start, start + self.seq_len + 1), side="right")
        ids = (ids - ids[0]).astype(np.int32)
        targets = np.where(ids[1:] == ids[:-1], tokens[1:], -1)
        return np.stack([tokens[:-1], targets, ids[:-1]])

    @property
    def sha256(self) -> str:
        """The SHA-256 of tokens and documents, as hex digits, to check that a resumed run has the same text."""
        digest = hashlib.sha256()
        for start in range(0, len(self.tokens), 1 << 24):
            digest.update(np.ascontiguousarray(self.tokens[start : start + (1 << 24)]))
        if self.documents is not None:
            digest.update(self.documents)
        return digest.hexdigest()


def _checked_documents(documents: np.ndarray, length: int) -> np.ndarray:
    """The documents as int64. Raises ValueError unless they are integers that ascend from 0 and stay below `length`."""
    if documents.ndim != 1 or not np.issubdtype(documents.dtype, np.integer):
        raise ValueError(f"documents: got {documents.dtype} {documents.shape}, want integers [documents]")
    if not len(documents) or documents[0] != 0 or documents[-1] >= length or (np.diff(documents) <= 0).any():
        raise ValueError(
            f"documents: got {documents}, want first tokens that ascend from 0, each below the {length} tokens"
        )
    return np.ascontiguousarray(documents, np.int64)
