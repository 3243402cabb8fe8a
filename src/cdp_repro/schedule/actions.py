"""The vocabulary of every schedule: actions, their text form, and the slots that order them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache


class Op(StrEnum):
    """What an action does; the value is the first letter of its text form."""

    FORWARD = "F"
    BACKWARD = "B"
    UPDATE = "U"
    FREE = "X"
    SEND = "S"
    RECEIVE = "R"
    ADD = "A"
    COLLECTIVE = "C"

    is_compute: bool
    """Whether the action is a forward or a backward, which occupy a slot of their worker."""
    is_message: bool
    """Whether the action is one end of a message."""

    def __init__(self, letter: str) -> None:
        self.is_compute = letter in "FB"
        self.is_message = letter in "SR"


class Payload(StrEnum):
    """What a message carries of a stage."""

    ACTIVATIONS = "activations"
    """The stage's output for a micro-batch, to the rank of the next stage."""
    INPUT_GRADIENTS = "input_gradients"
    """The gradient of the stage's input for a micro-batch, to the rank of the stage before."""
    GRADIENTS = "gradients"
    """Parameter gradients, summed by the sender, up to and with those of a micro-batch."""
    TOTAL = "total"
    """The sum of all micro-batches' parameter gradients, from which a version is made."""
    PARAMETERS = "parameters"
    """A version of the parameters, for a forward or a backward of a micro-batch."""
    BUFFERS = "buffers"
    """A worker's buffers (BatchNorm's running statistics) after the forward of a micro-batch."""


_NAMED_BY = {
    Payload.ACTIVATIONS: (True, False),
    Payload.INPUT_GRADIENTS: (True, False),
    Payload.GRADIENTS: (True, False),
    Payload.TOTAL: (False, True),
    Payload.PARAMETERS: (True, True),
    Payload.BUFFERS: (True, False),
}
"""Whether a message is named by a micro-batch, and whether by a version."""

_COLLECTIVES = (Payload.TOTAL, Payload.PARAMETERS, Payload.GRADIENTS)
"""What collectives bring, by an all-reduce, an all-gather, a reduce-scatter; each names a micro-batch, too."""

_TEXT = re.compile(
    r"(?P<op>[FBUXSRAC])(?P<stage>\d+)(?:\.m(?P<micro_batch>\d+))?(?:@v(?P<version>\d+))?"
    r"(?::(?P<payload>[a-z_]+)(?:(?P<direction>[<>])(?P<peer>\d+))?)?(?:#(?:(?P<part>\d+)/)?(?P<parts>\d+))?"
)


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a rank does.

    | text | meaning |
    | --- | --- |
    | `F2.m5@v1` | forward of stage 2 on micro-batch 5 with parameter version 1 |
    | `B2.m5@v1` | backward of the same, with the same version |
    | `U2@v3` | the update that makes version 3 of stage 2, from version 2 and the gradients of step 2 |
    | `U2@v3:total` | the same, but the sum of the gradients stays for another rank, until `X2@v3:total` frees it |
    | `X2@v1` | free version 1 of stage 2: nothing reads it any more |
    | `S2.m5:activations>3` | send the output of stage 2 on micro-batch 5 to rank 3 |
    | `R2.m5:activations<0` | get ready to receive it from rank 0; whoever needs it waits for it |
    | `A2.m5` | add the gradients of micro-batch 5, or the sum up to it that was received, to the sum of stage 2 |
    | `S2.m5:gradients>3#1/4` | send the first of four parts of the gradients; `A2.m5#4` waits for all of them |
    | `C2.m5@v3:total` | take part in the all-reduce of the gradients of stage 2 with those of micro-batch 5 |
    | `C2.m5:gradients` | take part in their reduce-scatter, to the shards of stage 2 |
    | `C2.m5@v1:parameters` | take part in the all-gather of version 1 of stage 2, to compute micro-batch 5 with it |

    Version v of a stage is theta[v], its parameters after v updates. Micro-batch m = tM + i is the i-th of the M of
    training step t; with one replica a worker that is worker i's. `version` is None only in compute that no pass
    has given a version yet. The text leaves out `rank`: a rank's program is its own.
    """

    op: Op
    stage: int
    micro_batch: int | None = None
    version: int | None = None
    payload: Payload | None = None
    peer: int | None = None
    """Of a message: the rank at its other end."""
    rank: int = 0
    """Where the action runs."""
    part: int | None = None
    """Of a message that is part of another: which part, from 1."""
    parts: int = 1
    """Of such a message, and of an ADD that waits for all parts: how many there are."""

    def __post_init__(self) -> None:
        names = self.micro_batch is not None, self.version is not None, self.peer is not None
        fault = _misnamed(self.op, self.payload, *names)
        if self.parts != 1 or self.part is not None:
            fault = fault or _misparted(self.op, self.payload, self.part, self.parts)
        if fault:
            raise ValueError(f"{self.op.name} of stage {self.stage} {fault}: {self}")

    def __str__(self) -> str:
        micro_batch = "" if self.micro_batch is None else f".m{self.micro_batch}"
        version = "" if self.version is None else f"@v{self.version}"
        payload = "" if self.payload is None else f":{self.payload}"
        peer = "" if self.peer is None else f"{'>' if self.op is Op.SEND else '<'}{self.peer}"
        part = "" if self.part is None else f"{self.part}/"
        parts = "" if self.parts == 1 else f"#{part}{self.parts}"
        return f"{self.op}{self.stage}{micro_batch}{version}{payload}{peer}{parts}"

    @classmethod
    def parse(cls, text: str, rank: int = 0) -> Action:
        """Return the action of `rank` whose text form is `text`; ValueError if it is none."""
        match = _TEXT.fullmatch(text)
        direction = {"S": ">", "R": "<"}.get(text[:1])
        if match is None or match["direction"] != direction or (match["payload"] or "total") not in list(Payload):
            raise ValueError(f"not an action: {text!r}; actions look like F2.m5@v1, B2.m5@v1, U2@v3, X2@v1, "
                             "S2.m5:activations>3, R2.m5:activations<0, A2.m5, C2.m5@v3:total, "
                             "S2.m5:gradients>3#1/4, A2.m5#4")  # fmt: skip
        numbers = {
            name: int(match[name])
            for name in ("micro_batch", "version", "peer", "part", "parts")
            if match[name] is not None
        }
        payload = None if match["payload"] is None else Payload(match["payload"])
        return cls(Op(match["op"]), int(match["stage"]), payload=payload, rank=rank, **numbers)

    def at_version(self, version: int) -> Action:
        """Return the same action with the given parameter version."""
        return replace(self, version=version)

    def at_rank(self, rank: int) -> Action:
        """Return the same action on the given rank."""
        return replace(self, rank=rank)

    @property
    def message(self) -> MessageKey:
        """What tells the message of a SEND or RECEIVE from all others on their way between the same two ranks, and
        what a rank brings to a COLLECTIVE from all else."""
        assert self.payload is not None
        return self.payload, self.stage, self.micro_batch, self.version, self.part


@cache  # a schedule makes millions of actions of a few dozen kinds
def _misnamed(op: Op, payload: Payload | None, batched: bool, versioned: bool, peered: bool) -> str | None:
    """Return what is wrong with the things that an action names, or None."""
    if op.is_message != peered or (op.is_message and payload is None):
        return "must name both payload and peer if it is a message, and no peer otherwise"
    if op is Op.COLLECTIVE and payload not in _COLLECTIVES:
        return f"must name one of the payloads {', '.join(_COLLECTIVES)}"
    keeps_total = op in (Op.UPDATE, Op.FREE) and payload is Payload.TOTAL
    if payload is not None and not (op.is_message or op is Op.COLLECTIVE or keeps_total):
        return f"names the payload {payload}: only messages and collectives do, and who keeps or frees a total"
    needs_batch, needs_version = op.is_compute or op is Op.ADD, op in (Op.UPDATE, Op.FREE)
    if payload is not None and not keeps_total:
        needs_batch, needs_version = _NAMED_BY[payload]
        needs_batch |= op is Op.COLLECTIVE
    if needs_batch != batched:
        return f"must name {'a' if needs_batch else 'no'} micro-batch"
    if op.is_compute or needs_version == versioned:
        return None
    return f"must name {'a' if needs_version else 'no'} version"


def _misparted(op: Op, payload: Payload | None, part: int | None, parts: int) -> str | None:
    """Return what is wrong with the part that an action names, or None."""
    is_message = op.is_message and payload is Payload.GRADIENTS
    if not is_message and op is not Op.ADD:
        return "names parts: only messages with gradients do, and an ADD that waits for them"
    if parts < 2 or is_message is (part is None) or (part is not None and not 1 <= part <= parts):
        return f"names part {part} of {parts}: a message names one from 1 on of 2 or more, an ADD only how many"
    return None


MessageKey = tuple[Payload, int, int | None, int | None, int | None]
"""Payload, stage, micro-batch, version, part."""


def send(
    payload: Payload, stage: int, source: int, destination: int, *, micro_batch: int | None = None,
    version: int | None = None,
) -> tuple[Action, Action]:  # fmt: skip
    """Return both ends of a message: the SEND and the RECEIVE."""
    return (
        Action(Op.SEND, stage, micro_batch, version, payload, peer=destination, rank=source),
        Action(Op.RECEIVE, stage, micro_batch, version, payload, peer=source, rank=destination),
    )


def consumed(action: Action, micro_batches: int) -> tuple[MessageKey, ...]:
    """Return the messages that `action` waits for if they are on their way to its rank.

    `micro_batches` is M, the number of micro-batches in a training step.
    """
    stage, m, version = action.stage, action.micro_batch, action.version
    parameters = (Payload.PARAMETERS, stage, m, version, None)
    if action.op is Op.FORWARD:
        assert m is not None
        buffers = (Payload.BUFFERS, stage, m - micro_batches, None, None)
        return (Payload.ACTIVATIONS, stage - 1, m, None, None), parameters, buffers
    if action.op is Op.BACKWARD:
        return (Payload.INPUT_GRADIENTS, stage + 1, m, None, None), parameters
    if action.op is Op.ADD:
        parts = (None,) if action.parts == 1 else range(1, action.parts + 1)
        return tuple((Payload.GRADIENTS, stage, m, None, part) for part in parts)
    if action.op is Op.UPDATE or (action.op is Op.SEND and action.payload is Payload.TOTAL):
        return ((Payload.TOTAL, stage, None, version, None),)
    return ()


def result_of(collective: Action, micro_batches: int) -> MessageKey:
    """Return the message that a COLLECTIVE is to the rank that waits for its result.

    `micro_batches` is M, the number of micro-batches in a training step: a reduce-scatter brings the gradients of all.
    """
    payload, stage, m, version, _ = collective.message
    assert m is not None
    if payload is Payload.TOTAL:
        return payload, stage, None, version, None
    if payload is Payload.GRADIENTS:
        return payload, stage, m - m % micro_batches + micro_batches - 1, None, None
    return collective.message


@dataclass(frozen=True, slots=True)
class Slot:
    """One time slot: its number and its actions, in the order in which one device would run them.

    A slot is the time of one forward or backward of one stage on one micro-batch (the paper's "time step").
    Slots order actions; they are not barriers.
    """

    number: int
    actions: tuple[Action, ...]

    def program_of(self, rank: int) -> tuple[Action, ...]:
        """Return the actions of one rank in its order: it gets ready to receive first of all, which does not wait."""
        own = [action for action in self.actions if action.rank == rank]
        return tuple(sorted(own, key=lambda action: action.op is not Op.RECEIVE))

    def __str__(self) -> str:
        return f"{self.number}: {' '.join(map(str, self.actions))}"
