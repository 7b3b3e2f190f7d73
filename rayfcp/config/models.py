"""What a user writes: the sections of a run's configuration, each key with its meaning and bounds."""

import sysconfig
from typing import Annotated, Literal

from pydantic import (
    BeforeValidator,
    Field,
    PositiveFloat,
    field_validator,
    model_validator,
)

from rayfcp.config.architecture import ArchitectureConfig
from rayfcp.config.elastic import ElasticConfig
from rayfcp.config.plan import PlanConfig
from rayfcp.config.section import Beta, Count, Fraction, Section, Words
from rayfcp.config.words import as_list, workers_or_range

STDLIB_PLACEHOLDER = "{stdlib}"


class RunConfig(Section):
    """Where a run keeps its files, and the seed of everything random in it."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    dir: str | None = Field(default=None, description="run directory; runs/NAME if absent")
    seed: int = Field(default=0, ge=0)


class ModelConfig(Section):
    """Which model: a folder or hub name of a Hugging Face causal LM, or an architecture of our own."""

    path: str | None = Field(default=None, description="Hugging Face folder or name; overrides `architecture`")
    name: str | None = Field(default=None, description="a named shape, e.g. qwen3-1.7b; overrides `architecture`")
    init: Literal["random", "pretrained"] = "random"
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    freeze_vision: bool = Field(default=False, description="keep the weights of the vision encoder, if there is one")
    architecture: ArchitectureConfig = ArchitectureConfig()

    @model_validator(mode="after")
    def _pretrained_has_weights(self) -> "ModelConfig":
        if self.init == "pretrained" and self.path is None:
            raise ValueError(
                "init is 'pretrained', must be 'random' without model.path; give model.path the weights' folder"
            )
        return self


class DataConfig(Section):
    """What is read, how it becomes tokens, and what happens to rows that are too long or broken."""

    paths: Words = Field(
        min_length=1, description="files, folders, fsspec URLs; `{stdlib}` is this Python's standard library"
    )
    format: Literal["auto", "text", "jsonl", "parquet", "arrow", "prepared"] = "auto"
    include: Words = Field(default=(), description="file name patterns inside folders, e.g. *.py")
    exclude: Words = Field(
        default=(), description="patterns of file and folder names below `paths` that are left out, e.g. test*"
    )
    text_column: str = "text"
    tokenizer: str = Field(default="bytes", description="`bytes`, or a Hugging Face tokenizer by path")
    processor: str | None = Field(
        default=None, description="a Hugging Face processor by path, for rows with pictures; it brings its tokenizer"
    )
    max_picture_pixels: Count = Field(
        default=1 << 26, description="of an image or a frame; rows with larger are left out"
    )
    video_fps: PositiveFloat | None = Field(default=None, description="of the rows' frames; the processor's if absent")
    picture_targets: bool = Field(default=False, description="whether tokens that stand for pictures enter the loss")
    decoder_actors: int = Field(
        default=2, ge=0, description="CPUs that decode pictures ahead of the step; 0: workers do"
    )
    decode_ahead_steps: Count = Field(default=2, description="steps whose pictures are decoded before they run")
    max_seqlen: Count = 8192
    global_batch_sequences: Count = 32
    long_sequences: Literal["cut", "split", "drop"] = "cut"
    max_bad_fraction: Fraction = 0.01
    cache_dir: str | None = Field(default=None, description="prepared tokens; RUN_DIR/../.data if absent")

    @field_validator("paths")
    @classmethod
    def _expand_stdlib(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(path.replace(STDLIB_PLACEHOLDER, sysconfig.get_paths()["stdlib"]) for path in paths)

    @model_validator(mode="after")
    def _one_tokenizer(self) -> "DataConfig":
        if self.processor is not None and self.tokenizer not in ("bytes", self.processor):
            raise ValueError(
                f"tokenizer is {self.tokenizer!r}, must be absent beside processor ({self.processor!r}), which brings "
                "its own; leave it out"
            )
        return self


class ClusterConfig(Section):
    """Which devices, and how many."""

    address: str | None = Field(default=None, description="Ray address; a local Ray is started if absent")
    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    num_workers: Annotated[Count | tuple[Count, Count], BeforeValidator(workers_or_range)] = Field(
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
    reduce_every: Literal["microbatch", "step"] = Field(
        default="step", description="when gradients are reduced: `step` keeps unreduced gradients in memory"
    )
    gather_every: Literal["microbatch", "step"] = Field(
        default="microbatch", description="when parameters are gathered: `step` keeps them in memory all through it"
    )
    threads_per_worker: Count = Field(default=1, description="CPU threads of one worker")
    compile: bool = Field(default=False, description="torch.compile for what stands between attention")
    on_nonfinite: Literal["stop", "skip"] = Field(
        default="stop", description="a loss or gradient that is not finite: end the run, or leave the update out"
    )
    max_skipped_steps: Count = Field(default=5, description="updates left out one after the other; one more stops")


class CheckpointConfig(Section):
    """What is kept on disk, and where a run starts from."""

    every_steps: Count | None = Field(default=None, description="only at the end if absent")
    keep: Count = 2
    max_failures: int = Field(default=3, ge=0, description="saves that may fail one after the other; one more stops")
    resume: str = Field(default="auto", description="auto, never, or a checkpoint folder")


class MetricsConfig(Section):
    """What is reported, and where."""

    host: str = Field(default="127.0.0.1", description="interface of metrics and live page; others ask for a token")
    port: int = Field(default=0, ge=0, le=65535, description="0 takes a free port")
    token_file: str | None = Field(default=None, description="holds the token; RUN_DIR/token is made if absent")
    ray: bool = Field(default=True, description="the same metrics through ray.util.metrics")
    peak_flops: PositiveFloat | None = Field(default=None, description="of one device; from a table if absent")
    trace_steps: int = Field(default=3, ge=0, description="the last steps whose spans trace.json keeps")
    loggers: Annotated[tuple[Literal["tensorboard", "mlflow", "wandb"], ...], BeforeValidator(as_list)] = Field(
        default=(), description="other dashboards that are told of each step; each is an extra of this package"
    )


class Config(Section):
    """A whole run."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig
    cluster: ClusterConfig = ClusterConfig()
    plan: PlanConfig = PlanConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    elastic: ElasticConfig = ElasticConfig()
    metrics: MetricsConfig = MetricsConfig()

    @property
    def run_dir(self) -> str:
        return self.run.dir or f"runs/{self.run.name}"

    @model_validator(mode="after")
    def _sections_agree(self) -> "Config":
        train, shape = self.train, self.model.architecture
        if train.warmup_steps > train.steps:
            raise ValueError(
                f"train.warmup_steps is {train.warmup_steps}, must be at most train.steps ({train.steps}); "
                "lower it or train longer"
            )
        if train.compile and self.cluster.tensor_parallel > 1:
            raise ValueError(
                f"train.compile is true, must be false with cluster.tensor_parallel above 1 "
                f"({self.cluster.tensor_parallel}); set one of them back"
            )
        if self.model.path is not None or self.model.name is not None:
            return self
        if train.recompute_layers > shape.num_layers:
            raise ValueError(
                f"train.recompute_layers is {train.recompute_layers}, must be at most "
                f"model.architecture.num_layers ({shape.num_layers}); lower it"
            )
        if self.data.max_seqlen > shape.max_positions:
            raise ValueError(
                f"data.max_seqlen is {self.data.max_seqlen}, must be at most "
                f"model.architecture.max_positions ({shape.max_positions}); lower it or raise max_positions"
            )
        return self
