"""The run directory, its metrics, and what the mirror on W&B receives (real offline runs, read back)."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from offline_wandb import history, records, wandb_files

from cdp_repro.observe import atomic_file, metrics, run_directory, trace_files
from cdp_repro.observe.metrics import MetricsLog, read_metrics
from cdp_repro.observe.run_directory import RunDirectory, RunDirectoryError
from cdp_repro.observe.wandb_mirror import WandbMirror, _text, previous_run_id
from cdp_repro.predict.costs import StageCosts
from cdp_repro.predict.simulate import simulate
from cdp_repro.schedule import Program, Schedule

CONFIG = {
    "mode": "cdp_v2",
    "optim": {"lr": 1e-5, "betas": [0.9, 0.999], "nesterov": False, "schedule": None},
    "staleness": [[0, 1], [1, 1]],
    "looks_like": ["1e-4", "null", "on", "007", "a: b", "ünïcode", ""],
    "limit": float("inf"),
}
COMMAND = ["cdp-train", "mode=cdp_v2", "note=two words & a 'quote'"]


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


# ---- the run directory


def test_a_look_whether_a_run_is_being_trained_does_not_keep_it_from_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory.create(tmp_path / "run", CONFIG, COMMAND)
    look = (run.path / "logs" / ".lock").open("w")
    fcntl.flock(look, fcntl.LOCK_SH)
    monkeypatch.setattr(time, "sleep", lambda _: look.close())  # a moment later
    with run.locked():
        assert look.closed


def test_create_then_open_gives_the_same_configuration_and_commands(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "a" / "b", CONFIG, COMMAND)
    assert names(run.path) == ["checkpoints", "command.txt", "config.yaml", "logs"]
    again = RunDirectory.open(run.path)
    assert again.config() == CONFIG
    again.add_command(["cdp-train", f"resume={run.path}"])
    first, second = (run.path / "command.txt").read_text().splitlines()
    assert second.startswith("cdp-train resume=")
    assert first == """cdp-train mode=cdp_v2 'note=two words & a '"'"'quote'"'"''""" and second.startswith(
        "cdp-train r"
    )


def test_every_path_lies_in_the_directory_under_its_known_name(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", {}, ["x"])
    paths = [run.metrics_path, run.summary_path, run.trace_path, run.memory_path, run.comms_path, run.checkpoints_path]
    known = ["metrics.jsonl", "summary.json", "trace.json", "memory.csv", "comms.csv", "checkpoints", "logs/rank3.log"]
    assert [str(path.relative_to(run.path)) for path in [*paths, run.log_path(3)]] == known
    run.log_path(3).write_text("logs/ exists")


def test_an_empty_directory_is_accepted_and_a_relative_path_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)
    assert RunDirectory.create(Path("run"), {}, ["x"]).path == tmp_path / "run"


@pytest.mark.parametrize("marker", ["config.yaml", "metrics.jsonl"])
def test_another_run_is_refused_with_both_ways_out(tmp_path: Path, marker: str) -> None:
    (tmp_path / marker).write_text("precious")
    with pytest.raises(RunDirectoryError, match=f"another run: it holds {marker}") as caught:
        RunDirectory.create(tmp_path, CONFIG, COMMAND)
    assert "another run_dir=" in str(caught.value) and f"resume={tmp_path}" in str(caught.value)
    assert names(tmp_path) == [marker] and (tmp_path / marker).read_text() == "precious"


def test_other_files_or_a_file_in_the_way_are_refused_and_kept(tmp_path: Path) -> None:
    for number in range(7):
        (tmp_path / f"photo{number}").write_text("mine")
    with pytest.raises(RunDirectoryError, match="holds photo0, photo1, photo2, photo3, photo4 and 2 more"):
        RunDirectory.create(tmp_path, CONFIG, COMMAND)
    with pytest.raises(RunDirectoryError, match="photo0 is taken: it is a file"):
        RunDirectory.create(tmp_path / "photo0", CONFIG, COMMAND)
    with pytest.raises(RunDirectoryError, match="Not a directory"):
        RunDirectory.create(tmp_path / "photo0" / "run", CONFIG, COMMAND)
    assert names(tmp_path) == [f"photo{number}" for number in range(7)]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "command.txt").write_text("of another program")  # a killed run leaves a claim beside it
    with pytest.raises(RunDirectoryError, match=r"is taken: it holds command\.txt"):
        RunDirectory.create(tmp_path / "mine", CONFIG, COMMAND)
    assert (tmp_path / "mine" / "command.txt").read_text() == "of another program"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a place where not even root can make a folder")
def test_a_place_that_cannot_be_written_is_named() -> None:
    with pytest.raises(RunDirectoryError, match=r"cannot make the run directory /proc/run.*run_dir="):
        RunDirectory.create(Path("/proc/run"), CONFIG, COMMAND)


def test_of_two_runs_that_start_at_once_one_is_refused(tmp_path: Path) -> None:
    class Late(RunDirectory):
        def _claimed(self) -> AbstractContextManager[None]:
            RunDirectory.create(self.path, {"first": 1}, COMMAND)  # after our look, before our claim
            return super()._claimed()

    with pytest.raises(RunDirectoryError, match="already holds another run"):
        Late.create(tmp_path / "run", {"second": 2}, COMMAND)
    assert RunDirectory.open(tmp_path / "run").config() == {"first": 1}
    assert ".claim" not in names(tmp_path / "run")


def test_where_a_process_trains_no_way_to_go_on_is_named(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", CONFIG, COMMAND)
    for is_trained, said in (
        (False, r"or go on with that run by resume=\S+ restart=true"),
        (True, "another process is"),
    ):
        with run.locked() if is_trained else nullcontext(), pytest.raises(RunDirectoryError, match=said):
            RunDirectory.create(run.path, CONFIG, COMMAND)


KILLED = """
import os, signal, sys
from pathlib import Path
from cdp_repro.observe import run_directory
moment = sys.argv[2]
honest = run_directory.replace_file
def replace_file(path, data):
    if path.name == "command.txt" and moment != "first":
        return honest(path, data)
    if moment == "within":
        path.with_name(f".{path.name}.new").write_bytes(data[:1])
    if moment == "after":
        honest(path, data)
    os.kill(os.getpid(), signal.SIGKILL)
run_directory.replace_file = replace_file
run_directory.RunDirectory.create(Path(sys.argv[1]), {"a": 1}, ["x"])
"""


@pytest.mark.parametrize("moment", ["first", "before", "within"])
def test_a_run_killed_before_it_has_its_configuration_can_begin_again(tmp_path: Path, moment: str) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "run"), moment], check=False)
    assert ".claim" in names(tmp_path / "run")
    run = RunDirectory.create(tmp_path / "run", CONFIG, COMMAND)
    assert names(run.path) == ["checkpoints", "command.txt", "config.yaml", "logs"] and run.config() == CONFIG
    assert (run.path / "command.txt").read_text().count("\n") == 1, "that of the killed one is gone"


def test_a_run_killed_after_it_has_its_configuration_goes_on(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "run"), "after"], check=False)
    with pytest.raises(RunDirectoryError, match=rf"go on with that run by resume={tmp_path}/run restart=true$"):
        RunDirectory.create(tmp_path / "run", CONFIG, COMMAND)
    with RunDirectory.open(tmp_path / "run").locked() as run:
        assert run.config() == {"a": 1} and (run.path / "command.txt").read_text() == "x\n"


def test_open_refuses_what_is_not_a_run_and_says_what_to_pass(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", CONFIG, COMMAND)
    with pytest.raises(RunDirectoryError, match=rf"it is empty, and no config.yaml.*give {run.path}$"):
        RunDirectory.open(run.checkpoints_path)
    with pytest.raises(RunDirectoryError, match="is not a run directory: it does not exist; give the directory of an"):
        RunDirectory.open(tmp_path / "absent")
    with pytest.raises(RunDirectoryError, match="is not a run directory: it is a file; it lies in one: give"):
        RunDirectory.open(run.path / "command.txt")
    with pytest.raises(RunDirectoryError, match="holds run, and no config"):
        RunDirectory.open(tmp_path)


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str) -> None:
    run = RunDirectory.create(tmp_path / "run", CONFIG, COMMAND)
    (run.path / name).unlink(missing_ok=True)
    os.mkfifo(run.path / name)
    with pytest.raises(RunDirectoryError, match=f"{name} is no regular file: move it away"):
        RunDirectory.open(run.path)


@pytest.mark.parametrize("name", ["checkpoints", "metrics.jsonl", "summary.json"])
def test_a_link_that_leads_to_nothing_is_told_before_training(tmp_path: Path, name: str) -> None:
    run = RunDirectory.create(tmp_path / "run", CONFIG, COMMAND)
    if name == "checkpoints":
        run.checkpoints_path.rmdir()
    (run.path / name).symlink_to("nothing/there")
    with pytest.raises(RunDirectoryError, match=f"{name} is a link that leads to nothing: move it away"):
        RunDirectory.open(run.path)
    if name == "metrics.jsonl":
        with pytest.raises(RunDirectoryError, match="cannot write to"):
            MetricsLog(run.metrics_path)


def test_a_file_system_without_locks_is_not_taken_for_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory.create(tmp_path / "run", CONFIG, COMMAND)

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_directory.fcntl, "flock", no_locks)
    with pytest.raises(RunDirectoryError, match=r"run cannot be locked: No locks available\. Pass"), run.locked():
        pass


def test_of_an_offline_and_an_online_part_the_newer_is_gone_on_with(tmp_path: Path) -> None:
    for folder in ("offline-run-20260101_000000-aaaa", "run-20260102_000000-bbbb"):
        (tmp_path / "wandb" / folder).mkdir(parents=True)
        (tmp_path / "wandb" / folder / f"run-{folder[-4:]}.wandb").touch()
    assert previous_run_id(tmp_path) == "bbbb"
    newest = tmp_path / "wandb" / "offline-run-20260103_000000-cccc"
    newest.mkdir()
    (newest / "run-cccc.wandb").touch()
    assert previous_run_id(tmp_path) == "cccc"


def test_a_copy_that_is_being_replaced_is_a_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    assert run_directory.arguments_to_go_on(tmp_path) == [f"resume={tmp_path}", "restart=true"]
    for name in ("step-000000004", ".replaced-step-000000008"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert run_directory.newest_checkpoint(tmp_path) == tmp_path / "checkpoints" / ".replaced-step-000000008"
    (tmp_path / "checkpoints" / "step-000000004").rmdir()
    assert run_directory.arguments_to_go_on(tmp_path) == [f"resume={tmp_path}"]


def test_a_command_line_that_is_no_text_comes_back_as_it_was(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", {"seed": 0}, ["cdp-train"])
    run.add_command(["cdp-train", "dataset.root=\udcff"])
    assert shlex.split(run.commands()[1]) == ["cdp-train", "dataset.root=\udcff"]


@pytest.mark.parametrize("another_run_begins", [False, True])
def test_nothing_is_written_where_the_run_is_no_longer(tmp_path: Path, another_run_begins: bool) -> None:
    ours = RunDirectory.create(tmp_path / "run", {"seed": 0}, ["cdp-train"])
    with ours.locked():
        ours.write_summary({"status": "stopped"})
        shutil.rmtree(ours.path)
        if another_run_begins:
            other = RunDirectory.create(tmp_path / "run", {"seed": 1}, ["cdp-train"])
            with (
                other.locked(),
                pytest.raises(RunDirectoryError, match="was moved, removed or replaced while this run"),
            ):
                ours.write_summary({"status": "finished"})
            assert other.summary() == {} and other.config() == {"seed": 1}
        else:
            with pytest.raises(RunDirectoryError, match="it gets no more files"):
                ours.refuse_replaced()
            assert not ours.path.exists()


def test_a_lock_file_that_is_deleted_ends_no_run(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", {"seed": 0}, ["cdp-train"])
    with run.locked():
        shutil.rmtree(run.path / "logs")
        run.write_summary({"status": "finished"})
    assert run.summary() == {"status": "finished"}


def test_a_new_run_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_directory, "replace_file", _full)
    with pytest.raises(RunDirectoryError, match="No space left on device"):
        RunDirectory.create(tmp_path / "deep" / "er" / "run", CONFIG, COMMAND)
    assert not names(tmp_path)


def test_a_path_too_long_for_the_files_of_a_run_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path.joinpath(*["b" * 200] * 19)
    path /= "c" * (4001 - 1 - len(str(path)))
    with pytest.raises(RunDirectoryError, match=r"has 4001 bytes, and its files need more: use at most 4000$"):
        RunDirectory.create(path, CONFIG, COMMAND)
    assert not names(tmp_path)


def test_a_run_beside_the_list_of_a_sweep_is_one_of_its_cells(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "mine" / "seed=0", CONFIG, COMMAND)
    assert run.sweep is None
    (tmp_path / "mine" / "sweep.json").touch()
    assert run.sweep == "mine"


def test_a_log_of_wandbs_on_a_full_disk_prints_no_tracebacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = logging.getLogger("of-wandb")
    theirs.addHandler(handler := logging.FileHandler("/dev/full"))
    mirror = WandbMirror()
    mirror._folder = tmp_path / "wandb"
    try:
        mirror._try("log", lambda: theirs.error("a line that does not fit"))
        assert capsys.readouterr().err == ""
        theirs.error("outside a call")
        assert "--- Logging error ---" in capsys.readouterr().err
    finally:
        theirs.removeHandler(handler)


def test_a_run_that_cannot_be_written_is_read_and_not_trained(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", CONFIG, COMMAND)
    (run.path / "logs" / ".lock").mkdir()
    with pytest.raises(RunDirectoryError, match=rf"cannot write to {run.path}: .*bytes free"), run.locked():
        pass
    shutil.rmtree(run.path / "logs")
    assert RunDirectory.open(run.path).config() == CONFIG and "logs" not in names(run.path)


@pytest.mark.parametrize("text", ["a: [1", "- 1\n- 2\n", "\x00", ""])
def test_a_damaged_configuration_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(RunDirectoryError, match=r"config\.yaml"):
        RunDirectory.open(tmp_path)


def test_the_summary_is_replaced_whole_and_is_valid_json(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", {}, ["x"])
    run.write_summary({"eval/top1_percent": 12.5, "train/loss": math.nan, "per_stage": [1, math.inf]})
    run.write_summary({"train/loss": -math.inf, "nested": {"x": (math.nan, "a")}})
    assert strict_json(run.summary_path.read_text()) == {"train/loss": "-Infinity", "nested": {"x": ["NaN", "a"]}}
    with pytest.raises(TypeError):
        run.write_summary({"bad": object()})
    assert "summary.json" in names(run.path) and not [name for name in names(run.path) if name.startswith(".")]
    assert strict_json(run.summary_path.read_text())["train/loss"] == "-Infinity"


def _full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_named_wherever_the_run_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = RunDirectory.create(tmp_path / "run", {"seed": 0}, ["cdp-train"])
    log = MetricsLog(directory.metrics_path)
    log.log(1, {"train/loss": 1.0})
    for module in (metrics, run_directory, atomic_file):
        monkeypatch.setattr(module, "replace_file", _full)
    (directory.path / "command.txt").unlink()
    (directory.path / "command.txt").symlink_to("/dev/full")
    trace = simulate(Program(Schedule.build("cdp_v2", 2, 2)), StageCosts.equal(2), 3)
    writes = {
        "command.txt": lambda: directory.add_command(["cdp-train"]),
        "metrics.jsonl": lambda: log.truncate_after(0),
        "summary.json": lambda: directory.write_summary({}),
        "trace.json": lambda: trace_files.write_trace_files(trace, directory, lambda rank, stage: 1),
    }
    for name, write in writes.items():
        with pytest.raises(RunDirectoryError, match=rf"cannot write to .*/run/{name}: No space left .* bytes free"):
            write()
    assert directory.metrics_path.read_text().count("\n") == 1


def test_where_even_the_folder_cannot_be_made_the_free_space_is_that_around_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "logs" / "rank0.log"
    with pytest.raises(RunDirectoryError, match=rf"cannot write to {path}: .*bytes free"), run_directory.writing(path):
        path.parent.mkdir(parents=True)


@pytest.mark.parametrize("name", ["logs", "checkpoints"])
def test_a_file_in_place_of_a_folder_is_named(tmp_path: Path, name: str) -> None:
    run = RunDirectory.create(tmp_path / "run", CONFIG, COMMAND)
    (run.path / name).rmdir()
    (run.path / name).write_text("x")
    with pytest.raises(RunDirectoryError, match=f"{name} is a file, expected a folder: move it away"):
        RunDirectory.open(run.path)


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "command.txt"])
def test_a_folder_in_place_of_a_file_is_named(tmp_path: Path, name: str) -> None:
    run = RunDirectory.create(tmp_path / "run", CONFIG, COMMAND)
    (run.path / name).unlink(missing_ok=True)
    (run.path / name).mkdir()
    with pytest.raises(RunDirectoryError, match=f"{name} is a folder, expected a file: move it away"):
        RunDirectory.open(run.path)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "null"])
def test_a_damaged_summary_is_named_with_a_way_on(tmp_path: Path, text: str) -> None:
    run = RunDirectory.create(tmp_path / "run", CONFIG, COMMAND)
    run.summary_path.write_text(text)
    with pytest.raises(RunDirectoryError, match=r"summary\.json .*Delete it: the run then goes on"):
        run.summary()


# ---- metrics


def strict_json(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


class FakeMirror:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def log(self, step: int, values: Mapping[str, float | int | str]) -> None:
        self.rows.append({"step": step, **values})


def log_of(path: Path, *steps: int) -> MetricsLog:
    log = MetricsLog(path)
    for step in steps:
        log.log(step, {"train/loss": 1.0 / (step + 1)})
    return log


def steps_in(path: Path) -> list[int]:
    return [row["step"] for row in read_metrics(path)]


def test_rows_are_on_file_at_once_and_in_the_mirror(tmp_path: Path) -> None:
    mirror = FakeMirror()
    log = MetricsLog(tmp_path / "m.jsonl", mirror)
    log.log(0, {"train/loss": 0.1, "images": 64, "mode": "dp"})
    assert (tmp_path / "m.jsonl").read_text() == '{"step": 0, "train/loss": 0.1, "images": 64, "mode": "dp"}\n'
    log.log(1, {"train/loss": 1e-300})
    assert read_metrics(tmp_path / "m.jsonl") == mirror.rows and len(mirror.rows) == 2
    log.close()


def test_numbers_that_json_cannot_hold_become_strings_and_return_as_numbers(tmp_path: Path) -> None:
    mirror = FakeMirror()
    log = MetricsLog(tmp_path / "m.jsonl", mirror)
    log.log(7, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": "text"})
    written = strict_json((tmp_path / "m.jsonl").read_text())
    assert written == {"step": 7, "a": "NaN", "b": "Infinity", "c": "-Infinity", "d": "text"}
    for row in (read_metrics(tmp_path / "m.jsonl")[0], mirror.rows[0]):
        assert math.isnan(row["a"]) and row["b"] == math.inf and row["c"] == -math.inf and row["d"] == "text"


PLAIN_TEXT = st.text().filter(lambda text: text not in ("NaN", "Infinity", "-Infinity"))


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.dictionaries(
            st.text().filter(lambda key: key != "step"), st.floats(allow_nan=False) | st.integers() | PLAIN_TEXT
        )
    )
)
def test_any_rows_return_as_they_were(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    path = tmp_path / "m.jsonl"
    path.unlink(missing_ok=True)
    log = MetricsLog(path)
    for step, row in enumerate(rows):
        log.log(step, row)
    log.close()
    assert read_metrics(path) == [{"step": step, **row} for step, row in enumerate(rows)]


@pytest.mark.parametrize("values", [{"step": 3}, {"x": None}, {"x": [1.0]}])
def test_what_is_not_a_metric_is_refused_before_writing(tmp_path: Path, values: dict[str, Any]) -> None:
    log = log_of(tmp_path / "m.jsonl", 0)
    with pytest.raises(TypeError, match=next(iter(values))):
        log.log(1, values)
    assert steps_in(tmp_path / "m.jsonl") == [0]


def test_a_line_torn_anywhere_is_dropped_and_the_next_row_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    log_of(path, 0, 1).close()
    whole = path.read_bytes()
    last = whole.index(b"\n") + 1
    for length in range(last, len(whole)):  # every way to lose the end of the second line
        path.write_bytes(whole[:length])
        assert steps_in(path) == [0]
        log_of(path, 5).close()
        assert steps_in(path) == [0, 5] and path.read_bytes().startswith(whole[:last])


def test_damage_before_the_last_line_is_named_and_not_hidden(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    log_of(path, 0, 1, 2).close()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b'{"step": 1, "x\n' + lines[2])
    for use in (read_metrics, MetricsLog):
        with pytest.raises(RunDirectoryError, match="line 2 of 3 is damaged"):
            use(path)
    assert path.read_bytes().endswith(lines[2])


def test_truncate_after_a_step_lets_a_resumed_run_hold_each_row_once(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    log = log_of(path, 0, 1, 2)
    log.log(2, {"eval/top1_percent": 50.0})
    log.log(3, {"train/loss": 0.0})
    before = path.read_bytes()
    log.truncate_after(2)
    assert steps_in(path) == [0, 1, 2, 2] and before.startswith(path.read_bytes())
    log.log(3, {"train/loss": 0.0})
    assert path.read_bytes() == before and names(tmp_path) == ["m.jsonl"]
    log.truncate_after(2, "eval/top1_percent")
    assert path.read_bytes() == b"".join(before.splitlines(keepends=True)[:3])
    log.truncate_after(-1)
    assert path.read_bytes() == b""


FILL = """
import os, resource, sys
from pathlib import Path
from cdp_repro.observe.metrics import MetricsLog
from cdp_repro.observe.run_directory import RunDirectoryError
resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
path = Path(sys.argv[1])
log = MetricsLog(path)
log.log(0, {"a": "x" * 100})
try:
    log.log(1, {"a": "y" * 100})
except RunDirectoryError as error:
    print(error)
log.log(2, {"b": 1})
"""


def test_a_row_that_does_not_fit_leaves_the_others_whole(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FILL, str(tmp_path / "m.jsonl")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "m.jsonl: File too large" in done.stdout, done.stderr
    assert steps_in(tmp_path / "m.jsonl") == [0, 2]


# ---- the mirror on W&B

MIRROR = """
import json, logging, os, signal, subprocess, sys, tempfile
from pathlib import Path
from cdp_repro.observe.metrics import MetricsLog
from cdp_repro.observe.wandb_mirror import WandbMirror, previous_run_id

base = Path(sys.argv[1])
temporary = Path(tempfile.gettempdir())  # from here on Python remembers it
warnings = []
class Keep(logging.Handler):
    def emit(self, record): warnings.append(record.getMessage())
logging.getLogger("cdp_repro").addHandler(Keep())
state = lambda: (dict(os.environ), tempfile.tempdir, sys.exit, sys.excepthook)
before, changed = state(), []
def look(where):
    if state() != before: changed.append(where)

drawn = []
def picture():
    from matplotlib.figure import Figure
    drawn.append(1)
    return Figure(figsize=(4, 3))

# a whole run
run = base / "run"
run.mkdir()
mirror = WandbMirror()
mirror.start("offline", run, {"mode": "cdp_v2", "optim": {"lr": 0.1}}, "a name", "cdp-repro"); look("start")
metrics = MetricsLog(run / "metrics.jsonl", mirror)
for step in (10, 20):
    metrics.log(step, {"train/loss": step / 4, "note": "hi", "bad": float("nan")}); look("log")
mirror.log_table("memory", ["slot", "bytes"], [[0, 100], [1, "NaN"]]); look("log_table")
mirror.log_figure("timeline", picture); look("log_figure")
(run / "trace.json").write_text("[1, 2, 3]")
mirror.log_artifact("trace of experiment=paper/é", "trace", [run / "trace.json"]); look("log_artifact")
mirror.log_artifact("x" * 200, "of a long name", [run / "trace.json"])
first = mirror._run.id
in_temporary = [path.name for path in temporary.iterdir()]
mirror.finish({"eval/top1_percent": 97.5}, 0); look("finish")

# the same run, resumed from step 10
assert previous_run_id(run) == first and previous_run_id(base) is None
mirror = WandbMirror()
mirror.start("offline", run, {}, "a name", "cdp-repro", resume_id=previous_run_id(run))
mirror.log(20, {"train/loss": 5.0}); mirror.log(15, {"late": 1}); mirror.log(30, {"train/loss": 7.5})
second = mirror._run.id
mirror.finish({}, 1)
quiet = list(warnings); warnings.clear()

# online without a key
online = base / "online"
mirror = WandbMirror()
mirror.start("online", online, {}, "n", "p"); look("online")
mirror.log(1, {"x": 1})
mirror.finish({}, 0)
no_key = list(warnings); warnings.clear()

# its service dies in the middle
killed = base / "killed"
mirror = WandbMirror()
mirror.start("offline", killed, {}, "n", "p")
mirror.log(1, {"x": 1})
children = subprocess.run(["pgrep", "-P", str(os.getpid()), "wandb-core"], capture_output=True, text=True).stdout
os.kill(int(children), signal.SIGKILL)
os.waitpid(int(children), 0)
for step in range(2, 6): mirror.log(step, {"x": 1})
mirror.log_figure("gone", picture); mirror.log_artifact("a", "b", [Path("absent")])
mirror.finish({"x": 1}, 0); look("killed")
service_died = list(warnings); warnings.clear()

# it cannot even start; and a bad call in a good run
blocked = base / "blocked"
blocked.mkdir()
(blocked / "wandb").write_text("a file in the way")
mirror = WandbMirror()
mirror.start("offline", blocked, {}, "n", "p"); look("blocked")
mirror.log(1, {"x": 1}); mirror.log_table("t", ["a"], [[1]]); mirror.log_figure("p", picture); mirror.finish({}, 0)
no_start = list(warnings); warnings.clear()

bad = base / "bad"
mirror = WandbMirror()
mirror.start("offline", bad, {}, "n", "p")
mirror.log(1, {"x": 1})
mirror.log_figure("absent", lambda: absent_png); mirror.log_table("t", ["a", "b"], [[1]]); mirror.log(2, {"x": 2})
mirror.finish({"y": 1}, 0); look("bad")
bad_call = list(warnings); warnings.clear()

mirror = WandbMirror()
mirror.start("disabled", base / "disabled", {}, "n", "p")
mirror.log(1, {"x": 1}); mirror.log_figure("a", picture); mirror.finish({}, 0)
disabled = list(warnings)

names = "first second quiet no_key service_died no_start bad_call disabled changed in_temporary drawn"
(base / "seen.json").write_text(json.dumps({name: globals()[name] for name in names.split()}))
"""


@dataclass
class Seen:
    """What one process with many mirrors left behind."""

    base: Path
    output: str
    notes: dict[str, Any]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    base = tmp_path_factory.mktemp("mirror")
    for folder in ("home", "temporary", "cwd", "runs"):
        (base / folder).mkdir()
    kept = {name: value for name, value in os.environ.items() if "WANDB" not in name and not name.startswith("XDG")}
    environment = kept | {"HOME": str(base / "home"), "TMPDIR": str(base / "temporary"), "WANDB_NOTES": "the user's"}
    environment["PYTHONPATH"] = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", MIRROR, str(base / "runs")],
        cwd=base / "cwd",
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Seen(base, done.stdout + done.stderr, json.loads((base / "runs" / "seen.json").read_text()))


def test_the_mirror_holds_every_row_at_its_step(seen: Seen) -> None:
    file = wandb_files(seen.base / "runs" / "run")[0]
    rows = history(file)
    assert [(row["_step"], row["step"], row["train/loss"], row["note"]) for row in rows] == [
        (10, 10, 2.5, "hi"),
        (20, 20, 5.0, "hi"),
    ]
    assert math.isnan(float(rows[0]["bad"]))
    metrics = {record.metric.glob_name or record.metric.name for record in records(file) if record.HasField("metric")}
    assert {"step", "*"} <= metrics


def test_the_mirror_holds_name_and_configuration(seen: Seen) -> None:
    (run,) = [r.run for r in records(wandb_files(seen.base / "runs" / "run")[0]) if r.HasField("run")]
    assert (run.run_id, run.display_name, run.project) == (seen.notes["first"], "a name", "cdp-repro")
    settings_of = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert settings_of["mode"] == "cdp_v2" and settings_of["optim"] == {"lr": 0.1}


def test_the_mirror_holds_table_picture_artifact_and_summary(seen: Seen) -> None:
    file = wandb_files(seen.base / "runs" / "run")[0]
    last = history(file)[-1]
    assert last["memory/_type"] == "table-file" and last["timeline/_type"] == "image-file"
    assert (last["timeline/width"], last["timeline/height"]) == (600, 450), "4 x 3 inches of 150 dots"
    table = json.loads((file.parent / "files" / last["memory/path"]).read_text())
    assert (table["columns"], table["data"]) == (["slot", "bytes"], [[0, 100], [1, "NaN"]])
    picture = (file.parent / "files" / last["timeline/path"]).read_bytes()
    assert picture == (seen.base / "runs" / "run" / "wandb" / "timeline.png").read_bytes()
    assert seen.notes["drawn"] == [1], "only a mirror that works draws"
    artifacts = [r.request.log_artifact.artifact for r in records(file) if r.request.HasField("log_artifact")]
    artifacts += [record.artifact for record in records(file) if record.HasField("artifact")]
    assert {len(artifact.name) for artifact in artifacts if artifact.type == "of a long name"} == {128}
    (trace,) = [artifact for artifact in artifacts if artifact.type == "trace"]
    assert trace.name == "trace-of-experiment-paper-"
    (content,) = trace.manifest.contents
    assert content.path == "trace.json" and Path(content.local_path).read_text() == "[1, 2, 3]"
    assert seen.base / "runs" / "run" / "wandb" in Path(content.local_path).parents
    summary = {i.key: json.loads(i.value_json) for r in records(file) for i in r.summary.update}
    assert summary["eval/top1_percent"] == 97.5
    assert [record.exit.exit_code for record in records(file) if record.HasField("exit")] == [0]


def test_a_resumed_run_goes_on_under_its_identity_and_loses_no_row(seen: Seen) -> None:
    assert seen.notes["first"] == seen.notes["second"] is not None
    _, file = wandb_files(seen.base / "runs" / "run")
    assert file.name == f"run-{seen.notes['first']}.wandb"
    rows = history(file)
    assert [(row["_step"], row["step"]) for row in rows] == [(20, 20), (30, 30)]
    assert [row["train/loss"] for row in rows] == [5.0, 7.5] and rows[0]["late"] == 1
    assert [record.exit.exit_code for record in records(file) if record.HasField("exit")] == [1]


def test_the_mirror_is_silent_and_leaves_the_process_as_it_was(seen: Seen) -> None:
    assert seen.output == ""
    assert seen.notes["quiet"] == [] and seen.notes["disabled"] == []
    assert seen.notes["changed"] == []  # environment, temporary directory, sys.exit, sys.excepthook


def test_nothing_is_written_outside_the_run_directory(seen: Seen) -> None:
    assert seen.notes["in_temporary"] == []  # in the middle of a run; W&B clears up at its end
    for folder in ("home", "temporary", "cwd"):
        assert names(seen.base / folder) == [], folder
    assert names(seen.base / "runs" / "run") == ["metrics.jsonl", "trace.json", "wandb"]
    assert names(seen.base / "runs" / "killed") == ["wandb"]
    assert not (seen.base / "runs" / "disabled").exists()


def test_online_without_a_key_warns_and_goes_offline(seen: Seen) -> None:
    assert len(seen.notes["no_key"]) == 1 and "no API key" in seen.notes["no_key"][0]
    (file,) = wandb_files(seen.base / "runs" / "online")
    assert [row["x"] for row in history(file)] == [1]


@pytest.mark.parametrize(
    ("case", "says"),
    [("service_died", "could not log"), ("no_start", "could not start"), ("bad_call", "absent_png")],
)
def test_a_failure_warns_once_and_the_run_goes_on(seen: Seen, case: str, says: str) -> None:
    assert len(seen.notes[case]) == 1 and says in seen.notes[case][0]


def test_what_was_logged_before_a_bad_call_stays_readable(seen: Seen) -> None:
    (file,) = wandb_files(seen.base / "runs" / "bad")
    assert [row["x"] for row in history(file)] == [1]
    assert [record.exit.exit_code for record in records(file) if record.HasField("exit")] == [0]


def test_what_wandb_says_is_one_line_with_its_variables_but_not_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    error = ValueError("1 validation error\nmode\n  Input should be 'online'\n    For further information visit x")
    assert (
        _text(error)
        == "ValueError: 1 validation error; mode; Input should be 'online'; the environment has WANDB_API_KEY"
    )
