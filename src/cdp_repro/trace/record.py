"""The record of a run: the one format that both the simulator and the executor write."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple

from cdp_repro.schedule.actions import Action, Op, Slot
from cdp_repro.schedule.lanes import Lanes
from cdp_repro.schedule.sizes import Sizes
from cdp_repro.schedule.values import Kind, Value, collective_name
from cdp_repro.trace.chains import longest_chain
from cdp_repro.trace.rings import next_in_ring


@dataclass(frozen=True)
class SlotRecord:
    """What one rank did in one slot."""

    slot: int
    rank: int
    actions: tuple[Action, ...]
    """The actions in the order in which they ran; compute actions carry the version that they read."""
    activation_peak_bytes: int
    """Peak of live activation bytes on this rank during the slot (at its start and after each action)."""
    activation_bytes_at_end: int
    """Live activation bytes at the end of the slot; the rank holds them until it acts again."""
    versions: tuple[int, ...]
    """For each stage, the number of parameter versions alive at the end of the slot."""
    spans: tuple[tuple[float, float], ...] = field(compare=False)
    """Start and end of each action, in seconds since the trace began (one slot is one second when simulated)."""

    def idle_in(self, slot: int) -> SlotRecord:
        """Return the record of a later slot in which the rank does nothing, and keeps what it has."""
        held = self.activation_bytes_at_end
        return SlotRecord(slot, self.rank, (), held, held, self.versions, ())


@dataclass(frozen=True)
class Message:
    """One message from rank to rank, or all that a rank sends to its neighbour in the ring of a collective."""

    slot: int
    source: int
    destination: int
    kind: str
    """What it carries: activations, input_gradients, gradients, total, parameters or buffers."""
    stage: int
    """The stage that made the value."""
    bytes: int
    value: Value


Recorded = tuple[Sequence[SlotRecord], Sequence[Message]]
"""The records and messages of one rank."""


class _Run(NamedTuple):
    """A part of a trace from the start of the pipeline to its drain, or to the end of the trace."""

    slots: range
    steps: int
    is_whole: bool
    """Whether the trace has the drain."""

    def steady_steps(self, fill: int) -> int:
        """Training steps after `fill`, but for the last before a drain: none brings parameters for the next."""
        return self.steps - fill - self.is_whole


@dataclass(frozen=True)
class Trace:
    """Slot records and messages of one or many ranks, in the order of their slots."""

    sizes: Sizes
    lanes: Lanes
    """The lane of each micro-batch; there are N R L."""
    records: tuple[SlotRecord, ...]
    messages: tuple[Message, ...] = ()
    """Those of more than 0 bytes: others are never sent."""
    begins: tuple[int, ...] = (0,)
    """The first slot of each run; before the next one, the pipeline drains."""
    is_cut: bool = False
    """Whether the last run went on after the trace; else the trace has its drain."""
    fill: int = 0
    """Training steps of a run before those that repeat: `Program.steady_step`."""

    @classmethod
    def merged(
        cls,
        sizes: Sizes,
        lanes: Lanes,
        parts: Iterable[Recorded],
        begins: Sequence[int] = (0,),
        *,
        is_cut: bool = False,
        fill: int = 0,
    ) -> Trace:
        """Return one trace from the records of all ranks."""
        parts = list(parts)
        records = sorted((r for records, _ in parts for r in records), key=lambda r: (r.slot, r.rank))
        messages = sorted((m for _, messages in parts for m in messages), key=lambda m: (m.slot, m.source))
        return cls(sizes, lanes, tuple(records), tuple(messages), tuple(begins), is_cut, fill)

    def of_each_slot(self) -> Iterator[list[SlotRecord]]:
        """Yield the records of each slot from the first to the last, by rank, with those of idle ranks.

        A rank that has not acted yet has no record.
        """
        acting: dict[int, list[SlotRecord]] = defaultdict(list)
        for record in self.records:
            acting[record.slot].append(record)
        latest: dict[int, SlotRecord] = {}
        for slot in range(min(acting, default=0), max(acting, default=-1) + 1):
            latest |= {record.rank: record for record in acting[slot]}
            yield [record if record.slot == slot else record.idle_in(slot) for _, record in sorted(latest.items())]

    @property
    def activation_bytes_per_slot(self) -> dict[int, int]:
        """For each slot from the first to the last, the sum over ranks of the peak of live activation bytes in it."""
        return {records[0].slot: sum(each.activation_peak_bytes for each in records) for records in self.of_each_slot()}

    @property
    def activation_peak_bytes_total(self) -> int:
        """Largest sum over ranks of the peak of live activation bytes in a slot, over all slots."""
        return max(self.activation_bytes_per_slot.values(), default=0)

    @property
    def activation_peak_bytes_per_device(self) -> int:
        """Largest number of live activation bytes on any one rank."""
        return max((record.activation_peak_bytes for record in self.records), default=0)

    @property
    def versions_kept(self) -> int:
        """Largest number of parameter versions of one stage alive on one rank at the end of a slot."""
        return max((max(record.versions) for record in self.records), default=0)

    @property
    def max_messages_per_slot(self) -> int:
        """Largest number of messages in one slot."""
        return max(Counter(message.slot for message in self.messages).values(), default=0)

    @property
    def slots(self) -> list[Slot]:
        """The actions of all ranks, slot by slot."""
        actions: dict[int, list[Action]] = defaultdict(list)
        for record in self.records:
            actions[record.slot] += record.actions
        return [Slot(number, tuple(actions[number])) for number in sorted(actions)]

    @property
    def max_chain_per_slot(self) -> int:
        """Length of the longest chain of messages in one slot, where each had to wait for the one before."""
        actions = {slot.number: slot.actions for slot in self.slots}
        sent: dict[int, set[object]] = defaultdict(set)
        for message in self.messages:  # in a ring, one rank may have nothing to send: any rank's message tells
            sent[message.slot] |= {(message.source, message.destination, message.value), collective_name(message.value)}

        def is_sent(action: Action, slot: int) -> bool:
            assert action.value is not None
            if action.op is Op.COLLECTIVE:
                return collective_name(action.value) in sent[slot]
            return (action.rank, action.peer, action.value) in sent[slot]

        chains = (longest_chain(actions.get(slot, ()), partial(is_sent, slot=slot), self._ranks) for slot in sent)
        return max(chains, default=0)

    def bytes_sent_per_device_per_step(self, slots_per_step: int) -> float:
        """Return the bytes that a rank sends in a training step, on average over the ranks."""
        return sum(self.bytes_sent_by_rank(slots_per_step).values()) / max(1, self._ranks)

    def bytes_sent_by_rank(self, slots_per_step: int) -> dict[int, float]:
        """Return the bytes that each rank sends in a training step; a rank that sends none may be left out."""
        window, steps = self.measured_slots(slots_per_step)
        sent = Counter[int]()
        for message in self.messages:
            if message.slot in window:
                sent[message.source] += message.bytes
        return {rank: size / steps for rank, size in sent.items()}

    def messages_per_step(self, slots_per_step: int) -> int:
        """Return the number of messages of all ranks in a training step."""
        window, steps = self.measured_slots(slots_per_step)
        return round(sum(message.slot in window for message in self.messages) / steps)

    def idle_share(self, slots_per_step: int) -> float:
        """Return the share, 0 to 1, of the slots of all ranks in which a rank computes nothing."""
        window, _ = self.measured_slots(slots_per_step)
        busy = sum(slot in window for _, slot in self.lanes.computing(self.slots))
        return 1 - busy / (self._ranks * len(window)) if window else 0.0

    def measured_slots(self, slots_per_step: int) -> tuple[range, int]:
        """Return the slots by which a training step is measured, and the number of steps whose work they hold.

        In the steady state that is one step: the slots from its start to that of the next one. A run is in it once its
        steps repeat, until it drains. If no run is long enough, as with a checkpoint after each step, whole runs count,
        with fill and drain. A trace that ends in its first fill has no such slots.
        """
        longest = max(self._runs, key=lambda run: run.steady_steps(self.fill), default=None)
        whole = [run for run in self._runs if run.is_whole]
        if longest and longest.steady_steps(self.fill) > 0:
            begin = longest.slots.start + max(0, longest.steps - 1 - longest.is_whole) * slots_per_step
            return range(begin, begin + slots_per_step), 1
        if not whole:
            return range(0), 1
        return range(whole[0].slots.start, whole[-1].slots.stop), sum(run.steps for run in whole)

    @cached_property
    def _runs(self) -> list[_Run]:
        """The parts of the trace; each number of a step asks for them."""
        end = self.records[-1].slot + 1 if self.records else 0
        found = []
        for begin, stop in pairwise([*self.begins, end]):
            steps = {
                action.micro_batch // self.sizes.micro_batches
                for record in self.records
                for action in record.actions
                if begin <= record.slot < stop and action.op.is_compute
            }
            if steps:
                found.append(_Run(range(begin, stop), len(steps), not (self.is_cut and stop == end)))
        return found

    @property
    def _ranks(self) -> int:
        return len({record.rank for record in self.records})


class TraceRecorder:
    """Collects the events of one rank into slot records."""

    def __init__(self, rank: int, ranks: int, sizes: Sizes) -> None:
        self._rank, self._neighbour, self._sizes = rank, next_in_ring(rank, ranks), sizes
        self._events: dict[int, list[tuple[Action, int, tuple[float, float]]]] = defaultdict(list)
        """By slot: each action, with the live bytes after it and its span."""
        self._versions: dict[int, tuple[int, ...]] = {}
        """By slot: the live versions after its last action."""
        self._messages: list[Message] = []

    def record(
        self,
        slot: int,
        action: Action,
        activation_bytes: int,
        versions: Sequence[int],
        span: tuple[float, float],
    ) -> None:
        """Add an action that has just run, with the live bytes and live versions (one entry per stage) after it."""
        self._events[slot].append((action, activation_bytes, span))
        self._versions[slot] = tuple(versions)

    def sent(self, slot: int, action: Action, size: int) -> None:
        """Add the `size` bytes that a SEND that has just run sends, or that this rank sends in a COLLECTIVE."""
        assert action.value is not None
        peer = self._neighbour if action.peer < 0 else action.peer
        kind, stage = message_name(action.value, self._sizes.summed, self._sizes.readers)
        self._messages.append(Message(slot, self._rank, peer, kind, stage, size, action.value))

    def finish(self) -> tuple[tuple[SlotRecord, ...], tuple[Message, ...]]:
        """Return the records of all slots so far, and the messages sent in them."""
        records, live = [], 0
        for slot, events in self._events.items():
            actions, sizes, spans = zip(*events, strict=True)
            peak, live = max(live, *sizes), sizes[-1]
            records.append(SlotRecord(slot, self._rank, actions, peak, live, self._versions[slot], spans))
        return tuple(records), tuple(self._messages)


def message_name(value: Value, summed: int, readers: Sequence[int]) -> tuple[str, int]:
    """Return the kind of a message, as reports name it, and the stage that made its value.

    `summed` is the number of micro-batches of an update: the whole sum over all of them is a `total`. It and `readers`
    are those of `Sizes`.
    """
    kind, stage = value.kind, value.stage
    if kind == Kind.INPUT:
        return "activations", stage - 1
    if kind == Kind.OUTPUT_GRADIENT:
        return "input_gradients", readers[stage]
    if kind == Kind.GRADIENTS:
        return ("total" if len(value.members) == summed and value.parts == 1 else "gradients"), stage
    return ("buffers" if kind == Kind.BUFFERS else "parameters"), stage


def as_plain(recorded: Recorded) -> tuple[list[Any], list[Any]]:
    """Return the records and messages of a rank as numbers and text, to send to another rank."""
    records, messages = recorded
    return (
        [vars(record) | {"actions": [str(each) for each in record.actions]} for record in records],
        [vars(message) | {"value": str(message.value)} for message in messages],
    )


def from_plain(plain: tuple[list[Any], list[Any]]) -> Recorded:
    """Return the records and messages from which `as_plain` made `plain`."""
    records, messages = plain
    return (
        [SlotRecord(**each | {"actions": _parsed(each["actions"], each["rank"])}) for each in records],
        [Message(**each | {"value": Value.parse(each["value"])}) for each in messages],
    )


def _parsed(actions: Sequence[str], rank: int) -> tuple[Action, ...]:
    return tuple(Action.parse(each, rank) for each in actions)
