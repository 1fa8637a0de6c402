"""The result of tuning a call: the times of its implementations, and the blocks with which each is fastest."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jax_kernels.tuned.blocks import check_blocks, check_name

__all__ = ["Timed", "Tuned", "Winner"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuned:
    """The times that tuning measured for the implementation and the blocks of a plan.

    date: the day, as in "2026-11-27". ms: the median time of a call. untuned, untuned_ms: the implementation without
    tuning, with its block spec, and its time. timer: "cupti" for device time, or "host". with_gradients: whether the
    times include the backward. is_shipped: whether the times are of a file of the library, not of the user.
    """

    date: str
    ms: float
    untuned: str
    untuned_ms: float
    timer: str
    with_gradients: bool
    is_shipped: bool = False

    def text(self, implementation: str) -> str:
        """The times in words. implementation: the plan's."""
        direction = " with its backward" if self.with_gradients else ""
        source = " (shipped with the library)" if self.is_shipped else ""
        begin = f"tuned on {self.date}{source}: {self.ms:.3g} ms{direction}, "
        if self.untuned != implementation:
            return f"{begin}{self.untuned} {self.untuned_ms:.3g} ms"
        is_same = self.ms == self.untuned_ms
        return begin + ("no other candidate was faster" if is_same else f"block spec {self.untuned_ms:.3g} ms")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timed:
    """An implementation that was timed.

    ms: with the fastest blocks. untuned_ms: with its block spec. blocks: by field of its config, such as "forward", the
    name of the type of the blocks ("type") and its values by name; empty if the block spec is the fastest.
    """

    name: str
    ms: float
    untuned_ms: float
    blocks: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    def changed(self, config: Any) -> Any:
        """The config of the implementation with the fastest blocks.

        Raises AttributeError, TypeError or ValueError if the config's blocks are of other types.
        """
        changes = {}
        for name, fields in self.blocks.items():
            before, values = getattr(config, name), dict(fields)
            if (kind := values.pop("type", None)) != type(before).__name__:
                raise TypeError(f"{name}: got blocks of type {kind}, want {type(before).__name__}")
            changes[name] = dataclasses.replace(before, **values)
        return dataclasses.replace(config, **changes) if changes else config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Winner:
    """The fastest way to run the calls of one bucket, on one device.

    date: the day of the timing. timer: "cupti" for device time, or "host". with_gradients: whether the times include
    the backward. untuned: the implementation that dispatch picks without tuning. fastest: the fastest implementation;
    None if the caller named the implementation, so that the others were not timed. timed: the implementations that were
    timed. is_shipped: whether the winner is of a file of the library, not of the user.
    """

    date: str
    timer: str
    with_gradients: bool
    untuned: str
    fastest: str | None
    timed: tuple[Timed, ...]
    is_shipped: bool = False

    def of(self, implementation: str) -> Timed | None:
        """The Timed of an implementation; None if it was not timed."""
        return next((timed for timed in self.timed if timed.name == implementation), None)

    def tuned(self, implementation: str, *, by_name: bool) -> Tuned:
        """The times for a plan with this implementation, which was timed.

        by_name: whether the caller named the implementation. Without tuning, the call would then run it too.
        """
        timed = self.of(implementation)
        untuned = timed if by_name else self.of(self.untuned) or timed
        assert timed is not None
        assert untuned is not None
        return Tuned(
            date=self.date,
            ms=timed.ms,
            untuned=untuned.name,
            untuned_ms=untuned.untuned_ms,
            timer=self.timer,
            with_gradients=self.with_gradients,
            is_shipped=self.is_shipped,
        )

    def __str__(self) -> str:
        """The fastest implementation, or the one that the caller named, with its times, in words."""
        name = self.fastest or self.timed[0].name
        return f"{name} {self.tuned(name, by_name=self.fastest is None).text(name)}"

    def joined(self, later: "Winner") -> "Winner":
        """This winner, replaced by a later one. A later one that timed one named implementation keeps the others.

        Times with and without the backward do not compare: then the later one replaces all.
        """
        if later.fastest is not None or self.with_gradients != later.with_gradients:
            return later
        names = {timed.name for timed in later.timed}
        kept = tuple(timed for timed in self.timed if timed.name not in names)
        return dataclasses.replace(self, date=later.date, timer=later.timer, timed=(*later.timed, *kept))

    def as_json(self) -> dict[str, Any]:
        """The winner as a tree that json can write, without is_shipped."""
        return {name: x for name, x in dataclasses.asdict(self).items() if name != "is_shipped"}

    @classmethod
    def from_json(
        cls, tree: Any, *, request: Mapping[str, Any], shared_memory: int = 0, is_shipped: bool = False
    ) -> "Winner":
        """The winner of a tree that as_json made. Raises TypeError, ValueError or KeyError for others.

        request: the fields of the winner's request, by name. shared_memory: the most bytes of shared memory of a CTA;
        0 is no limit.
        """
        timed = tuple(Timed(**entry) for entry in tree["timed"])
        winner = cls(**{**tree, "timed": timed, "is_shipped": is_shipped})
        texts = (winner.date, winner.timer, winner.untuned, *(entry.name for entry in timed))
        blocks = [entry.blocks for entry in timed]
        blocks += [values for of in blocks if isinstance(of, dict) for values in of.values()]
        if not all(isinstance(text, str) for text in texts) or not all(isinstance(x, dict) for x in blocks):
            raise TypeError(f"winner: got {tree!r}, want text and blocks")
        if type(winner.with_gradients) is not bool:
            raise TypeError(f"with_gradients: got {winner.with_gradients!r}, want True or False")
        times = [ms for entry in timed for ms in (entry.ms, entry.untuned_ms)]
        is_time = lambda ms: type(ms) in (int, float) and 0 <= ms < math.inf
        if not times or not all(map(is_time, times)):
            raise ValueError(f"winner: got the times {times}, want numbers of 0 or more")
        if winner.fastest is not None and winner.of(winner.fastest) is None:
            raise ValueError(f"winner: got {winner.fastest!r} as the fastest, want one that was timed")
        for name in (winner.untuned, *(entry.name for entry in timed)):
            check_name(request["op"], name)
        for entry in timed:
            for field, values in entry.blocks.items():
                check_blocks(request, entry.name, field, values, shared_memory)
        return winner
