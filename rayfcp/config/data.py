"""The section `data`, and what describes one source of rows."""

import sysconfig
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, field_validator, model_validator

from rayfcp.config.losses import RowKind
from rayfcp.config.section import Count, Fraction, Name, Section, Words

STDLIB_PLACEHOLDER = "{stdlib}"


class FilesConfig(Section):
    """Input files."""

    paths: Words = Field(
        min_length=1, description="files, folders, fsspec URLs; `{stdlib}` is this Python's standard library"
    )
    format: Literal["auto", "text", "jsonl", "json", "csv", "tsv", "parquet", "arrow", "webdataset", "prepared"] = (
        "auto"
    )
    include: Words = Field(default=(), description="file name patterns inside folders, e.g. *.py")
    exclude: Words = Field(
        default=(), description="patterns of file and folder names below `paths` that are left out, e.g. test*"
    )

    @field_validator("paths")
    @classmethod
    def _expand_stdlib(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(path.replace(STDLIB_PLACEHOLDER, sysconfig.get_paths()["stdlib"]) for path in paths)


class SourceConfig(FilesConfig):
    """Input files, and which columns of their rows are read."""

    text_column: str = Field(default="text", description="column or key with the text, or with a list of messages")
    chat_template: str | None = Field(
        default=None,
        description="file with a Jinja template for conversations, or the name of a tokenizer's; its own if absent",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default={}, description="variables of the chat template, e.g. enable_thinking"
    )
    loss_on: Literal["assistant", "last_assistant", "all"] = Field(
        default="assistant", description="tokens of a conversation that enter the loss"
    )


class MixedSourceConfig(SourceConfig):
    """A source of a mixture. Without a weight or a share it counts by its tokens, see `DataConfig.temperature`."""

    weight: NonNegativeFloat | None = Field(default=None, description="sequences, relative to those of other sources")
    share: NonNegativeFloat | None = Field(default=None, description="tokens, relative to those of other sources")
    epochs: PositiveFloat | None = Field(default=None, description="passes over it, after which it is left out")


class ScheduleConfig(Section):
    """Weights, or shares, of the sources from a step on; a source that is not named has none."""

    from_step: Annotated[int, Field(ge=2)]
    weights: dict[str, NonNegativeFloat] = Field(default={})
    shares: dict[str, NonNegativeFloat] = Field(default={})

    @model_validator(mode="after")
    def _one_of_both(self) -> "ScheduleConfig":
        if bool(self.weights) == bool(self.shares):
            raise ValueError("weights must be given, or shares, and not both; leave one of them")
        if not sum((self.weights or self.shares).values()):
            raise ValueError("weights must not all be 0; raise one")
        return self


class DataConfig(SourceConfig):
    """Input files, tokenization, and the handling of long and broken rows."""

    paths: Words = Field(
        default=(), description="files, folders, fsspec URLs; `{stdlib}` is this Python's standard library"
    )
    sources: dict[Name, MixedSourceConfig] = Field(default={}, description="of a mixture by name, in place of `paths`")
    temperature: PositiveFloat = Field(
        default=1.0, description="of sources without weights: their shares are tokens^(1/temperature)"
    )
    schedule: tuple[ScheduleConfig, ...] = Field(default=(), description="other weights of sources from later steps on")
    tokenizer: str | None = Field(
        default=None,
        description="`bytes`, or a Hugging Face tokenizer by path; if absent, that of model.path, else `bytes`, but "
        "for model.name",
    )
    processor: str | None = Field(
        default=None, description="a Hugging Face processor by path, for rows with images; it brings its tokenizer"
    )
    max_picture_pixels: Count = Field(
        default=1 << 26, description="of an image or a frame; rows with larger are left out"
    )
    video_fps: PositiveFloat | None = Field(default=None, description="of the rows' frames; the processor's if absent")
    picture_targets: bool = Field(default=False, description="whether tokens that stand for images enter the loss")
    decoder_actors: int = Field(default=2, ge=0, description="CPUs that decode images ahead of the step; 0: workers do")
    decode_ahead_steps: Count = Field(default=2, description="steps whose images are decoded before they run")
    rows: RowKind | None = Field(default=None, description="what a row is; by loss.type if absent")
    streaming: bool = Field(default=False, description="tokenise while the run trains, instead of all rows before")
    reader_actors: Count = Field(default=2, description="processes that tokenise a stream")
    max_seqlen: Count = 8192
    global_batch_sequences: Count = 32
    long_sequences: Literal["auto", "cut", "split", "drop"] = Field(
        default="auto", description="what becomes of longer rows; auto: `drop` with images, else `cut`"
    )
    max_bad_fraction: Fraction = 0.01
    max_unreadable_files: int = Field(default=0, ge=0, description="files that may be broken or out of reach")
    cache_dir: str | None = Field(default=None, description="prepared tokens; RUN_DIR/../.data if absent")

    @model_validator(mode="after")
    def _paths_or_sources(self) -> "DataConfig":
        if self.paths and self.sources:
            raise ValueError(
                f"paths is {list(self.paths)}, must be absent beside sources; make it a source of its own, or leave it "
                "out"
            )
        return self

    @model_validator(mode="after")
    def _streams_are_of_one_source(self) -> "DataConfig":
        given = [name for name in ("sources", "processor") if getattr(self, name)]
        given += ["format prepared"] if self.format == "prepared" else []
        if self.streaming and given:
            raise ValueError(f"streaming is true, must be false with {given[0]}; leave one of both out")
        return self

    @model_validator(mode="after")
    def _sources_agree(self) -> "DataConfig":
        given = [each.model_dump(include={"weight", "share"}, exclude_none=True) for each in self.sources.values()]
        kinds = {tuple(each) for each in given}
        if len(kinds) > 1 or any(len(each) > 1 for each in given):
            raise ValueError("sources must all have a weight, or all a share, or none of both; change one")
        if any(given) and self.temperature != 1.0:
            raise ValueError(
                f"temperature is {self.temperature:g}, must be 1 where sources have a weight or share; leave one out"
            )
        if any(given) and not sum(sum(each.values()) for each in given):
            raise ValueError("sources must not all have a weight or share of 0; raise one")
        steps = [each.from_step for each in self.schedule]
        if any(later <= earlier for earlier, later in pairwise(steps)):
            raise ValueError(f"schedule has steps {steps}, must have ascending ones; sort them")
        named = {name for each in self.schedule for name in (*each.weights, *each.shares)}
        if unknown := sorted(named - set(self.sources)):
            raise ValueError(
                f"schedule names {unknown[0]!r}, must be one of data.sources ({', '.join(self.sources) or 'none'}); "
                "correct it"
            )
        return self

    @model_validator(mode="after")
    def _one_tokenizer(self) -> "DataConfig":
        if self.processor is not None and self.tokenizer not in (None, "bytes", self.processor):
            raise ValueError(
                f"tokenizer is {self.tokenizer!r}, must be absent beside processor ({self.processor!r}), which brings "
                "its own; leave it out"
            )
        return self

    def of(self, source: SourceConfig) -> "DataConfig":
        """Return this section with the keys of `source` in place of its own: tokenizer, processor, bounds and cache are
        shared by all sources of a run."""
        own = {name: getattr(source, name) for name in SourceConfig.model_fields}
        return self.model_copy(update={**own, "sources": {}, "schedule": (), "streaming": False})
