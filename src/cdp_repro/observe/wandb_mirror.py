"""W&B as a mirror of the run directory: offline unless asked, silent, and never a reason for a run to stop.

Everything that W&B writes lies in run_dir/wandb: its runs, caches, settings, staging and temporary files.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)

_LONGEST_NAME = 128
"""Characters that W&B takes in the name of an artifact."""


class WandbMirror:
    """One W&B run. The first failure of any call is logged as a warning, and later calls do nothing.

    While a call runs, W&B's environment variables point into the run directory; afterwards they are as they were.
    """

    def __init__(self) -> None:
        self._run: Any = None  # wandb.Run; W&B is imported by `start` only
        self._folder = Path()
        self._started = False
        self._failed = False
        self._last_step = 0

    def start(
        self,
        mode: Literal["offline", "online", "disabled"],
        run_dir: Path,
        config: Mapping[str, Any],
        name: str,
        project: str,
        group: str | None = None,
        resume_id: str | None = None,
    ) -> None:
        """Begin a W&B run in run_dir/wandb; `disabled` does nothing, `online` without an API key becomes offline.

        Runs with the same `group`, such as the cells of a sweep, are shown together.
        """
        if mode == "disabled":
            return
        self._folder = Path(run_dir).absolute() / "wandb"
        self._started = True
        self._try("start", lambda: self._init(mode, dict(config), name, project, group, resume_id))

    def log(self, step: int, values: Mapping[str, float | int | str]) -> None:
        """Mirror one row of the metrics."""
        self._log(step, lambda: dict(values))

    def log_table(self, key: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Log `rows`, each as long as `columns`, as a table."""

        def table() -> dict[str, Any]:
            import wandb

            data = [list(row) for row in rows]
            return {key: wandb.Table(columns=list(columns), data=data, allow_mixed_types=True)}

        self._log(self._last_step, table)

    def log_figure(self, key: str, draw: Callable[[], Figure]) -> None:
        """Draw a figure, and log it as a picture, run_dir/wandb/KEY.png."""

        def image() -> dict[str, Any]:
            import wandb

            from cdp_repro.observe.figures import save_figure  # here: matplotlib takes a second

            save_figure(draw(), path := self._folder / f"{key}.png")
            return {key: wandb.Image(str(path))}

        self._log(self._last_step, image)

    def log_artifact(self, name: str, type: str, paths: Sequence[Path]) -> None:
        """Log files, with their bare names, as one artifact; characters that W&B refuses in `name` become "-".

        Of a longer name than W&B takes, the beginning counts.
        """

        def artifact() -> None:
            import wandb

            files = wandb.Artifact(re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII)[:_LONGEST_NAME], type)
            for path in paths:
                if not path.is_file():
                    raise FileNotFoundError(f"{path} is not a file")
                files.add_file(str(path))
            self._run.log_artifact(files)

        self._unless_over("log_artifact", artifact)

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """End the W&B run; after a failure, only close what was logged before it."""
        if not self._started:
            return
        self._unless_over("write the summary", lambda: self._run.summary.update(dict(summary)))
        self._try("finish", lambda: self._end(exit_code))
        self._run, self._started = None, False

    def _log(self, step: int, values: Callable[[], dict[str, Any]]) -> None:
        # W&B drops rows whose step goes back, so late tables and pictures join the newest row.
        self._last_step = max(self._last_step, step)
        self._unless_over("log", lambda: self._run.log({**values(), "step": self._last_step}, step=self._last_step))

    def _unless_over(self, what: str, call: Callable[[], None]) -> None:
        if self._run is not None and not self._failed:
            self._try(what, call)

    def _try(self, what: str, call: Callable[[], None]) -> None:
        try:
            with _inside(self._folder), _without_tracebacks_of_logging():
                call()
        # W&B documents no list of what it raises (its own errors, OSError, TypeError, pydantic's, ConnectionError of
        # its service; SystemExit at the end), and a mirror must not stop the run, whatever it was.
        except (Exception, SystemExit) as error:
            if not self._failed:
                logger.warning("W&B could not %s (%s); going on without", what, _text(error))
            self._failed = True

    def _init(
        self, mode: str, config: dict[str, Any], name: str, project: str, group: str | None, resume_id: str | None
    ) -> None:
        import wandb

        if mode == "online" and not wandb.login(prompt=False):
            logger.warning("W&B has no API key (see `wandb login`); logging offline")
            mode = "offline"
        hooks = sys.exit, sys.excepthook
        try:
            self._run = wandb.init(
                mode=mode,  # type: ignore[arg-type]
                dir=str(self._folder.parent),
                config=config,
                name=name,
                project=project,
                group=group,
                id=resume_id,
                resume="allow" if resume_id and mode == "online" else None,
                reinit="create_new",
                settings=wandb.Settings(
                    silent=True,
                    console="off",
                    disable_git=True,
                    disable_code=True,
                    x_disable_stats=True,  # a process beside the run that would disturb its timing
                    x_disable_meta=True,
                    init_timeout=30,  # seconds; W&B's own limits are 90 and none
                    finish_timeout=300,
                    finish_timeout_raises=True,
                ),
            )
        finally:
            sys.exit, sys.excepthook = hooks  # W&B replaces them and never puts them back
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def _end(self, exit_code: int) -> None:
        import wandb

        try:
            if self._run is not None:
                self._run.finish(exit_code=exit_code)
        finally:
            # The service, perhaps dead, holds our environment; the next run of this process starts one of its own.
            if wandb.run is None:  # unless somebody else in this process uses it
                wandb.teardown()


def previous_run_id(run_dir: Path) -> str | None:
    """Identity of the newest W&B run in run_dir/wandb, for `start(resume_id=)`; None if there is none."""
    # wandb/offline-run-20261121_004339-n16v7acf/run-n16v7acf.wandb
    files = (Path(run_dir) / "wandb").glob("*run-*/run-*.wandb")
    newest = max(files, key=lambda file: file.parent.name.removeprefix("offline-"), default=None)
    return None if newest is None else newest.stem.removeprefix("run-")


def _text(error: BaseException) -> str:
    """Return an error in one line, with the names of W&B's variables in the environment: they are a likely cause."""
    said = "; ".join(line.strip() for line in str(error).splitlines() if "further information" not in line)
    names = ", ".join(sorted(name for name in os.environ if name.startswith("WANDB_")))
    return f"{type(error).__name__}: {said}" + (f"; the environment has {names}" if names else "")


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """Point everything that W&B may write to, temporary files included, into `folder`."""
    places = {f"WANDB_{kind}_DIR": folder / kind.lower() for kind in ("CACHE", "CONFIG", "DATA", "ARTIFACT")}
    places["TMPDIR"] = folder / "tmp"
    if _OF_MATPLOTLIB not in os.environ:
        places[_OF_MATPLOTLIB] = folder / "matplotlib"  # else it writes to the user's home
    for place in places.values():
        place.mkdir(parents=True, exist_ok=True)
    before, temporary = _environment(), tempfile.tempdir
    tempfile.tempdir = str(places["TMPDIR"])
    os.environ.update({name: str(place) for name, place in places.items()}, WANDB_DIR=str(folder.parent))
    os.environ.update(WANDB_SILENT="true")
    try:
        yield
    finally:
        tempfile.tempdir = temporary
        for name in _environment():
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _without_tracebacks_of_logging() -> Iterator[None]:
    """Let W&B's own log, which may lie on a full disk, lose lines instead of printing a traceback for each."""
    before = logging.raiseExceptions
    logging.raiseExceptions = False
    try:
        yield
    finally:
        logging.raiseExceptions = before


def _environment() -> dict[str, str]:
    """The variables that `_inside` or W&B itself may change."""
    ours = ("TMPDIR", _OF_MATPLOTLIB)
    return {name: value for name, value in os.environ.items() if "WANDB" in name or name in ours}


_OF_MATPLOTLIB = "MPLCONFIGDIR"
