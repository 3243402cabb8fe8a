"""Branches that join: which stage reads what, and pipelines in which branches run side by side."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdp_repro.predict.costs import StageCosts
from cdp_repro.predict.simulate import simulate
from cdp_repro.schedule import Op, Program, Schedule
from cdp_repro.schedule.branches import chain, check_sources, readers, towers, two_towers
from cdp_repro.schedule.program_text import read_program, write_program

SIX = ((), (0,), (), (2,), (1, 3), (4,))


def test_two_towers_have_a_third_of_the_stages_each():
    assert two_towers(3) == ((), (), (0, 1))
    assert two_towers(6) == SIX
    assert readers(SIX) == (1, 4, 3, 4, 5, -1)
    assert towers(1, 3, 2) == ((), (), (1,), (2,), (0, 3), (4,))
    assert chain(3) == ((), (0,), (1,))


@pytest.mark.parametrize(("stages", "works"), [(1, "stages=3"), (4, "stages=3 or stages=6"), (0, "stages=3")])
def test_stages_that_are_no_three_thirds_are_refused(stages, works):
    with pytest.raises(ValueError, match=rf"stages={stages} is not a multiple of 3.*use {works}$"):
        two_towers(stages)


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        ([[], [0], [1]], None),
        ([[]], "1 entries for stages=3"),
        ([[], [], [1]], "0 stages read the output of stage 0"),
        ([[], [0], [0, 1]], "2 stages read the output of stage 0"),
        ([[], [2], [0, 1]], "the sources of stage 1 are"),
        ([[], [], [1, 0]], "the sources of stage 2 are"),
        ([[], [], [0, 0, 1]], "the sources of stage 2 are"),
        ([[], [-1], [0, 1]], "the sources of stage 1 are"),
    ],
)
def test_each_output_is_read_once_by_a_later_stage(sources, said):
    if said is None:
        check_sources(sources, 3)
        assert Schedule.build("dp", 3, 3, sources=sources).sizes == Schedule.build("dp", 3, 3).sizes
        return
    with pytest.raises(ValueError, match=said) as refusal:
        Schedule.build("dp", 3, 3, sources=sources)
    assert "a chain has sources=[[], [0], [1]]" in str(refusal.value)


@st.composite
def trees(draw, most=7):
    """Sources of up to 7 stages: each output goes to any later stage."""
    stages = draw(st.integers(1, most))
    to = [draw(st.integers(stage + 1, stages - 1)) for stage in range(stages - 1)]
    return tuple(tuple(stage for stage in range(reader) if to[stage] == reader) for reader in range(stages))


def depth(sources, stage):
    return 1 + max((depth(sources, source) for source in sources[stage]), default=0)


@settings(max_examples=60, deadline=None)
@given(trees(), st.sampled_from(["gpipe", "one_f_one_b", "zero_bubble"]), st.integers(1, 6))
def test_a_pipeline_of_branches_is_as_long_as_its_longest_branch(sources, mode, micro_batches):
    stages = len(sources)
    schedule = Schedule.build(
        mode, 1, stages, "pipeline", ranks=stages, micro_batches=micro_batches, sources=sources, replicas=1
    )
    longest = depth(sources, stages - 1)
    assert 1 + max(schedule.sizes.behind) == longest
    if mode != "zero_bubble":
        assert schedule.slots_per_step == 2 * (micro_batches + longest - 1)
    else:
        alone = Schedule.build(mode, 1, longest, "pipeline", ranks=longest, micro_batches=micro_batches)
        assert schedule.slots_per_step == alone.slots_per_step
    Program(schedule)  # checked: no rank computes two things in a slot, nothing is read before it is there


@settings(max_examples=60, deadline=None)
@given(
    trees(6),
    st.sampled_from(["dp", "cdp_v1", "cdp_v2"]),
    st.sampled_from(["single_device", "replicated", "zero", "model_parallel", "pipeline"]),
    st.sampled_from(["paper", "backward_first"]),
)
def test_every_placement_serves_branches(sources, mode, placement, slot_order):
    stages = len(sources)
    program = Program(Schedule.build(mode, stages, stages, placement, slot_order, sources=sources))
    trace = simulate(program, StageCosts.equal(stages), 3)
    sent = [m for m in trace.messages if m.kind in ("activations", "input_gradients")]
    made = {"activations": set(), "input_gradients": set()}
    for message in sent:
        made[message.kind].add(message.stage)
    if placement in ("model_parallel", "pipeline") and stages > 1:
        assert made["activations"] == set(range(stages - 1))
        assert made["input_gradients"] == {stage for stage, read in enumerate(sources) if read}
        per_step = 2 * (stages - 1) * stages
        assert len(sent) == 3 * per_step, "each output and its gradient is sent once a micro-batch"


def test_towers_run_side_by_side():
    """Two towers and a trunk on three ranks, three micro-batches: 8 slots, where a chain takes 10."""
    program = Program(Schedule.build("one_f_one_b", 3, 3, "pipeline", sources=two_towers(3)))
    computes = [
        {(action.op, action.stage, action.micro_batch) for action in slot.actions if action.op.is_compute}
        for slot in program.slots(1)
    ]
    assert computes[0] == {(Op.FORWARD, 0, 0), (Op.FORWARD, 1, 0)}
    assert computes[7] == {(Op.BACKWARD, 0, 2), (Op.BACKWARD, 1, 2)}
    assert len(computes) == 8 and Schedule.build("one_f_one_b", 3, 3, "pipeline").slots_per_step == 10


@pytest.mark.parametrize("ranks", [1, 3, 6])
@pytest.mark.parametrize("mode", ["gpipe", "one_f_one_b", "zero_bubble"])
def test_a_rank_has_stages_of_one_branch(mode, ranks):
    schedule = Schedule.build(mode, 2, 6, "pipeline", ranks=ranks, sources=SIX) if ranks > 1 else None
    if schedule is not None:
        Program(schedule)
        assert 1 + max(schedule.sizes.behind) == {3: 2, 6: 4}[ranks]
    with pytest.raises(ValueError, match=r"ranks=2 puts stages on one rank.*use ranks=3 or ranks=6"):
        Schedule.build(mode, 2, 6, "pipeline", ranks=2, sources=SIX)
    assert Program(Schedule.build(mode, 2, 6, sources=SIX))


@pytest.mark.parametrize("mode", ["interleaved", "chimera"])
def test_pipelines_that_go_to_and_fro_refuse_branches(mode):
    with pytest.raises(ValueError, match=f"mode={mode} passes a chain.*use mode=gpipe, one_f_one_b or zero_bubble"):
        Schedule.build(mode, 6, 6, "pipeline", ranks=3 if mode == "interleaved" else 6, sources=SIX)


def test_a_program_file_keeps_the_branches():
    program = Program(Schedule.build("cdp_v2", 3, 6, "pipeline", sources=SIX))
    again = read_program(write_program(program))
    assert again.schedule == program.schedule and again.schedule.sizes.chosen_sources == SIX
    for mine, theirs in zip(again.slots(3), program.slots(3), strict=True):
        assert sorted(mine.actions, key=str) == sorted(theirs.actions, key=str)


def test_the_documented_table_is_what_schedules_give():
    lines = (Path(__file__).parents[2] / "docs" / "systems.md").read_text().splitlines()
    begin = lines.index("| micro-batches M | 1 | 2 | 4 | 8 | 16 | 32 |")
    rows = [lines[begin + k].strip("| ").split(" | ")[1:] for k in (0, 2, 3, 4)]
    for m, chained, towered, ratio in zip(*rows, strict=True):
        slots = [
            Schedule.build("gpipe", 1, 6, "pipeline", ranks=6, micro_batches=int(m), sources=sources).slots_per_step
            for sources in (None, SIX)
        ]
        idle = [1 - 2 * int(m) / each for each in slots]
        assert [f"{each:.2f}" for each in (*idle, slots[0] / slots[1])] == [chained, towered, ratio]
