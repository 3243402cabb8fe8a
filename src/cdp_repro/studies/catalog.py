"""The studies of this project: which runs the report's tables and figures need."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from cdp_repro.baselines import BASELINES
from cdp_repro.predict.system_specs import CommonSizes
from cdp_repro.schedule import COLLECTIVE_PLACEMENTS
from cdp_repro.schedule.virtual_clock import Round, ticks_of
from cdp_repro.studies.cost_settings import EXECUTED_WORKERS, PLACEMENT_NAMES
from cdp_repro.studies.delay_studies import DELAY_STUDIES
from cdp_repro.studies.study import Cell, Study

_MODES = [f"mode={mode}" for mode in ("dp", "cdp_v1", "cdp_v2")]


def _cells(*swept: Sequence[str], seeds: Sequence[int] = (0,)) -> tuple[Cell, ...]:
    """Return a cell for every combination; a text may hold several overrides with blanks between."""
    return tuple(Cell(tuple(" ".join(chosen).split()), tuple(seeds)) for chosen in product(*swept))


def _constant(delay: int, workers: int) -> str:
    row = f"[{','.join([str(delay)] * workers)}]"
    return f"mode=[{','.join([row] * workers)}]"


CIFAR10 = "dataset=cifar10 channels_last=true optim.lr={}"
TUNED_LR = 0.2
"""Of data parallelism, for all modes. `accuracy.chosen_rate` chose it and the following from the tuning study."""
STALENESS_LR = {2: 0.1, 3: 0.025, 5: 0.025}
"""By delay: the learning rate that suits it."""

SYSTEM_RANKS, SYSTEM_MICRO_BATCHES = 4, 8
"""D and M of the table of systems."""

LATE_WORKERS, LATE_SAMPLES = 4, 32
"""Workers and the images of a micro-batch where the accuracy of late systems is compared."""
LATE_SPEEDS, LATE_JITTER = (1, 1, 1, 2), 1
"""Speeds and jitter, there, of the workers of `ssp` and `async`."""
LATE_BOUNDS = (0, 2, 3, 5, None)
"""Pushes by which a worker of `ssp` may be ahead of the slowest, there; None is `async`, without a bound."""
WEIGHT_DECAY = 5e-4
"""The default of `optim=sgd`."""

_NETWORKS = {"resnet18": 10, "resnet50": 18, "vit_b_16": 14}
"""The networks of the memory figures, with their number of blocks."""


def _memory() -> tuple[Cell, ...]:
    found: list[Cell] = []
    for model, blocks in _NETWORKS.items():
        for workers in (4, 8, blocks):
            size = (
                f"dataset=synthetic dataset.channels=3 dataset.image_size=224 dataset.classes=1000 model={model} "
                f"workers={workers} batch_size={workers} dataset.train_samples={3 * workers} dataset.test_samples=1 "
                "epochs=1 optim.lr=0.0001"
            )
            cuts = [f"partition={name}" for name in ("flops", "activations")] if workers < blocks else [""]
            orders = ["mode=dp", "mode=cdp_v2", "mode=cdp_v2 slot_order=backward_first"]
            found += _cells(orders, [size], cuts)
    return tuple(found)


def _costs() -> tuple[Cell, ...]:
    """All settings and the libraries, on a network with equal stages except for the last."""
    found: list[Cell] = []
    for workers in EXECUTED_WORKERS:
        size = f"model=mlp model.depth={workers - 1} workers={workers} batch_size={12 * workers} epochs=1"
        found += _cells(_MODES, [size], [f"placement={name}" for name in PLACEMENT_NAMES])
        found += _cells(["mode=dp"], [size], ["placement=pipeline pipeline_schedule=gpipe"])
        found += _cells(["mode=dp collectives=true"], [size], [f"placement={name}" for name in COLLECTIVE_PLACEMENTS])
        found += _cells(["mode=accumulation"], [size])
        found += _cells(["mode=dp"], [size], [f"baseline={name}" for name in BASELINES])
    return tuple(found)


def _systems() -> tuple[Cell, ...]:
    """All systems that `cdp-plan --systems` compares, on 4 ranks with mini-batches of 8 micro-batches of 12 images.

    Where each micro-batch is a step of its own, a mini-batch is one micro-batch. The traced steps are enough to fill
    any of them.
    """
    found: list[Cell] = []
    for spec in CommonSizes(SYSTEM_RANKS, SYSTEM_MICRO_BATCHES // SYSTEM_RANKS).specs():
        size = f"workers={spec.workers} stages={spec.stages} accumulate={spec.accumulate}"
        batch = 12 * spec.sizes.micro_batches
        run = f"model=mlp model.depth=7 batch_size={batch} epochs=1 traced_steps=12"
        found += _cells([f"mode={spec.mode} placement={spec.placement}"], [size], [run])
    return tuple(found)


def _late_systems() -> tuple[Cell, ...]:
    """Systems that update after each micro-batch, most of which read late, at one learning rate for each image.

    All have data parallelism's micro-batches, of 32 images. Where an update has a single micro-batch, the learning rate
    is divided by 4; where gradients are divided by N = 4 instead, weight decay is. The first reads nothing late: it
    separates the effect of small updates from that of delay.
    """
    alone = f"{CIFAR10.format(TUNED_LR / LATE_WORKERS)} batch_size={LATE_SAMPLES}"
    found = _cells(["mode=dp workers=1 stages=4", "mode=pipedream", "mode=ampnet"], [alone], seeds=range(2))
    ticks = ticks_of(LATE_SPEEDS, LATE_JITTER)
    clock = f"speeds=[{','.join(map(str, LATE_SPEEDS))}] jitter={LATE_JITTER}"
    divided = f"{CIFAR10.format(TUNED_LR)} {clock} optim.weight_decay={WEIGHT_DECAY / LATE_WORKERS:g}"
    for bound in LATE_BOUNDS:
        mode = "mode=async" if bound is None else f"mode=ssp slack={bound}"
        pushes = len(Round.for_workers(ticks, bound).turns)
        found += _cells([mode], [f"{divided} batch_size={pushes * LATE_SAMPLES}"], seeds=range(2))
    return found


STUDIES = {
    study.name: study
    for study in (
        Study(
            "cifar10",
            "accuracy",
            "CIFAR-10, resnet8: the paper's three modes",
            _cells(_MODES, [CIFAR10.format(TUNED_LR)], seeds=range(5)),
        ),
        Study(
            "cifar10-staleness",
            "accuracy",
            "CIFAR-10, resnet8: bounded staleness beyond one step, at the learning rate of dp and at its own",
            tuple(
                cell
                for delay, own in STALENESS_LR.items()
                for cell in _cells(
                    [_constant(delay, 4)], [CIFAR10.format(lr) for lr in (TUNED_LR, own)], seeds=range(2)
                )
            ),
            reference="cifar10",
            varied=("optim.lr",),
        ),
        Study(
            "cifar10-late-systems",
            "late-systems",
            "CIFAR-10, resnet8: systems that update after each micro-batch, at data parallelism's rate for each image",
            _late_systems(),
            reference="cifar10",
            varied=("slack",),
        ),
        Study(
            "digits",
            "accuracy",
            "Handwritten digits, resnet8",
            _cells(_MODES, seeds=range(10)),
        ),
        Study(
            "paper-cifar10-resnet18",
            "accuracy",
            "CIFAR-10, ResNet-18, the authors' set-up at full length",
            _cells(_MODES, ["experiment=paper/cifar10_resnet18"]),
        ),
        Study(
            "cifar10-tuning",
            "tuning",
            "CIFAR-10, resnet8, three epochs: the learning rate of data parallelism, and of longer delays",
            _cells(["mode=dp"], [f"{CIFAR10.format(lr)} epochs=3" for lr in (0.05, 0.1, 0.2, 0.4)])
            + _cells(
                [_constant(delay, 4) for delay in STALENESS_LR],
                [f"{CIFAR10.format(lr)} epochs=3" for lr in (0.0125, 0.025, 0.05, 0.1, 0.2)],
            ),
            varied=("optim.lr",),
        ),
        *DELAY_STUDIES,
        Study("memory", "memory", "Live activations over a training step, executed", _memory()),
        Study("costs", "costs", "What each setting costs, executed", _costs()),
        Study("systems", "systems", "What each system of the field costs, executed", _systems()),
    )
}
"""All studies of the project, by name."""
