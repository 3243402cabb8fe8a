"""Values: the named things that actions read, write and free.

| text | value |
| --- | --- |
| `x2.m5` | output of stage 1 for micro-batch 5: the input of stage 2, or of the stage that joins its branch |
| `s2.m5` | what the forward of stage 2 on micro-batch 5 has saved for its backward |
| `d2.m5` | gradient of the output of stage 2 for micro-batch 5 |
| `w2.m5` | what the first part of a backward of stage 2 on micro-batch 5 leaves for the second |
| `k2.m5` | what layers of stage 2 keep of the tokens of micro-batch 5 and those before: of attention, keys and values |
| `h2.m5` | gradient of `k2.m5` |
| `g2[4:6]` | sum of the parameter gradients of stage 2 over micro-batches 4 and 5, added in that order |
| `g2[1:6:4]` | the same over micro-batches 1 and 5 |
| `p2@v3` | parameters of stage 2 after 3 updates, theta[3] |
| `pf2.m5@v3`, `pb2.m5@v3` | a copy of them, lent for the forward (the backward) of micro-batch 5 |
| `b2.w1` | set 1 of the buffers of stage 2 (BatchNorm's statistics); `Schedule.statistics_of` says whose it is |
| `g2[4:6]#1/4`, `p2@v3#1/4` | the first of four parts of the value: of a message, or the shard of one rank |

A value lives on one rank. The same name on two ranks is two copies of the same content.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from functools import partial
from typing import NamedTuple


class Kind(StrEnum):
    """What a value is; the first letters of its text."""

    INPUT = "x"
    SAVED = "s"
    OUTPUT_GRADIENT = "d"
    WEIGHT_WORK = "w"
    PREFIX = "k"
    PREFIX_GRADIENT = "h"
    GRADIENTS = "g"
    PARAMETERS = "p"
    LENT_FORWARD = "pf"
    LENT_BACKWARD = "pb"
    BUFFERS = "b"

    __hash__ = str.__hash__  # as of `Op`: a large program hashes millions of values


LENT = (Kind.LENT_FORWARD, Kind.LENT_BACKWARD)

NUMBER = r"\d{1,9}"
"""A number in a text, for `re`: at most 9 digits, since a longer one is a slip of the pen."""

_TEXT = re.compile(
    rf"(?P<kind>{'|'.join(Kind)})(?P<stage>{NUMBER})"
    rf"(?:\.[mw](?P<number>{NUMBER})|\[(?P<start>{NUMBER}):(?P<stop>{NUMBER})(?::(?P<stride>{NUMBER}))?\])?"
    rf"(?:@v(?P<version>{NUMBER}))?(?:#(?P<part>{NUMBER})/(?P<parts>{NUMBER}))?"
)


class Value(NamedTuple):
    """The name of one value. The functions below make them."""

    kind: Kind
    stage: int
    number: int
    """The micro-batch; for parameters the version, for buffers the set, for a sum its first micro-batch."""
    version: int = 0
    """The version of lent parameters; else 0."""
    stop: int = 0
    """For a sum, the micro-batch after its last; else 0."""
    stride: int = 1
    """For a sum, the difference between the numbers of its micro-batches; else 1."""
    part: int = 0
    """The number of this part, from 1; 0 for a whole value."""
    parts: int = 1

    @property
    def members(self) -> range:
        """The micro-batches in a sum, in the order in which they were added."""
        return range(self.number, self.stop, self.stride)

    @property
    def whole(self) -> Value:
        """The value of which this is a part, or itself."""
        return self if self.parts == 1 else Value(*self[:6])

    def divided(self, part: int, parts: int) -> Value:
        """Return one of `parts` parts, counted from 1; the value itself if there is only one."""
        return self if parts == 1 else Value(*self[:6], part, parts)

    def shifted(self, micro_batches: int, versions: int) -> Value:
        """Return the value that takes this one's place after this many more micro-batches and versions."""
        kind, stage, number, version, stop, stride, part, parts = self
        if kind == Kind.BUFFERS:
            return self
        if kind == Kind.PARAMETERS:
            return _fast((kind, stage, number + versions, 0, 0, 1, part, parts))
        ahead = number + micro_batches
        if kind == Kind.GRADIENTS:
            return _fast((kind, stage, ahead, 0, stop + micro_batches, stride, part, parts))
        return _fast((kind, stage, ahead, version + versions if kind in LENT else 0, 0, 1, 0, 1))

    def __str__(self) -> str:
        names = {
            Kind.GRADIENTS: f"[{self.number}:{self.stop}{'' if self.stride == 1 else f':{self.stride}'}]",
            Kind.PARAMETERS: f"@v{self.number}",
            Kind.BUFFERS: f".w{self.number}",
        }
        version = f"@v{self.version}" if self.kind in LENT else ""
        part = "" if self.parts == 1 else f"#{self.part}/{self.parts}"
        return f"{self.kind}{self.stage}{names.get(self.kind, f'.m{self.number}')}{version}{part}"

    @classmethod
    def parse(cls, text: str) -> Value:
        """Return the value whose name is `text`; raise ValueError if `text` is not one."""
        match = _TEXT.fullmatch(text)
        if match is not None:
            kind, *numbers = match.groups()
            stage, number, start, stop, stride, version, part, parts = (int(each or 0) for each in numbers)
            if kind == Kind.PARAMETERS:
                value = parameters(stage, version)
            elif start < stop:
                value = gradient_sum(stage, range(start, stop, stride or 1))
            else:
                value = cls(Kind(kind), stage, number, version)
            value = value.divided(part, parts or 1)
            if kind == Kind.GRADIENTS and start >= stop:
                raise ValueError(f"a sum of no micro-batches: {text!r}")
            if parts and not 0 < part <= parts:
                raise ValueError(f"there is no part {part} of {parts}: {text!r}")
            if str(value) == text:
                return value
        raise ValueError(f"not a value: {text!r}; values look like x2.m5, s2.m5, d2.m5, k2.m5, g2[4:6], p2@v3, "
                         "pf2.m5@v3, pb2.m5@v3, b2.w1, g2[4:6]#1/4")  # fmt: skip


_fast = partial(tuple.__new__, Value)
"""Makes a value from all its fields in a fifth of the time: a large program has millions of values."""


def micro_batch_value(kind: Kind, stage: int, micro_batch: int) -> Value:
    """Return a value of a kind that a stage has once per micro-batch, such as its Kind.INPUT."""
    return _fast((kind, stage, micro_batch, 0, 0, 1, 0, 1))


def parameters(stage: int, version: int) -> Value:
    """Return the parameters of a stage after `version` updates."""
    return _fast((Kind.PARAMETERS, stage, version, 0, 0, 1, 0, 1))


def buffers(stage: int, number: int) -> Value:
    """Return a set of buffers of a stage by its number."""
    return _fast((Kind.BUFFERS, stage, number, 0, 0, 1, 0, 1))


def gradient_sum(stage: int, members: Sequence[int]) -> Value:
    """Return the sum over `members`, which are equally spaced. Its `stop` is the number after the last member."""
    stride = members[1] - members[0] if len(members) > 1 else 1
    return _fast((Kind.GRADIENTS, stage, members[0], 0, members[-1] + 1, stride, 0, 1))


def collective_name(value: Value) -> tuple[object, ...]:
    """Return the name of a collective that all ranks share, given the value that it makes on one of them.

    The values differ: each rank gathers parameters for its own micro-batch, and gets its own shard of a scattered sum.
    """
    if value.kind == Kind.GRADIENTS:
        return value.whole, value.parts
    return value.kind, value.stage, value.version
