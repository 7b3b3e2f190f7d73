"""The command `ray` for a head whose workers are forks, and a provider of such nodes for its autoscaler:
`python -m tests.forks.nodes start --head ...`."""

import sys

import pytest
from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider

from tests.forks.cluster import ask_for_forks


class NodesOfForks(FakeMultiNodeProvider):
    """Starts nodes on this machine whose workers are forks of the head's server."""

    def __init__(self, *given: object, **named: object) -> None:
        ask_for_forks(pytest.MonkeyPatch())
        super().__init__(*given, **named)


if __name__ == "__main__":
    from ray.scripts.scripts import main

    ask_for_forks(pytest.MonkeyPatch())
    sys.exit(main())
