"""The record of what ran: the one format that the simulator and the executor both write."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from cdp_repro.schedule.actions import Action
from cdp_repro.schedule.costs import StageCosts


@dataclass(frozen=True)
class SlotRecord:
    """What one rank did in one slot."""

    slot: int
    rank: int
    actions: tuple[Action, ...]
    """The actions in the order they ran; compute actions carry the parameter version that they read."""
    activation_bytes: int
    """Peak of live activation bytes on this rank during the slot (at its start and after each action)."""
    activation_bytes_after: int
    """Live activation bytes at the end of the slot, which the rank holds until it acts again."""
    versions: tuple[int, ...]
    """Parameter versions of each stage that are alive at the end of the slot."""
    spans: tuple[tuple[float, float], ...] = field(compare=False)
    """Start and end of each action, in seconds since the trace began (one slot is one second when simulated)."""


@dataclass(frozen=True)
class Message:
    """One message from rank to rank."""

    slot: int
    source: int
    destination: int
    kind: str
    """What is sent: activations, gradients, parameters."""
    stage: int
    bytes: int


@dataclass(frozen=True)
class Trace:
    """Slot records and messages of one or many ranks, in the order of their slots."""

    workers: int
    stages: int
    records: tuple[SlotRecord, ...]
    messages: tuple[Message, ...] = ()

    @property
    def activation_bytes_per_slot(self) -> dict[int, int]:
        """Live activation bytes of each slot, summed over ranks; a rank without an action holds what it held."""
        by_slot: dict[int, dict[int, SlotRecord]] = defaultdict(dict)
        for record in self.records:
            by_slot[record.slot][record.rank] = record
        held: dict[int, int] = {}
        total = {}
        for slot, active in by_slot.items():
            idle = sum(live for rank, live in held.items() if rank not in active)
            total[slot] = idle + sum(record.activation_bytes for record in active.values())
            held |= {rank: record.activation_bytes_after for rank, record in active.items()}
        return total

    @property
    def activation_peak_bytes_total(self) -> int:
        """Largest sum over ranks of live activation bytes, over all slots."""
        return max(self.activation_bytes_per_slot.values(), default=0)

    @property
    def activation_peak_bytes_per_device(self) -> int:
        """Largest number of live activation bytes on any one rank."""
        return max((record.activation_bytes for record in self.records), default=0)

    @property
    def versions_kept(self) -> int:
        """Largest number of parameter versions of one stage alive on one rank at the end of a slot."""
        return max((max(record.versions) for record in self.records), default=0)

    @property
    def max_messages_per_slot(self) -> int:
        """Largest number of messages in one slot."""
        return max(Counter(message.slot for message in self.messages).values(), default=0)

    @property
    def max_chain_per_slot(self) -> int:
        """Longest chain of messages in one slot, each of which must wait for the one before."""
        longest: dict[tuple[int, int], int] = defaultdict(int)
        for message in self.messages:
            here, there = (message.slot, message.source), (message.slot, message.destination)
            longest[there] = max(longest[there], longest[here] + 1)
        return max(longest.values(), default=0)

    def bytes_sent_per_device_per_step(self, steps: int) -> float:
        """Return the bytes that a rank sends in one of the `steps` traced training steps, on average."""
        ranks = len({record.rank for record in self.records})
        return sum(message.bytes for message in self.messages) / (ranks * steps) if ranks else 0.0

    def flops_per_slot(self, costs: StageCosts) -> dict[int, int]:
        """Return the floating-point operations of each slot, summed over ranks."""
        by_op = {"F": costs.forward_flops, "B": costs.backward_flops}
        total: dict[int, int] = defaultdict(int)
        for record in self.records:
            total[record.slot] += sum(by_op[a.op][a.stage] for a in record.actions if a.op.is_compute)
        return dict(total)


class TraceRecorder:
    """Collects the events of one rank into slot records."""

    def __init__(self, rank: int, stages: int) -> None:
        self._rank = rank
        self._stages = stages
        self._records: list[SlotRecord] = []
        self._slot: int | None = None
        self._live = 0
        self._open()

    def _open(self) -> None:
        self._actions: list[Action] = []
        self._spans: list[tuple[float, float]] = []
        self._peak = self._live

    def record(
        self,
        slot: int,
        action: Action,
        activation_bytes: int,
        versions: Sequence[int],
        span: tuple[float, float],
    ) -> None:
        """Add an action that has just run, with the live bytes and live versions (one entry a stage) after it."""
        if self._slot is not None and slot != self._slot:
            self._close()
        self._slot = slot
        self._actions.append(action)
        self._spans.append(span)
        self._live = activation_bytes
        self._peak = max(self._peak, activation_bytes)
        self._versions = tuple(versions)

    def _close(self) -> None:
        if self._slot is not None:
            self._records.append(
                SlotRecord(
                    self._slot,
                    self._rank,
                    tuple(self._actions),
                    self._peak,
                    self._live,
                    self._versions,
                    tuple(self._spans),
                )
            )
        self._slot = None
        self._open()

    def finish(self) -> tuple[SlotRecord, ...]:
        """Return the records of all slots so far."""
        self._close()
        return tuple(self._records)
