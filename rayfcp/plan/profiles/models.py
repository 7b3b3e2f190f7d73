"""Named model profiles, of multimodal models (`internvl*`, `qwen3-vl-*`) with their vision encoder. Figures and their
sources: `data/models.yaml`.
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
