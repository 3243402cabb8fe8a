"""What delay costs: data parallelism against each mode with each method, all tuned alike.

There are four studies for each network, and one of a larger network. *Tuning*: short runs of every setting at the same
learning rates, once each, on a seed that no comparison uses; the best must not lie at the edge of the grid. *Finals*:
runs of full length at the two best rates of each setting, and at their neighbours in the grid until the best lies
between two worse ones. Short runs alone mislead: the training loss of data parallelism on CIFAR-10 is lowest at 0.8
after 5 epochs, but at 0.2 after 15. *Delay*: every setting at its winning rate, on a few seeds; it chooses the setting
of each mode with the best mean. *Verdict*: those and data parallelism on fresh seeds, so that the choice of the best
does not flatter it. Only this study states a margin, and only it gives a verdict of equivalence. *Larger*: the same on
a larger network, at the learning rates of the smaller one, on too few seeds for a verdict. All its runs use bf16, with
which a step on a CPU takes about two thirds of the time.

What one study chooses for the next is entered below by hand; a test compares it with the committed rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cdp_repro.studies.study import Cell, Study

TUNING_SEED = 100
"""The seed of tuning and finals; no other study uses it."""
PASSED_ON = 2
"""Learning rates of each setting that go from its short runs to the finals."""
FRESH_SEEDS = tuple(range(10, 20))
"""The seeds of the runs behind a verdict."""

OPTIMIZER_KEYS = ("optim.name", "optim.nesterov")
"""Keys that a setting has in common with the data parallelism it is compared with."""
VARIED = (*OPTIMIZER_KEYS, "delay.name", "accumulate")
"""Settings that tell the groups of a study apart."""
METHOD_KEYS = (*VARIED, "delay.strength", "optim.momentum", "optim.beta1")
"""All settings in which methods against delay differ."""

_METHODS = ("delay=error_feedback", "delay=prediction")
_MODES = ("mode=cdp_v1", "mode=cdp_v2")


@dataclass(frozen=True)
class Larger:
    """A larger network on the same data set, on which the best settings run once more, untuned."""

    title: str
    overrides: str
    """Overrides beyond those of the benchmark."""
    settings: tuple[str, ...]
    """Settings that run besides data parallelism and the best."""
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Benchmark:
    """A network on a data set, and what is compared on it."""

    name: str
    title: str
    base: str
    """Overrides of all runs."""
    settings: tuple[str, ...]
    """Overrides of each mode with each method; data parallelism first, and with each optimizer that a mode has, so that
    an optimizer's gain is not counted as the method's."""
    grid: tuple[float, ...]
    """Learning rates, the same for each setting."""
    margin: float
    """In points of top-1, or nats per token: a difference that is surely smaller counts as none."""
    seeds: tuple[int, ...]
    tuning_epochs: int
    finalists: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """By setting: learning rates that run at full length, the best of the tuning first; none until that has run."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """By setting: the winner of the finals; none until those have run. The delay study has the settings named here."""
    best: tuple[str, ...] = ()
    """The setting of each mode that the delay study found best; none until that has run."""
    judged_before: tuple[str, ...] = ()
    """Settings that were the best when fresh seeds judged them, before a better one was tried; they stay in the table.
    """
    larger: Larger | None = None

    def studies(self) -> Iterator[Study]:
        """Yield the studies that can run: those for which the study before has found `finalists`, `rates` or `best`."""
        grids = dict.fromkeys(self.settings, self.grid)
        yield Study(
            self._tuning,
            "delay-tuning",
            f"{self.title}: learning rates in short runs, the same for all settings",
            self._trials(grids, f"epochs={self.tuning_epochs}"),
            varied=(*VARIED, "optim.lr"),
            passes_on=PASSED_ON,
        )
        if self.finalists:
            yield Study(
                self._finals,
                "delay-finals",
                f"{self.title}: the best learning rates of each setting at full length",
                self._trials(self.finalists),
                varied=(*VARIED, "optim.lr"),
                tuning=self._tuning,
            )
        if self.rates:
            title = f"{self.title}: every method, {len(self.seeds)} seeds (chooses)"
            tuned = [each for each in self.settings if each in self.rates]
            yield replace(self._compared("delay", title, tuned, self.seeds), chooses=True)
        if self.best:
            title = f"{self.title}: the best of each mode, {len(FRESH_SEEDS)} fresh seeds (judges)"
            judged = self._beside_data_parallelism([*self.judged_before, *self.best])
            yield replace(self._compared("verdict", title, judged, FRESH_SEEDS), margin=self.margin)
        if self.best and self.larger is not None:
            seeds = f"{len(self.larger.seeds)} seeds at most"
            title = f"{self.larger.title}: settings of the smaller network, untuned, {seeds}"
            settings = self._beside_data_parallelism([*self.larger.settings, *self.best])
            yield self._compared("larger", title, settings, self.larger.seeds, *self.larger.overrides.split())

    def _beside_data_parallelism(self, settings: Sequence[str]) -> list[str]:
        """Return the first data parallelism, that of each optimizer among the settings, and then the settings."""
        first, *others = [setting for setting in self.settings if "mode=dp" in setting.split()]
        optimizers = {_optimizer(setting) for setting in settings}
        references = [first, *(other for other in others if _optimizer(other) in optimizers)]
        return [*dict.fromkeys((*references, *settings))]

    def _compared(self, part: str, title: str, settings: Sequence[str], seeds: Sequence[int], *others: str) -> Study:
        return Study(
            f"{self.name}-{part}",
            "delay",
            title,
            tuple(self._cell(setting, self.rates[setting], seeds, *others) for setting in settings),
            varied=VARIED,
            tuning=self._finals,
        )

    @property
    def _tuning(self) -> str:
        return f"{self.name}-delay-tuning"

    @property
    def _finals(self) -> str:
        return f"{self.name}-delay-finals"

    def _trials(self, grids: Mapping[str, Sequence[float]], *others: str) -> tuple[Cell, ...]:
        return tuple(
            self._cell(setting, rate, (TUNING_SEED,), *others) for setting, grid in grids.items() for rate in grid
        )

    def _cell(self, setting: str, rate: float, seeds: Sequence[int], *others: str) -> Cell:
        return Cell((*self.base.split(), *setting.split(), f"optim.lr={rate:g}", *others), tuple(seeds))


def _optimizer(setting: str) -> tuple[str, ...]:
    """Return the overrides of a setting that choose its optimizer."""
    return tuple(word for word in setting.split() if word.startswith("optim"))


CIFAR10 = Benchmark(
    "cifar10",
    "CIFAR-10, resnet8",
    "dataset=cifar10 channels_last=true",
    (
        "mode=dp",
        "mode=dp optim.nesterov=true",
        *(f"{mode} {method}".strip() for mode in _MODES for method in ("", "optim.nesterov=true", *_METHODS)),
        "mode=cdp_v1 optim.nesterov=true delay=prediction",
        "mode=cdp_v2 accumulate=2",
        "mode=cdp_v2 accumulate=4",
        "mode=cdp_v1 delay=compensation",  # a control
    ),
    grid=(0.05, 0.1, 0.2, 0.4, 0.8, 1.6),  # at 0.025 nothing was best, at 0.8 data parallelism was
    margin=0.3,
    seeds=tuple(range(5)),
    tuning_epochs=5,
    finalists={
        "mode=dp": (0.2, 0.8, 0.1, 0.4),
        "mode=dp optim.nesterov=true": (0.8, 0.4, 0.2, 0.1),
        "mode=cdp_v1": (0.1, 0.2, 0.4),
        "mode=cdp_v1 optim.nesterov=true": (0.2, 0.4, 0.1),
        "mode=cdp_v1 delay=error_feedback": (0.2, 0.4, 0.1),
        "mode=cdp_v1 delay=prediction": (0.2, 0.4, 0.1),
        "mode=cdp_v1 optim.nesterov=true delay=prediction": (0.4, 0.2, 0.1),
        "mode=cdp_v2": (0.2, 0.4, 0.1),
        "mode=cdp_v2 optim.nesterov=true": (0.4, 0.8, 0.2, 0.1),
        "mode=cdp_v2 delay=error_feedback": (0.4, 0.8, 0.2),
        "mode=cdp_v2 delay=prediction": (0.2, 0.4, 0.1),
        "mode=cdp_v2 accumulate=2": (0.2, 0.4, 0.1),
        "mode=cdp_v2 accumulate=4": (0.4, 0.8, 0.2, 0.1),
        "mode=cdp_v1 delay=compensation": (0.1, 0.2, 0.4),
    },
    rates={
        "mode=dp": 0.2,
        "mode=dp optim.nesterov=true": 0.2,
        "mode=cdp_v1": 0.2,
        "mode=cdp_v1 optim.nesterov=true": 0.2,
        "mode=cdp_v1 delay=error_feedback": 0.2,
        "mode=cdp_v1 delay=prediction": 0.2,
        "mode=cdp_v1 optim.nesterov=true delay=prediction": 0.2,
        "mode=cdp_v2": 0.2,
        "mode=cdp_v2 optim.nesterov=true": 0.2,
        "mode=cdp_v2 delay=error_feedback": 0.4,
        "mode=cdp_v2 delay=prediction": 0.2,
        "mode=cdp_v2 accumulate=2": 0.2,
        "mode=cdp_v2 accumulate=4": 0.2,
        "mode=cdp_v1 delay=compensation": 0.2,
    },
    best=("mode=cdp_v1 optim.nesterov=true delay=prediction", "mode=cdp_v2 optim.nesterov=true"),
    judged_before=("mode=cdp_v1 optim.nesterov=true",),
    larger=Larger("CIFAR-10, resnet20 in bf16", "model=resnet20 epochs=30 precision=bf16", ("mode=cdp_v2",), (0, 1, 2)),
)

TEXT = Benchmark(
    "text",
    "Text, small gpt",
    "dataset=text model=gpt model.width=144 optim.warmup_epochs=0.1 epochs=2",
    (
        "optim=adamw mode=dp",
        "optim=nadamw mode=dp",
        *(
            f"{optim} {mode} {method}".strip()
            for mode in _MODES
            for optim, method in (("optim=adamw", ""), ("optim=nadamw", ""), *(("optim=adamw", m) for m in _METHODS))
        ),
        "optim=muon mode=dp",
        *(f"optim=muon {mode} {method}".strip() for mode in _MODES for method in ("", _METHODS[0])),
        "optim=muon mode=cdp_v2 accumulate=4 delay=error_feedback",
    ),
    # within 0.0005 to 0.008, most AdamW settings were best at the lower end, and Muon at the upper, even at 0.032
    grid=(1.25e-4, 2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2),
    margin=0.01,
    seeds=tuple(range(3)),
    tuning_epochs=1,
    finalists={
        "optim=adamw mode=dp": (2e-3, 1e-3, 4e-3),
        "optim=nadamw mode=dp": (5e-4, 1e-3, 2.5e-4),
        "optim=adamw mode=cdp_v1": (5e-4, 1e-3, 2.5e-4),
        "optim=nadamw mode=cdp_v1": (5e-4, 2e-3, 2.5e-4, 1e-3),
        "optim=adamw mode=cdp_v1 delay=error_feedback": (5e-4, 1e-3, 2.5e-4),
        "optim=adamw mode=cdp_v1 delay=prediction": (5e-4, 1e-3, 2.5e-4),
        "optim=adamw mode=cdp_v2": (1e-3, 5e-4, 2.5e-4),
        "optim=nadamw mode=cdp_v2": (1e-3, 5e-4, 2e-3),
        "optim=adamw mode=cdp_v2 delay=error_feedback": (2e-3, 1e-3, 4e-3),
        "optim=adamw mode=cdp_v2 delay=prediction": (1e-3, 5e-4, 2e-3),
        "optim=muon mode=dp": (1.6e-2, 3.2e-2, 8e-3, 4e-3),
        "optim=muon mode=cdp_v1": (8e-3, 4e-3, 1.6e-2),
        "optim=muon mode=cdp_v1 delay=error_feedback": (8e-3, 4e-3, 1.6e-2),
        "optim=muon mode=cdp_v2": (1.6e-2, 8e-3, 3.2e-2, 4e-3),
        "optim=muon mode=cdp_v2 delay=error_feedback": (1.6e-2, 8e-3, 3.2e-2, 4e-3),
        "optim=muon mode=cdp_v2 accumulate=4 delay=error_feedback": (1.6e-2, 3.2e-2, 8e-3, 4e-3),
    },
    rates={
        "optim=adamw mode=dp": 2e-3,
        "optim=nadamw mode=dp": 5e-4,
        "optim=adamw mode=cdp_v1": 5e-4,
        "optim=nadamw mode=cdp_v1": 5e-4,
        "optim=adamw mode=cdp_v1 delay=error_feedback": 5e-4,
        "optim=adamw mode=cdp_v1 delay=prediction": 5e-4,
        "optim=adamw mode=cdp_v2": 5e-4,
        "optim=nadamw mode=cdp_v2": 1e-3,
        "optim=adamw mode=cdp_v2 delay=error_feedback": 2e-3,
        "optim=adamw mode=cdp_v2 delay=prediction": 1e-3,
        "optim=muon mode=dp": 8e-3,
        "optim=muon mode=cdp_v1": 8e-3,
        "optim=muon mode=cdp_v1 delay=error_feedback": 8e-3,
        "optim=muon mode=cdp_v2": 8e-3,
        "optim=muon mode=cdp_v2 delay=error_feedback": 8e-3,
        "optim=muon mode=cdp_v2 accumulate=4 delay=error_feedback": 8e-3,
    },
    best=("optim=muon mode=cdp_v1 delay=error_feedback", "optim=muon mode=cdp_v2 accumulate=4 delay=error_feedback"),
    judged_before=("optim=muon mode=cdp_v2 delay=error_feedback",),
)

DELAY_STUDIES = tuple(study for benchmark in (CIFAR10, TEXT) for study in benchmark.studies())
"""All studies of delay that can run."""
