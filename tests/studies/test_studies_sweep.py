"""What `scripts/accuracy.py` and its neighbours do: train what is missing, survive kills, queue on SLURM."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import TINY
from ranks import PRELOADED

from cdp_repro.cli import report, sweep
from cdp_repro.observe.metrics import read_metrics
from cdp_repro.observe.run_directory import COMMAND, RunDirectory
from cdp_repro.studies import at_once, missing_runs
from cdp_repro.studies.collecting import collect
from cdp_repro.studies.rows import read_rows, write_row
from cdp_repro.studies.study import Cell, Study

SETTINGS = tuple(text for text in TINY if not text.startswith("wandb"))
SHORT = Study("short", "accuracy", "two cells", tuple(Cell((f"mode={mode}", *SETTINGS)) for mode in ("dp", "cdp_v2")))
SEEDS = Study("seeds", "accuracy", "three seeds", (Cell(("mode=dp", *SETTINGS), seeds=(0, 1, 2)),))
LONG = Study("long", "accuracy", "seconds", (Cell(("mode=dp", *SETTINGS, "dataset.train_samples=1600", "epochs=4")),))
STEPS = 400
"""Of LONG."""
RATES = Study("rates", "delay-tuning", "one too large", (Cell(("mode=cdp_v1", *SETTINGS, "optim.lr=1e6")),))


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for study in (SHORT, SEEDS, LONG, RATES):
        monkeypatch.setitem(sweep.STUDIES, study.name, study)


@pytest.fixture
def quick(cells_here):
    """Train within this process; return what `cdp-train` was called with."""
    return cells_here


def failing(monkeypatch, code=1, said=b""):
    """Let every run fail at once; return the environments."""
    environments = []

    def run_cell(arguments, stop, environment, log):
        environments.append(environment)
        log.write(said)
        log.flush()
        return code

    monkeypatch.setattr(missing_runs, "train_in_process", run_cell)
    return environments


def sweeps(*arguments: str) -> int:
    return sweep.main(["short"], arguments, script="scripts/short.py")


def directory(study: Study, cell: int = 0, seed: int = 0) -> Path:
    return missing_runs.run_directory(Path("runs/studies"), study.name, study.cells[cell], seed)


def rows(study: Study = SHORT):
    return read_rows(Path("results/rows") / study.name)


# --- what is missing, and only that --------------------------------------------------------------------------------


def test_a_run_that_another_study_has_is_taken_over_with_its_whole_cell_or_not_at_all(quick, monkeypatch, caplog):
    caplog.set_level("INFO", logger="cdp_repro")
    one, all_of_it = (Study(name, "accuracy", "seeds again", SEEDS.cells) for name in ("one", "all"))
    for study in (one, all_of_it):
        monkeypatch.setitem(sweep.STUDIES, study.name, study)
    assert sweeps("short", "--seeds=1") == 0 and len(quick) == 2
    assert sweeps("seeds", "--run=0") == 0 and len(quick) == 3, "seed 0 of `short` is wanted, but not the whole cell"
    assert sweeps("seeds") == 0 and len(quick) == 5
    assert sweeps("one") == 0 and len(quick) == 5 and "one: seed 2 is taken over from the study seeds" in caplog.text
    rows = {row.study: [] for row in read_rows(Path("results/rows"))}
    for row in read_rows(Path("results/rows")):
        rows[row.study].append(replace(row, study=""))
    assert rows["one"] == rows["seeds"] and {row.seed for row in rows["one"]} == {0, 1, 2}
    for row in read_rows(Path("results/rows/seeds")):
        if row.seed == 0:
            (Path("results/rows/seeds") / row.file_name).write_text("damaged")
    assert sweeps("all") == 0 and len(quick) == 5, "those of `one` are whole"


def test_a_run_that_diverged_is_no_result_of_a_study_of_accuracy(quick, monkeypatch, caplog):
    accuracy = Study("accurate", "accuracy", "the same", RATES.cells)
    monkeypatch.setitem(sweep.STUDIES, accuracy.name, accuracy)
    assert sweeps("rates") == 0 and rows(RATES)[0].has_diverged and len(quick) == 1
    assert sweeps("accurate") == 1 and len(quick) == 2 and not rows(accuracy), "it ran, and failed"


def test_it_trains_what_is_missing_and_repeats_nothing(quick, capsys):
    assert sweeps() == 0
    assert "2 of 2 runs are done" in capsys.readouterr().out
    assert {row.cell for row in rows()} == {cell.hash for cell in SHORT.cells}  # a row is found again by its cell
    assert [len(quick), "wandb=disabled" in quick[0]] == [2, True]
    assert RunDirectory.open(directory(SHORT)).summary()["status"] == "finished"
    assert sweeps() == 0
    assert len(quick) == 2

    next(Path("results/rows").rglob("*cdp_v2*")).unlink()  # it is collected again, not trained
    assert sweeps() == 0
    assert len(quick) == 2 and len(rows()) == 2


def test_a_run_that_went_on_on_another_placement_is_no_result_of_the_study(quick, capsys):
    assert sweeps("--run=0") == 0
    next(Path("results/rows").rglob("*-dp-*")).unlink()
    run = RunDirectory.open(directory(SHORT))
    config = run.config()
    run.write_summary(run.summary() | {"config": config | {"placement": {**config["placement"], "name": "pipeline"}}})
    capsys.readouterr()
    assert sweeps("--run=0") == 1 and len(quick) == 1 and not rows()
    assert f"{directory(SHORT)} has ended on another placement: move it away" in capsys.readouterr().err
    assert report.main(["collect", str(run.path)]) == 2 and not rows()
    assert report.main(["collect", str(run.path), "--study=mine"]) == 0
    (row,) = read_rows(Path("results/rows/mine"))
    assert row.config["placement.name"] == "pipeline" and "-dp-pipeline-" in row.file_name


def test_seeds_and_run_choose_from_the_whole_list(quick, capsys):
    assert sweeps("seeds", "--seeds=2", "--run=1") == 0
    assert [row.seed for row in rows(SEEDS)] == [1]
    assert sweeps("seeds", "--seeds=2") == 0
    assert [row.seed for row in rows(SEEDS)] == [0, 1]
    assert sweeps("seeds", "--run=1") == 0
    assert len(quick) == 2 and "1 of 1 runs are done" in capsys.readouterr().out


def test_a_run_that_diverges_is_a_result_of_tuning_and_a_failure_elsewhere(quick, capsys):
    for _ in range(2):
        assert sweeps("rates") == 0
    (row,) = rows(RATES)
    assert row.summary["diverged"] and len(quick) == 1 and "1 of 1 runs are done" in capsys.readouterr().out
    next(Path("results/rows").rglob("*cdp_v1*")).unlink()
    assert report.main(["collect", str(directory(RATES))]) == 0 and rows(RATES)
    sweep.STUDIES["rates"] = replace(RATES, kind="accuracy")
    next(Path("results/rows").rglob("*cdp_v1*")).unlink()
    assert sweeps("rates") == 1
    assert report.main(["collect", str(directory(RATES))]) == 2
    assert not rows(RATES)


def test_a_run_that_was_killed_before_it_had_a_configuration_starts_again(quick):
    directory(SHORT).mkdir(parents=True)
    for name in (".claim", ".config.yaml.new"):
        (directory(SHORT) / name).write_text("m")
    assert sweeps("--run=0") == 0
    assert len(rows()) == 1


def test_a_value_goes_to_those_studies_that_know_it(quick, capsys):
    images = Study("images", "accuracy", "", (Cell(("mode=dp", "dataset=cifar10")),))
    sweep.STUDIES["images"] = images
    try:
        assert sweeps("short", "images", "dataset.root=nowhere", "wandb=disabled", "--run=0") == 0
        assert sweeps("short", "images", "dataset.root=nowhere", "log_every_steps=5", "--run=2") == 1
    finally:
        del sweep.STUDIES["images"]
    first, second = quick
    assert not any(text.startswith("dataset.root") for text in first)
    assert {"dataset.root=nowhere", "log_every_steps=5", "wandb=disabled"} <= set(second)
    assert "exit code 2: images: cdp-train mode=dp dataset=cifar10" in capsys.readouterr().err


def test_failures_are_listed_at_the_end_with_what_was_said_last(monkeypatch, capsys):
    failing(monkeypatch, 3, b"Traceback\nOSError: disk full\n\n")
    assert sweeps() == 1
    shown = capsys.readouterr()
    lines = [line for line in shown.err.splitlines() if line.startswith("exit code 3: short: cdp-train mode=")]
    assert len(lines) == 2 and all("OSError: disk full (see runs/studies/short/" in line for line in lines)
    assert "0 of 2 runs are done" in shown.out


def test_a_damaged_run_directory_does_not_keep_others_from_being_trained(quick, capsys):
    directory(SHORT).mkdir(parents=True)
    (directory(SHORT) / "config.yaml").write_text("{")
    assert sweeps() == 1
    assert "config.yaml cannot be read" in capsys.readouterr().err
    assert len(rows()) == 1


def test_runs_at_once_share_the_cores(monkeypatch):
    monkeypatch.setattr(at_once, "usable_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    environments = failing(monkeypatch)
    sweeps("--jobs=2")
    sweeps("--jobs=1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    sweeps("--jobs=2")
    assert environments == [{"OMP_NUM_THREADS": "4"}] * 2 + [{}] * 4


def test_jobs_run_at_once(monkeypatch):
    both = threading.Barrier(2, timeout=20)
    monkeypatch.setattr(missing_runs, "train_in_process", lambda *arguments: both.wait() * 0 + 5)
    assert sweeps("--jobs=2") == 1


def test_rows_of_other_code_count_and_are_named(quick, caplog):
    assert sweeps("seeds", "--run=0") == 0
    path = next(Path("results/rows").rglob("*.json"))
    old = replace(rows(SEEDS)[0], summary={**rows(SEEDS)[0].summary, "version/code": "feedfacecafebeef"})
    path.unlink()
    write_row(old, Path("results/rows"))
    caplog.clear()
    assert sweeps("seeds", "--run=0") == 0
    assert "warning" not in caplog.text
    assert sweeps("seeds", "--seeds=2") == 0
    warnings = [text for text in caplog.messages if text.startswith("warning")]
    present = collect(directory(SEEDS, seed=1), "seeds").code
    assert len(warnings) == 1 and "feedfacecafebeef" in warnings[0] and present in warnings[0]
    assert len(rows(SEEDS)) == 2


# --- the command line ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["shorts"], "unknown study 'shorts'"),
        (["shorts"], "did you mean 'short'?"),
        (["--jobs=0"], "--jobs=0: must be a whole number, 1 or more"),
        (["--jobs"], "--jobs=: must be"),
        (["--seeds=many", "--run=-1"], "--run=-1: must be a whole number, 0 or more"),
        (["--seed=1"], "unknown option --seed: choose --jobs="),
        (["-j"], "unknown option -j: choose --jobs="),
        (["--jobs=1", "--jobs=2"], "--jobs= is given twice: leave one out"),
        (["--run=2"], "there are 2 runs, use --run=0 to --run=1"),
        (["--slurm="], "--slurm= names no file"),
        (["--slurm=x.sh", "--jobs=2"], "drop --run= and --jobs="),
        (["device=cpu"], "device=cpu is not for a sweep"),
        (["wandb=of"], "wandb=of: choose offline"),
        (["dataset.root=data"], "dataset.root has no effect with this dataset"),
    ],
)
def test_mistakes_are_told_before_anything_is_trained(arguments, said, capsys):
    assert sweeps(*arguments) == 2
    shown = capsys.readouterr().err
    assert said in shown and "Traceback" not in shown
    assert not list(Path().iterdir())


def test_a_damaged_row_is_the_users_to_restore(capsys):
    Path("results/rows/short").mkdir(parents=True)
    Path("results/rows/short/a.json").write_text("{")
    assert sweeps() == 2
    assert "restore it from git" in capsys.readouterr().err


def test_help_names_options_and_studies(capsys):
    assert sweeps("--help") == 0
    shown = capsys.readouterr().out
    assert "usage: python scripts/short.py" in shown and "--slurm=FILE" in shown and "cifar10-tuning" in shown


@pytest.mark.parametrize("name", ["accuracy", "memory", "costs"])
def test_each_script_has_its_studies(name, monkeypatch, capsys):
    path = Path(__file__).parents[2] / "scripts" / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    code = compile(path.read_text(), str(path), "exec")
    with pytest.raises(SystemExit) as ended:
        exec(code, {"__name__": "__main__", "__file__": str(path)})
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    wanted = [study.name for study in sweep.STUDIES.values() if study.kind == name]
    wanted = [study for study in wanted if "paper" not in study]  # too long but for a GPU: only if named
    assert wanted and all(study in shown.split("Options")[0] for study in wanted)


# --- kills and signals, with processes -----------------------------------------------------------------------------


def swept(study: Study, output: Path) -> None:
    """Sweep one study, in a process of its own."""
    sweep.STUDIES[study.name] = study
    with output.open("w", buffering=1) as file, redirect_stdout(file), redirect_stderr(file):
        code = sweep.main([study.name], [], script="scripts/long.py")
    sys.exit(code)


def started(study: Study, output: str) -> multiprocessing.Process:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=swept, args=(study, Path(output).absolute()))
    process.start()
    return process


def wait_for(condition, seconds: float = 90):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def child_of(process: int) -> int | None:
    found = Path(f"/proc/{process}/task").glob("*/children")
    return next((int(pid) for path in found for pid in path.read_text().split()), None)


def steps_logged(study: Study = LONG) -> int:
    path = directory(study) / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_kills_of_a_run_and_of_a_sweep_cost_nothing_but_time(caplog):
    children = []
    caplog.set_level("INFO", "cdp_repro")
    try:
        first = started(LONG, "first.txt")
        wait_for(lambda: steps_logged() > STEPS / 3)
        children.append(child_of(first.pid))
        os.kill(children[-1], signal.SIGKILL)
        first.join(30)
        assert first.exitcode == 1
        assert "killed by SIGKILL: long: cdp-train" in Path("first.txt").read_text()

        second = started(LONG, "second.txt")
        lines = directory(LONG) / COMMAND
        wait_for(lambda: "resume=" in lines.read_text())
        children.append(child_of(second.pid))
        second.kill()
        second.join(30)
        os.kill(children[-1], signal.SIGSTOP)  # it must not finish before the third sweep looks
        threading.Timer(1, os.kill, (children[-1], signal.SIGCONT)).start()
        assert sweep.main(["long"], [], script="scripts/long.py") == 0  # the run went on without a sweep
    finally:
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
    assert "another process trains in" in caplog.text
    commands = lines.read_text().splitlines()
    assert len(commands) == 2  # the third sweep has waited, and trained nothing
    metrics = read_metrics(directory(LONG) / "metrics.jsonl")
    assert [row["step"] for row in metrics if "train/loss" in row] == list(range(1, STEPS + 1))
    assert len(rows(LONG)) == 1


def script_of(study: Study) -> Path:
    """Write a script, in this folder, that sweeps the study as `scripts/` do theirs."""
    script = Path(f"scripts/{study.name}.py")
    script.parent.mkdir()
    script.write_text(
        "import sys\nfrom cdp_repro.studies.catalog import STUDIES\nfrom cdp_repro.studies.study import Cell, Study\n"
        "from cdp_repro.cli.sweep import main\n"
        f"STUDIES[{study.name!r}] = {study!r}\nsys.exit(main([{study.name!r}], sys.argv[1:], script=__file__))\n"
    )
    return script


@pytest.mark.skipif(sys.platform != "linux", reason="SLURM")
def test_a_job_of_the_array_trains_its_run_and_queues_again_before_the_time_is_up(tmp_path, quick, capsys):
    script = script_of(LONG)
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "scontrol").write_text('#!/bin/bash\necho "$@" > requeued.txt\n')
    (tools / "scontrol").chmod(0o755)
    assert sweep.main(["long"], ["--slurm=sweep.sh", "wandb=disabled"], script=str(script)) == 0
    assert "sbatch sweep.sh queues 1 runs" in capsys.readouterr().out
    assert Path("runs/studies/slurm").is_dir()  # SLURM does not make it
    environment = {
        **os.environ, "PYTHON": sys.executable, "PATH": f"{tools}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(Path.cwd()), "SLURM_JOB_ID": "8", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0",
        "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NODELIST": "n1",
        "SLURM_STEP_NODELIST": "login1", "RANK": "1", "WORLD_SIZE": "2",  # of where sbatch was called
    }  # fmt: skip
    command = ["bash", str(Path("sweep.sh").absolute())]
    job = subprocess.Popen(command, env=environment, cwd="/")
    try:
        wait_for(lambda: steps_logged() > 10)
        job.send_signal(signal.SIGUSR2)
        assert job.wait(60) == 128 + signal.SIGTERM
    finally:
        job.kill()
    assert Path("requeued.txt").read_text() == "requeue 7_0\n"
    assert json.loads((directory(LONG) / "summary.json").read_text())["status"] == "interrupted"

    assert sweep.main(["long"], ["--run=0"], script=str(script)) == 0  # as the job does when it starts again
    assert len(rows(LONG)) == 1 and quick == [[f"resume={directory(LONG)}", "wandb=disabled"]]


def test_the_array_script_is_for_any_cluster(capsys, monkeypatch):
    for path in ("jobs/sweep.sh", "more.sh"):
        arguments = ["seeds", "short", f"--slurm={path}", "--seeds=2", "--results=my results", "log_every_steps=5"]
        assert sweeps(*arguments) == 0
        subprocess.run(["bash", "-n", path], check=True)
    text = Path("more.sh").read_text()
    assert text.startswith("#!/bin/bash\n") and "#SBATCH --array=0-3\n" in text and os.access("more.sh", os.X_OK)
    assert "#SBATCH --output=runs/studies/slurm/%A_%a.log\n" in text
    assert "in the folder in which --slurm= was given: sbatch jobs/sweep.sh\n" in Path("jobs/sweep.sh").read_text()
    assert (
        "scripts/short.py seeds short log_every_steps=5 --runs=runs/studies '--results=my results' --seeds=2 "
        '--run="$SLURM_ARRAY_TASK_ID" &' in text
    )
    assert "#SBATCH --cpus-per-task=4\n" in text
    wide = Study("wide", "accuracy", "many processes", (Cell(("mode=cdp_v2", "workers=6", "placement=replicated")),))
    monkeypatch.setitem(sweep.STUDIES, "wide", wide)
    assert sweeps("wide", "--slurm=wide.sh") == 0
    assert "#SBATCH --cpus-per-task=6\n" in Path("wide.sh").read_text(), "a core for each process"
    assert str(Path.home()) not in text and not re.search(r"@\w+@", text)
    assert not Path("results").exists()
