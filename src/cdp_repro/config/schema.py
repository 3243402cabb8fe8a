"""The typed configuration of a run, explained field by field.

`compose` lets Hydra compose it, `loading` checks it; behind the entry points, code sees only a `RunConfig`, none of
Hydra's own types. `--help` shows the string below each field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from cdp_repro.config.task import Task, task_of
from cdp_repro.schedule import MODES, Schedule, Spec
from cdp_repro.schedule.branches import Sources, two_towers

if TYPE_CHECKING:
    import torch

BRANCHES: Mapping[str, Callable[[int], Sources]] = {"two_towers": two_towers}
"""By model with branches: the function from the number of stages to the sources of each stage. Others are chains."""


@dataclass
class ModeConfig:
    """Timeline and update rule."""

    name: str = "cdp_v2"
    """Set by mode=...: `dp` (all workers at once), `accumulation` (one micro-batch after the other), `cdp_v1`, `cdp_v2`
    (staggered in a cycle; all reads one step late, or as fresh as possible), `matrix` (the same cycle, with the given
    `staleness`); pipelines that flush: `naive`, `gpipe`, `one_f_one_b`, `interleaved`, `zero_bubble`, `chimera`,
    `terapipe`; pipelines that do not: `pipedream`, `pipedream_2bw`, `ampnet`; workers that push each micro-batch when
    it is done: `ssp`, `async`. docs/systems.md explains each."""
    staleness: list[list[int]] | None = None
    """For `matrix`: staleness d(i, j) in training steps, with a column for each stage and a row for each micro-batch of
    a step (k N or `micro_batches`; replicas share a row)."""


@dataclass
class DatasetConfig:
    """The data set."""

    name: str = "digits"
    """Set by dataset=..."""
    channels: int = 1
    """Channels of an image."""
    image_size: int = 8
    """Height and width of an image, in pixels."""
    classes: int = 10
    """Number of classes; for `text`, of different tokens."""
    recommended_epochs: int = 1
    """Default of `epochs`."""
    recommended_batch_size: int = 64
    """Default of `batch_size`."""
    root: str | None = None
    """Folder of the files; for `text`, a UTF-8 file or a folder of them (default: sources of Python's own library)."""
    tokens: str = "bytes"
    """For `text`, what a token is: `bytes` (of UTF-8) or `characters`."""
    download: bool = False
    """Download CIFAR-10 from its home page if it is not in `root`."""
    train_samples: int = 1024
    """For `synthetic`: images in the training set."""
    test_samples: int = 256
    """For `synthetic`: images in the test set."""
    loader_workers: int = 2
    """Processes of each rank that decode ImageNet, or CIFAR-10 from an image tree; 0: the rank itself decodes."""


@dataclass
class ModelConfig:
    """The network."""

    name: str = "resnet8"
    """Set by model=..."""
    hidden: int = 64
    """For `mlp`: width of the hidden layers."""
    depth: int = 6
    """For `mlp`: hidden layers, without normalisation, so that many are slow to start; for `gpt`: blocks; for
    `two_towers`: blocks in each of its three parts."""
    dropout: float = 0.0
    """Dropout probability of `mlp`, `gpt`, `two_towers` and timm's models."""
    width: int = 96
    """For `gpt`: length of a token's vector, a multiple of `heads`; for `two_towers`: channels of a tower."""
    heads: int = 4
    """For `gpt`: attention heads of a block."""
    context: int = 128
    """For `gpt`: tokens of a sequence."""
    weights: str | None = None
    """File (`.safetensors`, `.pt`) of cdp-export, torchvision, timm or transformers with the initial weights; default:
    drawn from `seed`."""


@dataclass
class PlacementConfig:
    """Where the stages run."""

    name: str = "single_device"
    """Set by placement=...: `single_device`, or on several ranks: `replicated` (a worker on each), `zero` (the same,
    but each stage is held by one rank, which lends its parameters; with `collectives`, each rank holds a shard of every
    stage), `parameter_server` (the same, but `servers` more ranks hold the stages), `model_parallel` (one stage on
    each; as many ranks per stage as it has micro-batches at once) or `pipeline` (`stages` spread over `ranks`)."""


@dataclass
class OptimConfig:
    """The optimizer and its learning-rate schedule."""

    name: str = "sgd"
    """Set by optim=...: `sgd`, `adamw`, `nadamw` (Adam with Nesterov momentum and decoupled decay) or `muon` (for the
    matrices and filters inside the network; AdamW for the rest)."""
    lr: float = 0.1
    """Learning rate at the start of the schedule, after the warm-up."""
    momentum: float = 0.9
    """Momentum of `sgd` and `muon`."""
    nesterov: bool = False
    """For `sgd`: Nesterov momentum, a step along the gradient plus the momentum, not along the momentum alone."""
    beta1: float = 0.9
    """For `adamw`, `nadamw` and the AdamW part of `muon`: decay of the mean of gradients, per update."""
    beta2: float = 0.999
    """For `adamw`, `nadamw` and the AdamW part of `muon`: decay of the mean of squared gradients, per update."""
    weight_decay: float = 0.0
    """Decoupled weight decay; with `sgd`, it is added to the gradient instead."""
    clip_norm: float | None = None
    """Largest norm of the mean gradient of an update: over all stages in modes that read nothing late (`dp`) or
    everything late (`cdp_v1`); else of each stage by itself (`cdp_v2`), as some are read before all norms are known."""
    schedule: str = "constant"
    """Learning rate over time: `constant`, `step` (times `gamma` every `step_epochs`) or `cosine` (to 0 at the end)."""
    warmup_epochs: float = 0.0
    """Epochs in which the learning rate grows linearly to its full value."""
    step_epochs: int = 30
    """For optim.schedule=step: epochs between two changes of the learning rate."""
    gamma: float = 0.1
    """For optim.schedule=step: factor on the learning rate at each change."""


@dataclass
class DelayConfig:
    """The method against delay, which makes up for stale reads."""

    name: str = "none"
    """Set by delay=...: `none`, `error_feedback` (each step is corrected by its difference from the last), `prediction`
    (stale reads see parameters moved on by the last step) or `compensation` (gradients are corrected to first order).
    """
    strength: float | None = None
    """For `error_feedback`: its factor (default: the share of a stage's reads that are stale). For `compensation`:
    lambda."""


@dataclass
class ClusterConfig:
    """Seconds of stages, and links, for `cdp-plan price=true`. A run does not read them."""

    devices_per_host: int = 8
    """Devices of a host; devices 0, 1, ... fill one host after the other."""
    latency_seconds: float = 1e-5
    """Latency of a message within a host."""
    bandwidth_bytes_per_second: float = 1.25e10
    """Bandwidth from a device to others on its host, in each direction (1.25e10 is 100 Gbit/s)."""
    between_hosts_latency_seconds: float | None = None
    """Latency of a message between hosts; default: as within a host."""
    between_hosts_bandwidth_bytes_per_second: float | None = None
    """Bandwidth from a device to other hosts, in each direction: its share of its host's; default: as within a host."""
    flops_per_second: float | None = None
    """FLOP/s that a device reaches in training, not its peak; gives the seconds of stages from their FLOPs."""
    forward_seconds: list[float] | None = None
    """Forward of each stage on one micro-batch; used in place of `flops_per_second`."""
    backward_seconds: list[float] | None = None
    """Backward of each stage on one micro-batch; default: twice `forward_seconds`."""
    update_seconds: list[float] | None = None
    """Update of each stage by the optimizer; default: 0."""
    calibrate: bool = False
    """Measure forwards, backwards and the links within a host on this machine, in place of their values above."""


def is_evaluated(epoch: int, every: int, epochs: int) -> bool:
    """Whether a run evaluates after an epoch, counted from 1: after each `every`-th, and after the last."""
    return epoch % every == 0 or epoch == epochs


@dataclass
class RunConfig:
    """The configuration of one run."""

    mode: ModeConfig = field(default_factory=ModeConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    delay: DelayConfig = field(default_factory=DelayConfig)
    workers: int = 4
    """N: workers, which take the micro-batches in turn: N are under way at once, times `replicas`. `accumulation` and
    pipelines that flush use N only to give the number of micro-batches, k N."""
    stages: int | None = None
    """S: stages that the model is cut into; default: `workers`. The cyclic timeline needs a multiple of `workers`."""
    accumulate: int = 1
    """k: micro-batches that each worker runs in a training step, one after the other; a mini-batch has k N,
    times `replicas` and `slices`."""
    ranks: int | None = None
    """D, for placement=pipeline: ranks that the stages are spread over, a divisor of `stages`; default: `workers`."""
    servers: int | None = None
    """P, for placement=parameter_server: ranks that hold the stages and compute none; default: 1."""
    speeds: list[int] | None = None
    """For mode=ssp and async, and dp on single_device or parameter_server: micro-batches that each worker computes in
    the same time, e.g. [1,1,1,2]; default: all workers are equally fast."""
    jitter: int | None = None
    """For mode=ssp and async: seed of uneven times; each micro-batch then takes 0.5 to 1.5 times as long as its worker
    usually needs. Default: all micro-batches of a worker take the same time."""
    message_time: float | None = None
    """For mode=ssp and async: time of a pull, and of a push, in micro-batches of the fastest worker; default: 0."""
    slack: int | None = None
    """s, for mode=ssp: pushes by which a worker may be ahead of the slowest one when it starts; default: 3."""
    micro_batches: int | None = None
    """Replaces `accumulate` x `workers` on placement=pipeline and single_device, and need not be a multiple of
    `workers`; M is this number times `slices` and `replicas`."""
    slices: int | None = None
    """L, for mode=terapipe: micro-batches that a sequence is cut into along its tokens, a divisor of `model.context`;
    default: 2."""
    replicas: int = 1
    """R: micro-batches that a worker computes at once, each on a rank of its own; on `single_device` one device
    computes all of them."""
    baseline: str | None = None
    """A library that trains in place of our engine, with mode=dp and one process per worker: `ddp`
    (DistributedDataParallel), `fsdp2` (fully_shard), `torch_gpipe` or `torch_1f1b` (torch.distributed.pipelining)."""
    pipeline_schedule: str = "one_f_one_b"
    """How mode=dp runs on placement=pipeline: `one_f_one_b` or `gpipe`."""
    collectives: bool = False
    """Run mode=dp on placement=replicated or zero with the library's collectives (all-reduce; all-gather and
    reduce-scatter of shards) in place of our ordered messages. Collectives add in an order of their own."""
    partition: str = "flops"
    """Cost that the cut into stages balances: `flops`, `parameters` or `activations` (bytes), or `time` (measured)."""
    slot_order: str = "paper"
    """Order in a slot: `paper` (forwards before backwards) or `backward_first` (frees memory first: lower peak)."""
    batch_size: int = 64
    """Samples (images, sequences) in a mini-batch, i.e. of all workers together."""
    epochs: int = 1
    """Passes over the training set; each drops the last samples if they do not fill a mini-batch."""
    seed: int = 0
    """Seed of initial weights, data order, augmentation, dropout and the images of `synthetic`."""
    precision: str = "fp32"
    """`fp32`, `fp64`, or `bf16` (autocast: parameters stay fp32)."""
    channels_last: bool = False
    """Keep images in the layout NHWC, which makes convolutions faster on GPUs."""
    device: str = "auto"
    """`cpu`, `cuda`, or `auto`: cuda if there is one."""
    run_dir: str | None = None
    """Directory of the run, new or empty, or of the runs of a sweep; default: a new one under runs/."""
    traced_steps: int | None = None
    """Training steps at the start whose actions and activation bytes are recorded; 0 records nothing. Default: until
    the timeline repeats itself, at least 3."""
    evaluate_every_epochs: int = 1
    """Epochs between evaluations; the last epoch is always evaluated."""
    evaluation_batch_size: int = 256
    """Samples per forward in an evaluation."""
    checkpoint_every_steps: int = 500
    """Training steps between checkpoints; there is also one at the end of each epoch."""
    timeout_seconds: int = 600
    """Seconds that a rank waits for another before it gives up; only with several processes."""
    grace_seconds: int = 20
    """Seconds that ranks may take to end after a signal (writing a checkpoint) or after one of them has failed; those
    that still run are then killed."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints to keep."""
    log_every_steps: int = 10
    """Training steps between rows of metrics.jsonl."""
    wandb: str = "offline"
    """Weights & Biases (W&B): `offline` (in the run directory), `online` or `disabled`."""
    wandb_project: str = "cdp-repro"
    """Project in W&B that the run belongs to."""
    price: bool = False
    """For cdp-plan: show what a training step takes on a cluster: for `dp`, `cdp_v1`, `cdp_v2` and the chosen mode on
    every placement that can run them, for `accumulation` on one device, and for the baselines."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    program: str | None = None
    """A program file (cdp-plan --program=FILE) to run as it stands; it must be for this mode, placement and sizes."""

    @property
    def stage_count(self) -> int:
        """S."""
        return self.workers if self.stages is None else self.stages

    @property
    def step_micro_batches(self) -> int:
        """M: micro-batches that a mini-batch is cut into.

        M = k N R L, or `micro_batches` R L if that is set. M = R if each micro-batch is a training step. If workers run
        on clocks of their own, M is the number of pushes of a round.

        Raises:
            ValueError: workers run on clocks of their own, and there is no schedule with these sizes.
        """
        if self.has_own_clocks:
            return self.schedule().micro_batches
        if self.updates_each:
            return self.replicas
        return (self.micro_batches or self.workers * self.accumulate) * self.replicas * self.slices_of_a_sequence

    @property
    def slices_of_a_sequence(self) -> int:
        """L: micro-batches that sequences are cut into along their tokens; 1 in modes that do not cut them."""
        return MODES[self.mode.name].slices(self.slices) if self.mode.name in MODES else 1

    def reading_whole(self) -> RunConfig:
        """Return this configuration; if its mode cuts sequences along their tokens, with `dp` on whole ones instead."""
        if self.slices_of_a_sequence == 1:
            return self
        return replace(self, mode=ModeConfig("dp"), slices=None)

    @property
    def sample_parts(self) -> int:
        """M / L: parts that a mini-batch is cut into along its samples."""
        return self.step_micro_batches // self.slices_of_a_sequence

    @property
    def micro_batch_shape(self) -> tuple[int, ...]:
        """Shape of the inputs of a micro-batch: (samples, *shape of an image), or (samples, tokens of a slice)."""
        samples = self.batch_size // self.sample_parts
        if self.task.is_text:
            return samples, self.model.context // self.slices_of_a_sequence
        return samples, *self.input_shape

    @property
    def has_own_clocks(self) -> bool:
        """Whether workers run on clocks of their own, and each micro-batch is an update."""
        return self.mode.name in MODES and MODES[self.mode.name].has_own_clocks

    @property
    def updates_each(self) -> bool:
        """Whether each micro-batch is a training step of its own."""
        return self.mode.name in MODES and MODES[self.mode.name].updates_each

    @property
    def processes(self) -> int:
        """Processes that the run needs."""
        return self.schedule().ranks if self.baseline is None else self.workers

    @property
    def task(self) -> Task:
        """What the samples are, and how a model is judged on them."""
        return task_of(self.dataset.name)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of a sample: (channels, height, width) of an image, or (tokens,) of a sequence."""
        image = self.dataset.channels, self.dataset.image_size, self.dataset.image_size
        return (self.model.context,) if self.task.is_text else image

    @property
    def torch_device(self) -> torch.device:
        """The device that `device` stands for on this machine."""
        import torch  # here: it takes seconds, and most readers of a configuration do not need it

        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as plain data."""
        return asdict(self)

    def spec(self) -> Spec:
        """Return the choices from which the schedule of the run is made."""
        staleness = self.mode.staleness
        return Spec(
            mode=self.mode.name if staleness is None else tuple(map(tuple, staleness)),
            workers=self.workers,
            stages=self.stage_count,
            placement=self.placement.name,
            slot_order=self.slot_order,
            accumulate=self.accumulate,
            replicas=self.replicas,
            ranks=self.ranks,
            servers=self.servers,
            speeds=None if self.speeds is None else tuple(self.speeds),
            jitter=self.jitter,
            message_time=self.message_time,
            slack=self.slack,
            slices=self.slices,
            sources=self.sources,
            micro_batches=self.micro_batches,
            pipeline_schedule=self.pipeline_schedule,
            collectives=self.collectives and self.baseline is None,
        )

    @property
    def sources(self) -> Sources | None:
        """For each stage, the stages whose outputs it reads; None if the model is a chain.

        Raises:
            ValueError: the branches cannot share this number of stages.
        """
        return self.branches(self.stage_count) if self.branches else None

    @property
    def branches(self) -> Callable[[int], Sources] | None:
        """The function from the number of stages to the sources of each stage; None if the model is a chain."""
        return BRANCHES.get(self.model.name)

    def schedule(self, gradient_bytes: Sequence[int] = ()) -> Schedule:
        """Return the schedule of the run. `gradient_bytes` of each stage decide how it exchanges gradients.

        Raises:
            ValueError: values do not fit together; names values that work.
        """
        return Schedule.from_spec(self.spec(), gradient_bytes)
