"""What rayfcp needs of a Python environment: as `pyproject.toml` says, for nodes that run it from its files."""

PYTHON = (3, 11)

REQUIRED = {
    "fsspec": "2024.6",
    "highspy": "1.10",
    "numba": "0.61",
    "numpy": "1.26",
    "prometheus-client": "0.20",
    "pyarrow": "15",
    "pydantic": "2.7",
    "pyyaml": "6",
    "ray": "2.50",
    "rich": "13",
    "safetensors": "0.4",
    "scipy": "1.11",
    "torch": "2.9",
    "transformers": "5",
}
"""The least version of each."""

DASHBOARD_MODULES = ("aiohttp", "aiohttp_cors", "opencensus", "opentelemetry")
"""Without which Ray starts no dashboard, and with it no job server and no metrics: the extra `default`."""

SAME_EVERYWHERE = ("ray", "torch")
"""Of one version on all nodes; Python to its minor version too."""


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version.

    >>> numbers("2.13.0+cpu"), numbers("5.0rc1")
    ((2, 13, 0), (5, 0))
    """
    found: list[int] = []
    for part in version.split("+", maxsplit=1)[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        found.append(int(digits))
        if digits != part:
            break
    return tuple(found)
