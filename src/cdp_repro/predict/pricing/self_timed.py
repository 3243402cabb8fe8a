"""`price`: the price of a training step by self-timed simulation of the very programs that run.

Each rank runs its actions in program order. Compute takes the time of its stage; a SEND takes no time but occupies
links. An action waits for the messages that it consumes, and for nothing else. A collective begins when all ranks take
part, and occupies the links of a ring. Links serve messages in the order of the program, so every time is a maximum of
sums of the cluster's numbers (a max-plus linear system). Hence slower links never make a step shorter, and the steps
become periodic. The period is the price.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from cdp_repro.predict.costs import StageCosts
from cdp_repro.predict.pricing.cluster import Cluster, ring_seconds
from cdp_repro.predict.simulate import Devices
from cdp_repro.schedule import Action, Op, Program, Schedule, Slot, Value
from cdp_repro.schedule.values import Kind
from cdp_repro.trace.rings import next_in_ring, ring_bytes

MAX_STEPS, MAX_MICRO_BATCHES = 12, 192
"""A simulation stops looking for an exact period after as many training steps, or micro-batches if those are more."""

_Link = tuple[bool, bool, int]
"""Whether outgoing, whether between hosts, rank."""

_STEADY = 1e-9
"""Relative difference up to which two steps take the same time."""


@dataclass(frozen=True)
class Price:
    """Seconds and bytes of one training step in the steady state."""

    devices: int
    step_seconds: float
    busy_seconds: float
    """Seconds of forwards, backwards and updates, summed over devices."""
    within_host_bytes: float
    """Sent to devices on the sender's host, summed over devices."""
    between_hosts_bytes: float
    """Sent to devices on other hosts, summed over devices."""
    activation_bytes: float
    """Peak of live activation bytes on the device with most."""
    state_bytes: float
    """Peak of parameters, in all versions kept, plus optimizer state on the device with most; without gradients, and
    without copies that are lent or gathered to compute with. It is that of a full pipeline: once drained, a stale mode
    keeps two versions everywhere."""
    method: str
    """`simulated` or `closed form`, both exact in this model of a cluster, or `extrapolated` (see `estimate`). Where
    the steps of a simulation do not repeat, its seconds are a mean over many."""
    at_most_seconds: float | None = None
    """Upper bound of `step_seconds`; only for an extrapolation."""

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


@dataclass(slots=True)  # not frozen: creating frozen events would take half of the time
class _Event:
    """The effect of an action on the clock of its rank, on any cluster."""

    rank: int
    waits_for: tuple[int, ...]
    """Numbers of the messages that it waits for."""
    computes: tuple[Op, int] | None = None
    """Op and stage, if it keeps its rank busy."""
    begins_step: bool = False
    share: float = 1.0
    """Factor on the seconds of the op on the whole stage: below 1 for an update of a shard, above for a slow worker."""
    carries: tuple[Value, int] | None = None
    """The value that it sends, and its bytes; None if it sends nothing."""
    links: tuple[_Link, ...] = ()
    """Links that the message occupies: an outgoing and an incoming one, or all links of a ring."""
    brings: tuple[int, ...] = ()
    """The message that arrives; at the last part of a collective, one message for each rank."""
    is_collective: bool = False


class _Reader:
    """Turns actions into events and counts them; an event waits only for events before it."""

    def __init__(self, schedule: Schedule, costs: StageCosts, cluster: Cluster) -> None:
        """`cluster` says which ranks share a host."""
        self._costs = costs
        self._cluster = cluster
        self._ranks = schedule.ranks
        self._micro_batches = schedule.micro_batches
        self._lanes = schedule.timeline.lanes
        # one device alone computes for all workers at its own speed
        is_uneven = schedule.ranks > 1 and self._lanes.durations
        self._fastest = min(map(fmean, schedule.sizes.ticks.durations)) if is_uneven else 0
        self._open: dict[tuple[int, Value], deque[int]] = defaultdict(deque)
        self._sent = 0
        self._joined: list[Action] = []
        self.starts: list[int] = []
        """The slot in which each training step started."""
        self.computed: dict[int, dict[tuple[Op, int], float]] = defaultdict(lambda: defaultdict(float))
        """By slot, then by op and stage: the sum of `share` over events."""
        self.bytes_sent: Counter[tuple[int, bool]] = Counter()
        """Bytes by slot and whether they go between hosts."""

    def read(self, slot: Slot) -> Iterator[_Event]:
        """Yield the events of the next slot; an action that takes no time and waits for nothing has none."""
        for action in slot.actions:
            event = self._event(slot.number, action)
            if event is not None:
                yield event

    def _event(self, slot: int, action: Action) -> _Event | None:
        waits_for = tuple(
            waiting.popleft() for value in action.reads if (waiting := self._open.get((action.rank, value)))
        )
        if action.op.is_compute or action.op is Op.UPDATE:
            first = len(self.starts) * self._micro_batches  # of the training step that has not begun
            begins_step = action.op is Op.FORWARD and action.stage == 0 and action.micro_batch == first
            if begins_step:
                self.starts.append(slot)
            computes = action.op, action.stage
            is_update = action.op is Op.UPDATE
            share = 1 / action.writes[0].parts if is_update else self._slowness(action.micro_batch)
            self.computed[slot][computes] += share
            return _Event(action.rank, waits_for, computes, begins_step, share)
        if action.op is Op.SEND:
            return self._send(slot, action, waits_for)
        if action.op is Op.COLLECTIVE:
            return self._join(slot, action)
        return _Event(action.rank, waits_for) if waits_for else None

    def _slowness(self, micro_batch: int) -> float:
        """Return the time of a compute over the mean of the fastest worker, whose seconds the cluster gives."""
        return self._lanes.duration(micro_batch) / self._fastest if self._fastest else 1.0

    def _send(self, slot: int, action: Action, waits_for: tuple[int, ...]) -> _Event:
        """Occupy the sender's outgoing and the receiver's incoming link."""
        assert action.value is not None
        size = self._costs.bytes_of(action.value)
        if not size:
            return _Event(action.rank, waits_for)
        crosses = self._cluster.crosses(action.rank, action.peer)
        self.bytes_sent[slot, crosses] += size
        links = (True, crosses, action.rank), (False, crosses, action.peer)
        brings = (self._brought(action.peer, action.value),)
        return _Event(action.rank, waits_for, carries=(action.value, size), links=links, brings=brings)

    def _join(self, slot: int, action: Action) -> _Event | None:
        """Wait for the last rank that takes part, then occupy all links of a ring."""
        assert action.value is not None
        size = self._costs.bytes_of(action.value.whole)
        if not size:
            return None
        crosses = self._crosses_to_next(action.rank)
        self.bytes_sent[slot, crosses] += ring_bytes(action, size, self._ranks)
        self._joined.append(action)
        if len(self._joined) < self._ranks:
            return None
        parts, self._joined = self._joined, []
        links: list[_Link] = []
        for part in parts:
            crosses, after = self._crosses_to_next(part.rank), next_in_ring(part.rank, self._ranks)
            links += (True, crosses, part.rank), (False, crosses, after)
        brings = tuple(self._brought(part.rank, part.value) for part in parts if part.value)
        carries = action.value, size
        return _Event(action.rank, (), carries=carries, links=tuple(links), brings=brings, is_collective=True)

    def _crosses_to_next(self, rank: int) -> bool:
        return self._cluster.crosses(rank, next_in_ring(rank, self._ranks))

    def _brought(self, rank: int, value: Value) -> int:
        """Return the number of a new message to `rank`."""
        self._sent += 1
        self._open[rank, value].append(self._sent)
        return self._sent


class _SelfTimedClock:
    """When each event happens on one cluster."""

    def __init__(self, schedule: Schedule, cluster: Cluster, at_least: int) -> None:
        """The clock runs for at least `at_least` steps."""
        self._cluster = cluster
        self._at_least = at_least
        self._at_most = max(MAX_STEPS, 3 * at_least, MAX_MICRO_BATCHES // schedule.micro_batches)
        self._now = [0.0] * schedule.ranks
        self._free: dict[_Link, float] = defaultdict(float)
        """When each link is free again."""
        self._arrivals: dict[int, float] = {}
        """By number of the message: arrival times of messages that no event has waited for yet."""
        self._states: list[list[float]] = []
        """At the start of each training step: times of ranks and links, sorted, because ranks may take turns."""
        self.is_done = False
        """Whether all times grew by the same amount in the last two steps, or the most steps have passed."""
        whole = {Op.FORWARD: cluster.forward_seconds, Op.UPDATE: cluster.update_seconds}
        parts = {op: [op.backward_share * each for each in cluster.backward_seconds] for op in Op if op.backward_share}
        self.seconds = {
            (op, stage): seconds for op, times in (whole | parts).items() for stage, seconds in enumerate(times)
        }
        """Seconds of an op on a stage."""

    def run(self, event: _Event) -> None:
        """Run an event as soon as its rank has reached it and the messages that it waits for have arrived."""
        if event.begins_step:
            self._begin_step()
        now = self._now[event.rank]
        for number in event.waits_for:
            now = max(now, self._arrivals.pop(number))
        if event.computes is not None:
            now += event.share * self.seconds[event.computes]
        elif event.is_collective:
            self._collective(event)
        elif event.carries is not None:
            self._message(event, now)
        self._now[event.rank] = now

    def _begin_step(self) -> None:
        self._states.append(sorted([*self._now, *self._free.values()]))
        steps = len(self._states) - 1
        self.is_done = steps >= self._at_least and (steps >= self._at_most or self._is_steady())

    def _message(self, event: _Event, now: float) -> None:
        """Occupy the sender's outgoing and, a latency later, the receiver's incoming link."""
        assert event.carries is not None
        outgoing, incoming = event.links
        link = self._cluster.link(outgoing[1])
        start = max(now, self._free[outgoing], self._free[incoming] - link.latency_seconds)
        self._free[outgoing] = start + link.seconds(event.carries[1])
        self._free[incoming] = self._arrivals[event.brings[0]] = self._free[outgoing] + link.latency_seconds

    def _collective(self, event: _Event) -> None:
        """Run as soon as all ranks take part, and the links of the ring are free."""
        assert event.carries is not None
        value, size = event.carries
        factors = self._cluster.collectives
        if value.kind != Kind.GRADIENTS:
            rounds = factors.all_gather
        else:
            rounds = 2 * factors.all_reduce if value.parts == 1 else factors.reduce_scatter
        seconds = rounds * ring_seconds(self._cluster, len(self._now), size)
        end = max(*self._now, *(self._free[link] for link in event.links)) + seconds
        self._free |= dict.fromkeys(event.links, end)
        self._arrivals |= dict.fromkeys(event.brings, end)

    def _is_steady(self) -> bool:
        """Whether all ranks and links have advanced by the same time in each of the last two steps.

        Then the next step is like the last: what is done depends on differences of these times only. They are compared
        in their order, as ranks that take turns are in each other's place a step later.
        """
        if len(self._states) < 3 or len({len(state) for state in self._states[-3:]}) > 1:
            return False
        one, two, three = self._states[-3:]
        growths = [late - early for early, late in zip(one + two, two + three, strict=True)]
        return max(growths) - min(growths) <= _STEADY * max(growths)

    @property
    def period(self) -> float:
        """Seconds from one training step to the next: exact once steady, else the mean over the later half of steps."""
        last = len(self._states) - 1
        first = last - 1 if self._is_steady() else last // 2
        return (self._states[last][-1] - self._states[first][-1]) / (last - first)


def price(program: Program, costs: StageCosts, cluster: Cluster, optimizer_states: Sequence[float] = ()) -> Price:
    """Return the price of a training step of `program`, by simulating it until it is periodic.

    `optimizer_states`: by stage, how many values are kept beside each value of a parameter: 1 for momentum, 2 for Adam;
    () for none.

    Raises:
        ValueError: `program`, `costs` and `cluster` do not have the same number of stages.
    """
    (found,) = price_on_each(program, costs, (cluster,), optimizer_states)
    return found


def price_on_each(
    program: Program, costs: StageCosts, clusters: Sequence[Cluster], optimizer_states: Sequence[float] = ()
) -> list[Price]:
    """Return the price on each of several clusters, from one pass over the program.

    Most of the time goes into shifting the actions and counting live bytes, which do not depend on the cluster; only
    the clocks do. So the program is read once, and every event advances the clock of each cluster. A clock stops when
    it is steady, and the pass ends with the last clock.

    Bytes sent and compute are counted over whole training steps from step `settled` on: the largest staleness of any
    read, plus two. For `cdp_v2`, whose largest staleness is 1, that is step 3. By then the pipeline is full, and all
    steps are alike.

    Raises:
        ValueError: a cluster has another number of stages than the program.
    """
    schedule = program.schedule
    for cluster in clusters:
        if cluster.stages != schedule.stages:
            raise ValueError(
                f"the cluster has times of {cluster.stages} stages, the schedule has {schedule.stages}: give one a "
                "stage"
            )
    settled = schedule.rule.longest + 2
    reader = _Reader(schedule, costs, clusters[0])
    clocks = [_SelfTimedClock(schedule, cluster, settled + 2) for cluster in clusters]
    devices = Devices(schedule, costs, optimizer_states)
    activation_bytes = state_bytes = 0
    for slot in program.endless():
        running = [clock for clock in clocks if not clock.is_done]
        if not running:
            break
        for event in reader.read(slot):
            for clock in running:
                clock.run(event)
        for action in slot.actions:
            devices.run(action)
            activation_bytes = max(activation_bytes, devices.activation_bytes[action.rank])
        state_bytes = max([state_bytes, *(devices.state_bytes(action.rank) for action in slot.actions)])
    full, steps = range(reader.starts[settled], reader.starts[-1]), len(reader.starts) - 1 - settled
    computed: dict[tuple[Op, int], float] = defaultdict(float)
    for place in full:
        for each, number in reader.computed[place].items():
            computed[each] += number
    within, between = (sum(reader.bytes_sent[slot, crosses] for slot in full) / steps for crosses in (False, True))
    return [
        Price(
            devices=schedule.ranks,
            step_seconds=clock.period,
            busy_seconds=math.fsum(number * clock.seconds[each] for each, number in computed.items()) / steps,
            within_host_bytes=within,
            between_hosts_bytes=between,
            activation_bytes=activation_bytes,
            state_bytes=state_bytes,
            method="simulated",
        )
        for clock in clocks
    ]
