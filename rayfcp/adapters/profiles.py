"""Profiles of the models of other trainers."""

import os
from collections.abc import Mapping
from typing import Any

from rayfcp.cost.configurations import profile_of_configuration
from rayfcp.plan import model_profile
from rayfcp.values import ModelProfile

ModelSource = ModelProfile | Mapping[str, Any] | str | os.PathLike[str]
"""A profile; a Hugging Face configuration as a mapping; or what `model_profile` takes."""


def profile_of(model: ModelSource) -> ModelProfile:
    """Return the profile of a model; of a VLM, that of its language model.

    Raises:
        ConfigError: An unknown name, or a configuration that cannot be read exactly.
    """
    if isinstance(model, ModelProfile):
        return model
    if isinstance(model, Mapping):
        return profile_of_configuration(model, name=str(model.get("model_type", "model")))
    return model_profile(os.fspath(model))
