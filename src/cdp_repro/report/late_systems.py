"""What reading late costs: accuracy of the systems that update after each micro-batch, against their staleness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from matplotlib.figure import Figure

from cdp_repro.config.task import IMAGES
from cdp_repro.report.accuracy import not_run
from cdp_repro.report.charts import not_of_the_paper, plain_axes, style
from cdp_repro.report.evidence import provenance
from cdp_repro.report.groups import OF_TWO_VERSIONS, Difference, Group, compared
from cdp_repro.report.tables import Table
from cdp_repro.schedule import Schedule
from cdp_repro.studies.catalog import LATE_SAMPLES, LATE_SPEEDS, STUDIES
from cdp_repro.studies.study import Cell, Study

DIFFERS = ("workers", "stages", "batch_size", "optim.weight_decay", "slack", "speeds", "jitter")
"""Settings in which systems differ, besides mode and learning rate."""


@dataclass(frozen=True)
class LateSystem:
    """A cell of the study, or of its reference, with its runs if there are any."""

    cell: Cell
    group: Group | None
    difference: Difference | None
    """From data parallelism that updates once per mini-batch, seed by seed."""
    mini_batch: int
    """Images per update of data parallelism."""

    @property
    def name(self) -> str:
        """The name of the system, as shown to people."""
        settings = self.cell.settings
        if settings["mode.name"] == "ssp":
            return f"ssp, s = {settings['slack']}"
        is_alone = settings["mode.name"] == "dp" and self.updates_often
        return "dp, a micro-batch an update" if is_alone else str(settings["mode.name"])

    @cached_property
    def _schedule(self) -> Schedule:
        return self.cell.config.schedule()

    @property
    def _images(self) -> float:
        """Images per update."""
        return float(self.cell.settings["batch_size"]) / self._schedule.sizes.updates

    @property
    def updates_often(self) -> bool:
        """Whether an update has fewer images than one of data parallelism."""
        return self._images < self.mini_batch

    @property
    def late(self) -> float:
        """The mean staleness in mini-batches of data parallelism, so that systems with other update sizes compare."""
        return self._schedule.rule.mean * self._images / self.mini_batch

    def row(self) -> list[str]:
        """Return the row of the table."""
        rule = self._schedule.rule
        before = [
            self.name,
            f"{self._images:g}",
            f"{rule.mean:.2f}",
            str(max(rule.largest_by_stage)),
            f"{self.late:.2f}",
        ]
        if self.group is None:
            return [*before, not_run(self.cell), "", ""]
        return [*before, self.group.sample(IMAGES.metric).text(), self.difference.text() if self.difference else "",
                self.group.sample("train/loss").text(4)]  # fmt: skip


def late_systems(groups: Mapping[str, Sequence[Group]], study: Study) -> list[LateSystem]:
    """Return the cells of the study's reference that have run, then all of its own; none if none of its own has run.

    `groups` are those of all studies by name.
    """
    if study.name not in groups or study.reference is None:
        return []
    reference, others = STUDIES[study.reference], groups.get(study.reference, ())
    by_cell = {group.cell: group for group in (*others, *groups[study.name])}
    plain = next((group for group in others if group.mode == "dp"), None)
    mini_batch = int(reference.cells[0].settings["batch_size"])
    found = []
    for cell in (*(cell for cell in reference.cells if cell.hash in by_cell), *study.cells):
        group = by_cell.get(cell.hash)
        difference = compared(group, plain, IMAGES.metric, DIFFERS) if group and plain and group is not plain else None
        found.append(LateSystem(cell, group, difference, mini_batch))
    return found


def late_systems_table(systems: Sequence[LateSystem], study: Study) -> Table:
    """Return staleness beside accuracy."""
    notes = [
        f"All read micro-batches of {LATE_SAMPLES} images and have one learning rate and weight decay for each image, "
        "those of data parallelism: nothing is tuned for a delay. The second dp makes an update of each micro-batch "
        "and reads fresh: the others differ from it by what they read. Staleness: updates that a forward misses, over "
        "micro-batches and stages, by the rule that every read of the runs was checked against; late: its mean in "
        f"mini-batches of dp. Workers of ssp and async have speeds={[*LATE_SPEEDS]} and jitter. Mean ± standard "
        "deviation over seeds, number of runs in brackets; differences are paired by seed.",
        OF_TWO_VERSIONS,
    ]
    rows = [row for each in systems if each.group is not None for row in each.group.rows]
    columns = (
        "system", "images an update", "mean staleness", "largest", "late [mini-batches]", "test top-1 [%]", "minus dp",
        "train loss",
    )  # fmt: skip
    return Table("late_systems", study.title, columns, [each.row() for each in systems], notes, provenance(rows))


def draw_late_systems(systems: Sequence[LateSystem]) -> Figure | None:
    """Draw top-1 against how late reads are, a point per seed; None if no system of the study has run."""
    shown = [(each, each.group.values(IMAGES.metric)) for each in systems if each.group is not None]
    if not any(each.updates_often and each.late for each, _ in shown):
        return None
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axis = figure.subplots()
    others = not_of_the_paper([each.name for each, _ in shown])
    for number, (each, values) in enumerate(shown):
        axis.plot(
            [each.late] * len(values), values, label=each.name, linestyle="", alpha=0.7,
            color=style(each.name, others)["color"], marker="osD^vP*X"[number % 8],
        )  # fmt: skip
    axis.set(xlabel="mean staleness of reads [mini-batches of dp]", ylabel="test top-1 [%]")
    plain_axes(axis)
    axis.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
