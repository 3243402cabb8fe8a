"""Actions: what a rank does, with the values that it reads, writes and frees."""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from typing import NamedTuple

from cdp_repro.schedule.values import LENT, NUMBER, Value, parameters


class Op(StrEnum):
    """What an action does; the value is the first letter of its text."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHTS = "W"
    UPDATE = "U"
    SEND = "S"
    RECEIVE = "R"
    ADD = "A"
    COLLECTIVE = "C"

    __hash__ = str.__hash__  # an enum's own hash is Python code, and the executor hashes the op of every action

    is_compute: bool
    """Whether the action is a forward, a backward or a part of one; such an action takes a slot of its rank."""
    passes_on: bool
    """Whether the micro-batch goes on by this compute, to the next stage or back; a compute that does not can wait."""
    backward_share: float
    """Share of the time of a stage's backward; in a linear layer, each part of a split one is one of two products."""
    gives_gradients: bool
    """Whether the action gives the gradients of a stage's parameters for one micro-batch."""
    sums_gradients: bool
    """Whether the action can complete a sum of gradients on its rank: it gives gradients, or adds two sums."""
    is_message: bool
    """Whether the action is one end of a message."""

    def __init__(self, letter: str) -> None:
        self.is_compute = letter in "FBIW"
        self.passes_on = letter in "FBI"
        self.backward_share = {"B": 1.0, "I": 0.5, "W": 0.5}.get(letter, 0.0)
        self.gives_gradients = letter in "BW"
        self.sums_gradients = letter in "BWA"
        self.is_message = letter in "SR"


class Action(NamedTuple):
    """One thing that a rank does. An action is complete: its meaning depends on nothing else.

    | text | meaning |
    | --- | --- |
    | `F2.m5@v1: x2.m5! p2@v1 b2.w1! -> s2.m5 x3.m5 b2.w1` | forward of stage 2 on micro-batch 5 at version 1 |
    | `B2.m5@v1: s2.m5! d2.m5! p2@v1! -> d1.m5 g2[5:6]` | backward of the same, with the same version |
    | `I2.m5@v1: s2.m5! d2.m5! p2@v1! -> d1.m5 w2.m5` | the first part of a backward: the gradient of the input |
    | `W2.m5@v1: w2.m5! -> g2[5:6]` | the second part: the gradients of the weights |
    | `A g2[4:6]: g2[4:5]! g2[5:6]! -> g2[4:6]` | add two sums that follow one another |
    | `U2@v3: p2@v2! g2[8:12]! -> p2@v3` | the update that makes version 3 of stage 2 |
    | `S x3.m5>3: x3.m5! ->` | send the input of stage 3 for micro-batch 5 to rank 3 |
    | `R x3.m5<0: -> x3.m5` | get ready to receive it from rank 0; the action that reads it waits for it |
    | `C g2[4:8]: g2[5:6]! -> g2[4:8]` | take part in a collective of all ranks, here the all-reduce of a sum |

    `!` marks the last read of a value on this rank: the value is freed. Before the colon, a message names the value
    that it carries, and a collective the value that it makes. The text omits `rank`: each rank has its own program.
    """

    op: Op
    rank: int
    stage: int
    micro_batch: int = -1
    """For a forward or backward; else -1."""
    version: int = -1
    """For a forward or backward the version that it reads, for an update the one that it makes; else -1."""
    peer: int = -1
    """For a message, the rank at its other end; else -1."""
    value: Value | None = None
    """What a message carries, a collective makes or an ADD yields; else None."""
    reads: tuple[Value, ...] = ()
    writes: tuple[Value, ...] = ()
    frees: tuple[Value, ...] = ()
    """Those of `reads` that are read for the last time."""

    @property
    def label(self) -> str:
        """The text without the values that are read and written."""
        if self.op.is_compute:
            return f"{self.op}{self.stage}.m{self.micro_batch}@v{self.version}"
        if self.op is Op.UPDATE:
            return f"U{self.stage}@v{self.version}"
        direction = {Op.SEND: f">{self.peer}", Op.RECEIVE: f"<{self.peer}"}.get(self.op, "")
        return f"{self.op} {self.value}{direction}"

    @property
    def edge(self) -> tuple[int, int] | None:
        """For a message, its source and destination ranks; else None."""
        if not self.op.is_message:
            return None
        return (self.rank, self.peer) if self.op is Op.SEND else (self.peer, self.rank)

    def __str__(self) -> str:
        reads = "".join(f" {value}{'!' if value in self.frees else ''}" for value in self.reads)
        return f"{self.label}:{reads} ->{''.join(f' {value}' for value in self.writes)}"

    @classmethod
    def parse(cls, text: str, rank: int = 0) -> Action:
        """Return the action of `rank` whose text is `text`; raise ValueError if `text` is not an action."""
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"not an action: {text!r}; actions look like {_EXAMPLES}")
        listed = match["reads"].split()
        reads = tuple(Value.parse(each.removesuffix("!")) for each in listed)
        frees = tuple(value for value, each in zip(reads, listed, strict=True) if each.endswith("!"))
        writes = tuple(map(Value.parse, match["writes"].split()))
        op = Op(match["op"])
        value = Value.parse(match["value"]) if match["value"] else None
        stage = value.stage if value else int(match["stage"])
        m, version, peer = (
            -1 if match[name] is None else int(match[name]) for name in ("micro_batch", "version", "peer")
        )
        action = cls(op, rank, stage, m, version, peer, value, reads, writes, frees)
        if action.label.replace(" ", "") != match["label"].replace(" ", ""):
            raise ValueError(f"not an action: {text!r}; actions look like {_EXAMPLES}")
        return action

    def shifted(self, micro_batches: int, versions: int, later: Callable[[int], int] | None = None) -> Action:
        """Return the action that takes this one's place after this many more micro-batches and versions.

        `later` maps each rank to the one that then plays its role; None if each keeps its own.
        """
        op, rank, stage, micro_batch, version, peer, value, reads, writes, frees = self
        if later is not None:
            rank, peer = later(rank), later(peer) if peer >= 0 else -1
        moved = tuple([each.shifted(micro_batches, versions) for each in reads])
        return _fast(
            (
                op,
                rank,
                stage,
                micro_batch + micro_batches if micro_batch >= 0 else -1,
                version + versions if version >= 0 else -1,
                peer,
                value and value.shifted(micro_batches, versions),
                moved,
                tuple([each.shifted(micro_batches, versions) for each in writes]),
                tuple([moved[reads.index(each)] for each in frees]) if len(frees) < len(reads) else moved,
            )
        )

    def freeing(self, values: tuple[Value, ...]) -> Action:
        """Return this action, freeing `values` and no others."""
        return _fast((*self[:-1], values))


_fast = partial(tuple.__new__, Action)
"""Makes an action from all its fields, fast, as `_fast` in `values` does."""


_TEXT = re.compile(
    rf"(?P<label>(?P<op>[{''.join(Op)}])(?:(?P<stage>{NUMBER})(?:\.m(?P<micro_batch>{NUMBER}))?@v(?P<version>{NUMBER})"
    rf"|\s+(?P<value>[^\s<>]+?)(?:[<>](?P<peer>{NUMBER}))?))"
    r":(?P<reads>[^:>]*(?:\[[^\]]*\][^:>]*)*)->(?P<writes>.*)"
)
_EXAMPLES = "F2.m5@v1: x2.m5! p2@v1 b2.w1! -> s2.m5 x3.m5 b2.w1, S x3.m5>3: x3.m5! ->, R x3.m5<0: -> x3.m5"


def send(value: Value, source: int, destination: int) -> tuple[Action, Action]:
    """Return both ends of a message.

    Lent parameters are sent from those that the sender holds. A part is sent from the whole: where only parts have
    arrived, the buffer of the others is not filled.
    """
    stage = value.stage
    read = parameters(stage, value.version) if value.kind in LENT else value.whole
    return (
        _fast((Op.SEND, source, stage, -1, -1, destination, value, (read,), (), ())),
        _fast((Op.RECEIVE, destination, stage, -1, -1, source, value, (), (value,), ())),
    )


Batch = tuple[Action, ...]
"""SENDs, of a rank and to it, whose messages the rank exchanges at once."""


class Slot(NamedTuple):
    """One time slot: its number and its actions, in an order in which one process could run them all.

    A slot is the time of one forward or backward of one stage on one micro-batch (the paper's "time step").
    Slots order actions; they are not barriers.
    """

    number: int
    actions: tuple[Action, ...]
    batches: tuple[Batch, ...] = ()
    """For one rank on NCCL: its messages that are sent in this slot, in its order."""

    def __str__(self) -> str:
        return f"{self.number}: {' '.join(action.label for action in self.actions)}"
