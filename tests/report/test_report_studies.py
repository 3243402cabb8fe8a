"""The cells of the studies are what their command lines run."""

from __future__ import annotations

import pytest

from cdp_repro.cli.compose import compose_config
from cdp_repro.report.rows import label_of_mode, settings_of
from cdp_repro.report.studies import STUDIES, Cell


@pytest.mark.parametrize("name", STUDIES)
def test_settings_are_what_hydra_composes(name):
    for cell in (STUDIES[name].cells[0], STUDIES[name].cells[-1]):
        arguments = cell.command(0).split()[1:]
        assert cell.settings == settings_of(compose_config(arguments, check_device=False).to_dict())


def test_no_two_cells_of_a_study_are_the_same():
    for study in STUDIES.values():
        hashes = [cell.hash for cell in study.cells]
        assert len(set(hashes)) == len(hashes)


def test_runs_come_seed_by_seed():
    runs = [(label_of_mode(cell.settings), seed) for cell, seed in STUDIES["cifar10"].runs()]
    assert runs[:4] == [("dp", 0), ("cdp_v1", 0), ("cdp_v2", 0), ("dp", 1)] and len(runs) == 15
    assert STUDIES["cifar10"].cells[0].command(3).endswith(" seed=3")


def test_a_cell_knows_how_many_processes_it_needs():
    four = Cell(("mode=dp", "placement=model_parallel", "workers=2"))
    assert four.config.ranks == 4
    assert Cell(("mode=dp", "baseline=ddp", "workers=2")).config.ranks == 2
