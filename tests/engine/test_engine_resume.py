"""Where runs are cut, closed or saved changes no bit."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cdp_repro import Engine
from cdp_repro.engine.executor import Executor

MODES = ["dp", "cdp_v1", "cdp_v2", [[3, 1, 1], [1, 2, 1], [2, 0, 1]]]
every_mode = pytest.mark.parametrize("mode", MODES, ids=["dp", "cdp_v1", "cdp_v2", "matrix"])
STEPS = 9


def make_stages():
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.3)),
        nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Dropout(0.1)),
        nn.Linear(6, 3),
    ]


def make_engine(mode, optimizer="sgd", **settings):
    factories = {
        "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
        "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    }
    settings = {"seed": 5, "learning_rate_factor": lambda step: 1.0 if step < 4 else 0.1} | settings
    return Engine(make_stages(), F.cross_entropy, factories[optimizer], mode, **settings)


def make_batches(count=STEPS, rows=12):
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(rows, 4, generator=generator), torch.randint(3, (rows,), generator=generator))
        for _ in range(count)
    ]


def flat(value, path=""):
    """{path: leaf} of nested dicts, lists and tuples."""
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in flat(item, f"{path}/{key}").items()}
    if isinstance(value, (list, tuple)):
        return {k: v for key, item in enumerate(value) for k, v in flat(item, f"{path}/{key}").items()}
    return {path: value}


def assert_bitwise(one, other):
    one, other = flat(one), flat(other)
    assert one.keys() == other.keys()
    for key, value in one.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == other[key].dtype
            assert torch.equal(value, other[key]), key
        else:
            assert value == other[key], key


def uninterrupted(mode, optimizer="sgd"):
    engine = make_engine(mode, optimizer)
    losses = [result.losses for result in engine.run(make_batches())]
    return engine, losses


@every_mode
@pytest.mark.parametrize("pieces", [[1] * 9, [2, 3, 4], [8, 1], [0, 5, 0, 4]], ids=str)
def test_cut_runs_are_bitwise_the_uninterrupted_one(mode, pieces):
    whole, expected = uninterrupted(mode)
    engine, batches, losses = make_engine(mode), iter(make_batches()), []
    for piece in pieces:
        losses += [result.losses for result in engine.run([next(batches) for _ in range(piece)])]
    assert losses == expected
    assert_bitwise(engine.state_dict(), whole.state_dict())
    assert_bitwise(engine.model().state_dict(), whole.model().state_dict())


@every_mode
@pytest.mark.parametrize("stop", [0, 3, 7, 8])
def test_an_iterator_closed_early_drains_and_changes_no_bit(mode, stop):
    whole, _ = uninterrupted(mode)
    engine, batches = make_engine(mode), make_batches()
    for result in engine.run(batches):
        if result.step == stop:
            break
    assert stop + 1 <= engine.step <= min(stop + 2, STEPS), "at most the two steps in flight are finished"
    engine.model()  # drained
    for _ in engine.run(batches[engine.step :]):
        pass
    assert_bitwise(engine.state_dict(), whole.state_dict())


@pytest.mark.parametrize("thrown", [KeyError, KeyboardInterrupt])
def test_an_error_that_is_thrown_into_the_iterator_drains_too(thrown):
    engine, batches = make_engine("cdp_v2"), make_batches()
    iterator = engine.run(batches)
    next(iterator)
    with pytest.raises(thrown):
        iterator.throw(thrown("mine"))
    for _ in engine.run(batches[engine.step :]):
        pass
    assert_bitwise(engine.state_dict(), uninterrupted("cdp_v2")[0].state_dict())


def test_closing_by_hand_and_twice_drains_too():
    engine, batches = make_engine("cdp_v1"), make_batches()
    iterator = engine.run(batches)
    next(iterator)
    iterator.close()
    iterator.close()
    done = engine.step
    for result in engine.run(batches[done:]):
        assert result.step == done
        done += 1
    assert_bitwise(engine.state_dict(), uninterrupted("cdp_v1")[0].state_dict())


@every_mode
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("stop", [1, 4])
def test_a_new_engine_goes_on_bitwise_from_a_saved_state(mode, optimizer, stop):
    whole, expected = uninterrupted(mode, optimizer)
    first, batches = make_engine(mode, optimizer), make_batches()
    for _ in first.run(batches[:stop]):
        pass
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert_bitwise(loaded, first.state_dict())
    torch.manual_seed(99)
    second = make_engine(mode, optimizer)
    for stage in second.model():  # what a new engine starts from must not matter
        for parameter in stage.parameters():
            parameter.data.normal_()
    second.load_state_dict(loaded)
    assert second.step == stop
    assert_bitwise(second.state_dict(), first.state_dict())
    assert [result.losses for result in second.run(batches[stop:])] == expected[stop:]
    assert_bitwise(second.state_dict(), whole.state_dict())
    assert_bitwise(second.model().state_dict(), whole.model().state_dict())


@every_mode
def test_state_of_step_zero_loads(mode):
    engine = make_engine(mode)
    engine.load_state_dict(copy.deepcopy(make_engine(mode).state_dict()))
    for _ in engine.run(make_batches()):
        pass
    assert_bitwise(engine.state_dict(), uninterrupted(mode)[0].state_dict())


def two_engines(optimizer):
    """An engine after four steps, a new one, and the batches that are left."""
    first, batches = make_engine("cdp_v2", optimizer), make_batches()
    for _ in first.run(batches[:4]):
        pass
    return first, make_engine("cdp_v2", optimizer), batches[4:]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_state_that_is_loaded_in_inference_mode_can_be_trained(optimizer):
    first, second, rest = two_engines(optimizer)
    with torch.inference_mode():
        second.load_state_dict(copy.deepcopy(first.state_dict()))
    for _ in second.run(rest):
        pass
    assert_bitwise(second.state_dict(), uninterrupted("cdp_v2", optimizer)[0].state_dict())


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_engine_a_state_came_from_can_go_on_beside_the_one_it_was_loaded_into(optimizer):
    first, second, rest = two_engines(optimizer)
    second.load_state_dict(first.state_dict())
    for engine in (first, second):
        for _ in engine.run(rest):
            pass
        assert_bitwise(engine.state_dict(), uninterrupted("cdp_v2", optimizer)[0].state_dict())


@every_mode
def test_batches_are_taken_when_their_first_forward_is_due(mode, monkeypatch):
    """On a single device, that is; where ranks send, what they send a slot earlier depends on whether one comes."""
    taken, in_slot = [], {}
    honest = Executor._execute

    def execute(self, slot, feed):
        in_slot[slot.number] = len(taken)
        return honest(self, slot, feed)

    def batches():
        for number, batch in enumerate(make_batches()):
            taken.append(number)
            yield batch

    monkeypatch.setattr(Executor, "_execute", execute)
    engine = make_engine(mode)
    iterator = engine.run(batches())
    assert taken == []
    for result in iterator:
        assert len(taken) - result.step - 1 <= 1, "at most one step beyond"
    period = engine.schedule.slots_per_step
    assert in_slot == {slot: min(STEPS, slot // period + 1) for slot in in_slot}


# --------------------------------------------------------------------------------------------------- randomness


def dropout_engine(mode="dp", seed=5, stages=2, **choices):
    """Losses are weighted means of dropout masks; nothing is learnt, so they depend on the draws only."""

    class Noise(nn.Module):
        def forward(self, x):
            return x + F.dropout(torch.ones_like(x), 0.5, self.training)

    return Engine(
        [Noise() for _ in range(stages)],
        lambda output, _: (output * torch.arange(output.numel()).view_as(output).sqrt()).mean(),
        lambda params: torch.optim.SGD(params, lr=0.1),
        mode,
        seed=seed,
        **choices,
    )


def draws(engine, cuts=(4,), rows=128):
    batches = [(torch.zeros(rows, 4), torch.zeros(rows)) for _ in range(4)]
    losses, start = [], 0
    for cut in cuts:
        losses += [result.losses for result in engine.run(batches[start : start + cut])]
        start += cut
    return losses


def test_dropout_depends_on_seed_step_worker_and_stage_only():
    expected = draws(dropout_engine())
    assert len({loss for losses in expected for loss in losses}) == 8, "every step and worker has its own"
    for mode in ("dp", "cdp_v1", "cdp_v2"):
        for order in ("paper", "backward_first"):
            for cuts in ((4,), (1, 1, 1, 1), (3, 1)):
                torch.rand(1)  # whatever the global state is
                assert draws(dropout_engine(mode, slot_order=order), cuts) == expected
    assert draws(dropout_engine(seed=6)) != expected
    one_stage_more = draws(dropout_engine(stages=1))
    assert one_stage_more[0][0] != expected[0][0]


def test_dropout_of_accumulated_and_of_replicated_micro_batches_is_their_own():
    for choices in ({"accumulate": 2}, {"replicas": 2}, {"accumulate": 2, "replicas": 2}):
        expected = draws(dropout_engine(**choices))
        assert len({loss for losses in expected for loss in losses}) == 8 * choices.get("accumulate", 1)
        for mode in ("cdp_v1", "cdp_v2"):
            assert draws(dropout_engine(mode, **choices), (1, 3)) == expected


def test_the_stages_draw_different_masks():
    class Noise(nn.Module):
        def forward(self, x):
            return torch.cat([x, F.dropout(torch.ones(len(x), 16), 0.5)], 1)

    outputs = []

    def loss(output, _):
        outputs.append(output.detach()[:, 1:])
        return output.mean()

    engine = Engine([Noise(), Noise()], loss, lambda params: torch.optim.SGD(params, lr=0.1), "dp")
    list(engine.run([(torch.zeros(8, 1), torch.zeros(8))]))
    assert len(outputs) == 2
    assert not any(torch.equal(output[:, :16], output[:, 16:]) for output in outputs)


@every_mode
def test_the_global_random_state_is_untouched(mode):
    engine = make_engine(mode)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    for _ in engine.run(make_batches()):
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(torch.get_rng_state(), before)
