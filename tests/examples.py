"""Number of examples of a property: the same few in every run of the tests, many times as many, drawn anew, in
`make explore`."""

from collections.abc import Sequence
from typing import Any

from hypothesis import HealthCheck, settings

CI, EXPLORE = "ci", "explore"
DEFAULT = 50
SHARE_IN_CI, TIMES_IN_EXPLORE = 0.6, 10


def register_profiles() -> None:
    """Loads that of `make test`; `--hypothesis-profile=explore` loads the other.

    A run that draws examples anew finds errors of other changes than the one it tests, so tests do not. Neither profile
    limits how long an example takes, since machines are shared.
    """
    usual: dict[str, Any] = {"deadline": None, "print_blob": True, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile(CI, max_examples=int(DEFAULT * SHARE_IN_CI), derandomize=True, **usual)
    settings.register_profile(EXPLORE, max_examples=DEFAULT * TIMES_IN_EXPLORE, **usual)
    settings.load_profile(CI)


def examples(number: int, *, suppress: Sequence[HealthCheck] = ()) -> settings:
    """Decorator of a property that needs more or fewer examples than others, multiplied as the profile says."""
    default = settings()
    return settings(
        max_examples=max(1, number * default.max_examples // DEFAULT),
        suppress_health_check=[*default.suppress_health_check, *suppress],
    )
