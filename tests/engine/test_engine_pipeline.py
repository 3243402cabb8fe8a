"""Pipelines of another number of ranks than workers: a stage's rank is free of N where the timeline is."""

from __future__ import annotations

import pytest
from ranks import run_ranks
from small_runs import check_same, ranks_of, train, train_each

TRAINING = {
    2: [(3, 4, 1), (1, 4, 3), (5, 2, 1), (2, 4, 2)],
    3: [(2, 3, 1), (1, 6, 2), (4, 3, 1)],
}
"""By D: (N, S, k)."""


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
@pytest.mark.parametrize("d", TRAINING)
def test_data_parallelism_flushes_on_any_number_of_ranks(tmp_path, d, schedule):
    cases = [
        (("dp", "pipeline", n, s), {"accumulate": k, "ranks": d, "pipeline_schedule": schedule})
        for n, s, k in TRAINING[d]
    ]
    assert {ranks_of(*arguments, **choices) for arguments, choices in cases} == {d}
    found = run_ranks(train_each, d, cases, folder=tmp_path)
    for number, (n, s, k) in enumerate(TRAINING[d]):
        check_same([each[number] for each in found], train("dp", "single_device", n, s, accumulate=k))


def test_replicas_of_a_pipeline_of_another_number_of_ranks(tmp_path):
    cases = [(("dp", "pipeline", 3, 4), {"ranks": 2, "replicas": 2})]
    found = run_ranks(train_each, 4, cases, folder=tmp_path)
    check_same([each[0] for each in found], train("dp", "single_device", 3, 4, replicas=2))


CYCLIC = [("cdp_v1", 2, 4, 1), ("cdp_v2", 2, 4, 1), ("cdp_v2", 2, 8, 1), ("cdp_v2", 2, 4, 2), ("matrix", 2, 4, 1)]


def test_the_cyclic_timeline_runs_on_twice_as_many_ranks_as_workers(tmp_path):
    cases = [((mode, "pipeline", n, s), {"ranks": 2 * n, "accumulate": k}) for mode, n, s, k in CYCLIC]
    found = run_ranks(train_each, 4, cases, folder=tmp_path)
    for number, (mode, n, s, k) in enumerate(CYCLIC):
        check_same([each[number] for each in found], train(mode, "single_device", n, s, accumulate=k))


ANY_M = {
    2: [("pipedream_2bw", 2, 2, 3), ("cdp_v2", 2, 4, 5), ("gpipe", 2, 2, 5), ("one_f_one_b", 4, 4, 3),
        ("zero_bubble", 2, 2, 3), ("naive", 2, 2, 3), ("interleaved", 2, 4, 6), ("chimera", 2, 2, 4)],
    3: [("pipedream_2bw", 3, 3, 4), ("cdp_v2", 3, 3, 5), ("cdp_v1", 3, 6, 7)],
    4: [("cdp_v2", 4, 4, 6), ("chimera", 4, 4, 6), ("pipedream_2bw", 4, 4, 5)],
}  # fmt: skip
"""By D: mode, N, S, M."""


@pytest.mark.parametrize("d", ANY_M)
def test_micro_batches_need_be_no_multiple_of_workers(tmp_path, d):
    cases = [
        ((mode, "pipeline", n, s), {"micro_batches": m, "ranks": None if n == d else d}) for mode, n, s, m in ANY_M[d]
    ]
    found = run_ranks(train_each, d, cases, folder=tmp_path)
    for number, (mode, n, s, m) in enumerate(ANY_M[d]):
        alone = mode if mode in ("cdp_v1", "cdp_v2", "pipedream_2bw") else "dp"
        check_same([each[number] for each in found], train(alone, "single_device", n, s, micro_batches=m))


def test_replicas_of_a_pipeline_with_any_number_of_micro_batches(tmp_path):
    found = run_ranks(
        train_each, 4, [(("cdp_v2", "pipeline", 2, 2), {"micro_batches": 3, "replicas": 2})], folder=tmp_path
    )
    check_same([each[0] for each in found], train("cdp_v2", "single_device", 2, 2, micro_batches=3, replicas=2))


def test_on_the_cyclic_timeline_ranks_that_are_no_multiple_of_workers_are_refused():
    with pytest.raises(ValueError, match=r"ranks=2 is not a multiple of workers=4.*use ranks=4"):
        train("cdp_v2", "pipeline", 4, 4, ranks=2)
