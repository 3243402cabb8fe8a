"""What reading late costs: accuracy of the systems that update after each micro-batch, against their staleness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from matplotlib.figure import Figure

from cdp_repro.report.accuracy import difference_text
from cdp_repro.report.charts import plain_axes
from cdp_repro.report.evidence import provenance
from cdp_repro.report.groups import Difference, Group, compared
from cdp_repro.report.tables import Table
from cdp_repro.studies.study import Cell, Study

DIFFERS = ("workers", "stages", "batch_size", "optim.weight_decay", "slack", "speeds", "jitter")
"""Settings in which systems differ, beside mode and learning rate."""
_TOP1 = "eval/top1_percent"


@dataclass(frozen=True)
class LateSystem:
    """A cell of the study, or of its reference, with its runs if there are any."""

    cell: Cell
    group: Group | None
    difference: Difference | None
    """From data parallelism in mini-batches, seed by seed."""
    mini_batch: int
    """Images of an update of data parallelism."""

    @property
    def name(self) -> str:
        """The system for people."""
        settings = self.cell.settings
        if settings["mode.name"] == "ssp":
            return f"ssp, s = {settings['slack']}"
        is_alone = settings["mode.name"] == "dp" and self._images < self.mini_batch
        return "dp, a micro-batch an update" if is_alone else str(settings["mode.name"])

    @property
    def _images(self) -> float:
        """Images of an update."""
        return float(self.cell.settings["batch_size"]) / self.cell.config.schedule().sizes.updates

    @property
    def staleness(self) -> tuple[float, int]:
        """Updates that a forward misses: the mean over micro-batches and stages, and the largest."""
        delays = [delay for row in self.cell.config.schedule().rule.matrix for delay in row]
        return fmean(delays), max(delays)

    @property
    def late(self) -> float:
        """The mean staleness in mini-batches of data parallelism: systems with updates of other sizes compare."""
        return self.staleness[0] * self._images / self.mini_batch

    def row(self) -> list[str]:
        """Return the row of the table."""
        mean, largest = self.staleness
        before = [self.name, f"{self._images:g}", f"{mean:.2f}", str(largest), f"{self.late:.2f}"]
        if self.group is None:
            return [*before, f"not run: `{self.cell.command(self.cell.seeds[0])}`", "", ""]
        return [*before, self.group.sample(_TOP1).text(), difference_text(self.difference),
                self.group.sample("train/loss").text(4)]  # fmt: skip


def late_systems(groups: Sequence[Group], study: Study, others: Sequence[Group], reference: Study) -> list[LateSystem]:
    """Return the cells of the reference that have run, then those of the study; `others` are the reference's groups."""
    by_cell = {group.rows[0].cell: group for group in (*others, *groups)}
    plain = next((group for group in others if group.mode == "dp"), None)
    mini_batch = int(reference.cells[0].settings["batch_size"])
    found = []
    for cell in (*(cell for cell in reference.cells if cell.hash in by_cell), *study.cells):
        group = by_cell.get(cell.hash)
        difference = compared(group, plain, _TOP1, DIFFERS) if group and plain and group is not plain else None
        found.append(LateSystem(cell, group, difference, mini_batch))
    return found


def late_systems_table(systems: Sequence[LateSystem], study: Study) -> Table:
    """Return staleness beside accuracy."""
    notes = [
        "All read micro-batches of 32 images and have one learning rate and weight decay for each image, those of data "
        "parallelism: nothing is tuned for a delay. The second dp makes an update of each micro-batch and reads fresh: "
        "the others differ from it by what they read. Staleness: updates that a forward misses, over micro-batches and "
        "stages, by the rule that every read of the runs was checked against; late: its mean in mini-batches of dp. "
        "Workers of ssp and async have speeds of 1, 1, 1 and 2, and jitter. Mean ± standard deviation over seeds, "
        "number of runs in brackets; differences are paired by seed.",
    ]
    rows = [row for each in systems if each.group is not None for row in each.group.rows]
    columns = (
        "system", "images an update", "mean staleness", "largest", "late [mini-batches]", "test top-1 [%]", "minus dp",
        "train loss",
    )  # fmt: skip
    return Table("late_systems", study.title, columns, [each.row() for each in systems], notes, provenance(rows))


def draw_late_systems(systems: Sequence[LateSystem]) -> Figure | None:
    """Draw top-1 against how late reads are, a point a seed; None if no system of the study has run."""
    shown = [(each, each.group.values(_TOP1)) for each in systems if each.group is not None]
    if not any(each.cell.settings["mode.name"] in ("pipedream", "ampnet", "ssp", "async") for each, _ in shown):
        return None
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axis = figure.subplots()
    for number, (each, values) in enumerate(shown):
        axis.plot(
            [each.late] * len(values), values, label=each.name, linestyle="", alpha=0.7,
            color=f"C{number % 10}", marker="osD^vP*X"[number % 8],
        )  # fmt: skip
    axis.set(xlabel="mean staleness of reads [mini-batches of dp]", ylabel="test top-1 [%]")
    plain_axes(axis)
    axis.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
