"""The executor knows programs, not what they were made from."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from small_runs import check_same, make_batches, make_engine, mixed_stages, outcome
from torch import nn

from cdp_repro import Engine
from cdp_repro.engine import executor
from cdp_repro.engine.compute import Network, Version
from cdp_repro.engine.executor import Executor
from cdp_repro.engine.mailbox import Pending
from cdp_repro.predict.profiling import profile_stages
from cdp_repro.predict.simulate import Devices
from cdp_repro.schedule import Action, Schedule, Value
from cdp_repro.schedule.values import Kind


def words(tree):
    """All names in a module: of variables, attributes, arguments, functions, classes and what it imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg) or (isinstance(node, ast.keyword) and node.arg):
            yield node.arg
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.alias):
            yield from node.name.split(".")
        elif isinstance(node, ast.ImportFrom):
            yield from (node.module or "").split(".")


def test_it_asks_neither_the_placement_nor_the_mode():
    found = {part for word in words(ast.parse(Path(executor.__file__).read_text())) for part in word.lower().split("_")}
    assert {"action", "reads", "writes", "frees"} <= found
    unwanted = {"placement", "placements", "mode", "modes", "timeline", "timelines", "rule", "rules", "holders", "spec"}
    assert not found & unwanted


def test_a_sum_that_is_still_needed_is_copied_when_all_of_its_parts_are_there():
    """Parts lie in one buffer, which the first of them names; here the second arrives when it is waited for."""
    buffer = torch.tensor([1.0, 1.0, 0.0, 0.0])
    names = ("g0[0:1]", "g0[1:2]#1/2", "g0[1:2]#2/2")
    contents = (
        {"weight": torch.ones(4)},
        Pending(lambda: {"weight": buffer}),
        Pending(lambda: [buffer[2:].fill_(1), {}][1]),
    )
    runner = object.__new__(Executor)
    runner.values = dict(zip(map(Value.parse, names), contents, strict=True))
    action = Action.parse(f"A g0[0:2]: {' '.join(names)} -> g0[0:2]")
    (total,) = runner._add(action, runner._take(action))[Kind.GRADIENTS]
    assert total["weight"].tolist() == [2, 2, 2, 2]
    assert buffer.tolist() == [1, 1, 1, 1]


def with_noise(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.register_step_pre_hook(
        lambda *_: [each.grad.add_(torch.randn_like(each.grad), alpha=0.1) for each in parameters] and None
    )
    return optimizer


def train_with_noise(placement, mode):
    """A loop draws random numbers of its own, which must not become those of the optimizer."""
    engine = Engine(mixed_stages(2), F.cross_entropy, with_noise, mode, placement, seed=3)
    losses = []
    for result in engine.run(make_batches(4, engine.schedule.micro_batches)):
        losses.append(result.losses)
        torch.rand(1 + engine.rank)
    return outcome(engine, losses)


@pytest.mark.parametrize("mode", ["dp", "cdp_v1", "cdp_v2"])
@pytest.mark.parametrize("placement", ["replicated", "zero", "pipeline"])
def test_noise_that_an_optimizer_adds_depends_on_what_it_updates_alone(tmp_path, placement, mode):
    check_same(
        run_ranks(train_with_noise, 2, placement, mode, folder=tmp_path), train_with_noise("single_device", mode)
    )


def test_noise_differs_by_stage_step_and_seed():
    drawn = []

    def recording(parameters):
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: drawn.append(torch.rand(1).item()))
        return optimizer

    for seed in (0, 1):
        engine = Engine([nn.Linear(5, 5).double() for _ in range(2)], F.cross_entropy, recording, "dp", seed=seed)
        assert len([*engine.run(make_batches(3, 2))]) == 3
    assert len(drawn) == len({*drawn}) == 2 * 2 * 3


def held_after_each_action(mode, placement, n, s, choices):
    """Actions of this rank, each with the bytes of what it then holds, by name; None for what is not there yet."""
    engine, found, run = make_engine(mode, placement, n, s, **choices), [], Executor._run

    def watched(self, action):
        run(self, action)
        found.append((action, {value: bytes_of(content) for value, content in self.values.items()}))

    Executor._run = watched
    try:
        list(engine.run(make_batches(3, engine.schedule.micro_batches)))
    finally:
        Executor._run = run
    return found


def bytes_of(content):
    if isinstance(content, Pending):
        return None
    tensors = content.tensors if isinstance(content, Version) else content if isinstance(content, dict) else {}
    return sum(tensor.nbytes for tensor in tensors.values())


def held_in_each(cases):
    return [held_after_each_action(*case) for case in cases]


ALIVE = {
    "single_device": [("dp", 2, 2, {}), ("cdp_v1", 2, 4, {}), ("cdp_v2", 2, 4, {"accumulate": 2}), ("gpipe", 3, 4, {})],
    "replicated": [("dp", 2, 4, {}), ("dp", 2, 4, {"collectives": True}), ("cdp_v1", 2, 4, {}), ("cdp_v2", 2, 4, {})],
    "zero": [("dp", 2, 2, {}), ("dp", 2, 2, {"collectives": True}), ("cdp_v1", 2, 2, {}), ("cdp_v2", 2, 2, {})],
    "pipeline": [("cdp_v2", 2, 4, {"ranks": 2}), ("zero_bubble", 3, 4, {"ranks": 2}), ("chimera", 2, 2, {})],
}
"""By placement, on two ranks. On `zero` without the stage that has frozen parameters: they are cut by themselves, so
that a shard has some bytes more or less than an equal part of all."""


@pytest.mark.parametrize("placement", ALIVE)
def test_sums_and_versions_take_the_bytes_that_the_simulator_counts(placement, tmp_path):
    cases = [(mode, placement, n, s, choices) for mode, n, s, choices in ALIVE[placement]]
    ranks = 1 if placement == "single_device" else 2
    for case, *on_ranks in zip(cases, *run_ranks(held_in_each, ranks, cases, folder=tmp_path), strict=True):
        mode, _, n, s, choices = case
        rows = torch.randn(3, 5, dtype=torch.float64), torch.randint(5, (3,))
        costs = profile_stages(Network(mixed_stages(s), F.cross_entropy), *rows)
        devices = Devices(Schedule.build(mode, n, s, placement, **choices), costs)
        kinds = {Kind.PARAMETERS: devices.parameter_bytes, Kind.GRADIENTS: devices.gradient_bytes}
        seen = set()
        for action, held in [each for found in on_ranks for each in found]:
            devices.run(action)
            for kind, counted in kinds.items():
                names = [value for value in held if value.kind == kind]
                assert sum(map(costs.bytes_of, names)) == counted[action.rank], (case, action)
            for value, size in held.items():
                if value.kind in kinds and size is not None:
                    seen.add(value.kind)
                    assert size == costs.bytes_of(value), (case, action, value)
        assert seen == {*kinds}, case
        assert sum(devices.gradient_bytes) == 0, "each sum has made its update"
