"""Batches of windows of a text, of which each process reads the rows of its own devices."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jax_kernels.models.sharding import ShardingRules, batch_sharding

__all__ = ["TokenBatches", "read_text"]


def read_text(paths: str | Path | Iterable[str | Path]) -> np.ndarray:
    """The bytes of text files, one after the other: uint8 [bytes]. A single file is mapped, not read.

    Args:
      paths: a file, a folder, of which all files are taken that are not hidden, or several of these. Files of a folder
        come in the order of their names.

    Raises:
      FileNotFoundError: a path is neither a file nor a folder. ValueError: there are no bytes.
    """
    files: list[Path] = []
    for path in [paths] if isinstance(paths, str | Path) else paths:
        path = Path(path)
        if path.is_dir():
            found = (x.relative_to(path) for x in path.rglob("*") if x.is_file())
            files += [path / x for x in sorted(found) if not any(part.startswith(".") for part in x.parts)]
        elif path.is_file():
            files.append(path)
        else:
            raise FileNotFoundError(f"paths: {path} is neither a file nor a folder")
    files = [file for file in files if file.stat().st_size]
    if not files:
        raise ValueError("paths: got no bytes of text")
    if len(files) == 1:
        return np.memmap(files[0], np.uint8, mode="r")
    return np.concatenate([np.fromfile(file, np.uint8) for file in files])


class TokenBatches:
    """Batches of windows of a sequence of tokens: batches[step] hangs on the seed and the step alone.

    A window has seq_len + 1 tokens, and begins where the one before ended. An epoch has each window once, in an order
    of its own, by grain. Neither the devices nor the processes have an effect on a step's batch, so that a run may go
    on at any step, on any mesh.

    Args:
      tokens: integers [n], such as read_text gives, or a np.memmap of token ids.
      seq_len: the tokens of a window. batch_size: the windows of a batch, over all devices.
      seed: of the order.
      mesh, rules: where to place the batches, as in shard_batch. None for the default device.

    Raises:
      ValueError: a number is below 1, the tokens are no sequence of integers or less than a window, or the devices do
        not divide the batch.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        seq_len: int,
        batch_size: int,
        *,
        seed: int = 0,
        mesh: Mesh | None = None,
        rules: ShardingRules | None = None,
    ) -> None:
        for name, value in (("seq_len", seq_len), ("batch_size", batch_size)):
            if value < 1:
                raise ValueError(f"{name}: got {value}, want 1 or more")
        if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError(f"tokens: got {tokens.dtype} {tokens.shape}, want integers [n]")
        count = (len(tokens) - 1) // seq_len
        if count < 1:
            raise ValueError(f"tokens: got {len(tokens)}, want at least {seq_len + 1} for seq_len={seq_len}")
        import grain  # it takes a second

        self.tokens = tokens
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.windows = count
        self._order = grain.MapDataset.range(count).shuffle(seed=seed).repeat()
        shape = (batch_size, seq_len)
        self._sharding = None if mesh is None else batch_sharding(shape, mesh, rules)

    def __getitem__(self, step: int) -> tuple[jax.Array, jax.Array]:
        """(tokens, targets) of a step, int32 [batch_size, seq_len]: targets are the tokens one place further on."""
        sharding = self._sharding
        if sharding is None:
            rows = self._rows(step, range(self.batch_size))
            return jax.numpy.asarray(rows[:, :-1]), jax.numpy.asarray(rows[:, 1:])
        shape = (self.batch_size, self.seq_len)
        read: dict[int, np.ndarray] = {}

        def part(first: int) -> Any:
            def of(index: Any) -> np.ndarray:
                numbers = range(*index[0].indices(self.batch_size))
                read.update({number: self._rows(step, [number])[0] for number in numbers if number not in read})
                rows = np.stack([read[number] for number in numbers])
                return rows[:, first : first + self.seq_len][:, index[1]]

            return jax.make_array_from_callback(shape, sharding, of)

        return part(0), part(1)

    def _rows(self, step: int, numbers: Sequence[int]) -> np.ndarray:
        """Windows of a batch by their numbers in it: int32 [n, seq_len + 1]."""
        starts = [self._order[step * self.batch_size + number] * self.seq_len for number in numbers]
        return np.stack([self.tokens[start : start + self.seq_len + 1] for start in starts]).astype(np.int32)

    @property
    def sha256(self) -> str:
        """The digest of the tokens, which tells whether a run goes on with the text that it began with."""
        digest = hashlib.sha256()
        for start in range(0, len(self.tokens), 1 << 24):
            digest.update(np.ascontiguousarray(self.tokens[start : start + (1 << 24)]))
        return digest.hexdigest()
