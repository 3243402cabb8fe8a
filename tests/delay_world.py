"""Studies of delay with all of their runs, some of which a test changes, for the tests of what a report says."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from report_rows import row_of

from cdp_repro.report import standing, tuning
from cdp_repro.report.claims import claims
from cdp_repro.report.delay_costs import delay_table
from cdp_repro.report.groups import grouped
from cdp_repro.report.standing import standings
from cdp_repro.studies.delay_studies import CIFAR10, TUNING_SEED

SETTINGS = (
    "mode=dp",
    "mode=cdp_v1 delay=prediction",
    "mode=cdp_v2 delay=compensation",
    "mode=cdp_v1 optim.nesterov=true",
    "mode=dp optim.nesterov=true",
)
GRID = (0.05, 0.1, 0.2, 0.4)
SMALL = replace(
    CIFAR10, base="dataset=digits epochs=2", settings=SETTINGS, grid=GRID, seeds=(0, 1, 2),
    finalists=dict.fromkeys(SETTINGS, GRID), rates=dict.fromkeys(SETTINGS, 0.2), best=SETTINGS[1:3],
    judged_before=(), larger=replace(CIFAR10.larger, settings=SETTINGS[3:4]),
)  # fmt: skip
STATE = {"memory/optimizer_bytes_per_device": 2**20, "memory/delay_bytes_per_device": 2**21}
BEST_AT_02 = (1.2, 1.0, 0.9, 1.1)
OTHERS = [BEST_AT_02] * (len(SETTINGS) - 1)
"""Losses of all settings but data parallelism."""


def studies_of(benchmark):
    """The studies of a benchmark by the end of their names, tuning and finals by kind."""
    return {
        each.kind if each.kind != "delay" else each.name.removeprefix(f"{benchmark.name}-"): each
        for each in benchmark.studies()
    }


def tried(study, losses):
    """Groups of a tuning or its finals; `losses` by setting, in the order of the rates; None has not run."""
    flat = [loss for of_setting in losses for loss in of_setting]
    rows = [
        row_of(cell, TUNING_SEED, study.name, **({"diverged": True} if loss == inf else {"train/loss": loss}))
        for cell, loss in zip(study.cells, flat, strict=True) if loss is not None
    ]  # fmt: skip
    return grouped(rows, study.varied)


def compared(study, top1, keep=lambda number, seed: True, **changed):
    """Groups of a comparison; `top1(number of the cell, seed)`, None if the run has diverged."""
    rows = [
        row_of(cell, seed, study.name, top1(number, seed) or 0.0, **STATE, **changed,
               **({} if top1(number, seed) else {"diverged": True}))
        for number, cell in enumerate(study.cells) for seed in cell.seeds if keep(number, seed)
    ]  # fmt: skip
    return grouped(rows, study.varied)


class World:
    """A benchmark with all of its runs, some of which a test changes."""

    def __init__(self, monkeypatch, benchmark=SMALL):
        self.studies = studies_of(benchmark)
        for module in (standing, tuning):
            monkeypatch.setattr(module, "STUDIES", {each.name: each for each in self.studies.values()})
        self.groups = {}
        for kind in ("delay-tuning", "delay-finals"):
            self.have(kind, tried(self.studies[kind], [BEST_AT_02] * len(benchmark.settings)))

    def have(self, kind, groups):
        self.groups[self.studies[kind].name] = groups

    def judge(self, *lost, keep=lambda number, seed: True, **changed):
        """Runs of the verdict whose settings lose so many points; None diverges on some seeds."""

        def top1(number, seed):
            loss = (0, *lost)[number]
            if loss is None:
                return None if seed % 4 == 3 else 90.0
            return 90 + 0.1 * (seed % 3) - loss + 0.01 * (number and (seed + number) % 2)

        self.have("verdict", compared(self.studies["verdict"], top1, keep, **changed))
        return self.standings("verdict")

    def standings(self, kind):
        return standings(self.studies[kind], self.groups)

    def table(self, kind, times=None):
        return delay_table(self.studies[kind], self.groups, self.standings(kind), times or {})

    def claim(self):
        return claims((), (), (), (), self.standings("verdict"))[2]
