"""How stages are connected: a chain, or branches that join.

The `sources` of a stage are the earlier stages whose outputs it reads; a stage without sources reads the data. Exactly
one stage reads each output; the last output is the loss. Two towers of two stages each, and two stages after them:

    0 -- 1 --+
             4 -- 5        sources = ((), (0,), (), (2,), (1, 3), (4,))
    2 -- 3 --+
"""

from __future__ import annotations

from collections.abc import Sequence

Sources = tuple[tuple[int, ...], ...]


def chain(stages: int) -> Sources:
    """Return the sources of a chain: each stage reads the output of the one before it."""
    return ((), *((stage,) for stage in range(stages - 1)))


def two_towers(stages: int) -> Sources:
    """Return the sources of two towers with a third of the stages each, and a last third that reads both.

    Raises:
        ValueError: the number of stages is not a multiple of 3.
    """
    if stages % 3 or not stages:
        works = " or ".join(f"stages={each}" for each in (stages // 3 * 3, stages // 3 * 3 + 3) if each)
        raise ValueError(
            f"stages={stages} is not a multiple of 3: two towers and what joins them have a third each; use {works}"
        )
    return towers(stages // 3, stages // 3, stages // 3)


def towers(left: int, right: int, trunk: int) -> Sources:
    """Return the sources of two towers and a trunk whose first stage reads both, given the stages of each."""
    one, other = chain(left), tuple(tuple(left + part for part in read) for read in chain(right))
    behind = tuple((left + right + part,) for part in range(trunk - 1))
    return (*one, *other, (left - 1, left + right - 1), *behind)


def readers(sources: Sources) -> tuple[int, ...]:
    """Return, for each stage, the stage that reads its output; -1 for the last stage."""
    found = [-1] * len(sources)
    for stage, read in enumerate(sources):
        for source in read:
            found[source] = stage
    return tuple(found)


def check_sources(sources: Sequence[Sequence[int]], stages: int) -> None:
    """Raise ValueError unless stages read only earlier ones, and each output except the last is read once."""
    works = f"a chain has sources={[[*read] for read in chain(stages)]}"
    if len(sources) != stages:
        raise ValueError(f"sources has {len(sources)} entries for stages={stages}: give one a stage; {works}")
    for stage, read in enumerate(sources):
        if any(not 0 <= source < stage for source in read) or list(read) != sorted(set(read)):
            raise ValueError(
                f"the sources of stage {stage} are {[*read]}: give stages before it, each once, in their order; {works}"
            )
    uses = [sum(stage in read for read in sources) for stage in range(stages)]
    expected = [1] * (stages - 1) + [0]
    if uses != expected:
        wrong = next(stage for stage, (use, wanted) in enumerate(zip(uses, expected, strict=True)) if use != wanted)
        raise ValueError(f"{uses[wrong]} stages read the output of stage {wrong}: it needs exactly one; {works}")
