"""What the report holds: its tables, figures, texts and sections, from the rows in `results/`; nothing is trained."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from matplotlib.figure import Figure

from cdp_repro.report import charts as figures
from cdp_repro.report.accuracy import (
    PAPER_VALUES,
    Comparison,
    accuracy_table,
    comparisons,
    read_paper_values,
    tuning_table,
)
from cdp_repro.report.activation_memory import SHOWN_WORKERS, Case, answer, cases, memory_table
from cdp_repro.report.bounded_staleness import draw_regret, measured, regret_caption, regret_table
from cdp_repro.report.claims import HOLDS, Claim, claim_table, claims, verdict_table
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
from cdp_repro.report.delay_figures import differences, rate_caption, rate_curves
from cdp_repro.report.delay_goal import gap_table, goal_paragraphs
from cdp_repro.report.evidence import origin, provenance
from cdp_repro.report.explorer import explorer_of_equal_layers
from cdp_repro.report.groups import Group, grouped
from cdp_repro.report.late_systems import LateSystem, draw_late_systems, late_systems, late_systems_table
from cdp_repro.report.page import Finding, Picture, Section, page
from cdp_repro.report.pipeline_curves import curves, draw_curves, gpipe_table
from cdp_repro.report.standing import Standing, standings
from cdp_repro.report.systems_table import systems_table
from cdp_repro.report.tables import Table
from cdp_repro.report.tuning import rate_table
from cdp_repro.studies.catalog import STUDIES
from cdp_repro.studies.cost_settings import EXECUTED_WORKERS
from cdp_repro.studies.rows import ROWS, Row, RowError, read_rows
from cdp_repro.studies.study import Study

_Figures = Mapping[str, tuple[Callable[[], Figure] | None, Sequence[Row], str]]
"""By name: what draws a figure, None if it has no data; the rows behind it; its caption."""


@dataclass(frozen=True)
class Shown:
    """A figure, the digest of its data, and its caption."""

    draw: Callable[[], Figure]
    """Draws it; some figures need many seconds of simulation."""
    data: str
    """Digest of the rows behind it."""
    caption: str


class Report:
    """Tables and figures of the rows of a results folder, computed on demand.

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
        found = {name: grouped(self._rows_of(name), STUDIES[name].varied if name in STUDIES else ()) for name in names}
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
        return advice(self.standings, self._begun("delay-tuning", "delay-finals"), self.groups, self._times)

    @cached_property
    def goal(self) -> list[str]:
        """Whether each mode keeps the accuracy of data parallelism on every network, and why not, in paragraphs."""
        return goal_paragraphs(self.standings, self._begun("delay-tuning"), self.groups)

    @cached_property
    def _tunings(self) -> dict[str, list[Group]]:
        """The groups of each tuning that has begun, and of its finals, by a title."""
        begun = self._begun("delay-tuning", "delay-finals")
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
        delayed = [f"### {table.title}\n\n{table.markdown()}" for table in self._delay_tables]
        return {
            **{name: table.markdown() for name, table in self.tables.items()},
            "verdicts": verdict_table(self.claims).markdown(),
            "advice": f"{self.advice}\n",
            "rates": f"{rate_caption(self._tunings)}\n",
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
            *self._late_tables(),
            *self._delay_tables,
        ]
        return {table.name: table for table in found}

    @cached_property
    def _late(self) -> list[LateSystem]:
        """The systems that read late, once one has run."""
        return late_systems(self.groups, STUDIES[_LATE_STUDY])

    def _late_tables(self) -> list[Table]:
        return [late_systems_table(self._late, STUDIES[_LATE_STUDY])] if self._late else []

    @cached_property
    def standings(self) -> list[Standing]:
        """How each mode with each method compares with data parallelism, in all studies of delay."""
        return [each for study in self._begun("delay") for each in standings(study, self.groups)]

    def _begun(self, *kinds: str) -> list[Study]:
        """Return the studies of these kinds that have a run."""
        return [study for study in STUDIES.values() if study.kind in kinds and study.name in self.groups]

    @cached_property
    def _delay_tables(self) -> list[Table]:
        """The tables of the studies of delay that have begun: verdicts, differences, and the choice of rates."""
        compared = sorted(self._begun("delay"), key=lambda study: study.margin is None)
        standing = {study.name: [each for each in self.standings if each.study is study] for study in compared}
        return [
            *(delay_table(study, self.groups, standing[study.name], self._times) for study in compared),
            *filter(None, (gap_table(study, self.groups, self.standings) for study in self._begun("delay-tuning"))),
            *(rate_table(study, self.groups) for study in self._begun("delay-finals", "delay-tuning")),
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
        return provenance([row for row in self._rows_of("costs") if row.config["workers"] == workers])

    def _rows_of(self, *studies: str) -> list[Row]:
        return [row for row in self.rows if row.study in studies]

    @cached_property
    def figures(self) -> dict[str, Shown]:
        """All figures that have data, by name."""
        found = {
            **self._memory_figures(), **self._cost_figures(), **self._accuracy_figures(), **self._delay_figures()
        }  # fmt: skip
        shown = {
            name: Shown(draw, _digest(row.digest for row in rows), caption)
            for name, (draw, rows, caption) in found.items()
            if rows and draw is not None
        }
        systems = Shown(partial(draw_curves, curves()), _digest([repr(curves())]), _CURVES)
        regret = Shown(partial(draw_regret, measured()), _digest([repr(measured())]), regret_caption())
        return {**shown, "systems": systems, "regret": regret}

    def _memory_figures(self) -> _Figures:
        """Return those of the memory study."""
        return {
            "peaks": (
                partial(figures.peak_bars, self.cases) if self.cases else None, self._rows_of("memory"),
                f"Activation peak of CDP-v2 over that of DP, executed with N = {SHOWN_WORKERS}. Look at how far the "
                "bars stand above the dotted line of equal stages, and what each remedy brings.",
            ),
            "memory": (
                partial(figures.memory_curves, self.cases) if self.cases else None, self._rows_of("memory"),
                "Live activation bytes of all workers on one device, executed: data parallelism rises to N times the "
                "activations of a micro-batch, CDP fills once and stays flat. Look at how far the flat part lies above "
                "the dotted line of equal stages, and how cutting by activation bytes brings it down.",
            ),
            "reduction": (
                partial(figures.reduction_curves, self.cases) if self.cases else None, self._rows_of("memory"),
                "Activation peak of CDP-v2 over that of DP against the number of workers. Lines are simulated from the "
                "measured bytes of every block; points are executed (filled: paper order, hollow: backward first, "
                "diamonds: every block a stage). Right of the grey line there are more stages than blocks, and blocks "
                "are taken as divisible.",
            ),
        }  # fmt: skip

    def _cost_figures(self) -> _Figures:
        """Return those of the cost study."""
        costs, n = self.groups.get("costs", []), max(EXECUTED_WORKERS)
        return {
            "timelines": (
                _as_drawn(figures.timelines(costs, 3)),
                [r for r in self._rows_of("costs") if r.config["workers"] == 3],
                "Timelines of DP, CDP-v1 and CDP-v2 with N = S = 3, drawn from the programs that ran: DP has all "
                "workers on one stage in a slot, CDP one worker on each. Numbers are the parameter versions read: "
                "CDP-v2 reads the newest wherever it is ready.",
            ),
            "communication": (
                _as_drawn(figures.communication(costs, n)),
                [r for r in self._rows_of("costs") if r.config["workers"] == n],
                "Bytes that all ranks send in each slot of a training step, executed: DP sends all gradients as the "
                "backward passes end, CDP a part in every slot. The areas of a panel are equal but for model "
                "parallelism, whose groups differ in size.",
            ),
        }  # fmt: skip

    def _accuracy_figures(self) -> _Figures:
        """Return those of the studies of accuracy, and of systems that read late."""
        return {
            "accuracy": (
                _as_drawn(figures.accuracy_curves(self.comparisons)),
                [r for e in self.comparisons for r in e.group.rows],
                "Test top-1 (of text: validation loss) after each epoch, mean over seeds with the range between the "
                "lowest and the highest.",
            ),
            "staleness": (
                _as_drawn(figures.staleness(self.comparisons)), [r for e in self.comparisons for r in e.group.rows],
                figures.staleness_caption(self.comparisons),
            ),
            "late": (
                _as_drawn(draw_late_systems(self._late)),
                [r for e in self._late if e.group is not None for r in e.group.rows], _LATE,
            ),
        }  # fmt: skip

    def _delay_figures(self) -> _Figures:
        """Return those of the studies of delay that have begun."""
        tuning, compared = self._begun("delay-tuning", "delay-finals"), self._begun("delay")
        panels: dict[str, list[Standing]] = {}
        for each in self.standings:
            panels.setdefault(each.study.network, []).append(each)
        return {
            "rates": (
                _as_drawn(rate_curves(self._tunings)), self._rows_of(*(study.name for study in tuning)),
                rate_caption(self._tunings),
            ),
            "differences": (
                _as_drawn(differences(panels)), self._rows_of(*(study.name for study in compared)), _DIFFERENCES,
            ),
        }  # fmt: skip

    def page(self, svgs: Mapping[str, bytes]) -> str:
        """Return the page, with the pictures given."""
        tables = self.tables

        def pictures(*names: str) -> list[Picture]:
            return [Picture(name, svgs[name], self.figures[name].caption) for name in names if name in svgs]

        sections = [
            Section("brief", "In brief", findings=self._findings(pictures)),
            Section("explorer", "Explorer", [_EXPLORER], embedded=explorer_of_equal_layers(_EXPLORED_RANKS)),
            Section("claims", "Claims", tables=[tables["claims"]]),
            Section(
                "memory", "Activation memory", [*answer(self.cases), _MEMORY], pictures=pictures("reduction"),
                folded=pictures("memory"), tables=[tables["memory"]],
            ),
            Section(
                "costs", "Costs", [_COSTS], tables=[tables[f"costs_N{max(EXECUTED_WORKERS)}"], tables["costs_large"]]
            ),
            Section(
                "systems", "Systems", [_SYSTEMS], pictures=pictures("systems", "regret", "late"),
                tables=[tables["systems"], tables["gpipe"], tables["regret"], *self._late_tables()],
            ),
            Section("accuracy", "Accuracy", [_ACCURACY], tables=[tables["accuracy"], tables["tuning"]]),
        ]  # fmt: skip
        if delayed := self._delay_tables:
            sections.append(
                Section(
                    "delay",
                    "What delay costs",
                    [_DELAY, self.advice, *self.goal],
                    pictures=pictures("differences", "rates"),
                    tables=delayed,
                )
            )
        return page("Cyclic data parallelism, executed", [_INTRODUCTION], sections)

    def _findings(self, pictures: Callable[..., list[Picture]]) -> list[Finding]:
        """Return the main findings: the timeline itself, and the claims that a figure shows."""
        by_number = {claim.number: claim for claim in self.claims}
        shown = [
            (by_number[number], pictures(name))
            for number, name in ((1, "peaks"), (2, "communication"), (3, "accuracy"), (6, "staleness"))
        ]
        return [
            Finding(_TIMELINE, "", True, "", pictures("timelines")),
            *(Finding(claim.text, claim.verdict, claim.verdict == HOLDS, claim.brief, them) for claim, them in shown),
        ]


def _as_drawn(figure: Figure | None) -> Callable[[], Figure] | None:
    return None if figure is None else lambda: figure


_INTRODUCTION = (
    "Cyclic data parallelism (Fournier and Oyallon, arXiv 2403.08837) runs the micro-batches of a training step one "
    "after another, at equal distances in time, where data parallelism (DP) runs them at once. This page holds what "
    "was measured by really running that timeline, and compares it with what the paper claims. Below each table stands "
    "what it comes from: runs and their commands, or what was simulated."
)
_TIMELINE = (
    "Data parallelism has all workers on one stage at once; cyclic data parallelism has one worker on each, starting "
    "at equal distances in time"
)
_EXPLORED_RANKS = 3
_EXPLORER = (
    "The programs themselves: what each rank does in each slot, on every system with the same sizes. Hover or tap an "
    "action to see what it reads and writes, from whom, and at which version. cdp-plan --html=FILE writes such a "
    "page for any run."
)
_MEMORY = (
    "Equal stages give (N + 1)/2N. Stage j keeps N - j micro-batches, so bytes in early stages count most: hence the "
    "cut by activation bytes. Running backwards first changes no update; another cut changes, with CDP-v2, which "
    "layers are read late, and so what is trained."
)
_COSTS = (
    "A small network of equal layers on handwritten digits, N = S; each setting was derived by formula, simulated, and "
    "run in processes of its own. Data parallelism on our placements sums gradients along a chain of ranks in the "
    "order of the workers; the libraries' rows say what collectives would send."
)
_SYSTEMS = (
    "Every schedule that people compare is here a timeline, a rule and a placement; cdp-plan --systems compares them "
    "on any model, and below all have run on real ranks. GPipe keeps all micro-batches of a training step, 1F1B as "
    "many as there are ranks; more micro-batches shrink the bubble of all that flush."
)
_CURVES = (
    "Pipelines of 4 ranks with equal stages, from their programs. Left: micro-batches whose activations the first rank "
    "keeps. Right: idle share; one_f_one_b idles as gpipe does, interleaved has two stages a rank, zero_bubble counts "
    "a part of a backward as a slot, and cdp_v2 is never idle."
)
_LATE_STUDY = "cifar10-late-systems"
_LATE = (
    "Test top-1 at the end against how late reads are, a point a seed. All have one learning rate for each image; the "
    "second dp updates after each micro-batch and reads fresh, which tells what small updates do from what delay does."
)
_ACCURACY = (
    "CIFAR-10 here is a copy from JPEG files, re-encoded, so that its numbers are not those of the original. Networks "
    "and epochs are small. Rows of the authors' set-up that say `not run` hold the command that runs it."
)

_DELAY = (
    "Each mode with each method against data parallelism. Every setting is tuned on a seed that no comparison uses: by "
    "the same short runs at the same learning rates, and by runs at full length until the best of them lies between "
    "two worse, which takes three or four. But data parallelism is one setting, and each delayed mode is the best of "
    "several. So the best is judged on fresh seeds."
)
_DIFFERENCES = (
    "Difference of each setting from data parallelism with the same optimizer, at the learning rates of the tables: "
    "mean over seeds with its 95 % interval. Circles give no verdict; where a panel of diamonds follows, they have "
    "chosen the best of each mode, which the diamonds judge on fresh seeds. The grey band is the margin of equivalence "
    "that was stated before. A method that also helps, or hurts, data parallelism has a difference from a better, or "
    "worse, one: the last column of the tables compares all with the first."
)


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
