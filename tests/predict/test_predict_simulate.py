"""`simulate` against the closed forms of design.md, section 4, on one device."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdp_repro.predict.costs import StageCosts
from cdp_repro.predict.simulate import held_bytes, simulate, version_bytes
from cdp_repro.schedule import Program, Schedule
from cdp_repro.schedule.values import Value

UNIT = 840  # bytes of a stage; divisible by what the forms divide by


def run(mode, n, order="paper", steps=4, **options):
    return simulate(Program(Schedule.build(mode, n, slot_order=order, **options)), StageCosts.equal(n, UNIT), steps)


@pytest.mark.parametrize(("n", "order"), itertools.product(range(1, 9), ("paper", "backward_first")))
def test_peaks_of_equal_stages_are_the_closed_forms(n, order):
    a = n * UNIT
    assert run("dp", n, order).activation_peak_bytes_total == n * a
    for mode in ("cdp_v1", "cdp_v2"):
        trace = run(mode, n, order)
        # backward first: N/2 * A, which odd N rounds up to whole stages (the live bytes alternate by one stage)
        peak = (n + 1) * a // 2 if order == "paper" else (n * n + 1) // 2 * UNIT
        assert trace.activation_peak_bytes_total == trace.activation_peak_bytes_per_device == peak
        steady = [live for slot, live in trace.activation_bytes_per_slot.items() if 2 * n - 1 <= slot < 2 * n * 4]
        if n > 1:
            assert set(steady) == {peak}, "total activation memory is flat in the steady state"


@pytest.mark.parametrize(("n", "k", "mode"), itertools.product((2, 3, 4), (2, 3), ("dp", "cdp_v1", "cdp_v2")))
def test_accumulation_takes_no_more_memory(n, k, mode):
    a = n * UNIT
    peak = run(mode, n, accumulate=k).activation_peak_bytes_total
    assert peak == (n * a if mode == "dp" else (n + 1) * a // 2)


@pytest.mark.parametrize("n", range(1, 7))
def test_dp_fills_and_empties(n):
    live = run("dp", n, steps=1).activation_bytes_per_slot
    rising = [n * UNIT * (k + 1) for k in range(n)]
    assert [live[k] for k in range(2 * n)] == [*rising, *reversed(rising)]


@pytest.mark.parametrize("n", range(1, 7))
def test_cdp_returns_to_zero(n):
    for mode, order in itertools.product(("dp", "cdp_v1", "cdp_v2"), ("paper", "backward_first")):
        # the peak of the last slot is what its last backward releases (in DP, those of all workers)
        last = run(mode, n, order).records[-1]
        assert last.activation_peak_bytes == (n if mode == "dp" else 1) * UNIT
        assert last.activation_bytes_at_end == 0


@pytest.mark.parametrize("n", range(1, 6))
def test_versions_kept(n):
    assert run("dp", n).versions_kept == 1
    assert run("cdp_v1", n).versions_kept == 2
    assert run("cdp_v2", n).versions_kept == (2 if n > 1 else 1)
    for most in (1, 2, 3, 5):
        matrix = [[most if (i, j) == (n - 1, 0) else 1 for j in range(n)] for i in range(n)]
        trace = simulate(Program(Schedule.build(matrix, n)), StageCosts.equal(n), most + 3)
        assert trace.versions_kept == most + 1
        if n > 1:
            assert max(record.versions[-1] for record in trace.records) == 2, "per stage, not for all the most"


@st.composite
def runs(draw):
    n, c = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    forward = draw(st.lists(st.integers(0, 50), min_size=n * c, max_size=n * c))
    backward = draw(st.permutations(forward))
    return n, n * c, draw(st.integers(1, 2)), forward, backward, draw(st.sampled_from(("dp", "cdp_v1", "cdp_v2")))


@given(runs(), st.sampled_from(("paper", "backward_first")))
@settings(deadline=None, max_examples=40, derandomize=True)
def test_peak_of_every_slot_by_direct_summation(run_, order):
    """From the closed forms of the slots alone: what is alive at the start, plus what the order lets overlap."""
    n, s, k, forward, backward, mode = run_
    steps, c = 3, s // n
    zeros = (0,) * s
    costs = StageCosts(tuple(forward), tuple(backward), zeros, zeros, zeros)
    schedule = Schedule.build(mode, n, s, slot_order=order, accumulate=k)
    live = simulate(Program(schedule), costs, steps).activation_bytes_per_slot
    takes, gives = {}, {}
    for i, j in itertools.product(range(steps * n * k), range(s)):
        begin = 2 * s * (i // n) if mode == "dp" else 2 * c * i
        takes[begin + j] = takes.get(begin + j, 0) + forward[j]
        end = begin + 2 * s - 1 - j
        gives[end] = gives.get(end, 0) + backward[j]
    total = 0
    for slot in sorted(live):
        up, down = takes.get(slot, 0), gives.get(slot, 0)
        assert live[slot] == total + (up if order == "paper" else max(0, up - down))
        total += up - down
    assert total == 0


def test_first_use_is_from_the_initial_parameters():
    trace = run("cdp_v1", 3)
    assert trace.records[0].versions == (1, 1, 1)
    assert trace.records[0].actions[0].label == "F0.m0@v0"


@pytest.mark.parametrize(
    "arguments",
    [
        ((1, 2), (1, 2), (1,), (1, 1), (1, 1)),
        ((1, 2), (1,), (1, 1), (1, 1), (1, 1)),
        ((1, 2), (2, 2), (1, 1), (1, 1), (1, 1)),
    ],
)
def test_costs_that_do_not_fit_are_refused(arguments):
    with pytest.raises(ValueError):
        StageCosts(*arguments)


def test_costs_of_another_number_of_stages_are_refused():
    with pytest.raises(ValueError, match=r"3 stages but the costs are of 2"):
        simulate(Program(Schedule.build("dp", 3)), StageCosts.equal(2), 1)


def test_costs_add_up():
    costs = StageCosts.equal(3, activation_bytes=5, parameter_bytes=7, flops=11)
    assert costs.stages == 3
    assert costs.activation_bytes == 15
    assert costs.backward_flops == (22, 22, 22)


@pytest.mark.parametrize(
    ("value", "size"),
    [
        ("x1.m5", 10), ("x2.m5", 20), ("d0.m5", 200), ("d1.m5", 300), ("g2[0:3]", 3000), ("p2@v1", 33),
        ("pf2.m5@v1", 33),
        ("pb0.m5@v1", 11), ("b2.w0", 3), ("g2[0:3]#1/2", 1504), ("g2[0:3]#2/2", 1496), ("p2@v1#2/3", 16),
        ("p2@v1#3/3", 1),
    ],
)  # fmt: skip
def test_values_have_the_bytes_of_what_they_name(value, size):
    costs = StageCosts(
        (1, 1, 1), (1, 1, 1), (11, 22, 33), (1, 1, 1), (1, 1, 1), output_bytes=(10, 20, 0),
        gradient_bytes=(1000, 2000, 3000),
        input_gradient_bytes=(0, 200, 300), buffer_bytes=(1, 2, 3),
    )  # fmt: skip
    assert costs.bytes_of(Value.parse(value)) == size


def test_each_rank_holds_its_share_of_every_stage():
    costs = StageCosts((1, 1, 1), (1, 1, 1), (96, 48, 100), (1, 1, 1), (1, 1, 1))
    schedule = Schedule.build("dp", 3, placement="zero", collectives=True)
    assert held_bytes(schedule, costs) == [32 + 16 + 48, 32 + 16 + 48, 32 + 16 + 4]
    size = version_bytes(schedule, costs)
    assert [1 * size(2, 0), 1 * size(2, 1), 2 * size(2, 2)] == [32, 16, 2 * 4]
    assert held_bytes(Schedule.build("dp", 3, placement="zero"), costs) == [96, 48, 100]
    assert held_bytes(Schedule.build("dp", 3, placement="replicated"), costs) == [244] * 3
    assert held_bytes(Schedule.build("cdp_v2", 3, placement="model_parallel"), costs) == [96, 96, 96, 48, 48, 100]
