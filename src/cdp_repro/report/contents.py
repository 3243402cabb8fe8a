"""What the rows in `results/` give: comparisons, claims, and the tables and texts of the report; nothing is trained."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path

from cdp_repro.report.accuracy import (
    PAPER_VALUES,
    Comparison,
    accuracy_table,
    comparisons,
    read_paper_values,
    tuning_table,
)
from cdp_repro.report.activation_memory import Case, cases, memory_table
from cdp_repro.report.bounded_staleness import measured, regret_table
from cdp_repro.report.claims import Claim, claim_table, claims, verdict_table
from cdp_repro.report.cost_table import (
    OF_STEPS,
    SIMULATED,
    Line,
    agreement_table,
    cost_table,
    large_lines,
    large_table,
    lines,
    simulations_of,
)
from cdp_repro.report.delay_advice import advice
from cdp_repro.report.delay_costs import Times, delay_table, read_times
from cdp_repro.report.delay_figures import rate_caption
from cdp_repro.report.delay_goal import gap_table, goal_paragraphs
from cdp_repro.report.evidence import origin, provenance
from cdp_repro.report.groups import Group, grouped
from cdp_repro.report.late_systems import LateSystem, late_systems, late_systems_table
from cdp_repro.report.pipeline_curves import gpipe_table
from cdp_repro.report.standing import Standing, standings
from cdp_repro.report.systems_table import systems_table
from cdp_repro.report.tables import Table
from cdp_repro.report.tuning import rate_table
from cdp_repro.studies.catalog import STUDIES
from cdp_repro.studies.cost_settings import EXECUTED_WORKERS
from cdp_repro.studies.rows import ROWS, Row, RowError, read_rows
from cdp_repro.studies.study import Study

_LATE_STUDY = "cifar10-late-systems"


class Report:
    """What the rows of a results folder give, computed on demand.

    Raises:
        RowError: there is no row, or rows are damaged, foreign, duplicated, or cannot be averaged.
    """

    def __init__(self, results: Path) -> None:
        self._results = results
        self.rows: list[Row] = read_rows(results / ROWS)
        if not self.rows:
            raise RowError(
                f"{results / ROWS} holds no rows: train with scripts/accuracy.py, scripts/memory.py, scripts/costs.py, "
                "or add finished runs by cdp-report collect RUN_DIRECTORY"
            )

    @cached_property
    def groups(self) -> dict[str, list[Group]]:
        """Groups of every study, the known studies first."""
        names = [*STUDIES, *sorted({row.study for row in self.rows} - STUDIES.keys())]
        found = {name: grouped(self.rows_of(name), STUDIES[name].varied if name in STUDIES else ()) for name in names}
        return {name: members for name, members in found.items() if members}

    @cached_property
    def cases(self) -> list[Case]:
        """The cases of the memory study."""
        return cases(self.groups.get("memory", ()))

    @cached_property
    def lines(self) -> list[Line]:
        """The lines of the cost study."""
        return lines(self.groups.get("costs", ()))

    @cached_property
    def _large_table(self) -> Table:
        """The table of the stored simulations."""
        path = self._results / SIMULATED
        try:
            parts = json.loads(path.read_text())["parts"] if path.exists() else []
            made_by = [f"Made by {origin(parts)}."] if parts else []
            return large_table(large_lines(simulations_of(parts)), made_by)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RowError(f"{path} is damaged ({error!r}): restore it from git") from error

    @cached_property
    def comparisons(self) -> list[Comparison]:
        """The comparisons of the accuracy studies, and of the user's own."""
        return comparisons(self.groups)

    @cached_property
    def claims(self) -> list[Claim]:
        """The claims of the paper, each with a verdict."""
        return claims(self.cases, self.lines, self.comparisons, self.rows, self.standings)

    @cached_property
    def advice(self) -> str:
        """Which setting to use, in one paragraph."""
        return advice(self.standings, self.begun("delay-tuning", "delay-finals"), self.groups, self._times)

    @cached_property
    def goal(self) -> list[str]:
        """Whether each mode keeps the accuracy of data parallelism on every network, and why not, in paragraphs."""
        return goal_paragraphs(self.standings, self.begun("delay-tuning"), self.groups)

    @cached_property
    def tunings(self) -> dict[str, list[Group]]:
        """The groups of each tuning that has begun, and of its finals, by a title."""
        begun = self.begun("delay-tuning", "delay-finals")
        epochs = {each.name: each.cells[0].settings["epochs"] for each in begun}
        return {
            f"{each.network}, {epochs[each.name]} epoch{'s' * (epochs[each.name] > 1)}": self.groups[each.name]
            for each in begun
        }

    @cached_property
    def _times(self) -> Times:
        return read_times(self._results)

    @cached_property
    def texts(self) -> dict[str, str]:
        """What documents show between their marks, by name: tables as Markdown, verdicts, and the texts on delay."""
        delayed = [f"### {table.title}\n\n{table.markdown()}" for table in self.delay_tables]
        return {
            **{name: table.markdown() for name, table in self.tables.items()},
            "verdicts": verdict_table(self.claims).markdown(),
            "advice": f"{self.advice}\n",
            "rates": f"{rate_caption(self.tunings)}\n",
            "goal": "\n\n".join(self.goal) + "\n",
            "delay": "\n".join(delayed),
        }

    @cached_property
    def tables(self) -> dict[str, Table]:
        """All tables by name."""
        found = [
            claim_table(self.claims),
            accuracy_table(self.comparisons, read_paper_values(self._results / PAPER_VALUES)),
            tuning_table(self.groups.get("cifar10-tuning", ()), STUDIES["cifar10-tuning"]),
            memory_table(self.cases),
            *(cost_table(self.lines, n, self._cost_notes(n), self._cost_evidence(n)) for n in EXECUTED_WORKERS),
            agreement_table(self.lines),
            self._large_table,
            systems_table(self.groups.get("systems", ()), STUDIES["systems"]),
            gpipe_table(),
            regret_table(measured()),
            *self.late_tables(),
            *self.delay_tables,
        ]
        return {table.name: table for table in found}

    @cached_property
    def late(self) -> list[LateSystem]:
        """The systems that read late, once one has run."""
        return late_systems(self.groups, STUDIES[_LATE_STUDY])

    def late_tables(self) -> list[Table]:
        """The table of the systems that read late, once one has run."""
        return [late_systems_table(self.late, STUDIES[_LATE_STUDY])] if self.late else []

    @cached_property
    def standings(self) -> list[Standing]:
        """How each mode with each method compares with data parallelism, in all studies of delay."""
        return [each for study in self.begun("delay") for each in standings(study, self.groups)]

    def begun(self, *kinds: str) -> list[Study]:
        """Return the studies of these kinds that have a run."""
        return [study for study in STUDIES.values() if study.kind in kinds and study.name in self.groups]

    @cached_property
    def delay_tables(self) -> list[Table]:
        """The tables of the studies of delay that have begun: verdicts, differences, and the choice of rates."""
        compared = sorted(self.begun("delay"), key=lambda study: study.margin is None)
        standing = {study.name: [each for each in self.standings if each.study is study] for study in compared}
        return [
            *(delay_table(study, self.groups, standing[study.name], self._times) for study in compared),
            *filter(None, (gap_table(study, self.groups, self.standings) for study in self.begun("delay-tuning"))),
            *(rate_table(study, self.groups) for study in self.begun("delay-finals", "delay-tuning")),
        ]

    def _cost_notes(self, workers: int) -> list[str]:
        mine = [line for line in self.lines if line.workers == workers]
        missing = sum(not line.executed for line in mine)
        differing = [f"{line.setting.name} {line.setting.mode}: {', '.join(names)}" for line in mine
                     if (names := line.disagreements())]  # fmt: skip
        if any(line.setting.baseline == "fsdp2" and line.disagreements() for line in mine):
            differing.append(
                "that of fsdp2 because fully_shard cuts every tensor along its first dimension, so that a rank gets "
                "more where that is no multiple of N"
            )
        agree = (
            "Where three numbers exist they are equal." if not differing else f"They differ in: {'; '.join(differing)}."
        )
        return [
            "A number stands for closed form, simulation and execution alike; where only some know it, they are "
            "in brackets: c, s, e. Libraries are not traced, so that only what they hold is measured. The chain is the "
            "longest sequence of messages, between two slots, each of which waits for the one before. " + agree,
            OF_STEPS,
            *([f"{missing} settings have not been run: python scripts/costs.py"] if missing else []),
        ]

    def _cost_evidence(self, workers: int) -> list[str]:
        return provenance([row for row in self.rows_of("costs") if row.config["workers"] == workers])

    def rows_of(self, *studies: str) -> list[Row]:
        """Return the rows of these studies."""
        return [row for row in self.rows if row.study in studies]
