"""The ranks of a cluster as numbers, and decisions on which devices a run uses."""

from dataclasses import dataclass, replace
from enum import StrEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """Ranks, their nodes and speeds, and how many tokens they hold.

    A rank is the devices that together hold the model's layers for the same tokens (`num_stages * tensor_parallel`
    devices). `max_tokens_per_rank` bounds the tokens of a rank in one microbatch; it is what the memory model leaves
    after model states. `node_of_rank[r]` is the node of rank r (empty: nodes are filled one after the other).
    `generation` counts changes of the set of ranks. `layers_of_stage[p]`: layers of stage p (empty: as even as
    possible, `split_layers`). Device (stage p, rank r, t of T tensor-parallel) is number (p x num_ranks + r) x T + t of
    the cluster; with several stages `node_of_rank` has an entry for each (stage, rank) in that order.
    `speed_of_rank[r]`: speed of rank r's slowest device relative to a usual one (empty: all are equally fast).
    `forward_tokens_per_rank`: `max_tokens_per_rank` of passes that are not followed by a backward pass (0: the same).
    """

    num_ranks: int
    max_tokens_per_rank: int
    node_of_rank: tuple[int, ...] = ()
    num_stages: int = 1
    tensor_parallel: int = 1
    generation: int = 0
    layers_of_stage: tuple[int, ...] = ()
    speed_of_rank: tuple[float, ...] = ()
    forward_tokens_per_rank: int = 0

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise ValueError(f"num_ranks is {self.num_ranks}, must be at least 1; add a worker")
        if self.max_tokens_per_rank < 1:
            raise ValueError(f"max_tokens_per_rank is {self.max_tokens_per_rank}, must be at least 1; give more memory")
        for name, count, each in (
            ("node_of_rank", self.num_ranks * self.num_stages, "ranks and stages"),
            ("speed_of_rank", self.num_ranks, "ranks"),
            ("layers_of_stage", self.num_stages, "stages"),
        ):
            given = len(getattr(self, name))
            if given not in (0, count):
                raise ValueError(f"{name} has {given} entries, must have one for each of {count} {each}, or none")
        if not all(speed > 0 for speed in self.speed_of_rank):
            raise ValueError(f"speed_of_rank is {self.speed_of_rank}, each must be above 0; measure it again")

    def forward_only(self) -> "ClusterSpec":
        """Return the cluster as passes without a backward pass find it."""
        return replace(self, max_tokens_per_rank=self.forward_tokens_per_rank or self.max_tokens_per_rank)

    @property
    def num_devices(self) -> int:
        """Devices in use."""
        return self.num_ranks * self.num_stages * self.tensor_parallel


class Move(StrEnum):
    """Kinds of decisions on the devices of a run."""

    GO_ON = "go on"
    FORM = "form"
    WAIT = "wait"
    GIVE_UP = "give up"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A decision and its `reason` in one sentence. Where `what` forms a new generation, perhaps of the same devices,
    `devices` are the ids of its devices in the order of their numbers, and `num_stages` its pipeline stages."""

    what: Move
    reason: str
    devices: tuple[str, ...] = ()
    num_stages: int = 1
