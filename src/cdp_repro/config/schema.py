"""The typed configuration of a run, explained field by field.

Hydra composes it (`compose`), `loading` checks it; past the entry point nobody sees anything but `RunConfig`.
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
"""By model: the function from a number of stages to what each reads. All others are chains."""


@dataclass
class ModeConfig:
    """Timeline and update rule."""

    name: str = "cdp_v2"
    """Set by mode=...: `dp` (all micro-batches at once), `accumulation` (one after the other), `cdp_v1`, `cdp_v2` (one
    by one in a cycle; reads one step late, or as fresh as can be), `matrix` (the same, with a staleness of yours);
    pipelines that flush: `naive`, `gpipe`, `one_f_one_b`, `interleaved`, `zero_bubble`, `chimera`, `terapipe`; that do
    not: `pipedream`, `pipedream_2bw`, `ampnet`; workers that push to servers when they are done: `ssp`, `async`.
    docs/systems.md explains each."""
    staleness: list[list[int]] | None = None
    """Of `matrix`: staleness d(i, j) in training steps, a row for each of the k N micro-batches, a column a stage."""


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
    """Number of classes; of `text`: of different tokens."""
    recommended_epochs: int = 1
    """Default of `epochs`."""
    recommended_batch_size: int = 64
    """Default of `batch_size`."""
    root: str | None = None
    """Folder of the files; of `text`: a UTF-8 file, or a folder of them, unless set Python's own library."""
    tokens: str = "bytes"
    """Of `text`: `bytes` of UTF-8, or `characters`."""
    download: bool = False
    """Fetch CIFAR-10 from its home page if it is not in `root`."""
    train_samples: int = 1024
    """Of `synthetic`: images in the training set."""
    test_samples: int = 256
    """Of `synthetic`: images in the test set."""
    loader_workers: int = 2
    """Processes that decode ImageNet, and CIFAR-10 from an image tree."""


@dataclass
class ModelConfig:
    """The network."""

    name: str = "resnet8"
    """Set by model=..."""
    hidden: int = 64
    """Of `mlp`: width of the hidden layers."""
    depth: int = 6
    """Of `mlp`: number of hidden layers; of `gpt`: of blocks; of `two_towers`: of blocks of each of three parts."""
    dropout: float = 0.0
    """Of `mlp`, `gpt`, `two_towers` and timm's models: dropout probability."""
    width: int = 96
    """Of `gpt`: values for each token between blocks; a multiple of `heads`. Of `two_towers`: channels of a tower."""
    heads: int = 4
    """Of `gpt`: attention heads of a block."""
    context: int = 128
    """Of `gpt`: tokens of a sequence."""
    weights: str | None = None
    """File (`.safetensors`, `.pt`) of cdp-export, torchvision or timm to start from; unless set: drawn from `seed`."""


@dataclass
class PlacementConfig:
    """Where the stages run."""

    name: str = "single_device"
    """Set by placement=...: `single_device`, or in processes of their own `replicated` (a worker each), `zero` (the
    same, each stage held by one of them, which lends its parameters; with `collectives` a shard of every stage on
    each), `parameter_server` (the same, parameters on ranks more), `model_parallel` (a stage each, on as many as it has
    micro-batches) or `pipeline`."""


@dataclass
class OptimConfig:
    """The optimizer and its learning-rate schedule."""

    name: str = "sgd"
    """Set by optim=...: `sgd`, `adamw`, `nadamw` (Adam with Nesterov momentum and decoupled decay) or `muon` (for the
    matrices and filters inside the network; AdamW for the rest)."""
    lr: float = 0.1
    """Learning rate at the start of the schedule (after the warm-up)."""
    momentum: float = 0.9
    """Of `sgd` and `muon`."""
    nesterov: bool = False
    """Of `sgd`: step along the gradient and the momentum that it makes, in place of the momentum alone."""
    beta1: float = 0.9
    """Of `adamw`, `nadamw`, and of the rest with `muon`: decay of the mean of gradients, per step."""
    beta2: float = 0.999
    """Of the same: decay of the mean of squared gradients, per step."""
    weight_decay: float = 0.0
    """Decoupled, but with `sgd` a part of the gradient."""
    clip_norm: float | None = None
    """Largest norm of the mean gradient of a training step: over all stages with `dp`, `cdp_v1` and `accumulation`;
    of each stage by itself with `cdp_v2`, whose last stages are read before the norm of all is known."""
    schedule: str = "constant"
    """`constant`, `step` (times `gamma` every `step_epochs`) or `cosine` (to 0 at the end)."""
    warmup_epochs: float = 0.0
    """Epochs in which the learning rate grows linearly to its full value."""
    step_epochs: int = 30
    """Of `step`: epochs between two steps."""
    gamma: float = 0.1
    """Of `step`: factor of a step."""


@dataclass
class DelayConfig:
    """What makes up for stale reads."""

    name: str = "none"
    """Set by delay=...: `none`, `error_feedback` (steps are corrected by the change from the last one), `prediction`
    (stale reads see parameters moved on by the last step) or `compensation` (gradients corrected to first order)."""
    strength: float | None = None
    """Of `error_feedback`: its factor, unless set the share of a stage's reads that are stale. Of `compensation`:
    lambda."""


@dataclass
class ClusterConfig:
    """Seconds of stages and links, for `cdp-plan price=true`. A run does not read it."""

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
    delay: DelayConfig = field(default_factory=DelayConfig)
    workers: int = 4
    """N: workers, which take the micro-batches in turn: so many are under way at once, times `replicas`. `accumulation`
    and pipelines that flush use N only to give M = k N."""
    stages: int | None = None
    """S: stages the model is cut into; unless set: `workers`. The cyclic timeline needs a multiple of `workers`."""
    accumulate: int = 1
    """k: micro-batches that each worker runs in a training step, one after the other; a mini-batch has k N of them."""
    ranks: int | None = None
    """D, of placement=pipeline: ranks that the stages are spread over, a divisor of `stages`; unless set: `workers`."""
    servers: int | None = None
    """P, of placement=parameter_server: ranks that hold the stages and compute none; unless set: 1."""
    speeds: list[int] | None = None
    """Of mode=ssp, async and dp: micro-batches that each worker computes in the same time, e.g. [1,1,1,2]; unless set:
    all are alike."""
    jitter: int | None = None
    """Of mode=ssp and async: seed by which each micro-batch takes from half to one and a half of its worker's time;
    unless set: all of a worker take the same."""
    message_time: float | None = None
    """Of mode=ssp and async: time of a pull, and of a push, in micro-batches of the fastest worker; unless set:
    they take none."""
    slack: int | None = None
    """s, of mode=ssp: pushes by which a worker may be ahead of the slowest one when it starts; unless set: 3."""
    micro_batches: int | None = None
    """In place of `accumulate` x `workers`, of pipelines (placement=pipeline or single_device), where it need be no
    multiple of `workers`; times `slices` and `replicas` it is M."""
    slices: int | None = None
    """L, of mode=terapipe: micro-batches that a sequence is cut into along its tokens, a divisor of `model.context`;
    unless set: 2."""
    replicas: int = 1
    """R: micro-batches that a worker computes at once, each on a rank of its own; on `single_device` one device
    computes all of them."""
    baseline: str | None = None
    """A library in place of our engine, with mode=dp and a process a worker: `ddp` (DistributedDataParallel), `fsdp2`
    (fully_shard), `torch_gpipe` or `torch_1f1b` (torch.distributed.pipelining)."""
    pipeline_schedule: str = "one_f_one_b"
    """How mode=dp runs on placement=pipeline: `one_f_one_b` or `gpipe`."""
    collectives: bool = False
    """Run mode=dp on placement=replicated or zero by collectives of the library (all-reduce; all-gather and
    reduce-scatter of shards) in place of our ordered messages: what it adds, it adds in an order of its own."""
    partition: str = "flops"
    """Cost that the cut balances: `flops`, `parameters`, `activations` (bytes) or `time` (measured)."""
    slot_order: str = "paper"
    """`paper`: forwards before backwards in a slot; `backward_first`: frees memory first, lower peak."""
    batch_size: int = 64
    """Samples (images, sequences) in a mini-batch, i.e. of all workers together."""
    epochs: int = 1
    """Passes over the training set; each drops the rest that fills no whole mini-batch."""
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
    traced_steps: int | None = None
    """Training steps at the start whose actions and activation bytes are recorded; 0 records nothing. Unless set: until
    the timeline repeats itself, 3 at least."""
    evaluate_every_epochs: int = 1
    """The last epoch is always evaluated."""
    evaluation_batch_size: int = 256
    """Samples per forward in an evaluation."""
    checkpoint_every_steps: int = 500
    """Training steps between checkpoints; there is also one at the end of each epoch."""
    timeout_seconds: int = 600
    """Seconds that a rank waits for another before it gives up; only with several processes."""
    grace_seconds: int = 20
    """Seconds that ranks may take to write a checkpoint and end, after a signal or after one has failed; those that
    still run are then killed."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints stay."""
    log_every_steps: int = 10
    """Training steps between rows of metrics.jsonl."""
    wandb: str = "offline"
    """`offline` (in the run directory), `online` or `disabled`."""
    wandb_project: str = "cdp-repro"
    """Project that W&B files the run under."""
    price: bool = False
    """Of cdp-plan: show what a training step takes on a cluster: for `dp`, `cdp_v1`, `cdp_v2` and the chosen mode on
    every placement that can run them, for `accumulation` on one device, and for the baselines."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    program: str | None = None
    """A program file (cdp-plan --program=FILE) to run as it stands; it must be of this mode, placement and sizes."""

    @property
    def stage_count(self) -> int:
        """S."""
        return self.workers if self.stages is None else self.stages

    @property
    def step_micro_batches(self) -> int:
        """M: micro-batches that a mini-batch is cut into.

        That is k N R L, or where M is chosen M R L; R where each micro-batch is a training step; where workers run on
        clocks of their own, the pushes of a round.

        Raises:
            ValueError: speeds of which there is no such round.
        """
        if self.pushes:
            return self.schedule().micro_batches
        if self.updates_each:
            return self.replicas
        return (self.micro_batches or self.workers * self.accumulate) * self.replicas * self.slices_of_a_sequence

    @property
    def slices_of_a_sequence(self) -> int:
        """L: micro-batches that sequences are cut into along their tokens; 1 but in a mode that does so."""
        return MODES[self.mode.name].slices(self.slices) if self.mode.name in MODES else 1

    def reading_whole(self) -> RunConfig:
        """Return the same, but where sequences are cut along their tokens data parallelism on whole ones."""
        if self.slices_of_a_sequence == 1:
            return self
        return replace(self, mode=ModeConfig("dp"), slices=None)

    @property
    def sample_parts(self) -> int:
        """M / L: parts that a mini-batch is cut into along its samples."""
        return self.step_micro_batches // self.slices_of_a_sequence

    @property
    def micro_batch_shape(self) -> tuple[int, ...]:
        """Shape of the inputs of a micro-batch: its samples, then the shape of an image, or the tokens of a slice."""
        samples = self.batch_size // self.sample_parts
        if self.task.is_text:
            return samples, self.model.context // self.slices_of_a_sequence
        return samples, *self.input_shape

    @property
    def pushes(self) -> bool:
        """Whether workers run on clocks of their own, and each micro-batch is an update."""
        return self.mode.name in MODES and MODES[self.mode.name].pushes

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
        """Channels, height and width of an image; the tokens of a sequence."""
        image = self.dataset.channels, self.dataset.image_size, self.dataset.image_size
        return (self.model.context,) if self.task.is_text else image

    @property
    def torch_device(self) -> torch.device:
        """The device that `device` stands for on this machine."""
        import torch  # here: it takes seconds, and most of what reads a configuration needs none of it

        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as plain data."""
        return asdict(self)

    def spec(self) -> Spec:
        """Return what the run's schedule is made from."""
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
        """Of each stage the stages whose outputs it reads, where the model has branches; None: a chain.

        Raises:
            ValueError: the branches cannot share the stages.
        """
        return self.branches(self.stage_count) if self.branches else None

    @property
    def branches(self) -> Callable[[int], Sources] | None:
        """Which of so many stages read which, where the model has branches that join; None: a chain."""
        return BRANCHES.get(self.model.name)

    def schedule(self, gradient_bytes: Sequence[int] = ()) -> Schedule:
        """Return the schedule of the run; with the bytes of each stage's gradients, as it sends them.

        Raises:
            ValueError: values that do not fit together, with values that work.
        """
        return Schedule.of(self.spec(), gradient_bytes)
