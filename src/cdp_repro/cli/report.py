"""`cdp-report`: tables, figures and claims from finished runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cdp_repro.cli.console import exit_code_of, wrapped
from cdp_repro.cli.entry import end_with
from cdp_repro.cli.streams import command, write_out
from cdp_repro.config import ConfigError
from cdp_repro.config.errors import refuse
from cdp_repro.config.keys import settings_of
from cdp_repro.config.paths import typed_path
from cdp_repro.observe.run_directory import RunDirectory, RunDirectoryError
from cdp_repro.observe.text import table as text_table
from cdp_repro.schedule.garbage import without_collection
from cdp_repro.studies.catalog import STUDIES
from cdp_repro.studies.collecting import collect
from cdp_repro.studies.rows import DIVERGED, ROWS, Row, RowError, cell_hash, read_rows, refuse_another, write_row
from cdp_repro.studies.status import status_text

USAGE = f"""usage: cdp-report build   [--results=results] [--root=FOLDER]
       cdp-report check   [--results=results] [--root=FOLDER]
       cdp-report collect [--results=results] [--study=NAME] RUN_DIRECTORY...
       cdp-report status  [--results=results] [--runs=runs/studies] [STUDY...]
       cdp-report sweep   SWEEP_DIRECTORY --x=KEY --y=NUMBER
                          [--group=KEY,...] [--out=FOLDER]

Rebuild the paper's tables and figures from finished runs; show the results of
any sweep.

  build    write tables (.md, .csv, .tex), figures (.svg, .png) and report.html
           from the rows in results/rows, and renew the marked parts of
           README.md and docs/ below --root, by default the folder around
           --results; trains nothing, takes seconds
  check    exit 1 if one of these files differs from what the rows give; a
           picture, if its data do
  collect  keep what the tables need of finished runs as rows in
           results/rows/STUDY; without --study the study whose runs they are. A
           study of your own (--study=mine) gets lines in the accuracy table
  status   show each run of the studies: state, progress, log
  sweep    show a number of each finished run of a sweep, such as
           eval/top1_percent, against a setting, or against --x=epoch: mean and
           spread over seeds, a line for each value of --group=, by default of
           all that differs beside x; write it as .csv, .svg and .png into
           SWEEP_DIRECTORY, or FOLDER

{wrapped(f"Studies: {', '.join(STUDIES)}.", 9)}

scripts/accuracy.py, scripts/memory.py and scripts/costs.py train what is
missing, here or on SLURM.
"""


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0, 1 if `check` finds a difference, 2 for the user's mistakes."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    commands: dict[str, Callable[[dict[str, str], list[str]], int]] = {
        "build": _build, "check": _check, "collect": _collect, "status": _status, "sweep": _sweep,
    }  # fmt: skip
    if not arguments or {"--help", "-h"} & set(arguments):
        write_out(USAGE)
        return 0 if arguments else 2
    name, *rest = arguments
    with exit_code_of() as result:
        if name not in commands:
            raise ConfigError([f"unknown command {name!r}: choose {', '.join(commands)}"])
        given = [text for text in rest if text.startswith("--") and "=" in text]
        options = dict(text.removeprefix("--").split("=", 1) for text in given)
        words = [text for text in rest if text not in given]
        refuse([*_unknown(name, options, words), *_wrong_words(name, words), *_repeated(given)])
        result.code = commands[name](options, words)
    return result.code


_OPTIONS = {
    "build": {"results", "root"},
    "check": {"results", "root"},
    "collect": {"results", "study"},
    "status": {"results", "runs"},
    "sweep": {"x", "y", "group", "out"},
}


def _unknown(command: str, options: dict[str, str], words: Sequence[str]) -> Iterator[str]:
    """Yield a sentence if there are options or words that the command does not take."""
    wrong = [f"--{name}=" for name in options if name not in _OPTIONS[command]]
    wrong += [word for word in words if word.startswith("-") or command in ("build", "check")]
    if wrong:
        takes = ", ".join(f"--{name}=" for name in sorted(_OPTIONS[command]))
        yield f"cdp-report {command} knows no {', '.join(wrong)}: it takes {takes} (see cdp-report --help)"


def _wrong_words(command: str, given: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for words, i.e. arguments that are not options, that the command cannot use."""
    words = [word for word in given if not word.startswith("-")]
    if command == "collect" and not words:
        yield "cdp-report collect needs the directory of a finished run"
    if command == "sweep" and len(words) != 1:
        yield f"cdp-report sweep takes one directory of a sweep, not {' '.join(words) or 'none'}"
    if command == "status" and (unknown := [word for word in words if word not in STUDIES]):
        yield f"unknown study {', '.join(unknown)}: choose {', '.join(STUDIES)}"


def _repeated(options: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each option that is given more than once."""
    values: dict[str, list[str]] = {}
    for text in options:
        name, _, value = text.partition("=")
        values.setdefault(name, []).append(value)
    for name, found in values.items():
        if len(found) > 1:
            one = f"{name}={','.join(found)}" if name == "--group" else f"one of {', '.join(found)}"
            yield f"{name}= is given {len(found)} times: give {one}"


def _files(options: dict[str, str], draws: bool) -> dict[Path, bytes]:
    results = Path(typed_path(options.get("results", "results")))
    if not results.is_dir():
        raise ConfigError([f"there is no folder {results}: go to the project's folder, or pass --results="])
    from cdp_repro.report.build import build, drawn, marked, undrawn  # here: matplotlib and scipy take seconds

    root = Path(typed_path(options["root"])) if "root" in options else results.resolve().parent
    if "root" in options and not (root / "README.md").is_file():
        raise ConfigError(
            [f"--root={root} holds no README.md, and so no documents to renew: give the project's folder"]
        )
    with without_collection():
        return build(results, marked(root), drawn if draws else undrawn)


def _build(options: dict[str, str], words: list[str]) -> int:  # noqa: ARG001 - as all commands
    files = _files(options, draws=True)
    from cdp_repro.report.build import write

    written = write(files)
    write_out("".join(f"{path}\n" for path in written) + f"{len(written)} files changed\n")
    return 0


def _check(options: dict[str, str], words: list[str]) -> int:  # noqa: ARG001 - as all commands
    files = _files(options, draws=False)
    from cdp_repro.report.build import stale

    differing = stale(files)
    write_out("".join(f"{sentence}\n" for sentence in differing))
    write_out("run cdp-report build\n" if differing else "everything is what the rows give\n")
    return 1 if differing else 0


def _collect(options: dict[str, str], words: list[str]) -> int:
    folder = Path(typed_path(options.get("results", "results"))) / ROWS
    study, rows = options.get("study"), list[Row]()
    problems = []
    if study is not None and not study.replace("-", "").replace("_", "").isalnum():
        problems.append(f"--study={study}: use letters, digits, - and _, as it names a folder")
    for word in words:
        try:
            row = _with_study(Path(typed_path(word)), study)
            refuse_another(row, folder)
            rows.append(row)
        except (ConfigError, RunDirectoryError, RowError) as error:
            problems.append(str(error))
    refuse([*problems, *_twice(rows), *_mixed_with_others(rows, folder)])  # before any row is written
    for row in rows:
        write_out(f"{write_row(row, folder)}\n")
    return 0


def _twice(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a sentence for each row whose file an earlier one with other content would take."""
    first: dict[tuple[str, str, int], Row] = {}
    for row in rows:
        other = first.setdefault((row.study, row.cell, row.seed), row)
        if other != row:
            yield (
                f"{other.source} and {row.source} are runs of one cell and seed, for the study {row.study}, with other "
                "numbers: give one of them"
            )


def _mixed_with_others(rows: Sequence[Row], folder: Path) -> Iterator[str]:
    """Yield a sentence for each study of the user's own whose runs, with these, could not be averaged."""
    from cdp_repro.report.groups import grouped  # here: scipy takes a moment

    for study in {row.study: None for row in rows if row.study not in STUDIES}:
        try:
            alike = {row.file_name: row for row in (*read_rows(folder / study), *rows) if row.study == study}
            grouped(alike.values())
        except RowError as error:
            yield str(error)


def _with_study(run_dir: Path, study: str | None) -> Row:
    """Return the row of a run, for the given study or else for the first study that lists the run, with its seed.

    A study of the user's own takes any run. Only studies that count divergence have rows of a run that has diverged, so
    these come first then.
    """
    if study is not None and study not in STUDIES:
        return collect(run_dir, study)
    run = RunDirectory.open(run_dir)
    config = run.config_at_end()
    own, seed = cell_hash(settings_of(config)), config.get("seed")
    asked = [STUDIES[study]] if study else [*STUDIES.values()]
    its = [each for each in asked if any(cell.hash == own and seed in cell.seeds for cell in each.cells)]
    if run.summary().get("status") == DIVERGED:
        its.sort(key=lambda study: not study.counts_divergence)  # keeps the order otherwise
    if not its:
        which = f"is no run of the study {study}" if study else f"belongs to none of the studies {', '.join(STUDIES)}"
        raise ConfigError([f"{run_dir} with seed={seed} {which}: name one of yours by --study=NAME"])
    return collect(run_dir, its[0].name, its[0].counts_divergence)


def _status(options: dict[str, str], words: list[str]) -> int:
    studies = [STUDIES[word] for word in words or STUDIES]
    write_out(
        status_text(
            studies,
            Path(typed_path(options.get("runs", "runs/studies"))),
            Path(typed_path(options.get("results", "results"))),
        )
    )
    return 0


def _sweep(options: dict[str, str], words: list[str]) -> int:
    root = Path(typed_path(words[0]))
    folder = Path(typed_path(options["out"])) if options.get("out") else root
    group = [key for key in options["group"].split(",") if key] if "group" in options else None
    from cdp_repro.report.sweep_results import sweep_results  # here: scipy takes a second

    results = sweep_results(root, options.get("x"), options.get("y"), group)
    table = results.table()
    write_out("\n".join([text_table([table.columns, *table.rows]), "", *table.notes, ""]))
    for name, why in results.left_out.items():
        write_out(f"not in it: {name} ({why})\n")
    from cdp_repro.report.sweep_figure import write_sweep

    write_out("written: " + " ".join(map(str, write_sweep(results, folder))) + "\n")
    return 0


if __name__ == "__main__":
    end_with(main)
