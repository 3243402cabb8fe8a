"""Standard streams that are closed or full: what a command prints may be lost, what it does goes on."""

from __future__ import annotations

import errno
import json
import logging
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cdp_repro.cli.console import console_logging, exit_code_of
from cdp_repro.config import ConfigError


def shell(command: str, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `command`, in which PROGRAM stands for a command of the package."""
    program = shlex.join([sys.executable, "-m", f"cdp_repro.cli.{module}", *arguments])
    return subprocess.run(
        ["bash", "-c", command.replace("PROGRAM", program)], capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.parametrize("streams", [">&- 2>&-", ">/dev/full 2>/dev/full", "<&- >&- 2>&-"])
def test_a_run_trains_on_and_writes_its_files(tiny, tmp_path, streams, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # then what could not be written stays to be flushed
    done = shell(
        f"PROGRAM {streams}", "train", *tiny, "workers=2", "placement=replicated", f"run_dir={tmp_path / 'run'}"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "finished"
    assert "epoch 2/2" in (tmp_path / "run" / "logs" / "rank0.log").read_text()
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 12


@pytest.mark.parametrize("arguments", [["workers=2", "batch_size=32"], ["--help"]])
def test_a_command_that_only_prints_says_that_the_disk_is_full(arguments):
    done = shell("PROGRAM >/dev/full", "plan", *arguments)
    assert (done.returncode, done.stderr) == (1, "cannot write to standard output: No space left on device\n")


def test_nobody_who_reads_on_is_no_error():
    done = shell("PROGRAM | true; exit ${PIPESTATUS[0]}", "plan", "--help")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_mistake_is_one_though_nobody_hears_of_it(tmp_path):
    done = shell("PROGRAM 2>&-", "plan", "mode=none")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")
    assert list(Path(tmp_path).iterdir()) == []


def test_matplotlib_says_nothing_of_its_font_cache_between_the_lines_of_a_run():
    console_logging()
    assert not logging.getLogger("matplotlib.font_manager").isEnabledFor(logging.WARNING)
    assert logging.getLogger("cdp_repro").isEnabledFor(logging.INFO)


def test_a_run_whose_summary_is_lost_says_where_it_is(tiny, tmp_path):
    done = shell("PROGRAM > /dev/full", "train", *tiny, f"run_dir={tmp_path / 'run'}")
    assert done.returncode == 0
    assert f"No space left on device; {tmp_path / 'run' / 'summary.json'} has the numbers" in done.stderr


def test_a_name_that_the_encoding_of_the_output_lacks_is_shown_by_escapes(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = shell("PROGRAM", "train", *tiny, f"run_dir={tmp_path / 'häuser'}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == rf"  run directory         {tmp_path}/h\xe4user"


def test_a_run_whose_folder_has_got_a_name_that_is_no_text_goes_on(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "utf-8:strict")
    monkeypatch.chdir(tmp_path)
    assert shell("PROGRAM", "train", *tiny, "run_dir=run").returncode == 0
    Path("run/summary.json").unlink()
    Path("run").rename("\udcff")
    done = shell("PROGRAM resume=$'\\xff'", "train")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == rf"  run directory         {tmp_path}/\udcff"
    assert Path("\udcff/command.txt").read_bytes().endswith(b"cdp-train 'resume=\xff'\n")


def test_a_current_folder_that_is_gone_is_told(tmp_path):
    done = shell(f"mkdir {tmp_path}/gone && cd {tmp_path}/gone && rmdir {tmp_path}/gone && PROGRAM", "plan")
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "error: the current folder does not exist any more: change to another one" in done.stderr


def test_a_path_that_may_not_be_searched_is_named_without_a_traceback(capsys):
    with exit_code_of() as result:
        raise PermissionError(errno.EACCES, "Permission denied", "/closed/run")
    assert result.code == 2
    assert (
        capsys.readouterr().err == "error: /closed/run: Permission denied: give a path that you may read, or write to\n"
    )


def test_what_is_noted_beside_an_error_is_told(capsys):
    error = ConfigError(["workers=0"])
    error.add_note("and the end of the run could not be recorded")
    with exit_code_of() as result:
        raise error
    assert result.code == 2 and "and the end of the run could not be recorded\n" in capsys.readouterr().err


@pytest.mark.parametrize("answer", [["--cfg", "job"], ["--info", "defaults"]])
def test_an_answer_of_hydra_that_nobody_reads_is_no_error(answer):
    assert shell("PROGRAM | true; exit ${PIPESTATUS[0]}", "plan", *answer).returncode == 0
    done = shell("PROGRAM > /dev/full", "plan", *answer)
    assert (done.returncode, done.stderr) == (1, "cannot write to standard output: No space left on device\n")
