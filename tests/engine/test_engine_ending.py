"""Several ranks leave a run at different moments: all drain after the same step, and going on changes no number."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from small_runs import check_same, make_batches, make_engine, mixed_stages, outcome, ranks_of, train

from cdp_repro import Engine

STEPS = 7
LEAVES = [
    ([0, 0, 0, 0], []),  # all after the first step
    ([3, 3, 3, 3], [0]),  # together, but rank 0 comes late to each step
    ([3, 3, 3, 3], [1]),
    ([1, 4, 2, 3], []),  # each after another step
    ([STEPS, 2, STEPS, 2], [0]),  # some never
]
"""After which step each rank leaves, and which ranks are slow."""


def leave_and_go_on(mode, placement, n, s, choices):
    """For each of LEAVES: the steps after which the run ended on each rank, and the outcome of going on to the end."""
    found = []
    for leaves, slow in LEAVES:
        engine = make_engine(mode, placement, n, s, **choices)
        batches = make_batches(STEPS, engine.schedule.micro_batches)
        seen = []
        for result in engine.run(batches):
            seen.append(result.losses)
            if engine.rank in slow:
                time.sleep(0.02)
            if result.step == leaves[engine.rank % 4]:
                break
        ends = [None] * engine.team.size
        dist.all_gather_object(ends, engine.step)
        seen += [None] * (engine.step - len(seen))  # nobody sees the losses of the steps in which it has left
        seen += [result.losses for result in engine.run(batches[engine.step :])]
        found.append((ends, outcome(engine, seen)))
    return found


CASES = [
    ("cdp_v1", "replicated", 2, 2, {}),
    ("cdp_v2", "replicated", 2, 2, {}),
    ("cdp_v1", "replicated", 3, 3, {}),
    ("cdp_v2", "replicated", 3, 3, {}),
    ("cdp_v2", "replicated", 2, 2, {"accumulate": 2}),
    ("dp", "replicated", 3, 3, {}),
    ("cdp_v2", "model_parallel", 2, 2, {}),
    ("cdp_v1", "model_parallel", 2, 2, {}),
    ("cdp_v2", "pipeline", 3, 3, {}),
    ("dp", "pipeline", 3, 4, {"ranks": 2}),
    ("cdp_v2", "zero", 3, 3, {}),
    ("cdp_v1", "zero", 2, 2, {"replicas": 2}),
    ("dp", "zero", 2, 2, {"collectives": True}),
]


@pytest.mark.parametrize(("mode", "placement", "n", "s", "choices"), CASES)
def test_ranks_that_leave_at_any_moment_end_after_the_same_step(tmp_path, mode, placement, n, s, choices):
    ranks = ranks_of(mode, placement, n, s, **choices)
    found = run_ranks(leave_and_go_on, ranks, mode, placement, n, s, choices, folder=tmp_path, patience=60)
    own = {name: value for name, value in choices.items() if name in ("accumulate", "replicas")}
    losses, *expected = train(mode, "single_device", n, s, pieces=(STEPS,), **own)
    for number, (leaves, _) in enumerate(LEAVES):
        ends = found[0][number][0]
        assert all(each[number][0] == ends for each in found)
        assert len({*ends}) == 1
        last = max(min(leaves[rank % 4], STEPS - 1) for rank in range(ranks))
        assert last + 1 <= ends[0] <= STEPS
        outcomes = [each[number][1] for each in found]
        seen = outcomes[0][0]
        kept = [step for step, values in enumerate(seen) if values is not None]
        assert {*range(min(leaves[0] + 1, STEPS))} <= {*kept}
        of_seen = [losses[step] if step in kept else None for step in range(STEPS)]
        assert seen == of_seen
        check_same([(losses, *each[1:]) for each in outcomes], (losses, *expected))


# ------------------------------------------------------------------------------------------ batches of other lengths

PATIENCE = 5


def error_of_unequal_lengths(mode, placement, n, s, lengths):
    """Return the error of this rank with its notes, and the seconds after which it came."""
    engine = make_engine(mode, placement, n, s)
    batches = make_batches(max(lengths), n)[: lengths[engine.rank]]
    begin = time.monotonic()
    try:
        for _ in engine.run(batches):
            pass
    except (ValueError, RuntimeError, TimeoutError) as error:
        told = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
        return told, time.monotonic() - begin
    return None


@pytest.mark.parametrize(("mode", "placement"), [("dp", "replicated"), ("cdp_v2", "replicated"), ("cdp_v1", "zero")])
def test_batches_of_different_lengths_fail_on_every_rank_in_time(tmp_path, mode, placement):
    """Of each pair of lengths at once, as the ranks only wait for each other."""
    pairs = [(3, 4), (5, 2), (0, 3)]
    with ThreadPoolExecutor(len(pairs)) as pool:
        found = [
            pool.submit(run_ranks, error_of_unequal_lengths, 2, mode, placement, 2, 2, lengths, folder=tmp_path,
                        patience=PATIENCE)
            for lengths in pairs
        ]  # fmt: skip
    for lengths, outcome_of_pair in zip(pairs, found, strict=True):
        check_unequal_lengths(lengths, outcome_of_pair.result())


def check_unequal_lengths(lengths, found):
    short = min((0, 1), key=lambda rank: lengths[rank])
    clear = (
        f"ValueError: another rank has begun more than {lengths[short]} steps, but the batches of this one end there: "
        "give all ranks the same number of batches"
    )
    assert found[short][0] == clear
    told, seconds = found[1 - short]
    assert clear in told, "the rank that waited in vain says why, too"
    assert seconds < 3 * PATIENCE


# ------------------------------------------------------------------------------------------------ several engines


def one_engine_after_the_other():
    """A second engine in the same processes, which runs nothing, then fewer steps; rank 1 comes late to each."""
    ends = []
    for lengths in ((STEPS,), (0, 2, 1)):
        engine = make_engine("cdp_v2", "replicated", 2, 2)
        for length in lengths:
            if engine.rank:
                time.sleep(0.3)
            for _ in engine.run(make_batches(length, 2)):
                pass
            ends.append(engine.step)
    return ends


def test_an_engine_knows_nothing_of_how_an_earlier_one_has_ended(tmp_path):
    assert run_ranks(one_engine_after_the_other, 2, folder=tmp_path, patience=60) == [[STEPS, 0, 2, 3]] * 2


def nothing_first(placement, choices):
    engine = make_engine("dp", placement, 2, 2, **choices)
    batches = make_batches(3, engine.schedule.micro_batches)
    assert list(engine.run([])) == []
    return outcome(engine, [result.losses for result in engine.run(batches)])


@pytest.mark.parametrize(("placement", "choices"), [("pipeline", {}), ("zero", {}), ("replicated", {})])
def test_a_first_run_without_a_batch_leaves_the_engine_as_it_was(tmp_path, placement, choices):
    found = run_ranks(nothing_first, 2, placement, choices, folder=tmp_path)
    check_same(found, train("dp", "single_device", 2, 2, pieces=(3,)))


class Unreadable:
    """A mini-batch whose data cannot be read."""

    def inputs(self, micro_batch):
        raise OSError("the disk is gone")

    def targets(self, micro_batch):
        return self.inputs(micro_batch)


def fail_while_ranks_connect():
    engine = make_engine("dp", "pipeline", 2, 2)
    with pytest.raises(OSError, match="the disk is gone"):
        next(engine.run([Unreadable()]))
    with pytest.raises(RuntimeError) as refused:
        engine.state_dict()
    return str(refused.value)


def test_an_engine_whose_ranks_could_not_connect_has_failed(tmp_path):
    """What a batch looks like is asked before the first slot; a rank that fails there has not just begun late."""
    for told in run_ranks(fail_while_ranks_connect, 2, folder=tmp_path, patience=60):
        assert "it failed in step 0: OSError('the disk is gone'); load a checkpoint into a new engine" in told


def train_after_a_failure(placement):
    """An optimizer fails on all ranks; a new engine would take messages of that run for its own."""

    def failing(parameters):
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer.register_step_pre_hook(fail)
        return optimizer

    def fail(*_):
        raise OverflowError("too large")

    engine = Engine(mixed_stages(2), F.cross_entropy, failing, "cdp_v2", placement, workers=2)
    with pytest.raises((OverflowError, RuntimeError)):
        list(engine.run(make_batches(3, 2)))
    with pytest.raises(RuntimeError, match="load a checkpoint into a new engine in new processes"):
        engine.state_dict()
    with pytest.raises(RuntimeError) as refused:
        make_engine("cdp_v2", placement, 2, 2)
    return str(refused.value)


@pytest.mark.parametrize("placement", ["replicated", "pipeline"])
def test_processes_in_which_a_run_has_failed_take_no_new_engine(tmp_path, placement):
    for said in run_ranks(train_after_a_failure, 2, placement, folder=tmp_path):
        assert "its messages may still be under way" in said and "start new processes" in said


def try_again_before_anything_was_sent():
    """Inputs that are refused before the ranks have connected; then the right ones, in a new engine."""
    first = make_engine("dp", "replicated", 2, 2)
    wrong = [(torch.randn(6, 7, dtype=torch.float64), torch.randint(5, (6,)))]
    with pytest.raises(RuntimeError):
        list(first.run(wrong))
    dist.barrier()
    engine = make_engine("dp", "replicated", 2, 2)
    return outcome(engine, [result.losses for result in engine.run(make_batches(3, 2))])


def test_a_failure_before_any_message_lets_ranks_try_again(tmp_path):
    found = run_ranks(try_again_before_anything_was_sent, 2, folder=tmp_path)
    check_same(found, train("dp", "single_device", 2, 2, pieces=(3,)))


def fail_then_meet_anew():
    """The way that the refusal names: another process group."""
    assert "start new processes" in train_after_a_failure("replicated")
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("anew", store), rank=rank, world_size=2)
    engine = make_engine("dp", "replicated", 2, 2)
    return outcome(engine, [result.losses for result in engine.run(make_batches(3, 2))])


def test_a_new_process_group_does(tmp_path):
    check_same(run_ranks(fail_then_meet_anew, 2, folder=tmp_path), train("dp", "single_device", 2, 2, pieces=(3,)))
