"""The sections of a run's configuration, each key with its meaning and bounds."""

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    ValidationError,
    model_validator,
)

from rayfcp.config.adapting import LoraConfig, RopeConfig
from rayfcp.config.architecture import VISION_FAMILIES, ArchitectureConfig
from rayfcp.config.constraints import UNCONSTRAINED, HostConstraints, preset
from rayfcp.config.data import DataConfig
from rayfcp.config.evaluation import EvalConfig
from rayfcp.config.losses import ROWS, LossConfig
from rayfcp.config.section import (
    Beta,
    Bounds,
    Count,
    Fraction,
    Index,
    Name,
    Section,
    as_list,
    as_numbers,
    as_primitives,
    count_or_range,
    known_device,
)
from rayfcp.values.devices import AUTO


class BlockOptions(Section):
    """Options of `flex-block` (FCP with blocks, Zhao et al., 2026).

    `alpha`, `beta`: weights of memory and compute in Algorithm 1. A rank may hold 1 + `tolerance` times the mean
    tokens, if memory permits. `paced`: transfers come when their target has computed those before, else in the order of
    the edge coloring alone.
    """

    block_tokens: Count | None = Field(default=None, description="of a block; from the cost model if absent")
    placement: Literal["shares", "lpt"] = Field(
        default="shares",
        description="equal tokens and pairs with the fewest cuts, or blocks of one size, longest first",
    )
    pairing: Literal["zigzag", "free"] = Field(
        default="zigzag", description="of lpt: a block goes with its mirror image"
    )
    alpha: NonNegativeFloat = 1.0
    beta: NonNegativeFloat = 1.0
    tolerance: NonNegativeFloat = 0.02
    heads: Count | None = Field(
        default=None, description="ranks of a node that share heads; the best that plan.primitives allow if absent"
    )
    coalesce: Count | None = Field(default=None, description="rounds that run as one; the fewest that hide if absent")
    num_buffers: int = Field(default=2, ge=2, description="phases of received transfers that a rank holds at once")
    paced: bool = True


class PipelineOptions(Section):
    """Options of `elastic-pipeline` (InfiniPipe, Wang et al., 2025).

    The defaults are the whole method; the others are its ablations. `recompute`: as memory asks of each stage and
    chunk, one number of layers for all, nothing, or everything. `order` 1f1b: the window never shrinks.
    """

    chunking: Literal["balanced", "fixed"] = Field(
        default="balanced", description="slices of equal backward time, or of equal tokens"
    )
    recompute: Literal["adaptive", "uniform", "none", "full"] = "adaptive"
    order: Literal["elastic", "1f1b"] = Field(
        default="elastic", description="fewer microbatches in flight as sequences get shorter, or as many all along"
    )
    slices: Count | None = Field(default=None, description="of the longest sequence; searched if absent")
    max_slices: Count = Field(default=64, description="most slices of the longest sequence that are tried")
    pipelines: Count = Field(default=4, description="most 1F1B pipelines that a batch is grouped into")
    candidates: Count = Field(default=12, description="of all tried, how many are also tried in several pipelines")


AUTO_MOVES: Literal["auto"] = "auto"
"""Value of `plan.search_moves` that leaves the number to the planner."""

AUTO_LOOKAHEAD, AUTO_PLANNERS = (4, 16), (1, 4)
"""Bounds of `auto`. Four steps ahead hide a planner that stalls for a step or two; more hold programs in memory (26 MiB
a step at 1,024 ranks) and follow refitted costs later, so that they are taken only where preparing is slow."""


def _bounds(given: Any, *, auto: tuple[int, int]) -> tuple[int, int]:
    if given == AUTO:
        return auto
    return given if isinstance(given, tuple) else (given, given)


class PlanConfig(Section):
    """Planning of global batches."""

    strategy: str = "flex-ring"
    auto_candidates: int = Field(
        default=3, ge=1, le=16, description="of plan.strategy=auto: how many of the best by prediction are simulated"
    )
    lookahead_steps: Bounds = Field(
        default="auto", description="steps that are planned ahead, or [min, max], so that no step waits for its plan"
    )
    planner_actors: Bounds = Field(
        default="auto", description="planners, or [min, max], as measured times ask and the cluster has CPUs for"
    )
    packing: Literal["joint", "bfd"] = Field(
        default="joint", description="cut, groups and degrees together, or the paper's best-fit decreasing"
    )
    degrees: Literal["exact", "dp"] = Field(
        default="exact", description="least degrees of the least makespan, or the paper's dynamic program"
    )
    primitives: Annotated[tuple[Literal["ring", "ulysses"], ...], BeforeValidator(as_primitives)] = Field(
        default="auto", validate_default=True, min_length=1, description="how groups may exchange what attention needs"
    )
    max_microbatches: Count = Field(default=8, description="how many more than the fewest are tried")
    refit: bool = Field(default=True, description="the cost model follows what steps take; losses do not change")
    blocks: BlockOptions = BlockOptions()
    pipeline: PipelineOptions = PipelineOptions()
    search_moves: Count | Literal["auto"] = Field(
        default=AUTO_MOVES,
        description="trials of a sequence in a group by the joint search, in each of up to six spaces of plans, for up "
        "to 512 sequences, more for more; auto: as ranks, sequences and spare time allow",
    )
    constraints: Annotated[HostConstraints, BeforeValidator(preset)] = Field(
        default=UNCONSTRAINED, description="of another trainer that executes the plans: a section, or megatron"
    )

    @property
    def lookahead_bounds(self) -> tuple[int, int]:
        """Fewest and most steps ahead."""
        return _bounds(self.lookahead_steps, auto=AUTO_LOOKAHEAD)

    @property
    def planner_bounds(self) -> tuple[int, int]:
        """Fewest and most planners."""
        return _bounds(self.planner_actors, auto=AUTO_PLANNERS)


class ElasticConfig(Section):
    """Timeouts, snapshots and limits of an elastic run."""

    start_timeout_s: PositiveFloat = Field(default=300.0, description="for workers to start")
    collective_timeout_s: PositiveFloat = Field(default=600.0, description="for one exchange between ranks")
    snapshot_every_steps: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        default="auto", description="finished steps that the loss of a node may take; 0: copies for checkpoints only"
    )
    snapshot_gb_per_s: PositiveFloat | None = Field(
        default=None, description="that a node's copies may take of the network; without a limit if absent"
    )
    snapshot_dir: str = Field(default="/dev/shm", description="of nodes, on a tmpfs: copies of the state live there")
    min_workers: Count | None = Field(
        default=None, description="devices to go on with; the least of num_workers' range, or of one rank, if absent"
    )
    wait_s: PositiveFloat = Field(default=600.0, description="for a replacement when too few devices are left")
    max_recoveries: Count = Field(default=5, description="without a finished step in between; one more ends the run")
    hang_factor: PositiveFloat = Field(default=10.0, description="times the usual step, after which a rank is hung")
    hang_min_s: PositiveFloat = Field(default=30.0, description="and never sooner than this")
    grow: bool = Field(default=True, description="take devices that appear, up to num_workers, at the next step")
    look_every_s: PositiveFloat = Field(default=1.0, description="for nodes that came, leave or are drained")
    recovery: Literal["auto", "in_place", "fresh_processes"] = Field(
        default="auto", description="of survivors; auto: in place, with fresh processes where that fails"
    )
    leave_timeout_s: PositiveFloat = Field(
        default=5.0, description="beyond a usual step, for survivors to leave an aborted step; then their process ends"
    )
    rebuild_timeout_s: PositiveFloat = Field(
        default=120.0, description="for survivors to build new process groups; then their processes end"
    )
    standby_workers: int = Field(
        default=0, ge=0, description="workers with a second process that stands by on their device, for recoveries"
    )
    standby_memory_gib: PositiveFloat = Field(
        default=0.5, description="of host memory that a process standing by takes, for the check of room"
    )
    balance_speeds: bool = Field(default=True, description="ranks that are slower than others get less work")
    slow_ratio: Fraction = Field(default=0.8, description="speed over the usual one below which a rank is reported")
    orphan_s: PositiveFloat = Field(default=300.0, description="that workers wait for a controller that is gone")
    controller_restarts: int = Field(default=2, ge=0, description="of the controller after its process was lost")


class RunConfig(Section):
    """Name and files of a run, and the seed of everything random in it."""

    name: Name = "run"
    dir: str | None = Field(default=None, description="run directory; runs/NAME if absent")
    seed: int = Field(default=0, ge=0)


WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack")
"""Suffixes of weight files, readable or not: loading refuses all but safetensors by name."""


def has_weights(path: str) -> bool:
    """Return whether `model.path` has weights: a folder with weight files has, and a path that is no folder here (a hub
    name, or a folder of other machines) is taken to have them."""
    folder = Path(path).expanduser()
    return not folder.is_dir() or any(each.suffix in WEIGHT_SUFFIXES for each in folder.iterdir())


def is_vision_model(path: str) -> bool:
    """Return whether `model.path` is a folder with a model that reads images."""
    try:
        found = json.loads((Path(path).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("model_type") in VISION_FAMILIES


def _has_processor(path: str) -> bool:
    """True if the folder has the files of a processor, and Pillow is installed."""
    names = ("preprocessor_config.json", "processor_config.json")
    return any((Path(path).expanduser() / name).exists() for name in names) and find_spec("PIL") is not None


def _section(given: Any) -> Any:
    return {} if given is None else given


NO_MODEL: Mapping[str, Any] = {"path": None, "name": None, "architecture": {}, "init": "auto"}
"""Keys of `model` that select a model, all unset: overrides that select another model start from these."""


class ModelConfig(Section):
    """The model of a run: a folder or hub name of a Hugging Face causal LM, a named shape, or an architecture of our
    own.

    `init` is `random` or `pretrained` once the section is checked.
    """

    path: str | None = Field(default=None, description="Hugging Face folder or name")
    name: str | None = Field(default=None, description="a named shape, e.g. qwen3-1.7b")
    init: Literal["auto", "random", "pretrained"] = Field(
        default="auto", description="auto: pretrained if model.path has weights, otherwise random"
    )
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    freeze_vision: bool = Field(default=False, description="keep the weights of the vision encoder, if there is one")
    rope: RopeConfig = RopeConfig()
    lora: LoraConfig = LoraConfig()
    architecture: Annotated[ArchitectureConfig, BeforeValidator(_section)] = ArchitectureConfig()

    @model_validator(mode="after")
    def _four_bits_fit(self) -> "ModelConfig":
        if self.lora.quantize is not None and self.dtype == "float64":
            raise ValueError("lora.quantize is 'nf4', must be absent with model.dtype float64; set bfloat16 or float32")
        return self

    @model_validator(mode="after")
    def _one_shape(self) -> "ModelConfig":
        models = {key: value for key in ("path", "name") if (value := getattr(self, key)) is not None}
        sizes = {f"architecture.{key}": getattr(self.architecture, key) for key in self._given_sizes()}
        if models and len(models) + len(sizes) > 1:
            (first, model), (second, value), *_ = (models | sizes).items()
            raise ValueError(
                f"{second} is {value!r}, must be absent beside model.{first} ({model!r}), which has sizes of its own; "
                f"leave one of the two out, e.g. by model.{second.partition('.')[0]}=null"
            )
        return self

    def _given_sizes(self) -> list[str]:
        shape, all_keys = self.architecture, ArchitectureConfig.model_fields
        given = [key for key in all_keys if key in shape.model_fields_set]
        # A written configuration has all keys; their defaults say nothing.
        is_default = len(given) == len(all_keys) and shape == ArchitectureConfig()
        return [] if is_default else given

    @model_validator(mode="after")
    def _weights_are_decided(self) -> "ModelConfig":
        if self.init == "auto":
            found = "pretrained" if self.path is not None and has_weights(self.path) else "random"
            object.__setattr__(self, "init", found)  # the section is frozen
        if self.init == "pretrained" and self.path is None:
            raise ValueError(
                "init is 'pretrained', must be 'random' without model.path; give model.path the weights' folder"
            )
        return self

    @property
    def weights(self) -> str:
        """Return one line on where the initial weights come from."""
        if self.init == "pretrained":
            return f"weights: pretrained from {self.path}"
        if self.path is None:
            return f"weights are random, in the shape of model.{'architecture' if self.name is None else 'name'}"
        loads = "; model.init=pretrained loads those that are there" if has_weights(self.path) else ""
        return f"weights are random, in the shape of {self.path}{loads}"


class ClusterConfig(Section):
    """Which devices, and how many."""

    address: str | None = Field(default=None, description="Ray address; a local Ray is started if absent")
    device: Annotated[str, AfterValidator(known_device)] = AUTO
    num_workers: Annotated[Count | tuple[Count, Count], BeforeValidator(count_or_range)] = Field(
        default=1, description="devices, or [min, max] of them"
    )
    pipeline_stages: Count = Field(default=1, description="parts of a rank that hold consecutive layers")
    tensor_parallel: Count = Field(default=1, description="devices over which each layer of a rank is split")
    layer_split: Literal["even", "cost"] = Field(
        default="cost", description="layers of a stage: equal numbers, or equal times, the head's counted"
    )
    communication_sms: int = Field(
        default=0,
        ge=0,
        le=64,
        description="multiprocessors of a GPU for messages, which kernels leave alone; 0: as libraries choose",
    )
    memory_gib_per_device: PositiveFloat | None = Field(default=None, description="the device's own if absent")

    @property
    def min_workers(self) -> int:
        return self.num_workers[0] if isinstance(self.num_workers, tuple) else self.num_workers

    @property
    def max_workers(self) -> int:
        return self.num_workers[1] if isinstance(self.num_workers, tuple) else self.num_workers

    @model_validator(mode="after")
    def _one_rank_fits(self) -> "ClusterConfig":
        devices_per_rank = self.pipeline_stages * self.tensor_parallel
        if self.min_workers < devices_per_rank:
            raise ValueError(
                f"num_workers is {self.min_workers}, must be at least pipeline_stages x tensor_parallel "
                f"({self.pipeline_stages} x {self.tensor_parallel} = {devices_per_rank}); add workers or lower them"
            )
        return self


class TrainConfig(Section):
    """The optimisation."""

    steps: Count = 20
    learning_rate: PositiveFloat = 1e-3
    lr_schedule: Literal["constant", "linear", "cosine"] = "cosine"
    warmup_steps: int = Field(default=0, ge=0)
    weight_decay: float = Field(default=0.1, ge=0.0)
    beta1: Beta = 0.9
    beta2: Beta = 0.95
    grad_clip: PositiveFloat = 1.0
    recompute_layers: int = Field(default=0, ge=0, description="layers whose activations are recomputed")
    recompute_attention: bool = Field(
        default=False, description="recomputed layers repeat attention and its messages instead of keeping its output"
    )
    reduce_every: Literal["microbatch", "step"] = Field(
        default="step", description="when gradients are reduced: `step` keeps unreduced gradients in memory"
    )
    gather_every: Literal["microbatch", "step"] = Field(
        default="microbatch", description="when parameters are gathered: `step` keeps them in memory all through it"
    )
    threads_per_worker: Count = Field(default=1, description="CPU threads of one worker")
    compile: Literal["auto", True, False] = Field(
        default="auto", description="torch.compile for what stands between attention; auto: on CUDA, if it agrees"
    )
    on_nonfinite: Literal["stop", "skip"] = Field(
        default="stop", description="a loss or gradient that is not finite: end the run, or leave the update out"
    )
    max_skipped_steps: Count = Field(default=5, description="updates left out one after the other; one more stops")


class CheckpointConfig(Section):
    """Checkpoints on disk, and the one from which a run starts."""

    every_steps: Count | None = Field(default=None, description="only at the end if absent")
    keep: Count = 2
    max_failures: int = Field(default=3, ge=0, description="saves that may fail one after the other; one more stops")
    resume: str = Field(default="auto", description="auto, never, or a checkpoint folder")
    accept_other_weights: bool = Field(
        default=False, description="go on if frozen weights or the reference model differ from the checkpoint's"
    )


class ProfilerConfig(Section):
    """Profiles of chosen steps."""

    steps: Annotated[tuple[Count, ...], BeforeValidator(as_numbers)] = Field(
        default=(), description="steps to profile; none if absent"
    )
    devices: Annotated[Literal["all"] | tuple[Index, ...], BeforeValidator(as_numbers)] = Field(
        default=(0,), description="numbers of the devices to profile, or all"
    )
    tool: Literal["torch", "nsys"] = Field(
        default="torch", description="torch.profiler; or Nsight Systems, which starts the workers then"
    )
    shapes: bool = Field(default=False, description="record shapes of operators' inputs")
    memory: bool = Field(default=False, description="record allocations (torch)")
    stacks: bool = Field(default=False, description="record Python stacks, which is slow (torch)")


class MetricsConfig(Section):
    """Metrics, the live page and loggers."""

    host: str = Field(default="127.0.0.1", description="interface of metrics and live page; others ask for a token")
    port: int = Field(default=0, ge=0, le=65535, description="0 takes a free port")
    token_file: str | None = Field(default=None, description="holds the token; RUN_DIR/token is made if absent")
    ray: bool = Field(default=True, description="the same metrics through ray.util.metrics")
    peak_flops: PositiveFloat | None = Field(default=None, description="of one device; from a table if absent")
    trace_steps: int = Field(default=3, ge=0, description="the last steps whose spans trace.json keeps")
    loggers: Annotated[tuple[Literal["tensorboard", "mlflow", "wandb"], ...], BeforeValidator(as_list)] = Field(
        default=(), description="other loggers that record each step; each is an extra of this package"
    )
    profiler: ProfilerConfig = ProfilerConfig()


class Config(Section):
    """A whole run."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig
    loss: LossConfig = LossConfig()
    eval: EvalConfig = EvalConfig()
    cluster: ClusterConfig = ClusterConfig()
    plan: PlanConfig = PlanConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    elastic: ElasticConfig = ElasticConfig()
    metrics: MetricsConfig = MetricsConfig()

    def __init__(self, **sections: Any) -> None:
        """Check the sections; a ConfigError has one line for the first problem."""
        from rayfcp.config.loading import ConfigError, describe

        try:
            super().__init__(**sections)
        except ValidationError as error:
            raise ConfigError(describe(error)) from None

    @property
    def run_dir(self) -> str:
        return self.run.dir or f"runs/{self.run.name}"

    @property
    def pictures(self) -> str | None:
        """Return one line on how images of rows are read; None for a model that is known to read none."""
        path, processor = self.model.path, self.data.processor
        if processor is not None:
            return f"images are read by the processor of {'model.path' if processor == path else processor}"
        if path is None or not is_vision_model(path):
            return None
        return (
            "images are not read, rows that have some are refused: data.processor is not set, and model.path stands "
            "for it only in runs of loss.type cross_entropy without data.tokenizer and data.streaming, with a "
            "preprocessor_config.json in the folder and Pillow (pip install 'rayfcp[vision]')"
        )

    def compiles_layers(self, *, by_default: bool) -> bool:
        """Whether layers are to be compiled on devices that do so `by_default` or not."""
        if self.train.compile != "auto":
            return self.train.compile
        return by_default and self.cluster.tensor_parallel == 1 and self.model.lora.quantize is None

    def changed(self, **sections: Mapping[str, Any]) -> "Config":
        """Return a copy with other values of some keys, e.g. `changed(train={"steps": 3})`, checked again.

        Raises:
            ConfigError: one line for the first problem.
        """
        return Config(**{name: {**keys, **sections.get(name, {})} for name, keys in self.model_dump().items()})

    @model_validator(mode="after")
    def _sections_agree(self) -> "Config":
        train = self.train
        if train.warmup_steps > train.steps:
            raise ValueError(
                f"train.warmup_steps is {train.warmup_steps}, must be at most train.steps ({train.steps}); "
                "lower it or train longer"
            )
        if self.model.lora.rank is not None and self.cluster.tensor_parallel > 1:
            raise ValueError(
                f"cluster.tensor_parallel is {self.cluster.tensor_parallel}, must be 1 with model.lora.rank, since "
                "adapters are not split; set it to 1"
            )
        if train.compile is True and self.model.lora.quantize is not None:
            raise ValueError(
                "train.compile is true, must be false or auto with model.lora.quantize, whose layers are not compiled; "
                "set one of them back"
            )
        if train.compile is True and self.cluster.tensor_parallel > 1:
            raise ValueError(
                f"train.compile is true, must be false or auto with cluster.tensor_parallel above 1 "
                f"({self.cluster.tensor_parallel}); set one of them back"
            )
        if self.model.path is not None and self.data.tokenizer is None and self.data.processor is None:
            takes_pictures = ROWS[self.loss.type] == "sequences" and not self.data.streaming
            has_processor = takes_pictures and is_vision_model(self.model.path) and _has_processor(self.model.path)
            data = self.data.model_copy(update={"processor" if has_processor else "tokenizer": self.model.path})
            object.__setattr__(self, "data", data)  # the section is frozen
        self._check_rows()
        for name, each in self.eval.sets.items():
            if (each.max_seqlen or 0) > self.data.max_seqlen:
                raise ValueError(
                    f"eval.sets.{name}.max_seqlen is {each.max_seqlen}, must be at most data.max_seqlen "
                    f"({self.data.max_seqlen}), for which memory is planned; lower it, or raise that"
                )
        return self

    def _check_rows(self) -> None:
        """Fill in what rows are, by the loss, and check what they allow."""
        rows, data = ROWS[self.loss.type], self.data
        if data.rows is None:
            object.__setattr__(self, "data", data.model_copy(update={"rows": rows}))  # the section is frozen
        elif data.rows != rows:
            raise ValueError(
                f"data.rows is {data.rows!r}, must be {rows!r} with loss.type {self.loss.type!r}; leave it out"
            )
        refused = [("data.streaming", data.streaming), ("data.processor", data.processor is not None)]
        if rows == "pairs":
            refused += [("data.long_sequences: split", data.long_sequences == "split")]
            refused += [
                (f"eval.sets.{name}.long_sequences: split", each.long_sequences == "split")
                for name, each in self.eval.sets.items()
            ]
        if rows != "sequences" and (name := next((name for name, is_set in refused if is_set), None)):
            raise ValueError(f"loss.type is {self.loss.type!r}, which does not run with {name}; leave it out")
        if rows == "pairs" and data.global_batch_sequences % 2:
            raise ValueError(
                f"data.global_batch_sequences is {data.global_batch_sequences}, must be even with loss.type "
                f"{self.loss.type!r}, whose pairs have two; add one"
            )

    @model_validator(mode="after")
    def _sections_fit_the_architecture(self) -> "Config":
        train, shape = self.train, self.model.architecture
        if self.model.path is not None or self.model.name is not None:
            return self
        if train.recompute_layers > shape.num_layers:
            raise ValueError(
                f"train.recompute_layers is {train.recompute_layers}, must be at most "
                f"model.architecture.num_layers ({shape.num_layers}); lower it"
            )
        if self.data.max_seqlen > shape.max_positions and self.model.rope.type is None:
            raise ValueError(
                f"data.max_seqlen is {self.data.max_seqlen}, must be at most "
                f"model.architecture.max_positions ({shape.max_positions}); lower it, raise max_positions, or set "
                "model.rope"
            )
        return self
