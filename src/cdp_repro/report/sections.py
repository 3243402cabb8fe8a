"""The page of the report: its sections in order, with their texts, figures and tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from cdp_repro.report.activation_memory import answer
from cdp_repro.report.claims import HOLDS, Claim
from cdp_repro.report.contents import Report
from cdp_repro.report.explorer import explorer_of_equal_layers
from cdp_repro.report.page import Finding, Picture, Section, page
from cdp_repro.report.pictures import Shown
from cdp_repro.studies.cost_settings import EXECUTED_WORKERS

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
_ACCURACY = (
    "CIFAR-10 here is a copy from JPEG files, re-encoded, so that its numbers are not those of the original. Networks "
    "and epochs are small. Rows of the authors' set-up that say `not run` hold the command that runs it."
)
_DELAY = (
    "Each mode with each method against data parallelism. Every setting is tuned on a seed that no comparison uses: "
    "first by short runs at the same learning rates, then by three or four runs at full length, until the best lies "
    "between two worse ones. But data parallelism is one setting, and each delayed mode is the best of several. So the "
    "best is judged on fresh seeds."
)


def page_of(report: Report, shown: Mapping[str, Shown], svgs: Mapping[str, bytes]) -> str:
    """Return the page of the report, with those of its figures that are given as SVG."""
    tables = report.tables

    def pictures(*names: str) -> list[Picture]:
        return [Picture(name, svgs[name], shown[name].caption) for name in names if name in svgs]

    sections = [
        Section("brief", "In brief", findings=_findings(report.claims, pictures)),
        Section("explorer", "Explorer", [_EXPLORER], embedded=explorer_of_equal_layers(_EXPLORED_RANKS)),
        Section("claims", "Claims", tables=[tables["claims"]]),
        Section(
            "memory", "Activation memory", [*answer(report.cases), _MEMORY], pictures=pictures("reduction"),
            folded=pictures("memory"), tables=[tables["memory"]],
        ),
        Section(
            "costs", "Costs", [_COSTS], tables=[tables[f"costs_N{max(EXECUTED_WORKERS)}"], tables["costs_large"]]
        ),
        Section(
            "systems", "Systems", [_SYSTEMS], pictures=pictures("systems", "regret", "late"),
            tables=[tables["systems"], tables["gpipe"], tables["regret"], *report.late_tables()],
        ),
        Section("accuracy", "Accuracy", [_ACCURACY], tables=[tables["accuracy"], tables["tuning"]]),
    ]  # fmt: skip
    if delayed := report.delay_tables:
        sections.append(
            Section(
                "delay",
                "What delay costs",
                [_DELAY, report.advice, *report.goal],
                pictures=pictures("differences", "rates"),
                tables=delayed,
            )
        )
    return page("Cyclic data parallelism, executed", [_INTRODUCTION], sections)


def _findings(claims: Sequence[Claim], pictures: Callable[..., list[Picture]]) -> list[Finding]:
    """Return the main findings: the timeline itself, and the claims that a figure shows."""
    by_number = {claim.number: claim for claim in claims}
    shown = [
        (by_number[number], pictures(name))
        for number, name in ((1, "peaks"), (2, "communication"), (3, "accuracy"), (6, "staleness"))
    ]
    return [
        Finding(_TIMELINE, "", True, "", pictures("timelines")),
        *(Finding(claim.text, claim.verdict, claim.verdict == HOLDS, claim.brief, them) for claim, them in shown),
    ]
