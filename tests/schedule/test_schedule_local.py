"""One holder sums by itself: nothing is sent, and the update is made with the last backward."""

from __future__ import annotations

from hypothesis import given, settings
from summing import built, sums_of
from written import schedules

from cdp_repro.schedule import Op
from cdp_repro.schedule.summation import strategy_of
from cdp_repro.schedule.summation.local import sum_locally


@given(schedules())
@settings(max_examples=25, deadline=None, derandomize=True)
def test_backwards_add_to_one_sum_and_the_last_updates(schedule):
    slots, steps = built(schedule, 3)
    M = schedule.micro_batches
    for j in (j for j in range(schedule.stages) if strategy_of(schedule, j) is sum_locally):
        (holder,) = schedule.placement.holders(j)
        actions = [(slot.number, a) for slot in slots for a in slot.actions if a.stage == j]
        assert not [a for _, a in actions if a.op is Op.ADD or (a.op.is_message and a.value.kind == "g")]
        assert sums_of(slots, j, schedule) == {
            (step, holder): list(range(step * M, step * M + M)) for step in range(steps)
        }
        backwards = [(number, a) for number, a in actions if a.op is Op.BACKWARD]
        for _number, backward in backwards:
            first = backward.micro_batch // M * M
            assert [str(v) for v in backward.writes if v.kind == "g"] == [f"g{j}[{first}:{backward.micro_batch + 1}]"]
        updates = {a.version: (number, a.rank) for number, a in actions if a.op is Op.UPDATE}
        assert updates == {
            (a.micro_batch + 1) // M: (number, holder) for number, a in backwards if (a.micro_batch + 1) % M == 0
        }
