"""The vocabulary of every schedule: actions, their text form, and the slots that order them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum


class Op(StrEnum):
    """What an action does; the value is the first letter of its text form."""

    FORWARD = "F"
    BACKWARD = "B"
    UPDATE = "U"
    FREE = "X"

    @property
    def is_compute(self) -> bool:
        """Whether the action is a forward or a backward, which occupy a slot of their worker."""
        return self in (Op.FORWARD, Op.BACKWARD)


_TEXT = re.compile(r"(?P<op>[FBUX])(?P<stage>\d+)(?:\.m(?P<micro_batch>\d+))?(?:@v(?P<version>\d+))?")


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a rank does.

    | text | meaning |
    | --- | --- |
    | `F2.m5@v1` | forward of stage 2 on micro-batch 5 with parameter version 1 |
    | `B2.m5@v1` | backward of the same, with the same version |
    | `U2@v3` | the update that makes version 3 of stage 2, from version 2 and the gradients of step 2 |
    | `X2@v1` | free version 1 of stage 2: nothing reads it any more |

    Version v of a stage is theta[v], its parameters after v updates. Micro-batch m = tN + i belongs to worker i
    of training step t. `version` is None only in compute that no pass has given a version yet.
    """

    op: Op
    stage: int
    micro_batch: int | None = None
    version: int | None = None

    def __post_init__(self) -> None:
        if self.op.is_compute != (self.micro_batch is not None):
            raise ValueError(f"{self.op.name} of stage {self.stage}: forwards and backwards, and no other action, "
                             f"name a micro-batch; got micro_batch={self.micro_batch}")  # fmt: skip
        if self.version is None and not self.op.is_compute:
            raise ValueError(f"{self.op.name} of stage {self.stage} names no version")

    def __str__(self) -> str:
        micro_batch = "" if self.micro_batch is None else f".m{self.micro_batch}"
        version = "" if self.version is None else f"@v{self.version}"
        return f"{self.op}{self.stage}{micro_batch}{version}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action whose text form is `text`; ValueError if it is none."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"not an action: {text!r}; actions look like F2.m5@v1, B2.m5@v1, U2@v3, X2@v1")
        micro_batch, version = match["micro_batch"], match["version"]
        return cls(
            Op(match["op"]),
            int(match["stage"]),
            None if micro_batch is None else int(micro_batch),
            None if version is None else int(version),
        )

    def at_version(self, version: int) -> Action:
        """Return the same action with the given parameter version."""
        return replace(self, version=version)


@dataclass(frozen=True, slots=True)
class Slot:
    """One time slot: its number and its actions, in the order in which one device would run them.

    A slot is the time of one forward or backward of one stage on one micro-batch (the paper's "time step").
    Slots order actions; they are not barriers.
    """

    number: int
    actions: tuple[Action, ...]

    def __str__(self) -> str:
        return f"{self.number}: {' '.join(map(str, self.actions))}"
