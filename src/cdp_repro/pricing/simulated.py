"""`price`: the price of a training step by self-timed simulation of the very programs that run.

Each rank runs its actions in program order, compute takes its stage's time, a SEND takes none but occupies links, and
an action waits for the messages that it consumes; nothing else is a barrier. A collective begins when all ranks take
part, and occupies the links of a ring. Links serve messages in the order of the schedule, so that every time is a
maximum of sums of the cluster's numbers (a max-plus linear system): slower links never make a step shorter, and the
steps become periodic. The period is the price.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, takewhile

from cdp_repro.pricing.cluster import Cluster, ring_seconds
from cdp_repro.schedule import (
    Action,
    MessageKey,
    Op,
    Payload,
    Schedule,
    Slot,
    StageCosts,
    consumed,
    next_in_ring,
    result_of,
    ring_bytes,
    simulate_totals,
)

MAX_STEPS = 12
"""Training steps after which a simulation stops looking for an exact period."""

_STEADY = 1e-9
"""Relative difference up to which two steps take the same time."""


@dataclass(frozen=True)
class Price:
    """What one training step takes in the steady state."""

    devices: int
    step_seconds: float
    busy_seconds: float
    """Of forwards, backwards and updates, summed over devices."""
    within_host_bytes: float
    """Sent to devices on the sender's host, summed over devices."""
    between_hosts_bytes: float
    """Sent to devices on other hosts, summed over devices."""
    activation_bytes: float
    """Peak of live activation bytes on the device that has most."""
    state_bytes: float
    """Peak of parameters, in all versions kept, and optimizer state on the device that has most; without gradients.
    Of a full pipeline: drained, a stale mode keeps two versions everywhere."""
    method: str
    """`simulated` and `closed form`, which are exact in this model of a cluster, or `extrapolated` (see `estimate`)."""
    at_most_seconds: float | None = None
    """Of an extrapolation: what `step_seconds` may be at most."""

    @property
    def idle_share(self) -> float:
        """Share of all devices' time in which they do not compute, 0 to 1."""
        return max(0.0, 1 - self.busy_seconds / (self.step_seconds * self.devices)) if self.step_seconds else 0.0

    @property
    def between_hosts_share(self) -> float:
        """Share of the bytes that leave a host, 0 to 1."""
        return self.between_hosts_bytes / max(1, self.within_host_bytes + self.between_hosts_bytes)

    @property
    def sent_bytes_per_device(self) -> float:
        """Bytes that a device sends, on average over devices."""
        return (self.within_host_bytes + self.between_hosts_bytes) / self.devices


class _SelfTimedClock:
    """When each action runs, told in an order in which nothing waits for what comes later."""

    def __init__(self, schedule: Schedule, costs: StageCosts, cluster: Cluster) -> None:
        self._costs = costs
        self._cluster = cluster
        self._micro_batches = schedule.micro_batches
        self._now = [0.0] * schedule.ranks
        self._free: dict[tuple[bool, bool, int], float] = defaultdict(float)
        """By (whether outgoing, whether between hosts, rank): when the link has sent or received all so far."""
        self._arrivals: dict[tuple[int, MessageKey], deque[float]] = defaultdict(deque)
        self._joined: dict[Action, tuple[tuple[bool, bool, int], ...]] = {}
        """Parts in the collective that has begun, with the links that each uses."""
        self.starts: list[int] = []
        """The slot in which each training step has started."""
        self._states: list[list[float]] = []
        """At the start of each training step: all times above, sorted, as ranks may take turns."""
        self.busy: dict[int, list[float]] = defaultdict(list)
        """By slot: the seconds of its actions."""
        self.sent: dict[tuple[int, bool], int] = defaultdict(int)
        """By slot and whether between hosts: bytes."""

    def run(self, slot: Slot) -> None:
        """Run all actions of the next slot."""
        for action in slot.actions:
            self._run(slot.number, action)

    def _run(self, slot: int, action: Action) -> None:
        rank = action.rank
        next_step = len(self._states) * self._micro_batches
        if action.op is Op.FORWARD and action.stage == 0 and action.micro_batch == next_step:
            self.starts.append(slot)
            self._states.append(sorted([*self._now, *self._free.values()]))
        for key in consumed(action, self._micro_batches):
            if waiting := self._arrivals.get((rank, key)):
                self._now[rank] = max(self._now[rank], waiting.popleft())
        if action.op is Op.SEND:
            self._send(slot, action)
        elif action.op is Op.COLLECTIVE:
            self._join(slot, action)
        if seconds := self._cluster.seconds(action):
            self._now[rank] += seconds
            self.busy[slot].append(seconds)

    def _send(self, slot: int, action: Action) -> None:
        """Occupy the sender's outgoing and, a latency later, the receiver's incoming link."""
        assert action.payload is not None and action.peer is not None
        size = self._costs.sent_bytes(action.payload, action.stage)
        if not size:
            return
        crosses = self._cluster.crosses(action.rank, action.peer)
        self.sent[slot, crosses] += size
        link = self._cluster.link(crosses)
        outgoing, incoming = (True, crosses, action.rank), (False, crosses, action.peer)
        start = max(self._now[action.rank], self._free[outgoing], self._free[incoming] - link.latency_seconds)
        self._free[outgoing] = start + link.seconds(size)
        self._free[incoming] = self._free[outgoing] + link.latency_seconds
        self._arrivals[action.peer, action.message].append(self._free[incoming])

    def _join(self, slot: int, action: Action) -> None:
        """Run a collective as soon as all ranks, which come one after the other, take part, on the links of a ring."""
        assert action.payload is not None
        size, ranks = self._costs.sent_bytes(action.payload, action.stage), len(self._now)
        if not size:
            return
        crosses = self._cluster.crosses(action.rank, next_in_ring(action.rank, ranks))
        self.sent[slot, crosses] += ring_bytes(action, size, ranks)
        self._joined[action] = (True, crosses, action.rank), (False, crosses, next_in_ring(action.rank, ranks))
        if len(self._joined) < ranks:
            return
        links = [*chain.from_iterable(self._joined.values())]
        end = max(*self._now, *(self._free[link] for link in links)) + self._seconds(action, size)
        self._free |= dict.fromkeys(links, end)
        for part in self._joined:
            self._arrivals[part.rank, result_of(part, self._micro_batches)].append(end)
        self._joined.clear()

    def _seconds(self, collective: Action, size: int) -> float:
        """Return for how long a collective occupies the links."""
        factors = self._cluster.collectives
        rings = {
            Payload.TOTAL: 2 * factors.all_reduce,
            Payload.PARAMETERS: factors.all_gather,
            Payload.GRADIENTS: factors.reduce_scatter,
        }
        assert collective.payload is not None
        return rings[collective.payload] * ring_seconds(self._cluster, len(self._now), size)

    def is_done(self, at_least: int) -> bool:
        """Whether `at_least` steps have run, and all times grew by the same in the last two, or there is no use."""
        steps = len(self.starts) - 1
        return steps >= at_least and (steps >= MAX_STEPS or self._is_steady())

    def _is_steady(self) -> bool:
        if len(self._states) < 3 or len({len(state) for state in self._states[-3:]}) > 1:
            return False
        one, two, three = self._states[-3:]
        growths = [late - early for early, late in zip(one + two, two + three, strict=True)]
        return max(growths) - min(growths) <= _STEADY * max(growths)

    def per_step(self, settled: int) -> dict[str, float]:
        """Return the seconds that devices compute and the bytes that they send in a step, once `settled` have run."""
        full = range(self.starts[settled], self.starts[-1])
        steps = len(self.starts) - 1 - settled
        return {
            "busy_seconds": math.fsum(chain.from_iterable(self.busy.get(slot, ()) for slot in full)) / steps,
            "within_host_bytes": sum(self.sent.get((slot, False), 0) for slot in full) / steps,
            "between_hosts_bytes": sum(self.sent.get((slot, True), 0) for slot in full) / steps,
        }

    @property
    def period(self) -> float:
        """Seconds from one training step to the next: exact once steady, else the mean of the later half of them."""
        last = len(self._states) - 1
        first = last - 1 if self._is_steady() else last // 2
        return (self._states[last][-1] - self._states[first][-1]) / (last - first)


def price(schedule: Schedule, costs: StageCosts, cluster: Cluster, optimizer_states: int = 0) -> Price:
    """Return the price of a training step of `schedule`, by simulation of its programs until they are periodic.

    `optimizer_states` is the number of values that the optimizer keeps for a parameter: 1 for momentum, 2 for Adam.

    Raises:
        ValueError: `schedule`, `costs` and `cluster` are not of the same number of stages.
    """
    (found,) = price_on_each(schedule, costs, (cluster,), optimizer_states)
    return found


def price_on_each(
    schedule: Schedule, costs: StageCosts, clusters: Sequence[Cluster], optimizer_states: int = 0
) -> list[Price]:
    """Return the price on each of several clusters, of one run of the programs, which takes longer than its timing."""
    for cluster in clusters:
        if cluster.stages != schedule.stages:
            raise ValueError(
                f"the cluster has times of {cluster.stages} stages, the schedule has {schedule.stages}: give one a "
                "stage"
            )
    clocks = [_SelfTimedClock(schedule, costs, cluster) for cluster in clusters]
    settled = max(map(schedule.mode.oldest, range(schedule.stages))) + 2
    slots = takewhile(lambda _: not all(clock.is_done(settled + 2) for clock in clocks), schedule.slots(count()))
    totals = list(simulate_totals(schedule, costs, _timed(slots, clocks), optimizer_states))
    return [
        Price(
            devices=schedule.ranks,
            step_seconds=clock.period,
            **clock.per_step(settled),
            activation_bytes=max(slot.activation_bytes_per_device for slot in totals),
            state_bytes=max(slot.state_bytes_per_device for slot in totals),
            method="simulated",
        )
        for clock in clocks
    ]


def _timed(slots: Iterable[Slot], clocks: Sequence[_SelfTimedClock]) -> Iterator[Slot]:
    """Yield `slots` unchanged, each when all of its actions have run on all clocks."""
    for slot in slots:
        for clock in clocks:
            clock.run(slot)
        yield slot
