"""Messages in batches, as on NCCL, over gloo: the same numbers, though each rank runs one thing after the other."""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from ranks import run_ranks
from test_engine_placements import PLACEMENTS, UNEVEN, flat, make_batches, make_engine, rule, same, train

from cdp_repro.engine.delivery import AtOnce, InBatches
from cdp_repro.schedule import Schedule


@contextmanager
def one_thing_at_a_time():
    """What NCCL may do at worst: a batch blocks its rank until all of its messages have passed."""
    start = InBatches._start

    def start_and_wait(delivery, batch):
        start(delivery, batch)
        works, _ = delivery._under_way[-1]
        while works:  # gloo would wait for ever for what has ended already
            works.pop().wait()

    with (
        mock.patch("cdp_repro.engine.delivery.needs_batches", lambda device: True),
        mock.patch("cdp_repro.engine.engine.needs_batches", lambda device: True),
        mock.patch.object(InBatches, "_start", start_and_wait),
    ):
        yield


def train_in_batches(*arguments):
    with one_thing_at_a_time():
        return train(*arguments)


def check(tmp_path, kind, mode, placement, n, s, r=1, **settings):
    ranks = Schedule.build(rule(mode, n, s), n, s, placement, replicas=r, **settings).ranks
    outcomes = run_ranks(
        train_in_batches, ranks, kind, mode, placement, n, s, r, settings, folder=tmp_path, patience=30
    )
    alone = {name: value for name, value in settings.items() if name not in ("servers", "ranks")}
    losses, model, _, reads, state = train(kind, mode, "single_device", n, s, r, alone)
    assert outcomes[0][0] == losses
    for _, theirs, *_ in outcomes:
        same(theirs, model)
    assert sum(outcome[3] for outcome in outcomes) == reads
    same(flat(outcomes[0][4]), flat(state))


@pytest.mark.parametrize("mode", ["dp", "cdp_v1", "cdp_v2"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_placement_computes_what_one_device_computes(tmp_path, placement, mode):
    check(tmp_path, "linear", mode, placement, 3, 3)


@pytest.mark.parametrize(
    ("mode", "placement", "settings"),
    [
        ("dp", "replicated", {"n": 2, "s": 4, "r": 2}),
        ("cdp_v2", "model_parallel", {"n": 2, "s": 2, "r": 2}),
        ("dp", "pipeline", {"n": 3, "s": 4, "ranks": 2}),
        ("dp", "pipeline", {"n": 4, "s": 4, "pipeline_schedule": "gpipe"}),
        ("chimera", "pipeline", {"n": 4, "s": 4, "ranks": 4}),
        ("zero_bubble", "pipeline", {"n": 3, "s": 3}),
        ("cdp_v2", "parameter_server", {"n": 3, "s": 3, "servers": 2}),
        ("cdp_v1", "parameter_server", {"n": 4, "s": 4}),  # rank 0 finishes a step before others compute its losses
    ],
    ids=str,
)
def test_so_do_other_sizes_and_pipelines(tmp_path, mode, placement, settings):
    sizes = [settings.pop(name, 1) for name in ("n", "s", "r")]
    check(tmp_path, "linear", mode, placement, *sizes, **settings)


def test_gradients_that_leave_in_parts_do_so(tmp_path):
    check(tmp_path, UNEVEN, "cdp_v2", "replicated", 2, 4)


def keep_nothing():
    """What the delivery of a rank still holds after a run, and what is the largest number of batches under way."""
    with one_thing_at_a_time():
        engine = make_engine("linear", "cdp_v2", "pipeline", 2, 2)
        list(engine.run(make_batches("linear", 2) * 4))
        delivery = engine._executor.mailbox._delivery
        assert isinstance(delivery, InBatches)
        return len(delivery._due), len(delivery._packed), len(delivery._landed), len(delivery._under_way)


def test_a_run_ends_with_no_batch_under_way(tmp_path):
    assert run_ranks(keep_nothing, 2, folder=tmp_path) == [(0, 0, 0, 0)] * 2


def delivery_on_the_cpu():
    engine = make_engine("linear", "cdp_v2", "pipeline", 2, 2)
    list(engine.run(make_batches("linear", 2)))
    return isinstance(engine._executor.mailbox._delivery, AtOnce)


def test_on_gloo_messages_start_at_once(tmp_path):
    assert run_ranks(delivery_on_the_cpu, 2, folder=tmp_path) == [True, True]


def test_a_device_decides_whether_batches_are_needed():
    from cdp_repro.engine.delivery import needs_batches

    assert [needs_batches(torch.device(name)) for name in ("cpu", "cuda", "cuda:1")] == [False, True, True]
