"""What a run goes on from, and when it is refused."""

from __future__ import annotations

import re
from contextlib import ExitStack

import pytest

from cdp_repro.observe.run_directory import RunDirectory, RunDirectoryError, arguments_to_go_on
from cdp_repro.training.checkpoint import Checkpoint, CheckpointError, CheckpointStore
from cdp_repro.training.earlier_run import EarlierRun, open_earlier


@pytest.fixture
def directory(tmp_path):
    return RunDirectory.create(tmp_path / "run", {"seed": 0}, ["test"])


def save(directory, step, **meta):
    CheckpointStore(directory.checkpoints_path).save(step, {"engine": {"step": step}}, meta)


def test_the_newest_checkpoint_is_read_under_the_lock_of_the_run(directory):
    save(directory, 3)
    save(directory, 5, versions={"version/code": "a"}, blocks_per_stage=[2, 1])
    with ExitStack() as stack:
        opened, earlier = open_earlier(directory.path, False, stack)
        with pytest.raises(RunDirectoryError), directory.locked():
            pass
    with directory.locked():
        pass
    assert opened.path == directory.path and earlier.summary is None
    assert earlier.checkpoint.step == 5
    assert (earlier.versions, earlier.blocks_per_stage) == ({"version/code": "a"}, [2, 1])


def test_a_finished_run_is_read_while_another_process_holds_it_or_nothing_can_be_written(directory):
    directory.write_summary({"status": "finished", "seed": 0})
    with directory.locked(), ExitStack() as stack:
        earlier = open_earlier(directory.path, False, stack)[1]
    assert earlier.summary == {"status": "finished", "seed": 0} and earlier.checkpoint is None


@pytest.mark.parametrize("status", ["interrupted", "failed", "diverged"])
def test_a_run_that_has_stopped_early_goes_on(directory, status):
    save(directory, 3)
    directory.write_summary({"status": status})
    with ExitStack() as stack:
        assert open_earlier(directory.path, False, stack)[1].checkpoint.step == 3


def test_a_run_without_a_checkpoint_starts_again_only_if_asked_to(directory):
    with (
        ExitStack() as stack,
        pytest.raises(CheckpointError, match=r"run has no checkpoint to go on from. Add re"),
    ):
        open_earlier(directory.path, False, stack)
    with ExitStack() as stack:
        assert open_earlier(directory.path, True, stack)[1] == EarlierRun()


def test_a_run_with_a_checkpoint_does_not_start_again(directory):
    save(directory, 10)
    with (
        ExitStack() as stack,
        pytest.raises(CheckpointError, match="step-000000010 is one: drop restart=true to go on from it"),
    ):
        open_earlier(directory.path, True, stack)
    assert arguments_to_go_on(directory.path) == [f"resume={directory.path}"]


def test_a_run_that_begins_has_nothing_earlier():
    assert (EarlierRun().versions, EarlierRun().blocks_per_stage) == ({}, None)


@pytest.mark.parametrize("blocks", [["all"], [1, 0], "2", {"0": 1}])
def test_what_are_no_numbers_of_blocks_is_refused(blocks):
    earlier = EarlierRun(Checkpoint(1, {}, {"blocks_per_stage": blocks}))
    with pytest.raises(
        CheckpointError, match=f"numbers of blocks in blocks_per_stage, found {re.escape(repr(blocks))}"
    ):
        _ = earlier.blocks_per_stage
