"""PromQL that several boards share."""

RUN = 'run=~"$run"'
"""Runs that the reader chose above the board."""

EVENTS = "$__rate_interval"
"""Window of counters: long enough for two scrapes, as Grafana chooses it."""


def of(name: str, *matches: str) -> str:
    """The chosen runs' series of a metric; `name` without its prefix.

    >>> of("worker_memory_bytes", 'kind="peak"')
    'rayfcp_worker_memory_bytes{run=~"$run",kind="peak"}'
    """
    return f"rayfcp_{name}{{{','.join((RUN, *matches))}}}"


def recorded(name: str) -> str:
    """Series of a recording rule, by its full name."""
    return f"{name}{{{RUN}}}"


def per_second(name: str, *, by: str = "run") -> str:
    """Rate of a counter."""
    return f"sum by ({by}) (rate({of(name)}[{EVENTS}]))"


def grown(name: str, *, by: str = "run", window: str = EVENTS) -> str:
    """Increase of a counter."""
    return f"sum by ({by}) (increase({of(name)}[{window}]))"
