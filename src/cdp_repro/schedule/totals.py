"""Simulation without a trace: what all ranks together do in each slot, for schedules of up to a million ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cdp_repro.schedule.actions import Action, MessageKey, Op, Slot, consumed, result_of
from cdp_repro.schedule.collectives import ring_hops
from cdp_repro.schedule.costs import StageCosts
from cdp_repro.schedule.schedule import Schedule
from cdp_repro.schedule.simulate import Effects


@dataclass(frozen=True, slots=True)
class SlotTotals:
    """What all ranks did in one slot: what a `Trace` of them says of it, where the properties have the same names."""

    slot: int
    activation_bytes: int
    """Live activation bytes, summed over ranks: of each the peak during the slot."""
    activation_bytes_per_device: int
    """The largest of these peaks, of ranks that act in the slot."""
    state_bytes_per_device: int
    """Largest number of bytes of optimizer state, and of parameter versions that are alive at the end of the slot, on a
    rank that acts in it."""
    versions_kept: int
    """Largest number of versions of one stage that are alive on one rank at the end of the slot."""
    messages: int
    """Messages of more than 0 bytes: others are never sent."""
    chain: int
    """Longest chain of these messages, each of which had to wait for the one before."""
    bytes_sent: int
    """By all ranks."""
    computing_ranks: int
    """Ranks that run a forward or a backward."""


def simulate_totals(
    schedule: Schedule, costs: StageCosts, slots: Iterable[Slot], optimizer_states: int = 0
) -> Iterator[SlotTotals]:
    """Run the first slots of the schedule, as `simulate_slots` does, and yield the totals of each.

    Keeps nothing of a slot that has passed but what is alive. `optimizer_states` is the number of values that the
    optimizer keeps for a parameter.

    Raises:
        ValueError: `costs` has another number of stages than the schedule.
    """
    live = Live(schedule, costs, optimizer_states)
    effects = Effects(schedule, costs)
    for slot in slots:
        live.run(slot)
        sizes = [size for action in slot.actions if (size := effects.bytes_sent(action))]
        yield SlotTotals(
            slot.number, live.activation_bytes, live.activation_bytes_per_device, live.state_bytes_per_device,
            live.versions_kept, len(sizes), _longest_chain(slot, effects, schedule) if sizes else 0, sum(sizes),
            len({action.rank for action in slot.actions if action.op.is_compute}),
        )  # fmt: skip


class Live:
    """What is alive on all ranks together: activations, parameter versions and optimizer state, slot by slot."""

    activation_bytes: int
    """As of `SlotTotals`, like all that follow: of the slot that ran last."""
    activation_bytes_per_device: int
    state_bytes_per_device: int
    versions_kept: int

    def __init__(self, schedule: Schedule, costs: StageCosts, optimizer_states: int = 0) -> None:
        """Raise ValueError if `costs` has another number of stages than the schedule."""
        effects = Effects(schedule, costs)
        self._activations = _Activations(schedule, effects)
        self._versions = _Versions(schedule, costs, effects, optimizer_states)

    def run(self, slot: Slot) -> None:
        """Run all actions of the next slot."""
        self.activation_bytes, self.activation_bytes_per_device = self._activations.run(slot)
        self.state_bytes_per_device, self.versions_kept = self._versions.run(slot)


class _Activations:
    """Live activation bytes of each rank."""

    def __init__(self, schedule: Schedule, effects: Effects) -> None:
        self._effects = effects
        self._live = [0] * schedule.ranks
        self._total = 0

    def run(self, slot: Slot) -> tuple[int, int]:
        """Run a slot; return the peaks of all ranks, summed, and the largest of those that act."""
        live = self._live
        before: dict[int, int] = {}
        peaks: dict[int, int] = {}
        for action in slot.actions:
            rank, held = action.rank, live[action.rank]
            if rank not in before:
                before[rank] = peaks[rank] = held
            change = self._effects.activation_bytes(action)
            if change:
                live[rank] = held = held + change
                peaks[rank] = max(peaks[rank], held)
        started = sum(before.values())
        total = self._total + sum(peaks.values()) - started
        self._total += sum(live[rank] for rank in before) - started
        return total, max(peaks.values(), default=0)


class _Versions:
    """Live parameter versions of each stage on each rank, and the optimizer state."""

    def __init__(self, schedule: Schedule, costs: StageCosts, effects: Effects, optimizer_states: int) -> None:
        self._sizes = costs.parameter_bytes
        self._effects = effects
        self._held = [(1 + optimizer_states) * size for size in schedule.placement.held(costs.parameter_bytes)]
        self._alive: dict[tuple[int, int], int] = {}
        """By rank and stage, where it is not one."""
        self._placement = schedule.placement
        self._places = Counter({1: sum(len(schedule.placement.holders(stage)) for stage in range(schedule.stages))})
        """How many ranks and stages have so many versions alive."""

    def run(self, slot: Slot) -> tuple[int, int]:
        """Run a slot; return the most bytes on a rank that acts, and the most versions of a stage on any rank."""
        for action in slot.actions:
            change = self._effects.versions(action)
            if change:
                self._change(action, change)
        most = max((self._held[rank] for rank in {action.rank for action in slot.actions}), default=0)
        return most, max(number for number, places in self._places.items() if places)

    def _change(self, action: Action, change: int) -> None:
        place = action.rank, action.stage
        before = self._alive.pop(place, 1)
        after = before + change
        if after != 1:
            self._alive[place] = after
        self._places[before] -= 1
        self._places[after] += 1
        self._held[action.rank] += change * self._placement.share(action.rank, self._sizes[action.stage])


def _longest_chain(slot: Slot, effects: Effects, schedule: Schedule) -> int:
    """Return the longest chain among the messages of a slot, whose order has nothing wait for what comes later."""
    depth: dict[tuple[int, MessageKey], int] = {}
    waited: dict[int, int] = {}
    joined: list[Action] = []
    micro_batches, ranks = schedule.micro_batches, schedule.ranks
    for action in slot.actions:
        rank = action.rank
        for key in consumed(action, micro_batches) if depth else ():
            if (found := depth.get((rank, key), 0)) > waited.get(rank, 0):
                waited[rank] = found
        if not effects.payload_bytes(action):
            continue
        if action.op is Op.COLLECTIVE:
            joined.append(action)
            if len(joined) == ranks:  # one after the other, as validation has seen
                reached = max(waited.get(part.rank, 0) for part in joined) + ring_hops(action, ranks)
                depth |= {(part.rank, result_of(part, micro_batches)): reached for part in joined}
                joined.clear()
        else:
            assert action.peer is not None
            depth[action.peer, action.message] = waited.get(rank, 0) + 1
    return max(depth.values(), default=0)
