"""Activation memory: CDP's peak over that of data parallelism, executed and simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cdp_repro.predict.costs import StageCosts
from cdp_repro.predict.memory_reduction import reduction, theory
from cdp_repro.report.accuracy import not_run
from cdp_repro.report.evidence import provenance
from cdp_repro.report.groups import Group
from cdp_repro.report.tables import Table
from cdp_repro.studies.catalog import STUDIES
from cdp_repro.studies.study import Cell

PEAK = "memory/activation_peak_bytes_total"
ORDERS = ("paper", "backward_first")
CUTS = ("flops", "activations")
SHOWN_WORKERS = 8
"""The N that sentences and bars show."""


@dataclass(frozen=True)
class Case:
    """One network on N workers, cut in one way: data parallelism, and CDP in both slot orders."""

    model: str
    workers: int
    partition: str
    """`flops`, `activations`, or `blocks` where every block is a stage."""
    dp: Group
    cdp: Mapping[str, Group]
    """CDP-v2 by slot order."""

    @property
    def ratios(self) -> dict[str, float]:
        """Executed peak of CDP over that of DP, by slot order."""
        peak = self.dp.values(PEAK)[0]
        return {order: group.values(PEAK)[0] / peak for order, group in self.cdp.items()}

    @property
    def simulated_ratios(self) -> dict[str, float]:
        """The same by simulation from the costs of the stages."""
        costs = self.dp.rows[0].costs
        return {order: reduction(costs, order) for order in self.cdp}


def cases(groups: Sequence[Group]) -> list[Case]:
    """Return the cases of the memory study whose three runs are present, by network, N and cut."""
    by_case: dict[tuple[str, int, str], dict[tuple[str, str], Group]] = {}
    for group in groups:
        config = group.config
        stages = group.rows[0].costs.stages
        cut = "blocks" if stages == _blocks(config["model.name"]) else config["partition"]
        key = config["model.name"], config["workers"], cut
        by_case.setdefault(key, {})[group.mode, config["slot_order"]] = group
    found = []
    for (model, workers, cut), members in by_case.items():
        cdp = {order: members["cdp_v2", order] for order in ORDERS if ("cdp_v2", order) in members}
        if ("dp", "paper") in members and len(cdp) == len(ORDERS):
            found.append(Case(model, workers, cut, members["dp", "paper"], cdp))
    return sorted(found, key=lambda case: (case.model, case.workers, case.partition))


def _blocks(model: str) -> int:
    """Return the number of blocks of a network: the most workers on which the study runs it."""
    planned = STUDIES["memory"].cells
    return max((int(each.settings["workers"]) for each in planned if each.settings["model.name"] == model), default=0)


def profiles(found: Sequence[Case]) -> dict[str, StageCosts]:
    """Return the measured costs of every block, by network."""
    return {case.model: case.dp.rows[0].costs for case in found if case.partition == "blocks"}


def memory_table(found: Sequence[Case]) -> Table:
    """Return executed ratios beside the theory, and a command for each run that is missing."""
    columns = ("network", "N", "cut by", "paper order", "(N+1)/2N", "backward first", "simulated alike", "DP peak, N A")
    rows = []
    for case in found:
        ratios, expected = case.ratios, case.simulated_ratios
        alike = all(abs(ratios[order] - expected[order]) < 1e-9 for order in ORDERS)
        rows.append(
            [
                case.model, str(case.workers), case.partition, f"{ratios['paper']:.3f}", f"{theory(case.workers):.3f}",
                f"{ratios['backward_first']:.3f}",
                "yes" if alike else f"no: {expected['paper']:.3f}, {expected['backward_first']:.3f}",
                f"{case.dp.values(PEAK)[0] / 2**20:.1f} MiB",
            ]
        )  # fmt: skip
    runs = [row for case in found for group in (case.dp, *case.cdp.values()) for row in group.rows]
    present = {row.cell for row in runs}
    missing: list[Cell] = [cell for cell in STUDIES["memory"].cells if cell.hash not in present]
    rows += [[_name(cell), "", "", not_run(cell), "", "", "", ""] for cell in missing]
    notes = [
        "Peak of live activation bytes of CDP-v2 over that of DP, all workers on one device, executed at 224 px with "
        "micro-batches of one image, S = N; bytes are exact, so that one run is enough. `blocks`: every block is a "
        "stage.",
    ]
    return Table("memory", "Activation memory of CDP against DP, executed", columns, rows, notes, provenance(runs))


def _name(cell: Cell) -> str:
    return f"{cell.settings['model.name']}, N = {cell.settings['workers']}"


def answer(found: Sequence[Case]) -> list[str]:
    """Return a sentence for each network: how far from one half its peak is, and why."""
    sentences = []
    for model, blocks in profiles(found).items():
        mine = {case.partition: case.ratios for case in found if (case.model, case.workers) == (model, SHOWN_WORKERS)}
        if not all(cut in mine for cut in CUTS):
            continue
        share = sum(blocks.forward_bytes[: blocks.stages // 2]) / blocks.activation_bytes
        sentences.append(
            f"With N = {SHOWN_WORKERS} {model} has {mine['flops']['paper']:.2f} of data parallelism's peak, "
            f"{mine['activations']['paper']:.2f} if it is cut by activation bytes, "
            f"{mine['activations']['backward_first']:.2f} if each slot also runs its backward first: the first half of "
            f"its {blocks.stages} blocks holds {100 * share:.0f}\N{NO-BREAK SPACE}% of the activations."
        )
    return sentences
