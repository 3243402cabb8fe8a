"""`cdp-verify` in real processes."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stdout
from dataclasses import replace
from itertools import product

import pytest
import torch
from ranks import run_ranks

from cdp_repro.cli import plan as plan_command
from cdp_repro.cli import verify as command
from cdp_repro.config.compose import compose_config
from cdp_repro.training import comparing, equivalence
from cdp_repro.training.equivalence import Comparison

SMALL = ("dataset=digits", "model=mlp", "batch_size=12", "workers=2", "--steps=4")


@pytest.mark.parametrize("what", [("mode=cdp_v2", "placement=replicated"), ("mode=dp", "baseline=ddp")])
def test_a_placement_and_a_baseline_agree(capsys, what):
    assert command.main([*SMALL, *what]) == 0
    out = capsys.readouterr().out
    assert "in 2 processes against one device, 4 training steps, fp64" in out
    assert ("fp64, dropout 0.1\n" in out) == ("placement" in what[1]), "a library draws other random numbers"
    assert out.count("0.0e+00") == 3 or "baseline" in what[1]
    assert f"they agree {'bitwise' if 'placement' in what[1] else 'within 1e-09'}" in out


def test_a_pipeline_of_fewer_ranks_than_stages_and_accumulation_agree(capsys):
    sizes = ("stages=4", "ranks=2", "accumulate=3")
    assert command.main([*SMALL, "mode=dp", "placement=pipeline", *sizes]) == 0
    out = capsys.readouterr().out
    assert "in 2 processes against one device" in out and "they agree bitwise" in out


def test_collectives_agree_within_the_tolerance_of_a_library(capsys):
    assert command.main([*SMALL, "mode=dp", "placement=zero", "collectives=true"]) == 0
    assert "they agree within 1e-09" in capsys.readouterr().out


def test_the_tolerance_is_that_of_the_precision(capsys):
    """By collectives, replicas are compared in fp32; our own sums agree bitwise in any precision."""
    assert command.main([*SMALL, "mode=dp", "placement=replicated", "collectives=true", "precision=fp32"]) == 0
    assert "they agree within 1e-04" in capsys.readouterr().out
    assert command.main([*SMALL, "mode=dp", "baseline=ddp", "precision=bf16"]) == 2
    assert "use precision=fp64 or fp32" in capsys.readouterr().err


def test_losses_over_replicas_agree_in_fp32_wherever_they_are_computed(capsys):
    assert command.main([*SMALL, "placement=pipeline", "replicas=2", "precision=fp32"]) == 0
    assert "they agree bitwise" in capsys.readouterr().out


def test_one_device_is_not_compared_with_itself(capsys):
    assert command.main(SMALL) == 2
    assert "would be compared with itself: give a placement" in capsys.readouterr().err


def test_a_difference_is_told_by_stage(capsys, monkeypatch):
    def in_this_process(function, arguments, processes, *_):
        assert processes == 2
        return function(*arguments)

    def other(config, steps):
        alone = comparing.copy.deepcopy(config)
        alone.placement.name = "single_device"
        outcome = on_ranks(alone, steps)
        path = next(iter(outcome.stages[1]))
        wrong = dict(outcome.stages[1]) | {path: outcome.stages[1][path] * (1 + 1e-12)}
        return replace(outcome, stages=[outcome.stages[0], wrong])

    on_ranks = comparing._train_on_ranks
    monkeypatch.setattr(equivalence, "launch", in_this_process)
    monkeypatch.setattr(comparing, "_train_on_ranks", other)
    assert command.main([*SMALL, "placement=pipeline"]) == 1
    out = capsys.readouterr().out
    assert "stage 0   0.0e+00" in out
    assert "stage 1   1.0e-12" in out
    assert "they do NOT agree bitwise" in out


def test_what_is_not_finite_never_agrees():
    assert not Comparison(float("inf"), [0.0], 2, 4, 0.0).agrees
    assert comparing._difference(torch.tensor([float("nan")]), torch.tensor([1.0])) == float("inf")


def test_what_has_no_effect_is_told(capsys, caplog, monkeypatch):
    monkeypatch.setattr(command, "verify", lambda *_: Comparison(0.0, [0.0], 2, 4, 0.0))
    assert command.main([*SMALL, "placement=pipeline", "cluster.latency_seconds=1", "pipeline_schedule=gpipe"]) == 0
    assert caplog.messages == [
        "warning: price=true and cluster.* have no effect on a training: give them to cdp-plan",
        "warning: pipeline_schedule=gpipe has no effect but with mode=dp placement=pipeline",
    ]


@pytest.mark.parametrize("steps", ["1", "x", ""])
def test_steps_that_make_no_sense(capsys, steps):
    assert command.main([f"--steps={steps}"]) == 2
    assert "--steps=8" in capsys.readouterr().err


def test_help_teaches(capsys):
    assert command.main(["--help"]) == 0
    assert "usage: cdp-verify" in capsys.readouterr().out


@pytest.mark.parametrize("placement", ["replicated", "zero"])
def test_a_program_file_is_written_edited_run_and_compared(tmp_path, capsys, placement):
    path = tmp_path / "program.txt"
    assert plan_command.main(["mode=cdp_v2", "workers=2", f"placement={placement}", f"--program={path}"]) == 0
    assert f"program: {path}" in capsys.readouterr().out
    text = path.read_text()
    path.write_text(text.replace("\nrank 0\n", "\n// by hand\nrank 0\n", 1))
    assert command.main([f"program={path}", "--steps=4", "workers=2", "collectives=false"]) == 0, "as its header says"
    assert "they agree bitwise" in capsys.readouterr().out
    assert command.main([f"program={path}", "workers=4", "stages=4"]) == 2
    assert "workers=2 there, 4 here" in capsys.readouterr().err
    add = next(line for line in text.split("\n") if " A g" in line)
    path.write_text(text.replace(f"{add}\n", "", 1))
    assert command.main([f"program={path}"]) == 2
    said = capsys.readouterr().err
    assert "line " in said and "is not on rank" in said and "worker 0" in said


def test_a_program_file_that_is_not_there_is_refused(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    assert command.main([f"program={tmp_path}/pipe"]) == 2
    assert "pipe is no regular file" in capsys.readouterr().err
    assert command.main(["program="]) == 2
    assert "program= names no file: give one of cdp-plan --program=FILE" in capsys.readouterr().err
    assert command.main([f"program={tmp_path}/none"]) == 2
    assert "cannot be read" in capsys.readouterr().err


def _as_started_by_torchrun(arguments):
    with redirect_stdout(io.StringIO()) as out:
        return command.main(arguments), out.getvalue()


def test_ranks_of_torchrun_and_srun_are_compared_too_and_rank_0_tells(tmp_path):
    """Each rank runs the command; the single device is computed by rank 0 alone."""
    arguments = [*SMALL, "placement=pipeline", "device=cpu"]
    (code, said), *others = run_ranks(_as_started_by_torchrun, 2, arguments, folder=tmp_path, joins=True)
    assert code == 0 and "in 2 processes against one device" in said and "they agree bitwise" in said
    assert others == [(0, "")]


OVER_NCCL = [
    *product(
        (2, 3),
        ("mode=dp", "mode=cdp_v1", "mode=cdp_v2"),
        ("placement=replicated", "placement=zero", "placement=pipeline", "placement=parameter_server"),
    ),
    *product((2, 3), ("mode=dp collectives=true",), ("placement=replicated", "placement=zero")),
    (3, "mode=cdp_v2", "placement=model_parallel"),
]


def _on_the_one_gpu(arguments):
    """NCCL refuses two ranks on one GPU, unless each passes for a host of its own."""
    os.environ |= {"NCCL_HOSTID": f"host-{os.environ['RANK']}", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    return _as_started_by_torchrun(arguments)


@pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a GPU")
@pytest.mark.parametrize(("workers", "mode", "placement"), OVER_NCCL)
def test_ranks_agree_over_nccl(tmp_path, workers, mode, placement):
    sizes = [each for each in SMALL if not each.startswith(("--", "workers="))]
    overrides = [*sizes, f"workers={workers}", *mode.split(), placement, "device=cuda", "timeout_seconds=60"]
    ranks = compose_config(overrides, check_device=False).processes
    (code, said), *_ = run_ranks(_on_the_one_gpu, ranks, [*overrides, "--steps=4"], folder=tmp_path, joins=True)
    assert code == 0 and "they agree within 1e-09" in said


def test_what_holders_of_a_stage_have_differently_is_named():
    config = compose_config(["placement=replicated", "workers=2"])
    copies = [f"version 8 of stage {stage} on rank 1" for stage in range(7)]
    said = command._text(config, Comparison(losses=0, stages=[0], ranks=2, steps=8, tolerance=0, copies=copies))
    assert "  other than on the first rank that has it: version 8 of stage 0 on rank 1, version 8" in said
    assert "version 8 of stage 4 on rank 1 and 2 more\n" in said
    assert said.endswith("they do NOT agree bitwise\n")
