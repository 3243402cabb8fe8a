"""The cells of the studies are what their command lines run."""

from __future__ import annotations

import shlex
from pathlib import Path
from statistics import fmean

import pytest
from report_rows import row_of

from cdp_repro.config.compose import compose_config
from cdp_repro.config.keys import settings_of
from cdp_repro.report.accuracy import comparisons, tuning_table
from cdp_repro.report.charts import staleness_caption
from cdp_repro.report.groups import grouped
from cdp_repro.studies.catalog import STALENESS_LR, STUDIES, TUNED_LR
from cdp_repro.studies.rows import ROWS, label_of_mode, read_rows
from cdp_repro.studies.study import Cell

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", STUDIES)
def test_settings_are_what_hydra_composes(name):
    for cell in (STUDIES[name].cells[0], STUDIES[name].cells[-1]):
        arguments = shlex.split(cell.command(0))[1:]
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
    assert four.config.processes == 4
    assert Cell(("mode=dp", "baseline=ddp", "workers=2")).config.processes == 2


def test_the_learning_rates_of_the_studies_are_those_that_the_runs_choose():
    study = STUDIES["cifar10-tuning"]
    groups = grouped(read_rows(ROOT / "results" / ROWS / study.name), study.varied)
    used = {"dp": TUNED_LR, **{f"staleness{delay}": rate for delay, rate in STALENESS_LR.items()}}
    chosen = {row[1]: float(row[2]) for row in tuning_table(groups, study).rows if row[-1] == "yes"}
    assert chosen == used


def test_late_systems_have_the_learning_rate_and_the_weight_decay_of_data_parallelism_for_each_image():
    plain, *late = (STUDIES["cifar10"].cells[0], *STUDIES["cifar10-late-systems"].cells)
    assert late and per_image(plain) == (pytest.approx(TUNED_LR / 128), pytest.approx(TUNED_LR * 5e-4 / 128))
    for cell in late:
        assert per_image(cell) == pytest.approx(per_image(plain)), cell.command(0)


def per_image(cell):
    """What a gradient of one image changes, and what weight decay does meanwhile."""
    sizes, config = cell.config.schedule().sizes, cell.config
    of_micro_batch, of_update = (config.batch_size / number for number in (sizes.micro_batches, sizes.updates))
    rate = config.optim.lr
    return rate * sizes.gradient_weight / of_micro_batch, rate * config.optim.weight_decay / of_update


def test_the_caption_of_longer_delays_says_what_they_cost():
    names = ("cifar10", "cifar10-staleness")
    rows = {name: read_rows(ROOT / "results" / ROWS / name) for name in names}
    found = comparisons({name: grouped(rows[name], STUDIES[name].varied) for name in names})
    longest = [row for row in rows["cifar10-staleness"] if label_of_mode(row.config) == f"staleness{max(STALENESS_LR)}"]
    caption = staleness_caption(found)
    for rate, words in ((TUNED_LR, "the learning rate of data"), (STALENESS_LR[5], "one that short runs chose")):
        top1 = [row.summary["eval/top1_percent"] for row in longest if row.config["optim.lr"] == rate]
        assert f"{fmean(top1):.1f} % with {words}" in caption
    assert "From" not in staleness_caption([each for each in found if each.group.mode != "dp"])


def test_nothing_is_chosen_of_a_mode_with_a_learning_rate_that_was_not_run():
    study = STUDIES["cifar10-tuning"]
    dp = [cell for cell in study.cells if cell.settings["mode.name"] == "dp"]
    by_cell = zip(dp, (1.4, 1.005, 1.0, 1.1), strict=True)
    rows = [row_of(cell, study=study.name, **{"train/loss": loss}) for cell, loss in by_cell]
    found = {row[2]: row for row in tuning_table(grouped(rows, study.varied), study).rows if row[1] == "dp"}
    assert [row[2] for row in found.values() if row[-1]] == ["0.1"], "the smallest within 1 % of the lowest"
    found = [row for row in tuning_table(grouped(rows[:3], study.varied), study).rows if row[1] == "dp"]
    assert not any(row[-1] for row in found) and found[-1][4].startswith("not run: `cdp-train mode=dp")
