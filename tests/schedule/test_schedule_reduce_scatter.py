"""Sharded data parallelism: gather a slot ahead, scatter at once, update a slot later."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from summing import built, sent, sums_of
from written import of_rank

from cdp_repro.schedule import Op, Schedule


def test_all_gather_a_slot_ahead_and_update_their_shards_when_the_next_slot_has_hidden_the_reduce_scatter():
    slots, _ = built(Schedule.build("dp", 2, placement="zero", collectives=True), 2)
    for rank in range(2):
        own = [" ".join(action.label for action in actions) for actions in of_rank(slots, rank)]
        shard = f"#{rank + 1}/2"
        assert own[2:4] == [
            f"C pb0.m{rank}@v0 B1.m{rank}@v0 C g1[0:2]{shard}",
            f"B0.m{rank}@v0 C g0[0:2]{shard} U1@v1 U0@v1 C pf0.m{rank + 2}@v1",
        ]


@given(n=st.integers(2, 4), c=st.integers(1, 2), k=st.integers(1, 3), r=st.integers(1, 2))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_each_rank_updates_its_shard_with_its_part_of_the_total(n, c, k, r):
    schedule = Schedule.build("dp", n, n * c, "zero", collectives=True, accumulate=k, replicas=r)
    slots, steps = built(schedule, 2)
    ranks, M = n * r, schedule.micro_batches
    assert not sent(slots)
    counts = {"g": 0, "pf": 0, "pb": 0}
    for slot in slots:
        for action in slot.actions:
            if action.op is Op.COLLECTIVE:
                counts[action.value.kind] += 1
            if action.op is Op.UPDATE:
                assert {(v.part, v.parts) for v in (*action.reads, *action.writes)} == {(action.rank + 1, ranks)}
    stages = n * c
    assert counts == {"g": steps * stages * ranks, "pf": steps * stages * k * ranks, "pb": steps * stages * k * ranks}
    for j in range(stages):
        assert sums_of(slots, j, schedule) == {
            (t, rank): list(range(t * M, t * M + M)) for t in range(steps) for rank in range(ranks)
        }
