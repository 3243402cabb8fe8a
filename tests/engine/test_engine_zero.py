"""ZeRO with owners: more ranks than stages, the version that travels with the parameters, stages of no bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from small_runs import MODES, PLACEMENTS, check_same, make_batches, make_engine, ranks_of, train, train_each
from torch import nn

from cdp_repro.engine.ledger import LedgerError
from cdp_repro.engine.mailbox import Mailbox
from cdp_repro.schedule.values import Kind


@pytest.mark.parametrize("pieces", [(2, 3, 1), (1, 1, 4)], ids=str)
def test_ranks_that_own_nothing_end_several_runs_and_compute_what_one_device_computes(tmp_path, pieces):
    """N R = 4 ranks, two stages: ranks 1 and 3 update nothing, and so finish a step with its last backward."""
    cases = [((mode, "zero", 2, 2), {"replicas": 2, "pieces": pieces}) for mode in MODES]
    assert {ranks_of(*arguments, replicas=2) for arguments, _ in cases} == {4}
    found = run_ranks(train_each, 4, cases, folder=tmp_path)
    for number, mode in enumerate(MODES):
        check_same([each[number] for each in found], train(mode, "single_device", 2, 2, replicas=2, pieces=pieces))


def results_of_every_rank(steps):
    engine = make_engine("cdp_v2", "zero", 2, 2, replicas=2)
    found = []
    for part in (make_batches(steps, 4), make_batches(steps, 4)):
        found += [(result.step, engine.step) for result in engine.run(part)]
    return found


def test_a_rank_that_owns_nothing_yields_each_step_too(tmp_path):
    for found in run_ranks(results_of_every_rank, 4, 3, folder=tmp_path):
        assert [step for step, _ in found] == list(range(6))
        assert all(after == step + 1 for step, after in found)


# ---------------------------------------------------------------------------- the version that travels with parameters


def train_with_an_owner_that_sends_another_version(mode, kind, owner, step):
    """Return the error of this rank, if any. Owner `owner` says in the message that its version is a later one."""
    engine = make_engine(mode, "zero", 2, 2)
    honest = Mailbox.send

    def send(self, value, peer, content):
        if engine.rank == owner and value.kind == kind and value.version == step:
            content = replace(content, number=content.number + 1)
        return honest(self, value, peer, content)

    Mailbox.send = send
    try:
        for _ in engine.run(make_batches(4, 2)):
            pass
    except LedgerError as error:
        return str(error), engine.step
    except RuntimeError:  # the other rank has gone
        return None
    finally:
        Mailbox.send = honest
        dist.destroy_process_group()  # so that the other rank does not wait
    return None


@pytest.mark.parametrize("mode", ["dp", "cdp_v2"])
@pytest.mark.parametrize("owner", [0, 1])
@pytest.mark.parametrize("kind", [Kind.LENT_FORWARD, Kind.LENT_BACKWARD])
def test_a_version_other_than_the_label_of_its_message_is_seen_on_arrival(tmp_path, kind, owner, mode):
    found = run_ranks(
        train_with_an_owner_that_sends_another_version, 2, mode, kind, owner, 2, folder=tmp_path, patience=20
    )
    assert found[owner] is None
    told, step = found[1 - owner]
    what = "forward" if kind == Kind.LENT_FORWARD else "backward"
    assert told.startswith(f"{what} of stage {owner} on micro-batch {1 - owner} of step ")
    assert told.endswith("used version 3; the rule asks for version 2")
    assert step <= 3, "at once, not at the end of the run"


# ----------------------------------------------------------------------------------------- parameters of no bytes


class Nothing(nn.Module):
    """A stage whose only parameter has no values."""

    def __init__(self):
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, dtype=torch.float64))

    def forward(self, inputs):
        return torch.tanh(inputs) + self.nothing.sum()


def stages_with_nothing(count):
    torch.manual_seed(0)
    return [Nothing() if number % 2 else nn.Linear(5, 5).double() for number in range(count)]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_stage_whose_only_parameter_has_no_values(tmp_path, placement):
    groups = {}
    for mode in MODES:
        for collectives in {False, mode == "dp" and placement in ("zero", "replicated")}:
            case = (mode, placement, 2, 2), {"stages": stages_with_nothing, "collectives": collectives}
            groups.setdefault(ranks_of(*case[0], collectives=collectives), []).append(case)
    for ranks, cases in groups.items():
        found = run_ranks(train_each, ranks, cases, folder=tmp_path)
        for number, ((mode, *_), _) in enumerate(cases):
            expected = train(mode, "single_device", 2, 2, stages=stages_with_nothing)
            check_same([each[number] for each in found], expected)  # a sum of two does not depend on its order
