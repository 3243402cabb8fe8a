"""When the norm of all gradients is known: what `tests/engine/test_engine_clipping.py` trains by, without tensors."""

from __future__ import annotations

import re

import pytest

from cdp_repro.schedule import Program, Schedule, add_mode
from cdp_repro.schedule.norms import can_clip, clips_globally, knows_norms_in_time, refusal
from cdp_repro.schedule.program_text import read_program, write_program
from cdp_repro.schedule.rules import Rule


def completed_on_rank_1(text):
    """Let rank 2 send its gradients of stage 2 to rank 1, which completes the sums and sends them back."""
    found = []
    for piece in re.split(r"(?m)(?=^(?:fill|period|drain))", text):
        adds: list[str] = []

        def moved(match, adds=adds):
            slot, first, end = match[1], int(match[2]), int(match[3])
            before, own, total = f"g2[{first}:{end - 1}]", f"g2[{end - 1}:{end}]", f"g2[{first}:{end}]"
            adds.append(
                f"  {slot}  R {own}<2: -> {own}\n  {slot}  A {total}: {before}! {own}! -> {total}\n"
                f"  {slot}  S {total}>2: {total}! ->\n"
            )
            return f"  {slot}  S {own}>1: {own}! ->\n  {slot}  R {total}<1: -> {total}\n"

        head, *ranks = re.split(r"(?m)(?=^rank )", piece)
        by_name = {part.split("\n")[0]: part for part in ranks}
        if "rank 2" in by_name:
            received = r"(?m)^ +\d+  R g2\[\d+:\d+\]<1: -> (g2\[(\d+):(\d+)\])\n"
            kept = re.sub(received, lambda m: "" if int(m[3]) - int(m[2]) == 2 else m[0], by_name["rank 2"])
            by_name["rank 2"] = re.sub(r"(?m)^ +(\d+)  A g2\[(\d+):(\d+)\]: .*\n", moved, kept)
        if "rank 1" in by_name:
            without = re.sub(r"(?m)^ +\d+  S g2\[\d+:\d+\]>2: .*\n", "", by_name["rank 1"])
            name, *lines = [*without.strip("\n").split("\n"), *"".join(adds).splitlines()]
            by_name["rank 1"] = "\n".join([name, *sorted(lines, key=lambda line: int(line.split()[0]))]) + "\n\n"
        found.append(head + "".join(by_name.values()))
    return "".join(found)


def test_all_runs_of_a_file_are_looked_at():
    """The run from step 0 knows the norms in time, that from step 1 does not: its tellers are not those that add."""
    text = write_program(Program(Schedule.build("cdp_v1", 3, 3, "replicated")))
    assert knows_norms_in_time(read_program(text))
    first, second = (text[: (begin := text.index("run from step 1"))], text[begin:])
    edited = read_program(first + completed_on_rank_1(second))
    assert not knows_norms_in_time(edited)


class OnlyFirstLate(Rule):
    """Reads stage 0 a step late, and all others fresh: not all norms are known before a new version is read."""

    def staleness(self, i: int, j: int) -> int:
        return int(j == 0)


@pytest.mark.parametrize(("placement", "can"), [("zero", False), ("replicated", True)])
def test_no_rank_knows_the_norm_of_a_stage_that_is_in_shards(placement, can, registries_restored):
    add_mode("only_first_late", "simultaneous", OnlyFirstLate)
    schedule = Schedule.build("only_first_late", 2, 2, placement, collectives=True)
    assert not clips_globally(schedule)
    assert can_clip(Program(schedule)) is can
    if not can:
        told = refusal(schedule)
        assert "clips by the norm of each stage, but placement zero" in told
        assert "no rank in particular has a whole sum: use collectives=false, or" in told
