"""Named model profiles. Figures and their sources: `data/models.yaml`.

Multimodal models (`internvl*`, `qwen3-vl-*`) stand here with their language model alone: their encoders
cost nothing in a plan until plans know of encoders.
"""

from rayfcp.plan.profiles.files import Shipped
from rayfcp.values import ModelProfile

MODELS: Shipped[ModelProfile] = Shipped(ModelProfile, file="models.yaml", what="model")


def model_profile(name_or_path: str) -> ModelProfile:
    """The profile of that name, or the one in that YAML file.

    Raises:
        ConfigError: unknown name (told with the nearest known one), or a file that holds no model profile.
    """
    return MODELS.find(name_or_path)
