"""What all tests share."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from torch import nn

    from cdp_repro.config import RunConfig
    from cdp_repro.models import ModelSpec

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Before torch is imported: ranks have one thread each, and with more a reference adds in another order."""

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# where the environment forbids it, each of the many processes that tests start would compile all of our modules again

for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _handler)
"""In the background, or under nohup, they are ignored, and processes to which tests send them would inherit that."""

TINY = (
    "dataset=synthetic", "dataset.image_size=8", "dataset.train_samples=80", "dataset.test_samples=20",
    "model=mlp", "model.depth=4", "model.hidden=16", "model.dropout=0.1", "batch_size=16", "epochs=2",
    "log_every_steps=1", "wandb=disabled",
)  # fmt: skip
"""Overrides of a run that takes a second: 2 epochs of 5 training steps."""


@pytest.fixture
def tiny() -> tuple[str, ...]:
    return TINY


@pytest.fixture
def registries_restored() -> Iterator[None]:
    """Forget after a test which timelines, modes and placements it has entered: others run over all of them."""
    from cdp_repro.schedule import MODES, PLACEMENTS
    from cdp_repro.schedule.timelines import TIMELINES

    registries = (TIMELINES, MODES, PLACEMENTS)
    before = [dict(registry) for registry in registries]
    yield
    for registry, entries in zip(registries, before, strict=True):
        registry.clear()
        registry |= entries


@pytest.fixture
def cells_here(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """Run the cells of sweeps and studies in this process; return their arguments. To start a process takes seconds.

    Signals and logs of what a run prints need real processes.
    """
    from cdp_repro.cli import train
    from cdp_repro.studies import missing_runs, start_cells

    calls: list[Sequence[str]] = []

    def run_cell(arguments: Sequence[str], *_: object, **__: object) -> int:
        calls.append(arguments)
        return train.main(list(arguments))

    for module in (missing_runs, start_cells):
        monkeypatch.setattr(module, "train_in_process", run_cell)
    return calls


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunConfig]:
    """Return the configuration of a run, with overrides, whose model is that of a package that has entered `build`."""
    from cdp_repro.config.compose import compose_config
    from cdp_repro.models import registry
    from cdp_repro.schedule import by_name

    def enter(build: Callable[[ModelSpec], nn.Sequential], *overrides: str) -> RunConfig:
        monkeypatch.setitem(registry._BUILDERS, "mine", build)
        entered = ("models", "mine")
        monkeypatch.setattr(by_name, "_entries", lambda group, name: [name] if (group, name) == entered else [])
        config = compose_config(["workers=2", *overrides])
        config.model.name = "mine"
        return config

    return enter


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests that take longest or mostly wait: at the end, the other processes would wait for them."""
    early = ("test_commands_run", "test_a_rank_that_hangs", "test_a_rank_that_takes_longer", "test_a_link_or_a_host")
    items.sort(key=lambda item: not item.name.startswith(early))
