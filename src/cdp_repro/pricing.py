"""What a training step costs on a cluster: seconds, idle share, bytes, for each mode, placement and baseline.

`price` times the very programs that run. Each rank runs its actions in program order, compute takes its stage's time,
a SEND takes none but occupies links, and an action waits for the messages that it consumes; nothing else is a
barrier. A collective begins when all ranks take part, and occupies the links of a ring. Links serve messages in the
order of the schedule, so that every time is a maximum of sums of the cluster's numbers (a max-plus linear system):
slower links never make a step shorter, and the steps become periodic. The period is the price.

`estimate` does the same for jobs too large to simulate, by extrapolation from three small ones (see there), and
`price_ddp` and `price_fsdp2` are the published schedules of two libraries on one timeline, as their ranks are alike.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, takewhile

from cdp_repro.schedule import (
    Action,
    MessageKey,
    Op,
    Payload,
    Schedule,
    Slot,
    StageCosts,
    consumed,
    result_of,
    ring_bytes,
    simulate_totals,
)
from cdp_repro.schedule.collectives import awaits_result, next_in_ring

SIMULATED_FORWARDS = 1024
"""Jobs of up to so many forwards in a training step (N R S) are simulated, in a second or so; others extrapolated."""

MAX_STEPS = 12
"""Training steps after which a simulation stops looking for an exact period."""

_STEADY = 1e-9
"""Relative difference up to which two steps take the same time."""


@dataclass(frozen=True)
class Link:
    """One direction of the connection of a device."""

    latency_seconds: float = 0.0
    bandwidth_bytes_per_second: float = math.inf

    def __post_init__(self) -> None:
        if not (0 <= self.latency_seconds < math.inf and self.bandwidth_bytes_per_second > 0):
            raise ValueError(
                f"a link of latency_seconds={self.latency_seconds} and "
                f"bandwidth_bytes_per_second={self.bandwidth_bytes_per_second}: use 0 or more, and more than 0, "
                "e.g. 1e-5 and 1e10"
            )

    def seconds(self, size: float) -> float:
        """Return for how long `size` bytes occupy the link."""
        return size / self.bandwidth_bytes_per_second

    def faster(self, factor: float) -> Link:
        """Return a link of the same latency and a multiple of the bandwidth."""
        return replace(self, bandwidth_bytes_per_second=factor * self.bandwidth_bytes_per_second)


@dataclass(frozen=True)
class Collectives:
    """How many times as long as a ring over the same links the libraries' collectives take; 1 is the ring."""

    all_reduce: float = 1.0
    all_gather: float = 1.0
    reduce_scatter: float = 1.0


@dataclass(frozen=True)
class Cluster:
    """The seconds of each stage on one micro-batch, and the links. Tuples have one entry a stage.

    Devices 0..D-1 are on host 0, the next D on host 1, and so on. Every device has two links of its own, to devices
    on its host and to those on others, and sends and receives on each at the same time, one message after the other.
    """

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    update_seconds: tuple[float, ...] = ()
    """Of one update of the whole stage; unless given: 0."""
    within_host: Link = Link()
    between_hosts: Link = Link()
    devices_per_host: int = 1
    collectives: Collectives = Collectives()

    def __post_init__(self) -> None:
        if not self.update_seconds:
            object.__setattr__(self, "update_seconds", (0.0,) * self.stages)
        times = (self.forward_seconds, self.backward_seconds, self.update_seconds)
        if len({len(each) for each in times}) != 1:
            raise ValueError(f"forward, backward and update need one time a stage; got {[len(each) for each in times]}")
        if not all(0 <= seconds < math.inf for each in times for seconds in each):
            raise ValueError("every stage needs a finite number of seconds, 0 or more, e.g. 0.01")
        if self.devices_per_host < 1:
            raise ValueError(f"devices_per_host={self.devices_per_host}: use 1 or more")

    @classmethod
    def equal(cls, stages: int, forward: float = 1.0, backward: float = 1.0, update: float = 0.0) -> Cluster:
        """Return a cluster on which all stages take the same seconds, and messages none."""
        return cls((forward,) * stages, (backward,) * stages, (update,) * stages)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.forward_seconds)

    def crosses(self, source: int, destination: int) -> bool:
        """Whether the two ranks are on different hosts."""
        return source // self.devices_per_host != destination // self.devices_per_host

    def link(self, crosses: bool) -> Link:
        """Return a link within a host or between two."""
        return self.between_hosts if crosses else self.within_host

    def seconds(self, action: Action) -> float:
        """Return for how long an action keeps its device busy."""
        by_op = {
            Op.FORWARD: self.forward_seconds,
            Op.BACKWARD: self.backward_seconds,
            Op.UPDATE: self.update_seconds,
        }
        return by_op[action.op][action.stage] if action.op in by_op else 0.0


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
        self._placement = schedule.placement
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

    def timed(self, slots: Iterable[Slot]) -> Iterator[Slot]:
        """Yield `slots` unchanged, each when all of its actions have run."""
        for slot in slots:
            for action in slot.actions:
                self._run(slot.number, action)
            yield slot

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
        self.sent[slot, crosses] += ring_bytes(action, size, self._placement)
        self._joined[action] = (True, crosses, action.rank), (False, crosses, next_in_ring(action.rank, ranks))
        if len(self._joined) < ranks:
            return
        links = [*chain.from_iterable(self._joined.values())]
        end = max(*self._now, *(self._free[link] for link in links)) + self._seconds(action, size)
        self._free |= dict.fromkeys(links, end)
        for part in self._joined:
            if awaits_result(part, self._placement.holders(part.stage).start):
                self._arrivals[part.rank, result_of(part, self._micro_batches)].append(end)
        self._joined.clear()

    def _seconds(self, collective: Action, size: int) -> float:
        """Return for how long a collective occupies the links."""
        if collective.payload is Payload.TOTAL:
            return 2 * self._cluster.collectives.all_reduce * _ring(self._cluster, len(self._now), size)
        return _once_around(self._cluster, len(self._now), size)

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
    if cluster.stages != schedule.stages:
        raise ValueError(
            f"the cluster has times of {cluster.stages} stages, the schedule has {schedule.stages}: give one a stage"
        )
    clock = _SelfTimedClock(schedule, costs, cluster)
    longest = max(map(schedule.mode.oldest, range(schedule.stages)))
    slots = takewhile(lambda _: not clock.is_done(longest + 4), schedule.slots(count()))
    totals = list(simulate_totals(schedule, costs, clock.timed(slots), optimizer_states))
    steps = len(clock.starts) - 1 - (longest + 2)
    full = range(clock.starts[longest + 2], clock.starts[-1])  # and repeating itself
    return Price(
        devices=schedule.ranks,
        step_seconds=clock.period,
        busy_seconds=math.fsum(chain.from_iterable(clock.busy.get(slot, ()) for slot in full)) / steps,
        within_host_bytes=sum(clock.sent.get((slot, False), 0) for slot in full) / steps,
        between_hosts_bytes=sum(clock.sent.get((slot, True), 0) for slot in full) / steps,
        activation_bytes=max(slot.activation_bytes_per_device for slot in totals),
        state_bytes=max(slot.state_bytes_per_device for slot in totals),
        method="simulated",
    )


@dataclass(frozen=True)
class Job:
    """What `Schedule.build` takes, for sizes that it would take too long to build."""

    mode: str | Sequence[Sequence[int]]
    placement: str
    workers: int
    stages: int
    replicas: int = 1
    slot_order: str = "paper"
    pipeline_schedule: str = "one_f_one_b"
    collectives: bool = False

    def schedule(self) -> Schedule:
        """Return the schedule, which is validated as it runs."""
        return Schedule.build(
            self.mode, self.workers, self.stages, self.placement, self.slot_order,
            replicas=self.replicas, pipeline_schedule=self.pipeline_schedule, collectives=self.collectives, ahead=False,
        )  # fmt: skip

    @property
    def forwards(self) -> int:
        """Forwards in a training step: N R S."""
        return self.workers * self.replicas * self.stages


def estimate(
    job: Job, costs: StageCosts, cluster: Cluster, optimizer_states: int = 0, simulated: int = SIMULATED_FORWARDS
) -> Price:
    """Return the price of a job of any size: simulated if it has up to `simulated` forwards a step, else extrapolated.

    Extrapolated is first the number of replicas R, with the stages as they are, then that of workers N, with S/N as it
    is. Three jobs with 2n, 3n and 4n of it are simulated. What is exact about it, and what is not:

    - devices and bytes are polynomials of degree 2 in N and in R, which three points determine: exact for equal
      stages if n is a multiple of `devices_per_host`, as it is up to 8; larger hosts count as n devices, with too many
      borders between them. On `model_parallel` hosts and stages never align, and the larger has the links of the
      smaller in the same shares: not exact;
    - seconds are a maximum of such terms, linear but for `zero` in the simultaneous timeline, where the owner of a
      stage serves all others. The last points determine the one that is largest there: exact unless another overtakes
      it later, which makes `step_seconds` too low. So it comes with bounds, extrapolated from the same job with free
      links and with free compute, where terms compete less: a step is at least the longer, at most the sum of the two;
    - a job of fewer workers has fewer stages, each the mean of neighbours: exact for equal stages only. But no
      estimate is below what the mean device computes, or the busiest of a pipeline.
    """
    found = _extrapolated(job, costs, cluster, optimizer_states, simulated)
    if found.method == "simulated":
        return found
    nothing = (0.0,) * cluster.stages
    free_links = replace(cluster, within_host=Link(), between_hosts=Link())
    free_compute = replace(cluster, forward_seconds=nothing, backward_seconds=nothing, update_seconds=nothing)
    alone = [_extrapolated(job, costs, each, 0, simulated).step_seconds for each in (free_links, free_compute)]
    step_seconds = max(found.step_seconds, *alone)
    return replace(found, step_seconds=step_seconds, at_most_seconds=max(step_seconds, sum(alone)))


def _extrapolated(job: Job, costs: StageCosts, cluster: Cluster, optimizer_states: int, simulated: int) -> Price:
    """Return the price without bounds."""
    axis = "replicas" if job.replicas > 4 * _unit(cluster, "replicas", job) else "workers"
    unit, size = _unit(cluster, axis, job), getattr(job, axis)
    if job.forwards <= simulated or size <= 4 * unit or (axis == "workers" and not isinstance(job.mode, str)):
        return price(job.schedule(), costs, cluster, optimizer_states)
    at_least = _busiest_rank_seconds(job, cluster)
    growth = unit * job.replicas if axis == "workers" else unit
    if growth % cluster.devices_per_host and job.workers * job.replicas > cluster.devices_per_host:
        cluster = replace(cluster, devices_per_host=growth)
    small = [_resized(job, axis, k * unit, costs, cluster) for k in (2, 3, 4)]
    prices = [_extrapolated(*each, optimizer_states, simulated) for each in small]
    names = ("devices", "busy_seconds", "within_host_bytes", "between_hosts_bytes", "activation_bytes")
    found = {name: _through([getattr(each, name) for each in prices], size / unit) for name in names}
    if job.placement == "model_parallel":
        sent = found["within_host_bytes"] + found["between_hosts_bytes"]
        found["between_hosts_bytes"] = sent * prices[-1].between_hosts_share
        found["within_host_bytes"] = sent - found["between_hosts_bytes"]
    least, _, most = (each.state_bytes for each in prices)  # versions come in whole numbers
    found["state_bytes"] = least + (most - least) / 2 * (size / unit - 2)
    seconds = [each.step_seconds for each in prices]
    if not (axis == "workers" and job.placement == "zero" and job.mode == "dp"):
        seconds[0] = 2 * seconds[1] - seconds[2]  # the last two decide
    step_seconds = max(at_least, found["busy_seconds"] / found["devices"], _through(seconds, size / unit))
    found["devices"] = round(found["devices"])
    return Price(**found, step_seconds=step_seconds, method="extrapolated")  # type: ignore[arg-type]


def _unit(cluster: Cluster, axis: str, job: Job) -> int:
    """Return n, such that hosts are full where that is possible with few devices."""
    shared = math.gcd(cluster.devices_per_host, job.replicas) if axis == "workers" else 1
    least = 2 if axis == "workers" and job.replicas > 1 else 4
    return min(8, math.lcm(least, cluster.devices_per_host // shared))


def _busiest_rank_seconds(job: Job, cluster: Cluster) -> float:
    """Return what the busiest rank of a pipeline computes in a training step; 0 of other placements."""
    if job.placement != "pipeline":
        return 0.0
    per_stage = [
        job.workers * (forward + backward) + update
        for forward, backward, update in zip(
            cluster.forward_seconds, cluster.backward_seconds, cluster.update_seconds, strict=True
        )
    ]
    per_rank = job.stages // job.workers
    return max(sum(per_stage[first : first + per_rank]) for first in range(0, job.stages, per_rank))


def _resized(job: Job, axis: str, size: int, costs: StageCosts, cluster: Cluster) -> tuple[Job, StageCosts, Cluster]:
    """Return the same job with `size` replicas, or workers: then with fewer stages, each the mean of neighbours."""
    if axis == "replicas":
        return replace(job, replicas=size), costs, cluster
    stages = size * job.stages // job.workers
    groups = [range(stage * job.stages // stages, (stage + 1) * job.stages // stages) for stage in range(stages)]

    def mean(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(math.fsum(values[stage] for stage in group) / len(group) for group in groups)

    sizes = {name: [round(size) for size in mean(values)] for name, values in vars(costs).items()}
    sizes["backward_bytes"][-1] += sum(sizes["forward_bytes"]) - sum(sizes["backward_bytes"])  # of the rounding
    smaller = StageCosts(**{name: tuple(values) for name, values in sizes.items()})  # type: ignore[arg-type]
    times = (cluster.forward_seconds, cluster.backward_seconds, cluster.update_seconds)
    forward, backward, update = map(mean, times)
    cluster = replace(cluster, forward_seconds=forward, backward_seconds=backward, update_seconds=update)
    return replace(job, workers=size, stages=stages), smaller, cluster


def _through(values: Sequence[float], at: float) -> float:
    """Return at `at` the polynomial of degree 2 that has the three values at 2, 3 and 4."""
    two, three, four = values
    return two * (at - 3) * (at - 4) / 2 - three * (at - 2) * (at - 4) + four * (at - 2) * (at - 3) / 2


def _ring(cluster: Cluster, devices: int, size: float) -> float:
    """Return the seconds of an all-gather or a reduce-scatter of `size` bytes in a ring (Patarasuk and Yuan 2009).

    Each of D-1 rounds sends 1/D of the bytes to the next device, at the pace of the slowest link.
    """
    if devices == 1:
        return 0.0
    return (devices - 1) * max(
        link.latency_seconds + link.seconds(size / devices) for link in _links_of_ring(cluster, devices)
    )


def _once_around(cluster: Cluster, devices: int, size: float) -> float:
    """Return the seconds of a broadcast of `size` bytes, or of a reduction to one device, piped round a ring."""
    links = _links_of_ring(cluster, devices)
    return (devices - 1) * max(link.latency_seconds for link in links) + max(link.seconds(size) for link in links)


def _links_of_ring(cluster: Cluster, devices: int) -> list[Link]:
    """Return the kinds of links between neighbours, of two or more devices."""
    per_host = cluster.devices_per_host
    return [cluster.within_host] * (per_host > 1) + [cluster.between_hosts] * (devices > per_host)


def _data_parallel_price(
    costs: StageCosts, cluster: Cluster, devices: int, seconds: float, collectives: int, state: float, update: float
) -> Price:
    """Return the price of a data-parallel step of `seconds`, with so many ring collectives of every stage."""
    total = collectives * (devices - 1) * sum(costs.gradient_bytes)
    hosts = -(-devices // cluster.devices_per_host)
    crossing = total * hosts / devices if hosts > 1 else 0.0  # a ring leaves each host once
    compute = sum(cluster.forward_seconds) + sum(cluster.backward_seconds)
    peak = sum(costs.forward_bytes)
    return Price(devices, seconds, devices * (compute + update), total - crossing, crossing, peak, state, "closed form")


def price_ddp(costs: StageCosts, cluster: Cluster, devices: int, optimizer_states: int = 0) -> Price:
    """Return the price of DistributedDataParallel with a bucket a stage (Li et al. 2020, VLDB 13(12)).

    Each bucket's all-reduce, 2(D-1)/D of its bytes, starts when its backward and the bucket before are done; the
    optimizer runs after the last. One micro-batch a device.
    """
    computed = sum(cluster.forward_seconds)
    reduced = 0.0
    for stage in reversed(range(costs.stages)):
        computed += cluster.backward_seconds[stage]
        ring = 2 * _ring(cluster, devices, costs.gradient_bytes[stage])
        reduced = max(reduced, computed) + cluster.collectives.all_reduce * ring
    update = sum(cluster.update_seconds)
    state = (1 + optimizer_states) * sum(costs.parameter_bytes)
    return _data_parallel_price(costs, cluster, devices, max(computed, reduced) + update, 2, state, update)


def price_fsdp2(costs: StageCosts, cluster: Cluster, devices: int, optimizer_states: int = 0) -> Price:
    """Return the price of FSDP2 with a unit a stage, resharded after its forward (Zhao et al. 2023, VLDB 16(12)).

    Collectives run one after the other, in the order of their issue. The parameters of the next stage to compute are
    gathered when a stage starts; its gradients are reduced and scattered when its backward ends. Every device updates
    its shard. The state is the shards, and the two stages that are whole at a time.
    """
    factors = cluster.collectives
    gather = [factors.all_gather * _ring(cluster, devices, size) for size in costs.parameter_bytes]
    scattered = [factors.reduce_scatter * _ring(cluster, devices, size) for size in costs.gradient_bytes]
    passes = [(stage, cluster.forward_seconds[stage], 0.0) for stage in range(costs.stages)]
    passes += [(stage, cluster.backward_seconds[stage], scattered[stage]) for stage in reversed(range(costs.stages))]
    computed, linked = 0.0, gather[0]
    ready = linked
    for (stage, seconds, scatter), following in zip(passes, [*passes[1:], None], strict=True):
        begun = max(computed, ready)
        computed = begun + seconds
        if following:  # the last stage is freed before it is gathered again
            issued = computed if following[0] == stage else begun
            ready = linked = max(linked, issued) + gather[following[0]]
        if scatter:
            linked = max(linked, computed) + scatter
    update = sum(cluster.update_seconds) / devices
    whole = max(sum(costs.parameter_bytes[stage : stage + 2]) for stage in range(costs.stages))
    state = (1 + optimizer_states) * sum(costs.parameter_bytes) / devices + (whole if devices > 1 else 0)
    return _data_parallel_price(costs, cluster, devices, max(computed, linked) + update, 3, state, update)
