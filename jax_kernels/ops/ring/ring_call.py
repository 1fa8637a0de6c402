"""A call of ring_attention: its arrays and its static half."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_kernels.ops.ring.layouts import Layout
from jax_kernels.ops.ring.partial_results import Pair, Visitors
from jax_kernels.ops.ring.planning.costs import Prediction
from jax_kernels.ops.ring.sends import sent, sent_together
from jax_kernels.ops.ring.steps import Step

__all__ = ["RingArrays", "RingCall"]


class RingArrays(NamedTuple):
    """A device's arrays in ring_attention; None for an argument that was not given.

    query, key, value: [B, T, heads, D], this device's tokens. segment_ids: [B, T] int32. sinks: [1, H] float32. mask
    (a Mask) and score_mod (a ScoreMod) are of the whole sequence. bias: [B or 1, H or 1, T or 1, S or 1], rows for the
    device's queries, columns for all keys in sequence order. all_ids: int32 [B, S], the segment ids of all devices, in
    the order of the devices; None if ids travel with their keys.
    """

    query: Any
    key: Any
    value: Any
    segment_ids: Any
    sinks: Any
    mask: Any = None
    score_mod: Any = None
    bias: Any = None
    all_ids: Any = None


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class RingCall:
    """The static half of a checked call of ring_attention: everything except the arrays.

    strategy: "ring", "halo", "all_to_all" or "all_gather". differentiated: the strategy under differentiation.
    sends_ahead: the number of steps by which keys are sent ahead of their step. permutes_up_to: the largest number of
    devices that exchange heads by permutes; more devices use all-to-alls. dead: the numbers of the steps that the mask
    leaves without a pair on all devices. by_xla: whether the steps run by XLA, so that JAX can differentiate them.
    options: (name, value) of options of flash_attention. predictions: of the time of each strategy.
    """

    layout: Layout
    axis_name: str
    strategy: str
    differentiated: str
    sends_ahead: int
    permutes_up_to: int
    dead: tuple[int, ...] = ()
    by_xla: bool = False
    options: tuple[tuple[str, Any], ...]
    predictions: tuple[Prediction, ...] = ()

    def sendable(self, arrays: RingArrays, *, in_backward: bool = False) -> Visitors:
        """The Visitors that this device sends: its keys, values and ids.

        Tokens that no other device needs are left out, unless the layout sends all keys and values. in_backward: leave
        them out in any case, because float32 gradients of the sent keys travel too. If the steps run by XLA, whose
        sends are not a group, keys and values are one array.
        """
        some = lambda x: x if x is None or self.layout.shared == x.shape[1] else x[:, : self.layout.shared]
        ids = None if arrays.all_ids is not None else some(arrays.segment_ids)
        is_whole = self.layout.shared == self.layout.length or (self.layout.sends_all and not in_backward)
        if is_whole and not self.by_xla:
            return Visitors(Pair((arrays.key, arrays.value)), ids)
        return Visitors(Pair.of(some(arrays.key), some(arrays.value)), ids)  # a copy anyway

    def of_all_tokens(self, gradients: Pair) -> Pair:
        """The gradients of all of this device's keys and values, from the gradients of the keys that it sent."""
        more = self.layout.length - self.layout.shared
        pad = lambda x: jnp.pad(x, [(0, more if axis == x.ndim - 3 else 0) for axis in range(x.ndim)])
        return jax.tree.map(pad, gradients) if more else gradients

    def shifted(self, tree: Any, by: int) -> Any:
        """The tree of the device that is `by` devices before this one in the ring. tree: this device's arrays."""
        devices = self.layout.devices
        if by % devices == 0:
            return tree
        pairs = [(i, (i + by) % devices) for i in range(devices)]
        return sent(tree, self.axis_name, pairs) if self.by_xla else sent_together(tree, self.axis_name, pairs)

    def sent(self, at: int, visitors: Any) -> list[Any]:
        """Sends keys ahead: a list of the Visitors that arrive during step steps[at], in the order of their steps.

        They are for later steps. During the first step, the keys for the next sends_ahead steps arrive; during another
        step, the keys for one step, which is sends_ahead entries of `steps` later. Empty if no step is left to send
        for. visitors: the keys, values and ids of step steps[at]; each device passes them on to the device that needs
        them.
        """
        numbers = self.steps
        last = min(at + self.sends_ahead, len(numbers) - 1)
        first = 1 if at == 0 else at + self.sends_ahead
        return [self.shifted(visitors, numbers[i] - numbers[at]) for i in range(first, last + 1)]

    @property
    def steps(self) -> list[int]:
        """The numbers of the steps in which any device has work, ascending. In step 0 each device has its own keys."""
        is_dead = lambda step: step in self.dead or self.layout.is_dead(step)
        return [step for step in range(self.layout.devices) if step == 0 or not is_dead(step)]

    @property
    def index(self) -> Any:
        return lax.axis_index(self.axis_name)

    @property
    def scale(self) -> float:
        return dict(self.options)["scale"]

    def step(self, number: int, arrays: RingArrays) -> Step:
        """The Step in which this device attends to the keys of the device that is `number` before it."""
        return Step(
            layout=self.layout,
            number=number,
            index=self.index,
            query=arrays.query,
            q_ids=arrays.segment_ids,
            all_ids=arrays.all_ids,
            mask=arrays.mask,
            score_mod=arrays.score_mod,
            bias=arrays.bias,
            options=dict(self.options),
        )
