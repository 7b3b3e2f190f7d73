"""The section `eval`: data on which a run evaluates its model, and when."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from rayfcp.config.data import DataConfig, FilesConfig
from rayfcp.config.section import Count, Fraction, Name, Section


class EvalSetConfig(FilesConfig):
    """One evaluation set: its files, and keys of `data` that it has of its own. What is absent is as in `data`."""

    text_column: str | None = Field(default=None, description="data.text_column if absent")
    chat_template: str | None = Field(default=None, description="data.chat_template if absent")
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="data.chat_template_kwargs if absent")
    loss_on: Literal["assistant", "last_assistant", "all"] | None = Field(
        default=None, description="data.loss_on if absent"
    )
    max_seqlen: Count | None = Field(default=None, description="data.max_seqlen if absent")
    long_sequences: Literal["auto", "cut", "split", "drop"] | None = Field(
        default=None, description="data.long_sequences if absent"
    )
    max_bad_fraction: Fraction | None = Field(default=None, description="data.max_bad_fraction if absent")

    def source(self, data: DataConfig) -> DataConfig:
        """Return the set as a configuration of data, with what is absent taken from `data`."""
        given = {name: value for name, value in self.model_dump().items() if value is not None}
        if data.rows == "distilled":  # the loss is cross entropy
            given["rows"] = "sequences"
        return type(data).model_validate(
            data.model_dump(exclude={"sources", "temperature", "schedule", "streaming"}) | given
        )


class EvalConfig(Section):
    """Evaluation of the model on data that it is not trained on."""

    sets: Mapping[Name, EvalSetConfig] = Field(default={}, description="sources by name; no evaluation if empty")
    every_steps: Count | None = Field(default=None, description="steps between evaluations; after the last if absent")
    batches: Count | None = Field(
        default=None, description="of data.global_batch_sequences sequences of each set; all of a set if absent"
    )

    def is_due(self, step: int, *, last_step: int) -> bool:
        """Return whether the state after `step` is evaluated in a run of `last_step` steps: the last one always."""
        often = self.every_steps is not None and step % self.every_steps == 0
        return bool(self.sets) and step > 0 and (often or step == last_step)
