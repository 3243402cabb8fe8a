"""What a user chooses: refusals name a value that works; timelines, modes and placements can be added."""

from __future__ import annotations

import itertools

import pytest
from written import ORDERS

from cdp_repro.schedule import MODES, PLACEMENTS, TIMELINES, Op, Program, Schedule, Spec, add_mode, add_timeline
from cdp_repro.schedule.branches import two_towers
from cdp_repro.schedule.program import RankProgram
from cdp_repro.schedule.rules import Clock, Fresh, UniformDelay
from cdp_repro.schedule.timelines.cyclic import Cyclic
from cdp_repro.schedule.timelines.ordered import ZeroBubble


@pytest.mark.parametrize(
    ("arguments", "needle"),
    [
        (("cdp_v3", 3), "did you mean 'cdp_v"),
        (("cdp_v1", 3, 4), "stages=4 is not a multiple of workers=3: use stages=3 or stages=6"),
        (("cdp_v1", 4, 2), "use stages=4"),
        (("cdp_v1", 0), "=0: at least 1 is needed"),
        (("cdp_v1", 0, 2), "workers=0"),
        (("cdp_v1", -1, 2), "workers=-1"),
        (("cdp_v1", 2, 0), "stages=0: at least 1 is needed"),
        (("cdp_v1", 2, 2, "nowhere"), "single_device"),
        (("cdp_v1", 2, 2, "single_device", "random"), "backward_first"),
        (([[1, 1]], 2), "2 rows"),
        (([[1, 1], [1]], 2), r"\[\[1, 1\], \[1, 1\]\]"),
        (([[1, 1], [1, -1]], 2), "micro-batch 1 on stage 1 is -1"),
        (([[1, 1.0], [1, 1]], 2), "micro-batch 0 on stage 1 is 1.0"),
        (([[True, 1], [1, 1]], 2), "micro-batch 0 on stage 0 is True"),
        (([1, 2], 2), "no list"),
    ],
)
def test_refusals_name_a_value_that_works(arguments, needle):
    with pytest.raises(ValueError, match=needle):
        Schedule.build(*arguments)


@pytest.mark.parametrize(
    ("arguments", "choices", "needle"),
    [
        (
            ("interleaved", 6, 4, "pipeline"),
            {"ranks": 2, "micro_batches": 5},
            "use micro_batches=4 or micro_batches=6$",
        ),
        (("interleaved", 5, 4, "pipeline"), {"ranks": 2}, "use workers=4 or workers=6 with ranks=2"),
        (("chimera", 6, 4, "single_device"), {"micro_batches": 5}, "use micro_batches=6$"),
        (("dpp", 2, 2), {"speeds": [1, 2]}, "unknown mode 'dpp'.*did you mean 'dp'"),
        (("dp", "2", 2), {}, "workers='2' is of the type str: int is needed"),
        (("dp", 2, 2), {"accumulate": 1.5}, "accumulate=1.5 is of the type float: int is needed"),
        (("dp", 2, 2), {"collectives": 1}, "collectives=1 is of the type int: bool is needed"),
        (("dp", 2, 2), {"worker": 3}, "unknown choice worker: choose mode, workers, .*; did you mean 'workers'"),
        (("dp", 2, 2), {"bytes": 3}, "unknown choice bytes: choose mode, workers, stages, "),
        (("async", 2, 2), {"speeds": [1, 2.0]}, r"speeds=\(1, 2.0\) is of the type tuple: tuple\[int, ...\] \| None"),
    ],
)
def test_advice_names_the_setting_that_is_to_be_changed(arguments, choices, needle):
    with pytest.raises(ValueError, match=needle):
        Schedule.build(*arguments, **choices)


class Pausing(Cyclic):
    """Micro-batches one after the other, and two slots in which nothing is computed, also at the end of a step."""

    name = "pausing"

    @property
    def period(self):
        return (2 * self.sizes.stages + 4) * self.sizes.turns

    def forward(self, i, j):
        return (2 * self.sizes.stages + 4) * i + j

    def backward(self, i, j):
        return (2 * self.sizes.stages + 4) * i + 2 * self.sizes.stages + 1 - j

    def check(self, placement):
        pass


@pytest.mark.parametrize("placement", ["single_device", "replicated", "zero", "model_parallel", "pipeline"])
def test_a_timeline_may_compute_nothing_in_the_last_slots_of_its_period(placement):
    try:
        add_timeline(Pausing)
        add_mode("pausing", "pausing", UniformDelay)
        program = Program(Schedule.build("pausing", 2, 3, placement, ranks=3 if placement == "pipeline" else None))
        assert len(program.slots(3)) >= 3 * program.schedule.slots_per_step
    finally:
        MODES.pop("pausing", None), TIMELINES.pop("pausing", None)


def test_a_mode_from_outside_may_have_sizes_that_some_modes_alone_have():
    try:
        add_mode("patient", "clocked", Clock, sizes=("speeds", "slack"))
        schedule = Schedule.build("patient", 2, 2, "parameter_server", speeds=(1, 2), slack=1)
        assert schedule.sizes.slack == 1 and schedule.data_parallel().spec.slack is None
        with pytest.raises(ValueError, match="jitter=1 is for mode=ssp or async; mode=patient has none"):
            Schedule.build("patient", 2, 2, "parameter_server", jitter=1)
        with pytest.raises(ValueError, match="slack=2 is for mode=ssp or patient; mode=async has none"):
            Schedule.build("async", 2, 2, "parameter_server", slack=2)
    finally:
        MODES.pop("patient", None)


def test_a_rank_without_a_stage_ends_its_step_with_the_last_parts_of_its_backwards():
    class Anywhere(ZeroBubble):
        name = "anywhere"
        placements = None

    try:
        add_timeline(Anywhere)
        add_mode("anywhere", "anywhere", Fresh)
        program = Program(Schedule.build("anywhere", 3, 2, "zero"))
        holders = program.schedule.placement.holders
        (without,) = (rank for rank in range(3) if rank not in (*holders(0), *holders(1)))
        assert RankProgram(program, without).finishing == ({Op.BACKWARD, Op.BACKWARD_WEIGHTS}, 2)
    finally:
        MODES.pop("anywhere", None), TIMELINES.pop("anywhere", None)


@pytest.mark.parametrize(
    ("options", "needle"),
    [
        ({"ranks": 2}, "leave ranks out"),
        ({"accumulate": 0}, "accumulate=0: at least 1"),
        ({"replicas": 0}, "replicas=0: at least 1"),
        ({"placement": "pipeline", "ranks": 3}, "ranks=3 does not divide stages=4: use ranks=2, 4$"),
        ({"placement": "pipeline", "ranks": 0}, "ranks=0 does not divide stages=4: use ranks=2, 4$"),
        ({"placement": "pipeline", "ranks": 1}, "use ranks=2"),
        ({"pipeline_schedule": "zb"}, "one_f_one_b"),
    ],
)
def test_refusals_of_the_five_numbers_name_a_value_that_works(options, needle):
    with pytest.raises(ValueError, match=needle):
        Schedule.build("cdp_v2", 2, 4, **options)


def test_a_matrix_has_a_row_for_each_micro_batch_of_a_step():
    Schedule.build([[1, 1]] * 4, 2, accumulate=2)
    with pytest.raises(ValueError, match="needs 4 rows"):
        Schedule.build([[1, 1]] * 2, 2, accumulate=2)


def test_the_eight_by_four_command_of_the_authors_is_refused_with_sizes_that_work():
    with pytest.raises(ValueError, match=r"stages=4 is not a multiple of workers=8: use stages=8"):
        Schedule.build("cdp_v2", 8, 4)


def test_accumulation_needs_one_device():
    with pytest.raises(ValueError, match="use placement=single_device"):
        Schedule.build("accumulation", 2, placement="replicated")


@pytest.mark.parametrize(
    ("mode", "placement"),
    [("cdp_v1", "replicated"), ("cdp_v2", "zero"), ("dp", "pipeline"), ("dp", "model_parallel"),
     ("dp", "single_device"), ([[1, 1], [1, 1]], "replicated")],
)  # fmt: skip
def test_collectives_of_who_does_not_compute_at_once_are_refused_with_what_works(mode, placement):
    with pytest.raises(ValueError, match=r"use collectives=false, or mode=dp placement=replicated"):
        Schedule.build(mode, 2, placement=placement, collectives=True)


def test_sizes_of_other_stages_are_refused():
    with pytest.raises(ValueError, match="gradient_bytes has 3 entries: give 2"):
        Schedule.build("cdp_v2", 2, 2, "replicated", gradient_bytes=(1, 2, 3))
    with pytest.raises(ValueError, match="gradient_bytes has 3 entries: give 2"):
        Schedule.from_spec(Spec("cdp_v2", 2, 2, "replicated"), (1, 2, 3))


def test_a_schedule_is_what_its_spec_says():
    spec = Spec("cdp_v2", 2, 4, "pipeline", "backward_first", 3, 2, 4)
    schedule = Schedule.build("cdp_v2", 2, 4, "pipeline", "backward_first", accumulate=3, replicas=2, ranks=4)
    assert schedule == Schedule.from_spec(spec)
    assert (schedule.ranks, schedule.micro_batches, schedule.slots_per_step) == (8, 12, 24)
    assert schedule.data_parallel().spec == Spec("dp", 2, 4, "pipeline", "backward_first", 3, 2, 4)
    assert schedule.data_parallel().timeline.name == "one_f_one_b"
    assert str(schedule) == "placement pipeline with workers=2, stages=4, replicas=2 in mode cdp_v2"
    assert hash(schedule) == hash(Schedule.from_spec(spec))


def test_data_parallelism_to_compare_with_has_a_rank_a_stage_where_branches_share_ranks():
    sources = two_towers(6)
    for mode in ("cdp_v1", "cdp_v2", "naive", "pipedream", "ampnet"):
        beside = [Schedule.build(mode, 1, 6, "pipeline", ranks=d, sources=sources).data_parallel() for d in (2, 3, 6)]
        assert [(schedule.mode, schedule.ranks) for schedule in beside] == [("dp", 6), ("dp", 3), ("dp", 6)]
    with pytest.raises(ValueError, match=r"ranks=2 puts stages on one rank .* use ranks=3 or ranks=6"):
        Schedule.build("dp", 1, 6, "pipeline", ranks=2, sources=sources)


@pytest.mark.parametrize(("order", "mode"), itertools.product(ORDERS, MODES))
def test_stages_default_to_workers_and_ranks_of_a_pipeline_too(order, mode):
    assert Schedule.build(mode, 4, slot_order=order).stages == 4
    if not MODES[mode].has_own_clocks:
        assert Schedule.build(mode, 4, placement="pipeline", slot_order=order).ranks == 4


def test_a_timeline_and_a_mode_can_be_added():
    class Slow(Cyclic):
        """Twice the delay: nobody is stale by more than with the cyclic timeline, and half of the slots are idle."""

        name = "slow"

        def begin(self, i):
            return 2 * super().begin(i)

    add_timeline(Slow)
    add_mode("slow_v1", "slow", UniformDelay)
    try:
        program = Program(Schedule.build("slow_v1", 3, placement="pipeline"))
        assert program.schedule.slots_per_step == 12
        assert len(program.slots(2)) == 4 * 5 + 6
    finally:
        del TIMELINES["slow"], MODES["slow_v1"]


def programs_of(mode):
    """Return the slots of three training steps by placement and choices; None where the mode is refused."""
    found = {}
    for placement, choices in itertools.product(PLACEMENTS, ({}, {"collectives": True}, {"micro_batches": 6})):
        try:
            slots = Program(Schedule.build(mode, 4, placement=placement, **choices)).slots(3)
        except ValueError:
            slots = None
        found[placement, *choices] = slots
    return found


@pytest.mark.parametrize("mode", MODES)
def test_a_timeline_under_another_name_makes_the_same_programs(mode):
    ours = MODES[mode]
    kind = type("Renamed", (TIMELINES[ours.timeline],), {"name": "renamed"})
    add_timeline(kind)
    add_mode("renamed", "renamed", ours.rule, ours.updates_each, ours.sizes)
    try:
        found = programs_of("renamed")
    finally:
        del TIMELINES["renamed"], MODES["renamed"]
    assert any(found.values())
    assert found == programs_of(mode)
