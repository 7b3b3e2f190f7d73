"""Named hardware profiles: peaks, links, and the shares of them that kernels reach.

Figures and their sources: `data/hardware.yaml`.
"""

from rayfcp.plan.profiles.files import Shipped
from rayfcp.values import HardwareProfile

HARDWARE: Shipped[HardwareProfile] = Shipped(HardwareProfile, file="hardware.yaml", what="hardware")


def hardware_profile(name_or_path: str) -> HardwareProfile:
    """The profile of that name, or the one in that YAML file.

    Raises:
        ConfigError: unknown name (told with the nearest known one), or a file that holds no hardware profile.
    """
    return HARDWARE.find(name_or_path)
