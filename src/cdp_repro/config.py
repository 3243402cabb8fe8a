"""The configuration of a run: typed, checked as a whole, explained field by field.

Hydra composes it (`cli/compose.py`); past the entry point nobody sees anything but `RunConfig`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cdp_repro.schedule import MODES, PIPELINE_SCHEDULES, PLACEMENTS, SLOT_ORDERS, Schedule

BASELINES = ("ddp", "fsdp2", "torch_gpipe", "torch_1f1b")
PARTITIONS = ("flops", "parameters", "activations", "time")


class ConfigError(ValueError):
    """The user's mistake(s) in the configuration: one message with all of them."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        bullets = "\n".join(f"- {problem}" for problem in self.problems)
        super().__init__(bullets if len(self.problems) > 1 else self.problems[0])


@dataclass
class ModeConfig:
    """Timeline and update rule."""

    name: str = "cdp_v2"
    """Set by mode=...: `dp`, `cdp_v1`, `cdp_v2`, `accumulation` (of gradients, one worker after the other) or
    `matrix`."""
    staleness: list[list[int]] | None = None
    """Of `matrix`: staleness d(i, j) in training steps, a row a worker, a column a stage."""

    @property
    def rule(self) -> str | list[list[int]]:
        """What `Schedule.build` takes: a name or a matrix."""
        return self.name if self.staleness is None else self.staleness


@dataclass
class DatasetConfig:
    """What to train on."""

    name: str = "digits"
    """Set by dataset=..."""
    channels: int = 1
    """Channels of an image."""
    image_size: int = 8
    """Height and width of an image, in pixels."""
    classes: int = 10
    """Number of classes."""
    recommended_epochs: int = 1
    """What `epochs` is unless it is set."""
    recommended_batch_size: int = 64
    """What `batch_size` is unless it is set."""
    root: str | None = None
    """Folder of the files."""
    download: bool = False
    """Fetch CIFAR-10 from its home page if it is not in `root`."""
    train_samples: int = 1024
    """Of `synthetic`: images in the training set."""
    test_samples: int = 256
    """Of `synthetic`: images in the test set."""
    loader_workers: int = 2
    """Processes that decode ImageNet."""


@dataclass
class ModelConfig:
    """What to train."""

    name: str = "resnet8"
    """Set by model=..."""
    hidden: int = 64
    """Of `mlp`: width of the hidden layers."""
    depth: int = 6
    """Of `mlp`: number of hidden layers."""
    dropout: float = 0.0
    """Of `mlp` and timm's models: dropout probability."""


@dataclass
class PlacementConfig:
    """Where the stages run."""

    name: str = "single_device"
    """Set by placement=...: `single_device`, or in processes of their own `replicated` (a worker each), `zero` (the
    same, parameters sharded), `model_parallel` (a stage each, on as many as it has micro-batches) or `pipeline`."""


@dataclass
class OptimConfig:
    """The optimizer and its learning-rate schedule."""

    name: str = "sgd"
    """Set by optim=...: `sgd` or `adamw`."""
    lr: float = 0.1
    """Learning rate at the start of the schedule (after the warm-up)."""
    momentum: float = 0.9
    """Of `sgd`."""
    beta1: float = 0.9
    """Of `adamw`: decay of the mean of gradients, per step."""
    beta2: float = 0.999
    """Of `adamw`: decay of the mean of squared gradients, per step."""
    weight_decay: float = 0.0
    """Decoupled with `adamw`, a part of the gradient with `sgd`."""
    schedule: str = "constant"
    """`constant`, `step` (times `gamma` every `step_epochs`) or `cosine` (to 0 at the end)."""
    warmup_epochs: float = 0.0
    """Epochs in which the learning rate grows linearly to its full value."""
    step_epochs: int = 30
    """Of `step`: epochs between two steps."""
    gamma: float = 0.1
    """Of `step`: factor of a step."""


@dataclass
class ClusterConfig:
    """What `cdp-plan price=true` prices: the seconds of stages and links. A run does not read it."""

    devices_per_host: int = 8
    """Devices of a host; devices 0, 1, ... fill one host after the other."""
    latency_seconds: float = 1e-5
    """Of a message within a host."""
    bandwidth_bytes_per_second: float = 1.25e10
    """Of a device to others on its host, in each direction (1.25e10 is 100 Gbit/s)."""
    between_hosts_latency_seconds: float | None = None
    """Of a message from host to host; unless set: as within."""
    between_hosts_bandwidth_bytes_per_second: float | None = None
    """Of a device to others on other hosts, in each direction: its share of the host's; unless set: as within."""
    flops_per_second: float | None = None
    """Of a device, as reached in training, not its peak: gives the seconds of stages by their FLOPs."""
    forward_seconds: list[float] | None = None
    """Of each stage on one micro-batch, in place of `flops_per_second`."""
    backward_seconds: list[float] | None = None
    """Of each stage on one micro-batch; unless set: twice `forward_seconds`."""
    update_seconds: list[float] | None = None
    """Of the optimizer on each stage; unless set: 0."""
    calibrate: bool = False
    """Measure stages, and links within a host, on this machine, in place of the values above."""


@dataclass
class RunConfig:
    """One run."""

    mode: ModeConfig = field(default_factory=ModeConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    workers: int = 4
    """N: micro-batches per mini-batch."""
    stages: int | None = None
    """S: stages the model is cut into, a multiple of `workers`; unless set: `workers`."""
    replicas: int = 1
    """R: ranks that share each worker's micro-batch; on `single_device` one device computes all of them."""
    baseline: str | None = None
    """A peer in place of our engine, with mode=dp and a process a worker: `ddp` (DistributedDataParallel), `fsdp2`
    (fully_shard), `torch_gpipe` or `torch_1f1b` (torch.distributed.pipelining)."""
    pipeline_schedule: str = "one_f_one_b"
    """How mode=dp runs on placement=pipeline: `one_f_one_b` or `gpipe`."""
    collectives: bool = False
    """Run mode=dp on placement=replicated or zero by collectives of the library (all-reduce; all-gather and
    reduce-scatter of shards) in place of our ordered messages: what it adds, it adds in an order of its own."""
    partition: str = "flops"
    """What the cut balances: `flops`, `parameters`, `activations` (bytes) or `time` (measured)."""
    slot_order: str = "paper"
    """`paper`: forwards before backwards in a slot; `backward_first`: frees memory first, lower peak."""
    batch_size: int = 64
    """Samples in a mini-batch, i.e. of all workers together."""
    epochs: int = 1
    """Passes over the training set; what is left of it beyond whole mini-batches is dropped."""
    seed: int = 0
    """Of initial weights, data order, augmentation and dropout."""
    precision: str = "fp32"
    """`fp32`, `fp64`, or `bf16` (autocast: parameters stay fp32)."""
    channels_last: bool = False
    """Keep images as NHWC, which is faster for convolutions on GPUs."""
    device: str = "auto"
    """`cpu`, `cuda`, or `auto`: cuda if there is one."""
    run_dir: str | None = None
    """Directory of the run, new or empty; unless set: a new one under runs/."""
    traced_steps: int = 3
    """Training steps at the start whose actions and activation bytes are recorded; 0 records nothing."""
    evaluate_every_epochs: int = 1
    """The last epoch is always evaluated."""
    evaluation_batch_size: int = 256
    """Samples per forward in an evaluation."""
    checkpoint_every_steps: int = 500
    """Training steps between checkpoints; there is also one at the end of each epoch."""
    timeout_seconds: int = 600
    """For how long a rank waits for another before it gives up; only with several processes."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints stay."""
    log_every_steps: int = 10
    """Training steps between rows of metrics.jsonl."""
    wandb: str = "offline"
    """`offline` (in the run directory), `online` or `disabled`."""
    wandb_project: str = "cdp-repro"
    """Project that W&B files the run under."""
    price: bool = False
    """Of cdp-plan: show what a training step takes on a cluster, for every mode, placement and baseline."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    @property
    def stage_count(self) -> int:
        """S."""
        return self.workers if self.stages is None else self.stages

    @property
    def micro_batches(self) -> int:
        """M = N * R: micro-batches that a mini-batch is cut into."""
        return self.workers * self.replicas

    @property
    def ranks(self) -> int:
        """Processes that the run needs."""
        return self.schedule().ranks if self.baseline is None else self.workers

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        return self.dataset.channels, self.dataset.image_size, self.dataset.image_size

    @property
    def torch_device(self) -> torch.device:
        """The device that `device` stands for on this machine."""
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as plain data."""
        return asdict(self)

    def schedule(self, gradient_bytes: Sequence[int] = ()) -> Schedule:
        """Return the validated schedule of the run; with the bytes of each stage's gradients, as it sends them."""
        return Schedule.build(
            self.mode.rule,
            self.workers,
            self.stage_count,
            self.placement.name,
            self.slot_order,
            replicas=self.replicas,
            pipeline_schedule=self.pipeline_schedule,
            collectives=self.collectives and self.baseline is None,
            gradient_bytes=gradient_bytes,
        )


_CHOICES = {
    "mode.name": (*MODES, "matrix"),
    "optim.name": ("sgd", "adamw"),
    "optim.schedule": ("constant", "step", "cosine"),
    "placement.name": tuple(PLACEMENTS),
    "baseline": (None, *BASELINES),
    "pipeline_schedule": PIPELINE_SCHEDULES,
    "partition": PARTITIONS,
    "slot_order": SLOT_ORDERS,
    "precision": ("fp32", "fp64", "bf16"),
    "device": ("auto", "cpu", "cuda"),
    "wandb": ("offline", "online", "disabled"),
}

_MINIMA = {
    **dict.fromkeys(
        ("workers", "replicas", "batch_size", "epochs", "timeout_seconds", "evaluate_every_epochs",
         "evaluation_batch_size", "checkpoint_every_steps", "keep_checkpoints", "log_every_steps",
         "optim.step_epochs", "dataset.channels", "dataset.image_size",
         "dataset.classes", "dataset.train_samples", "dataset.test_samples", "model.hidden", "model.depth",
         "cluster.devices_per_host", "cluster.bandwidth_bytes_per_second"), 1,
    ),
    **dict.fromkeys(
        ("seed", "traced_steps", "optim.lr", "optim.weight_decay", "optim.momentum", "optim.warmup_epochs",
         "optim.gamma", "dataset.loader_workers", "cluster.latency_seconds"), 0,
    ),
}  # fmt: skip

_OPTIONAL_MINIMA = {
    "cluster.between_hosts_latency_seconds": 0, "cluster.between_hosts_bandwidth_bytes_per_second": 1,
    "cluster.flops_per_second": 1,
}  # fmt: skip

_SCHEDULE_KEYS = {
    "workers", "stages", "replicas", "batch_size", "slot_order", "mode.name", "mode.staleness", "placement.name",
    "pipeline_schedule", "collectives",
}  # fmt: skip

PLACING = ("placement.name", "pipeline_schedule", "collectives")
"""Values that say where and how the same numbers are computed."""

NO_INFLUENCE = (
    "run_dir", "wandb", "wandb_project", "keep_checkpoints", "checkpoint_every_steps", "log_every_steps",
    "traced_steps", "evaluation_batch_size", "timeout_seconds", *PLACING, "dataset.root",
    "dataset.download", "dataset.loader_workers", "price",
    *(f"cluster.{each.name}" for each in fields(ClusterConfig)),
)  # fmt: skip
"""Values that may differ between a checkpoint and the run that goes on from it: they change no parameter, but
`collectives` in its last bits."""


def load_config(composed: DictConfig, check_device: bool = True) -> RunConfig:
    """Return the typed configuration; raise ConfigError with every value of a wrong type or out of range.

    Without `check_device` a device that this machine lacks is accepted, as in a plan for another machine.
    """
    config, wrong = _typed(composed)
    problems = [*wrong.values()]
    out_of_range = dict(_out_of_range(config))
    problems += out_of_range.values()
    if not {*wrong, *out_of_range} & _SCHEDULE_KEYS:
        problems += _inconsistent(config)
    if check_device and config.device == "cuda" and not torch.cuda.is_available():
        problems.append("device=cuda: torch finds no CUDA device on this machine; use device=cpu (or device=auto)")
    if problems:
        raise ConfigError(problems)
    return config


def without_effect(config: RunConfig) -> list[str]:
    """Return a sentence for each setting that will have no effect, or another one than its name says."""
    found = []
    if config.optim.warmup_epochs >= config.epochs:
        found.append(
            f"optim.warmup_epochs={config.optim.warmup_epochs:g} covers all epochs={config.epochs}: the learning rate "
            "only grows"
        )
    elif config.optim.schedule == "step" and config.optim.step_epochs >= config.epochs:
        found.append(f"optim.step_epochs={config.optim.step_epochs} is not reached in epochs={config.epochs}")
    if config.collectives and config.ranks == 1:
        found.append("collectives=true has no effect on one rank")
    if config.channels_last and config.model.name == "mlp":
        found.append("channels_last=true has no effect on model=mlp")
    return found


def _typed(composed: DictConfig) -> tuple[RunConfig, dict[str, str]]:
    """Return the values that have the right type, in place of the defaults, and by key what is wrong with others."""
    schema = OmegaConf.structured(RunConfig)
    problems: dict[str, str] = {}
    fitting = []
    try:
        given = leaves(composed)
    except OmegaConfBaseException as error:
        raise ConfigError([f"the configuration cannot be resolved: {str(error).splitlines()[0]}"]) from error
    for key, value in given:
        if value == MISSING:
            problems[key] = f"{key} has no value yet: give {key}=..."
            continue
        try:
            OmegaConf.merge(schema, _nested(key, value))
            fitting.append(_nested(key, value))
        except OmegaConfBaseException as error:
            problems[key] = f"{key}={value}: {str(error).splitlines()[0]}"
    config = OmegaConf.to_object(OmegaConf.merge(schema, *fitting))
    assert isinstance(config, RunConfig)
    return config, problems


def _nested(key: str, value: Any) -> dict[str, Any]:
    """Return {"a": {"b": value}} for the key "a.b"."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return {**value}


def leaves(node: DictConfig, prefix: str = "") -> list[tuple[str, Any]]:
    """Return every value of a configuration with its dotted key; interpolations resolved, lists whole."""
    found: list[tuple[str, Any]] = []
    for key in map(str, node):
        if OmegaConf.is_missing(node, key):
            found.append((f"{prefix}{key}", MISSING))
        elif isinstance(node[key], DictConfig):
            found += leaves(node[key], f"{prefix}{key}.")
        else:
            value = node[key]
            found.append((f"{prefix}{key}", OmegaConf.to_container(value) if OmegaConf.is_list(value) else value))
    return found


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the most similar choice, or nothing if none is similar."""
    by_lower = {choice.lower(): choice for choice in choices}
    close = [by_lower[match] for match in difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.4)]
    return f"; did you mean {close[0]!r}?" if close else ""


def _value(config: RunConfig, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _out_of_range(config: RunConfig) -> Iterable[tuple[str, str]]:
    """Yield (key, what is wrong with it)."""
    for key, choices in _CHOICES.items():
        value = _value(config, key)
        if value not in choices:
            names = [str(choice) for choice in choices if choice is not None]
            yield key, f"{key}={value}: choose {', '.join(names)}{nearest(str(value), names)}"
    for key, minimum in _MINIMA.items():
        value = _value(config, key)
        if not (value >= minimum and math.isfinite(value)):
            yield key, f"{key}={value}: must be a finite number, {minimum} or more"
    for key, least in _OPTIONAL_MINIMA.items():
        value = _value(config, key)
        if value is not None and not (value >= least and math.isfinite(value)):
            yield key, f"{key}={value}: must be a finite number, {least} or more"
    for key in ("model.dropout", "optim.beta1", "optim.beta2"):
        value = _value(config, key)
        if not 0 <= value < 1:
            yield key, f"{key}={value}: must be at least 0 and below 1"
    if config.seed >= 2**63:
        yield "seed", f"seed={config.seed}: must be below 2^63"


def _inconsistent(config: RunConfig) -> Iterable[str]:
    try:
        config.schedule()
    except ValueError as error:
        yield str(error)
    if config.baseline is not None:
        yield from _wrong_with_baseline(config)
    if config.price:
        yield from _wrong_with_cluster(config)
    if config.batch_size % config.micro_batches:
        lower = config.batch_size // config.micro_batches * config.micro_batches
        works = " or ".join(f"batch_size={value}" for value in (lower, lower + config.micro_batches) if value)
        parts = f"workers={config.workers}" + (f" x replicas={config.replicas}" if config.replicas > 1 else "")
        yield f"batch_size={config.batch_size} is not divisible by {parts}: use {works}"


def _wrong_with_cluster(config: RunConfig) -> Iterable[str]:
    cluster, stages = config.cluster, config.stage_count
    ways = [cluster.calibrate, cluster.flops_per_second is not None, cluster.forward_seconds is not None]
    if sum(ways) != 1:
        yield (
            f"price=true takes the seconds of stages from one source, not {sum(ways)}: give cluster.calibrate=true, "
            f"cluster.flops_per_second=1e13 or cluster.forward_seconds={[0.01] * stages}"
        )
    if cluster.backward_seconds is not None and cluster.forward_seconds is None:
        yield "cluster.backward_seconds has no effect without cluster.forward_seconds: give both"
    for name in ("forward_seconds", "backward_seconds", "update_seconds"):
        seconds = getattr(cluster, name)
        if seconds is not None and (len(seconds) != stages or not all(0 <= each < math.inf for each in seconds)):
            yield (
                f"cluster.{name}={seconds}: must be {stages} finite numbers, 0 or more, one a stage, e.g. "
                f"{[0.01] * stages}"
            )


def _wrong_with_baseline(config: RunConfig) -> Iterable[str]:
    if config.workers < 2:
        yield f"baseline={config.baseline} is for several processes, not for workers={config.workers}: use workers=2"
    if config.mode.name != "dp":
        yield f"baseline={config.baseline} trains by data parallelism, not by mode={config.mode.name}: use mode=dp"
    if config.placement.name != "single_device":
        yield f"baseline={config.baseline} places its stages itself: drop placement={config.placement.name}"
    if config.collectives:
        yield f"baseline={config.baseline} uses the library's collectives in any case: drop collectives=true"
    if config.replicas != 1:
        yield f"baseline={config.baseline} knows no replicas={config.replicas}: use workers={config.micro_batches}"
    if config.baseline in ("torch_gpipe", "torch_1f1b") and config.stage_count != config.workers:
        yield (
            f"baseline={config.baseline} runs one stage a process, not stages={config.stage_count} on "
            f"workers={config.workers}: use stages={config.workers}"
        )


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings by dotted key, those that an older version did not have at their default."""
    return {**defaults(), **flat(config)}


def defaults() -> dict[str, Any]:
    """Return the default of every setting by dotted key."""
    return flat(RunConfig().to_dict())


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by dotted key."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found
