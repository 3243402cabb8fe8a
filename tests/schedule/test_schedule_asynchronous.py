"""Pipelines that never flush: PipeDream, PipeDream-2BW, AMPNet."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from symbolic import prove

from cdp_repro.schedule import Op, Program, Schedule


def versions_kept(program, steps):
    """The most versions of a stage that any rank keeps, by stage."""
    slots = program.slots(steps)
    alive = Counter(
        (rank, v.stage) for rank, values in program.schedule.held_after(0).items() for v in values if v.kind == "p"
    )
    most = Counter({stage: n for (_, stage), n in alive.items()})
    for slot in slots[: steps * program.schedule.slots_per_step]:
        for action in slot.actions:
            for change, values in ((1, action.writes), (-1, action.frees)):
                for value in values:
                    if value.kind == "p":
                        alive[action.rank, value.stage] += change
            most[action.stage] = max(most[action.stage], alive[action.rank, action.stage])
    return [most[stage] for stage in range(program.schedule.stages)]


@pytest.mark.parametrize("n", [*range(1, 7), 12])
def test_pipedream_reads_as_late_as_stages_follow_and_stashes_as_many_versions(n):
    program = Program(Schedule.build("pipedream", n, placement="pipeline"))
    rule = program.schedule.rule
    assert [rule.staleness(0, j) for j in range(n)] == [n - 1 - j for j in range(n)]
    assert program.schedule.micro_batches == 1 and program.schedule.slots_per_step == 2
    assert versions_kept(program, 3 * n) == [n - j for j in range(n)]


@pytest.mark.parametrize("n", range(1, 7))
def test_ampnet_reads_forwards_as_late_and_backwards_fresh_and_keeps_one_version(n):
    program = Program(Schedule.build("ampnet", n, placement="pipeline"))
    slots = program.slots(3 * n)
    for slot in slots:
        for action in slot.actions:
            if action.op is Op.FORWARD:
                assert action.version == max(0, action.micro_batch - (n - 1 - action.stage))
            elif action.op is Op.BACKWARD:
                assert action.version == action.micro_batch
    busy = slots[4 * n : 2 * 2 * n + 2]
    held = Counter((a.rank, a.stage) for slot in busy for a in slot.actions for v in a.writes if v.kind == "p")
    assert all(count <= 2 for count in held.values())


def test_pipelines_that_never_flush_never_idle():
    for mode in ("pipedream", "ampnet", "pipedream_2bw", "cdp_v2"):
        n = 4
        slots = Program(Schedule.build(mode, n, placement="pipeline")).slots(20)
        for slot in slots[2 * n : 30]:
            assert sum(a.op.is_compute for a in slot.actions) == n, (mode, slot.number)


def test_pipedream_2bw_is_cdp_v1():
    named, ours = (Schedule.build(mode, 4, placement="pipeline") for mode in ("pipedream_2bw", "cdp_v1"))
    assert Program(named).slots(5) == Program(ours).slots(5)


@st.composite
def schedules(draw):
    n, c, r = draw(st.integers(1, 4)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    placement = draw(st.sampled_from(["pipeline", "single_device"]))
    order = draw(st.sampled_from(["paper", "backward_first"]))
    return Schedule.build(draw(st.sampled_from(["pipedream", "ampnet"])), n, c * n, placement, order, replicas=r)


@given(schedules(), st.integers(1, 6), st.integers(0, 4))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_programs_are_proved(schedule, steps, first):
    prove(schedule, Program(schedule).slots(steps, first), steps, first)


@pytest.mark.parametrize("mode", ["pipedream", "ampnet"])
@pytest.mark.parametrize(
    ("placement", "options", "said"),
    [
        ("replicated", {}, "is not for placement=replicated: use placement=single_device or pipeline"),
        ("pipeline", {"accumulate": 2}, "not after accumulate=2 of them a worker: use accumulate=1"),
    ],
)
def test_what_they_cannot_have_is_refused(mode, placement, options, said):
    with pytest.raises(ValueError, match=said):
        Schedule.build(mode, 4, placement=placement, **options)
