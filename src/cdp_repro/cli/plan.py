"""`cdp-plan`: shows what a run will do, without running it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from cdp_repro.cli.command_line import Command, CommandLine
from cdp_repro.cli.entry import end_with
from cdp_repro.cli.streams import command, write_out
from cdp_repro.config import ConfigError, RunConfig
from cdp_repro.config.compose import compose_config
from cdp_repro.config.keys import defaults
from cdp_repro.config.paths import typed_path
from cdp_repro.config.program_file import with_header_of_program
from cdp_repro.config.schema import ClusterConfig
from cdp_repro.launch.environment import usable_cores
from cdp_repro.observe.atomic_file import replace_file
from cdp_repro.schedule import Program
from cdp_repro.schedule.program_text import write_program

USAGE = """usage: cdp-plan [--systems] [--out=FOLDER] [--program=FILE] [--html=FILE]
                [key=value ...]

Show the timeline, the stage cuts and the activation memory of the run that
`cdp-train` with the same values would make, beside data parallelism. Needs no
data, and takes seconds for any network: it computes nothing, unless
partition=time or cluster.calibrate=true measure.

  cdp-plan mode=cdp_v2 workers=4
  cdp-plan dataset=imagenet model=resnet50 partition=activations

With --out also as SVG, PNG, CSV and Perfetto traces in a folder; with --program
all ranks' actions as text, which cdp-plan and cdp-verify read again, edited by
hand or not; with --html one page to scroll, zoom, play and ask what an action
reads and writes, for all systems on the same sizes:

  cdp-plan mode=cdp_v1 --out=plan
  cdp-plan mode=cdp_v2 placement=zero --program=zero.txt
  cdp-plan program=zero.txt
  cdp-plan mode=cdp_v2 workers=4 --html=plan.html

With --systems compare every system of the field on the same model,
micro-batches and ranks: idle share, bytes, messages, staleness; with price=true
and a cluster, seconds; with --out one picture of all timelines:

  cdp-plan --systems workers=4 accumulate=2 --out=systems

With price=true show instead what a training step takes on a cluster, with --out
as a figure and a CSV, too: for dp, cdp_v1, cdp_v2 and the chosen mode on every
placement that can run them, for accumulation on one device, and for the
baselines. The cluster is described, or measured on this machine:

  cdp-plan price=true cluster.flops_per_second=1e13
  cdp-plan price=true cluster.calibrate=true --out=prices
"""


def _run(line: CommandLine) -> int:
    folder, program, page = (_output(line, name) for name in ("out", "program", "html"))
    config = compose_config(with_header_of_program(line.overrides), check_device=False, source=line.source)
    if config.cluster != ClusterConfig() and not config.price:
        raise ConfigError(["cluster.* describes the machines of a price: add price=true"])
    if program and config.price:
        raise ConfigError(["--program=FILE writes the program of one run, price=true prices many: leave one out"])
    if page and config.price:
        raise ConfigError(["--html=FILE shows what runs, price=true how long it takes: leave one out"])
    if program and config.baseline:
        raise ConfigError(
            [f"--program=FILE writes our programs, baseline={config.baseline} runs torch's: leave one out"]
        )
    if config.baseline and not config.price:
        raise ConfigError(
            [f"baseline={config.baseline} runs torch's own loop, which has no plan: leave it out, or give price=true"]
        )
    if config.program and (line.flags or config.price or page or program):
        other = "--systems" if line.flags else "price=true" if config.price else "--html" if page else "--program"
        raise ConfigError([f"program=FILE is planned as it is, {other} is about programs that are made: leave one out"])
    if program and line.flags:
        raise ConfigError(["--program=FILE writes the program of one run, --systems shows many: leave one out"])
    drawn = _page(config) if page else None  # first, as it may be refused
    answer = _systems if line.flags else _quote if config.price else _plan
    text, write, chosen = answer(config)
    write_out(text)
    if folder:
        try:
            written = write(folder)
        except OSError as error:
            raise ConfigError([f"--out={folder}: cannot write there: {error.strerror}"]) from error
        write_out("\nwritten: " + " ".join(map(str, written)) + "\n")
    if program and chosen is not None:
        _write("program", program, write_program(chosen))
    if page and drawn:
        text, left_out = drawn
        _write("html", page, text)
        if left_out:
            write_out(f"left out, so that the page stays small: {'; '.join(left_out)}\n")
    return 0


def _output(line: CommandLine, option: str) -> Path | None:
    """Return the path that an option names, if it is given.

    Raises:
        ConfigError: it names nothing, or nothing can be written there; checked before the plan takes seconds.
    """
    text = line.options.get(option)
    if text is None:
        return None
    kind = "folder" if option == "out" else "file"
    if not text:
        raise ConfigError([f"--{option}= names no {kind}: give --{option}={kind.upper()}"])
    key, is_pair, _ = text.partition("=")
    if is_pair and (line.source.is_group(key) or key in defaults()):
        raise ConfigError([f"--{option} took {text} for the name of a {kind}: give --{option}={kind.upper()} {text}"])
    path, wrong = Path(typed_path(text)), ""
    if option == "out":
        wrong = "is a file" if path.exists() and not path.is_dir() else ""
    elif path.is_dir():
        wrong = "is a folder"
    elif not path.parent.is_dir():
        wrong = f"would lie in {path.parent}, which is no folder"
    if wrong:
        raise ConfigError([f"--{option}={path} {wrong}: give the name of a {kind}"])
    return path


def _page(config: RunConfig) -> tuple[str, list[str]]:
    """Return the explorer: a page with the run, data parallelism, and all systems that can have the run's sizes.

    Also return the names of systems that it leaves out.
    """
    from cdp_repro.predict.systems import explored  # here: torch takes seconds
    from cdp_repro.report.explorer import explorer

    sizes = f"{config.model.name}, N = {config.workers} workers, mini-batch {config.batch_size}"
    return explorer(sizes, explored(config))


def _write(option: str, path: Path, text: str) -> None:
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise ConfigError([f"--{option}={path}: cannot write there: {error.strerror}"]) from error
    write_out(f"\n{option}: {path}\n")


Answer = tuple[str, Callable[[Path], list[Path]], Program | None]
"""The text to show, a function that writes the same as files into a folder, and the program if only one is shown."""


def _plan(config: RunConfig) -> Answer:
    from cdp_repro.predict.forecast import make_plan, plan_text, write_plan  # here: torch takes seconds

    plan = make_plan(config)
    return plan_text(plan, shutil.get_terminal_size((120, 24)).columns), partial(write_plan, plan), plan.chosen.program


def _systems(config: RunConfig) -> Answer:
    from cdp_repro.predict import systems as of_all  # here: torch takes seconds

    of_all.refuse_sizes_of_one_system(config)
    systems = of_all.compare_systems(config)
    return of_all.systems_text(systems, config), partial(of_all.write_systems, systems), None


def _quote(config: RunConfig) -> Answer:
    from cdp_repro.predict.pricing.quote import make_quote, quote_text, write_quote  # here: torch takes seconds

    quote = make_quote(config, processes=usable_cores())
    return quote_text(quote), partial(write_quote, quote), None


COMMAND = Command("cdp-plan", USAGE, _run, options=("out", "program", "html"), flags=(("--systems",),))
main = command(COMMAND.main)

if __name__ == "__main__":
    end_with(main)
