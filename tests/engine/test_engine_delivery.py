"""Messages in batches, as on NCCL, over gloo: the same numbers, though each rank runs one thing after the other."""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from ranks import run_ranks
from test_engine_placements import PLACEMENTS, STEPS, UNEVEN, flat, make_batches, make_engine, rule, same, train

from cdp_repro.engine.delivery import AtOnce, InBatches, needs_batches
from cdp_repro.schedule import Program, Schedule
from cdp_repro.schedule.program_text import read_program, write_program


@contextmanager
def one_thing_at_a_time():
    """What NCCL may do at worst: a batch blocks its rank until all of its messages have passed."""
    start = InBatches._start

    def start_and_wait(delivery, batch):
        start(delivery, batch)
        _, works, _ = delivery._under_way[-1]
        while works:  # gloo would wait for ever for what has ended already
            works.pop().wait()

    with (
        mock.patch("cdp_repro.engine.engine.needs_batches", lambda device: True),
        mock.patch.object(InBatches, "_start", start_and_wait),
    ):
        yield


def train_in_batches(*arguments):
    *arguments, settings = arguments
    given = {name: read_program(text) for name, text in settings.items() if name == "program"}
    with one_thing_at_a_time():
        return train(*arguments, settings | given)


def check(tmp_path, kind, mode, placement, n, s, r=1, **settings):
    chosen = {name: value for name, value in settings.items() if name != "program"}
    ranks = Schedule.build(rule(mode, n, s), n, s, placement, replicas=r, **chosen).ranks
    arguments = kind, mode, placement, n, s, r, settings
    outcomes = run_ranks(train_in_batches, ranks, *arguments, folder=tmp_path, patience=30)
    alone = {name: value for name, value in settings.items() if name not in ("servers", "ranks", "program")}
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


def most_under_way(steps):
    """The most batches under way after any training step, and what the delivery still holds after the run."""
    with one_thing_at_a_time():
        engine = make_engine("linear", "cdp_v2", "pipeline", 2, 2)
        batches = make_batches("linear", 2)
        most = 0
        for _ in engine.run(batches[step % len(batches)] for step in range(steps)):
            delivery = engine._executor.mailbox._delivery
            assert isinstance(delivery, InBatches)
            most = max(most, len(delivery._under_way))
        return most, len(delivery._due) + len(delivery._packed) + len(delivery._landed)


def test_buffers_of_complete_batches_are_let_go_and_none_is_left(tmp_path):
    few, many = (run_ranks(most_under_way, 2, steps, folder=tmp_path) for steps in (6, 24))
    assert few == many
    assert max(most for most, _ in many) > 0 and all(left == 0 for _, left in many)


class Work:
    """A message of NCCL that is complete only after so many looks, and then says why it failed, if it did."""

    def __init__(self, looks, error=None):
        self.looks, self.error = looks, error

    def is_completed(self):
        self.looks -= 1
        return self.looks < 0

    def wait(self):
        if self.error:
            raise self.error


def a_delivery():
    """One that has started nothing, of a rank whose buffers are kept for 6 slots."""
    found = InBatches.__new__(InBatches)
    found._rank, found._slot, found._kept_slots = 0, 0, 6
    found._due, found._under_way, found._packed, found._landed = deque(), deque(), {}, {}
    return found


def test_a_rank_waits_for_batches_of_long_ago_only():
    delivery, slow = a_delivery(), Work(looks=20)
    delivery._under_way.append((0, [slow], []))
    for _ in range(6):
        delivery.begin(())
    assert slow.looks == 14 and len(delivery._under_way) == 1, "one look a slot"
    delivery.begin(())
    assert slow.looks < 0 and not delivery._under_way


def test_an_error_of_a_batch_without_receives_is_raised():
    delivery = a_delivery()
    delivery._under_way.append((0, [Work(0, RuntimeError("NCCL error"))], []))
    with pytest.raises(RuntimeError, match="NCCL error"):
        delivery.begin(())


def clip_and_leave(clip_norm):
    """Clip by the norm over all stages, leave after two of five steps, and go on."""
    engine = make_engine("linear", "cdp_v1", "pipeline", 3, 3, clip_norm=clip_norm)
    batches, losses = make_batches("linear", 3), []
    for result in engine.run(batches[:4]):
        losses.append(result.losses)
        if result.step == 1:
            break
    losses += [result.losses for result in engine.run(batches[engine.step :])]
    return losses, engine.step, flat(engine.state_dict())


def clip_and_leave_in_batches(clip_norm):
    with one_thing_at_a_time():
        return clip_and_leave(clip_norm)


def test_norms_of_all_stages_and_a_run_that_is_left_early_hang_no_rank(tmp_path):
    found, expected = (
        run_ranks(function, 3, 0.1, folder=tmp_path, patience=20)
        for function in (clip_and_leave_in_batches, clip_and_leave)
    )
    assert found[0][:2] == expected[0][:2]
    same(found[0][2], expected[0][2])


def test_a_program_of_a_file_runs_in_batches(tmp_path):
    program = write_program(Program(Schedule.build("dp", 3, placement="replicated")))
    check(tmp_path, "linear", "dp", "replicated", 3, 3, program=program)


def delivery_on_the_cpu():
    engine = make_engine("linear", "cdp_v2", "pipeline", 2, 2)
    list(engine.run(make_batches("linear", 2)))
    return isinstance(engine._executor.mailbox._delivery, AtOnce)


def test_on_gloo_messages_start_at_once(tmp_path):
    assert run_ranks(delivery_on_the_cpu, 2, folder=tmp_path) == [True, True]


def test_a_device_decides_whether_batches_are_needed():
    assert [needs_batches(torch.device(name)) for name in ("cpu", "cuda", "cuda:1")] == [False, True, True]


def steps_seen():
    """For each result, the step that it is of and the one at which the engine stands."""
    engine = make_engine("linear", "cdp_v1", "parameter_server", 4, 4)
    return [(result.step, engine.step) for result in engine.run(make_batches("linear", 4))]


def test_a_result_that_waited_for_losses_comes_when_its_step_is_done(tmp_path):
    for seen in run_ranks(steps_seen, 5, folder=tmp_path):
        assert seen == [(step, step + 1) for step in range(STEPS)]
