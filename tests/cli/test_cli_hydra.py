"""What users of Hydra type: its options, its sweeps, files of their own; through its public interfaces."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import cdp_repro
from cdp_repro.cli import plan as plan_command
from cdp_repro.cli import train as command
from cdp_repro.config import ConfigError
from cdp_repro.config.compose import compose_config, output_folder
from cdp_repro.config.source import Source
from cdp_repro.config.sweep_cells import expand_sweep


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.fixture
def mine(tmp_path):
    """A folder of the user's: an experiment, a group of their own, and a primary file."""
    for name, text in {
        "experiment/tiny.yaml": "# @package _global_\nepochs: 3\nworkers: 2\n",
        "site/home.yaml": "# @package _global_\nwandb: disabled\n",
        "small.yaml": "defaults: [config, _self_]\nbatch_size: 8\n",
    }.items():
        (tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mine" / name).write_text(text)
    return tmp_path / "mine"


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert command.main(list(arguments)) == 0
    assert list(Path().iterdir()) == [], "nothing is written"
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert command.main(list(arguments)) == 2
    assert list(Path().iterdir()) == [], "nothing is written"
    return capsys.readouterr().err


def test_no_private_module_of_hydra_is_imported():
    for path in Path(cdp_repro.__file__).parent.rglob("*.py"):
        assert "hydra._internal" not in path.read_text(), path


def test_the_configuration_of_a_run_is_shown(capsys):
    job = yaml.safe_load(shown(capsys, "epochs=2", "--cfg", "job", "mode=[[1,1],[1,0]]", "workers=2"))
    assert job["epochs"] == 2 and job["mode"] == {"name": "matrix", "staleness": [[1, 1], [1, 0]]}
    assert job["batch_size"] == "${dataset.recommended_batch_size}" and "hydra" not in job
    assert yaml.safe_load(shown(capsys, "-c", "job", "--resolve"))["batch_size"] == 64
    assert yaml.safe_load(shown(capsys, "optim=adamw", "--cfg", "job", "-p", "optim"))["name"] == "adamw"
    hydra = yaml.safe_load(shown(capsys, "--cfg", "hydra", "hydra.sweep.dir=there", "hydra.verbose=true"))["hydra"]
    assert (hydra["sweep"]["dir"], hydra["verbose"], hydra["job"]["name"]) == ("there", True, "cdp-train")
    assert {"hydra", "epochs"} <= yaml.safe_load(shown(capsys, "--cfg", "all")).keys()
    assert plan_command.main(["--cfg", "job", "price=true"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["price"] is True


def test_how_it_is_composed_is_shown_and_hydra_explains_itself(mine):
    for arguments, text in (
        (["--info", "searchpath"], "pkg://cdp_repro.config.hydra_tree"),
        (["--info", "defaults-tree", f"--config-dir={mine}", "experiment=tiny"], "experiment: tiny"),
        (["--hydra-help"], "--shell-completion"),
    ):
        words = [sys.executable, "-m", "cdp_repro.cli.train", *arguments]
        assert text in subprocess.run(words, capture_output=True, text=True, check=True).stdout


def test_questions_that_do_not_fit_are_refused(capsys):
    assert "unknown mode 'cdp_v3'" in refused(capsys, "--cfg", "job", "mode=cdp_v3")
    said = refused(capsys, "--info", "nosuch")
    assert said.startswith("error:") and "invalid choice: 'nosuch' (choose from" in said, (
        "as all mistakes, without a usage"
    )
    assert "unknown key 'optm.lr'; did you mean 'optim.lr'?" in refused(capsys, "--info", "all", "optm.lr=1")
    assert "--cfg, --multirun ask for different things" in refused(capsys, "-m", "--cfg", "job")
    assert "add --cfg job" in refused(capsys, "--resolve")
    assert "invalid choice: 'jobs'" in refused(capsys, "--cfg", "jobs")
    assert "did you mean '--multirun'?" in refused(capsys, "--mutlirun")
    assert plan_command.main(["-m", "mode=dp,cdp_v1"]) == 2
    assert "unknown option -m" in capsys.readouterr().err


def test_files_of_ones_own_are_choices(capsys, mine):
    assert compose_config(["experiment=tiny"], source=Source(mine)).epochs == 3
    assert compose_config(["+site=home"], source=Source(mine)).wandb == "disabled"
    assert compose_config(["experiment=paper/cifar10_resnet18"], source=Source(mine)).epochs == 101
    assert compose_config(["seed=3"], source=Source(mine, "small")).batch_size == 8
    with_both = ["--config-dir", str(mine), "--config-name", "small", "experiment=tiny", "--cfg", "job"]
    job = yaml.safe_load(shown(capsys, *with_both))
    assert (job["batch_size"], job["epochs"]) == (8, 3)
    with_both[with_both.index("small")] = "small.yaml"
    assert yaml.safe_load(shown(capsys, *with_both)) == job
    assert "did you mean 'tiny'?" in refused(capsys, f"--config-dir={mine}", "experiment=tyni")
    assert "unknown site 'work': choose home" in refused(capsys, f"--config-dir={mine}", "+site=work")


def test_a_file_chooses_in_a_group_by_its_defaults(capsys, mine):
    """A name without the values that belong to it would train AdamW at the learning rate of SGD."""

    def file(text):
        (mine / "experiment" / "tiny.yaml").write_text(f"# @package _global_\n{text}")
        return [f"--config-dir={mine}", "experiment=tiny"]

    said = refused(capsys, *file("optim:\n  name: adamw\n"))
    assert "optim.name=adamw would have the values of optim=sgd" in said
    assert "choose it by `defaults: [override /optim: adamw]`" in said
    said = refused(capsys, *file("optim: adamw\nmodel: mlp\n"))
    assert "optim is a group: a file chooses in it by `defaults: [override /optim: adamw]`" in said
    assert "model is a group" in said
    file("mode:\n  name: dp\n")  # has no other values
    assert compose_config(["experiment=tiny"], source=Source(mine)).mode.name == "dp"
    file("defaults:\n  - override /optim: adamw\n  - override /model: timm\nmodel:\n  name: resnet10t\n")
    config = compose_config(["experiment=tiny"], source=Source(mine))
    assert (config.optim.name, config.optim.lr, config.model.name) == ("adamw", 0.001, "resnet10t")


def test_a_configuration_that_includes_itself_is_told(capsys, mine):
    (mine / "experiment" / "again.yaml").write_text("# @package _global_\ndefaults:\n  - /experiment: again\n")
    said = refused(capsys, f"--config-dir={mine}", "experiment=again")
    assert "a configuration includes itself: look at the `defaults` of config, experiment=again" in said


def test_folders_and_files_that_are_wrong_are_told(capsys, mine):
    assert "there is no such folder" in refused(capsys, "--config-dir=nowhere")
    said = refused(capsys, f"--config-dir={mine}", "--config-name=larger")
    assert f"there is no larger.yaml in our tree and {mine}" in said
    (mine / "experiment" / "tiny.yaml").write_text("# @package _global_\nepochs: [3\nworkers: 2\n")
    said = refused(capsys, f"--config-dir={mine}", "experiment=tiny")
    assert "not valid YAML" in said and "experiment/tiny.yaml" in said and "line 3" in said
    (mine / "experiment" / "tiny.yaml").write_text("# @package _global_\nepoch: 3\n")
    assert "epoch" in refused(capsys, f"--config-dir={mine}", "experiment=tiny")
    (mine / "experiment" / "tiny.yaml").rename(mine / "config.yaml")
    assert "holds config.yaml, as our tree does" in refused(capsys, f"--config-dir={mine}")


def test_values_are_added_and_removed_as_hydra_does():
    assert compose_config(["++seed=3"]).seed == 3
    assert compose_config(["+experiment=paper/cifar10_resnet18"]).epochs == 101
    assert compose_config(["~experiment", "optim.lr=0.5"]).optim.lr == 0.5
    for key, example in (("epochs", "epochs=1"), ("optim.momentum", "optim.momentum=0.9"), ("stages", "stages=4")):
        with pytest.raises(ConfigError, match=rf"^~{key}: every run has a value .* deleted: give one, e.g. {example}$"):
            compose_config([f"~{key}"])
    with pytest.raises(ConfigError, match="already at 'seed'"):
        compose_config(["+seed=3"])
    with pytest.raises(ConfigError, match="unknown key 'sed'; did you mean 'seed'"):
        compose_config(["~sed"])


@pytest.mark.parametrize(
    ("overrides", "cells"),
    [
        (["seed=range(0,6,2)"], [["seed=0"], ["seed=2"], ["seed=4"]]),
        (["mode=glob(cdp*)", "epochs=1"], [["mode=cdp_v1", "epochs=1"], ["mode=cdp_v2", "epochs=1"]]),
        (["mode=glob(c*, exclude=[cdp*])"], [["mode=chimera"]]),
        (["experiment=glob(paper/im*18)"], [["experiment=paper/imagenet_resnet18"]]),
        (["seed=choice(1,2)", "~experiment"], [["seed=1", "~experiment"], ["seed=2", "~experiment"]]),
        (["mode=[[1,1],[1,0]],dp"], [["mode=[[1,1],[1,0]]"], ["mode=dp"]]),
        (["seed=1,2", "seed=3", "hydra.sweep.dir=x"], [["seed=3"]]),
    ],
)  # fmt: skip
def test_sweeps_are_written_as_in_hydra(overrides, cells):
    assert expand_sweep(overrides) == cells


@pytest.mark.parametrize("group", ["mode", "placement", "model", "dataset"])
def test_a_glob_stands_for_what_can_be_chosen_alone(group):
    found = {text for (text,) in expand_sweep([f"{group}=glob(*)"])}
    assert len(found) > 3 and not found & {f"{group}={each}" for each in ("installed", "matrix", "timm")}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lr=interval(0,1)", "has no end: list its values"),
        ("mode=glob(pdp*)", "stands for no value: choose accumulation, ampnet, async, cdp_v1"),
        ("seed=glob(*)", "stands for no value: give one or more, such as seed=1,2"),
    ],
)
def test_sweeps_without_an_end_or_a_value_are_refused(override, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        expand_sweep([override])


@pytest.mark.parametrize("value", ["${nope}", "${oc.env:CDP_REPRO_HAS_NO_SUCH_VARIABLE}"])
def test_what_a_file_does_not_resolve_is_one_sentence_and_may_be_replaced(tmp_path, capsys, value):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\nbatch_size: {value}\n")
    ours = (f"--config-dir={tmp_path}", "experiment=mine")
    for words in ([], ["--cfg", "job", "--resolve"], ["-m", "seed=0,1", "--dry-run"]):
        said = refused(capsys, *ours, *words)
        assert "batch_size: the configuration cannot be resolved" in said and said.count("\n") < 5
    assert yaml.safe_load(shown(capsys, *ours, "batch_size=32", "--cfg", "job", "--resolve"))["batch_size"] == 32


def test_a_flag_with_a_value_is_refused_in_plain_words(capsys):
    assert "argument --multirun/-m: takes no value, not '2'" in refused(capsys, "--multirun=2")


def test_hydras_folders_say_where_runs_go(capsys):
    stamp = r"\d{8}-\d{6}-\d{6}"
    assert re.fullmatch(rf"runs/digits-resnet8-dp-seed3-{stamp}", str(output_folder("run", ["mode=dp", "seed=3"])))
    assert re.fullmatch(rf"runs/sweep-{stamp}", str(output_folder("sweep", ["seed=0,1"])))
    assert output_folder("run", []) != output_folder("run", []), "two runs within a second"
    assert output_folder("sweep", ["hydra.sweep.dir=x/${mode.name}", "mode=dp"]) == Path("x/dp")
    with pytest.raises(ConfigError, match=r"hydra.run.dir cannot be resolved"):
        output_folder("run", ["hydra.run.dir=${nothing}"])
    for nothing in ("hydra.run.dir=", "hydra.run.dir=.", "hydra.run.dir=/"):
        assert "names no new folder: give one, e.g. run_dir=runs/my-run" in refused(capsys, nothing)
    assert "name two folders" in refused(capsys, "run_dir=a", "hydra.run.dir=b")
    assert "name two folders" in refused(capsys, "-m", "seed=0,1", "run_dir=a", "hydra.sweep.dir=b")
    assert "all cells are one: a sweep gives a value twice" in refused(capsys, "-m", "seed=0,0")
    assert "two cells are the same (seed=0)" in refused(capsys, "-m", "seed=0,1,0")
    for sweep in ([], ["-m", "seed=0,1", "hydra.sweep.dir=x"]):
        said = refused(capsys, *sweep, "hydra.launcher.n_jobs=2", "hydra/launcher=joblib")
        assert said.count("has no effect") == 2 and "hydra.run.dir, hydra.sweep.dir" in said
    assert not Path("x").exists()


def test_what_hydra_would_answer_by_a_traceback_is_told(capsys):
    for words in ([], ["tcsh"], ["bash", "zsh"], ["remove=bash"]):
        said = refused(capsys, "--shell-completion", *words)
        assert "takes one shell, bash, zsh, fish" in said
    assert "use --cfg all --resolve" in refused(capsys, "--cfg", "hydra", "--resolve")


def test_a_sweep_over_a_range_with_files_of_ones_own(capfd, tiny, mine, cells_here):
    (mine / "experiment" / "tiny.yaml").write_text("# @package _global_\nepochs: 1\n")
    words = ["-m", f"--config-dir={mine}", "experiment=tiny", *(text for text in tiny if text != "epochs=2")]
    assert command.main([*words, "seed=range(2)", "hydra.sweep.dir=sweep"]) == 0
    assert "2 of 2 runs finished, in sweep" in capfd.readouterr().out
    summaries = {path.parent.name: json.loads(path.read_text()) for path in Path("sweep").glob("*/summary.json")}
    assert {name: each["epochs"] for name, each in summaries.items()} == {"seed=0": 1, "seed=1": 1}
    assert summaries["seed=1"]["command"][:2] == ["cdp-train", f"--config-dir={mine}"]


def test_one_run_goes_where_hydra_says(tiny, capsys):
    assert command.main([*tiny, "epochs=1", "hydra.run.dir=mine/${mode.name}"]) == 0
    assert json.loads(Path("mine/cdp_v2/summary.json").read_text())["config"]["run_dir"] is None


def test_a_shell_completes_keys_and_choices(tmp_path):
    shim = tmp_path / "bin" / "cdp-train"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/bash\nexec {shlex.quote(sys.executable)} -m cdp_repro.cli.train "$@"\n')
    shim.chmod(0o755)
    script = """
        eval "$(cdp-train --shell-completion bash)"
        complete() { COMP_LINE="cdp-train $1"; COMP_POINT=${#COMP_LINE}; COMP_CWORD=1; hydra_bash_completion
            echo "${COMPREPLY[@]}"; }
        complete mode=cd
        complete optim.l
    """
    path = {**os.environ, "PATH": f"{shim.parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], env=path, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["mode=cdp_v1 mode=cdp_v2", "optim.lr="]
