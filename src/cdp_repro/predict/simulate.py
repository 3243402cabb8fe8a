"""The first interpreter: runs a program on costs instead of tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cdp_repro.predict.costs import StageCosts
from cdp_repro.schedule.actions import Action, Op, Slot
from cdp_repro.schedule.norms import clips_globally
from cdp_repro.schedule.program import Program
from cdp_repro.schedule.schedule import Schedule
from cdp_repro.schedule.values import LENT, Kind, Value, parameters
from cdp_repro.trace import Trace, TraceRecorder, longest_chain
from cdp_repro.trace.rings import ring_bytes


class Devices:
    """What is alive on each rank, in bytes by rank, and the number of versions of each stage there."""

    def __init__(
        self, schedule: Schedule, costs: StageCosts, optimizer_states: Sequence[float] = (), clips: bool = False
    ) -> None:
        """`optimizer_states`: by stage, how many values are kept beside each value of a parameter; () for none.

        `clips`: gradients are clipped. If by the norm over all stages, an update waits until its version is first read.

        Raises:
            ValueError: `costs` has another number of stages than the schedule.
        """
        if costs.stages != schedule.stages:
            raise ValueError(f"the schedule has {schedule.stages} stages but the costs are of {costs.stages}")
        self._costs = costs
        self._clips, self._updates_wait = clips, clips and clips_globally(schedule)
        self._waiting: dict[tuple[int, Value], tuple[Value, bool]] = {}
        """By rank and version that an update makes, the sum that waits for it, and whether it is freed then."""
        self._ranks, self._sizes = schedule.ranks, schedule.sizes
        self._received: set[tuple[int, int]] = set()
        """(micro-batch m, number j) of each input `x_j.m` that came from another rank."""
        self.activation_bytes, self.parameter_bytes, self.gradient_bytes, self._lent_bytes, self._optimizer_bytes = (
            [0] * schedule.ranks for _ in range(5)
        )
        """Parameters: of all versions. Gradients: of sums. Optimizer: with what a method against delay keeps."""
        self._by_kind = {
            Kind.PARAMETERS: self.parameter_bytes,
            Kind.GRADIENTS: self.gradient_bytes,
            **dict.fromkeys(LENT, self._lent_bytes),
        }
        self.versions: Counter[tuple[int, int]] = Counter()
        """By rank and stage."""
        for rank, values in schedule.held_after(0).items():
            for value in values:
                self._hold(rank, value, 1)
                if value.kind == Kind.PARAMETERS and optimizer_states:
                    self._optimizer_bytes[rank] += round(optimizer_states[value.stage] * costs.bytes_of(value))

    def run(self, action: Action) -> int:
        """Run an action; return the bytes that it sends, as a message or as its part in a collective.

        If updates wait for a norm, `run_awaited_updates` comes first.
        """
        op, rank, stage, costs = action.op, action.rank, action.stage, self._costs
        if op is Op.FORWARD:
            received = sum(costs.received_bytes(j)[0] for m, j in self._inputs(action) if (m, j) in self._received)
            self.activation_bytes[rank] += costs.forward_bytes[stage] + received + self._of_prefix(action)
        elif op.gives_gradients:  # the first part of a split backward keeps everything for the second
            taken = self._received.intersection(self._inputs(action))
            received = sum(costs.received_bytes(j)[1] for _, j in taken)
            self._received -= taken
            self.activation_bytes[rank] -= costs.backward_bytes[stage] + received + self._of_prefix(action)
        elif op is Op.SEND and action.value is not None and action.value.kind == Kind.INPUT:
            self.activation_bytes[rank] -= costs.released_by_sending(stage - 1)
        elif op is Op.RECEIVE and action.value is not None and action.value.kind == Kind.INPUT:
            self._received.add((action.value.number, stage))
        for value in action.writes:
            self._hold(rank, value, 1)
        if op is Op.UPDATE and self._updates_wait:
            (total,) = (value for value in action.reads if value.kind == Kind.GRADIENTS)
            self._waiting[rank, action.writes[0]] = total, total in action.frees
        for value in action.frees:
            if (op, value.kind) != (Op.UPDATE, Kind.GRADIENTS) or not self._updates_wait:
                self._hold(rank, value, -1)
        return self.sent_bytes(action)

    def run_awaited_updates(self, action: Action) -> int:
        """Run the updates that have waited until `action` reads their versions.

        Return the most bytes on its rank while they ran; 0 if there are none.
        """
        most = 0
        for version in action.reads if self._waiting else ():
            total, is_freed = self._waiting.pop((action.rank, version), (None, False))
            if total is not None:
                most = max(most, self._bytes_of(action.rank) + self._costs.bytes_of(total))  # with the clipped copy
                if is_freed:
                    self._hold(action.rank, total, -1)
        return most

    def _hold(self, rank: int, value: Value, change: int) -> None:
        """Count a value that a rank holds from now on, or with `change` -1 no longer."""
        held = self._by_kind.get(value.kind)
        if held is not None:
            held[rank] += change * self._costs.bytes_of(value)
            if value.kind == Kind.PARAMETERS:
                self.versions[rank, value.stage] += change

    def state_bytes(self, rank: int) -> int:
        """Return the bytes of all versions of parameters and of the optimizer's state."""
        return self.parameter_bytes[rank] + self._optimizer_bytes[rank]

    def most_bytes(self, action: Action) -> int:
        """Return the most bytes on the rank of an action that has just run, at one time while it ran.

        What it has freed was there beside what it has written, unless it was written over: the sum beside the new
        version of an update, with a clipped copy if there is one; the parameters beside what a forward leaves, or
        beside the gradients of a backward.
        """
        beside: list[Value] = []
        if action.op is Op.UPDATE and not self._updates_wait:
            beside = [value for value in action.frees if value.kind == Kind.GRADIENTS]
            beside += [value for value in action.reads if value.kind == Kind.GRADIENTS] if self._clips else []
        elif action.op.is_compute:
            beside = [value for value in action.frees if value.kind in (Kind.PARAMETERS, *LENT)]
        return self._bytes_of(action.rank) + sum(map(self._costs.bytes_of, beside))

    def _bytes_of(self, rank: int) -> int:
        held = self.activation_bytes[rank] + self.gradient_bytes[rank] + self._lent_bytes[rank]
        return held + self.state_bytes(rank)

    def _inputs(self, action: Action) -> list[tuple[int, int]]:
        """Return the inputs of a stage, as in `_received`."""
        return [(action.micro_batch, source + 1) for source in self._sizes.sources[action.stage]]

    def _of_prefix(self, action: Action) -> int:
        """Return the bytes that a forward takes, or a backward releases, for the tokens before its slice."""
        if self._sizes.slices == 1:
            return 0
        return self._sizes.place(action.micro_batch)[1] * self._costs.prefix_bytes[action.stage]

    def sent_bytes(self, action: Action) -> int:
        """Return the bytes that an action sends."""
        if action.value is None or action.op not in (Op.SEND, Op.COLLECTIVE):
            return 0
        if action.op is Op.COLLECTIVE:
            return ring_bytes(action, self._costs.bytes_of(action.value.whole), self._ranks)
        return self._costs.bytes_of(action.value)


def simulate(program: Program, costs: StageCosts, steps: int) -> Trace:
    """Run `steps` training steps of a program, from the initial parameters, and return the trace of all ranks.

    Raises:
        ValueError: `costs` has another number of stages than the schedule.
    """
    return simulate_slots(program.schedule, costs, program.slots(steps), fill=program.steady_step)


def simulate_slots(schedule: Schedule, costs: StageCosts, slots: Iterable[Slot], *, fill: int = 0) -> Trace:
    """Run the first slots of a program and return the trace of all ranks, in which a slot is a second.

    The slots end with the program's drain. `fill`: see `Trace`.

    Raises:
        ValueError: `costs` has another number of stages than the schedule.
    """
    devices, stages = Devices(schedule, costs), range(schedule.stages)
    recorders = [TraceRecorder(rank, schedule.ranks, schedule.sizes) for rank in range(schedule.ranks)]
    for slot in slots:
        for action in slot.actions:
            rank, size = action.rank, devices.run(action)
            versions = [devices.versions[rank, stage] for stage in stages]
            span = float(slot.number), slot.number + 1.0
            recorders[rank].record(slot.number, action, devices.activation_bytes[rank], versions, span)
            if size:
                recorders[rank].sent(slot.number, action, size)
    parts = [recorder.finish() for recorder in recorders]
    return Trace.merged(schedule.sizes, schedule.timeline.lanes, parts, fill=fill)


@dataclass(frozen=True, slots=True)
class SlotTotals:
    """Totals over all ranks for one slot; the properties of a `Trace` with the same names agree with them."""

    slot: int
    activation_bytes: int
    """Sum over ranks of each rank's peak of live activation bytes during the slot."""
    activation_bytes_per_device: int
    """The largest of these peaks among ranks that act in the slot."""
    parameter_bytes_per_device: int
    """Largest number of bytes of parameter versions that are alive at the end of the slot on a rank that acts in it."""
    gradient_bytes_per_device: int
    """Largest number of bytes of sums of gradients at one time in the slot on a rank that acts in it."""
    bytes_per_device: int
    """Largest number of bytes of all this, of lent parameters and of optimizer state, at one time in the slot on a rank
    that acts in it."""
    versions_kept: int
    """Largest number of versions of one stage that are alive at the end of the slot on a rank that acts in it."""
    messages: int
    """Messages of more than 0 bytes; empty ones are never sent."""
    chain: int
    """Longest chain of these messages, each of which had to wait for the one before."""
    bytes_sent: Mapping[int, int]
    """By rank; missing ranks send nothing."""
    computing_ranks: int
    """Ranks that run a forward or a backward."""


def simulate_totals(
    schedule: Schedule,
    costs: StageCosts,
    slots: Iterable[Slot],
    optimizer_states: Sequence[float] = (),
    clips: bool = False,
) -> Iterator[SlotTotals]:
    """Run the first slots of a program, as `simulate_slots` does, and yield the totals of each, without a trace.

    Of past slots it only keeps what is still alive, so that it can run programs of a million ranks.
    `optimizer_states` and `clips` are those of `Devices`.

    Raises:
        ValueError: `costs` has another number of stages than the schedule.
    """
    devices = Devices(schedule, costs, optimizer_states, clips)
    held = 0
    for slot in slots:
        before: dict[int, int] = {}
        peaks: dict[int, int] = {}
        messages, gradients, most, sent = 0, 0, 0, dict[int, int]()
        for action in slot.actions:
            rank = action.rank
            before.setdefault(rank, devices.activation_bytes[rank])
            most = max(most, devices.run_awaited_updates(action))
            if size := devices.run(action):
                messages += 1
                sent[rank] = sent.get(rank, 0) + size
            peaks[rank] = max(peaks.get(rank, before[rank]), devices.activation_bytes[rank])
            gradients = max(gradients, devices.gradient_bytes[rank])
            most = max(most, devices.most_bytes(action))
        started = sum(before.values())
        peak = held + sum(peaks.values()) - started
        held += sum(devices.activation_bytes[rank] for rank in before) - started
        yield SlotTotals(
            slot.number, peak, max(peaks.values(), default=0),
            max((devices.parameter_bytes[rank] for rank in before), default=0),
            gradients, most,
            max((devices.versions[a.rank, a.stage] for a in slot.actions), default=0),
            messages,
            longest_chain(slot.actions, lambda a: devices.sent_bytes(a) > 0, schedule.ranks) if messages else 0,
            sent,
            len({action.rank for action in slot.actions if action.op.is_compute}),
        )  # fmt: skip


def version_bytes(schedule: Schedule, costs: StageCosts) -> Callable[[int, int], int]:
    """Return (rank, stage) -> the bytes of one version of the stage's parameters there: all, or those of its shard."""
    return lambda rank, stage: costs.bytes_of(schedule.own(parameters(stage, 0), rank))


def held_bytes(schedule: Schedule, costs: StageCosts) -> list[int]:
    """Return the bytes of one version of all stages that each rank holds."""
    sizes = [0] * schedule.ranks
    size = version_bytes(schedule, costs)
    for stage in range(schedule.stages):
        for rank in schedule.placement.holders(stage):
            sizes[rank] += size(rank, stage)
    return sizes
