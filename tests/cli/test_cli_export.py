"""`cdp-export` as a user types it."""

from __future__ import annotations

import re

import torch

from cdp_repro.cli import export as command
from cdp_repro.config.compose import compose_config
from cdp_repro.training.run import train


def test_the_weights_of_a_run_are_written_and_told(tmp_path, tiny, capsys):
    train(compose_config([*tiny]), tmp_path / "run", ["test"])
    assert command.main([str(tmp_path / "run"), str(tmp_path / "mlp.pt")]) == 0
    found = torch.load(tmp_path / "mlp.pt", weights_only=True)
    numbers = sum(tensor.numel() for tensor in found.values())
    said = f"mlp after 10 training steps, {numbers:,} numbers in {len(found)} tensors\n"
    assert re.fullmatch(rf".*mlp\.pt: {said}", capsys.readouterr().out)


def test_mistakes_are_explained(tmp_path, capsys):
    for arguments, said in (
        ([], "takes a run directory and a file, not nothing"),
        (["one"], "takes a run directory and a file, not one"),
        (["run", "file.pt", "--force"], "takes a run directory and a file"),
        ([str(tmp_path), str(tmp_path / "file.pt")], "is not a run directory"),
        ([str(tmp_path), "file"], "use file.safetensors or file.pt"),
    ):
        assert command.main(arguments) == 2
        assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_help_teaches(capsys):
    assert command.main(["--help"]) == 0
    assert "model.weights=" in capsys.readouterr().out
