"""The section `plan`: how a global batch becomes a plan."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat

from rayfcp.config.section import Count, Section
from rayfcp.config.words import as_list


class BlockOptions(Section):
    """Of `flex-block` (FCP with blocks, Zhao et al., 2026).

    `alpha`, `beta`: weights of memory and compute in Algorithm 1. A rank may hold 1 + `tolerance` times the mean
    tokens, if memory permits. `search_moves`: moves and swaps after `lpt`, 0 for none. `paced`: transfers
    come when their target has computed those before, else in the order of the colouring alone.
    """

    block_tokens: Count | None = Field(default=None, description="of a block; from the cost model if absent")
    placement: Literal["shares", "lpt"] = Field(
        default="shares",
        description="equal tokens and cells with the fewest cuts, or blocks of one size, longest first",
    )
    pairing: Literal["zigzag", "free"] = Field(
        default="zigzag", description="of lpt: a block goes with its mirror image"
    )
    alpha: NonNegativeFloat = 1.0
    beta: NonNegativeFloat = 1.0
    tolerance: NonNegativeFloat = 0.02
    search_moves: int = Field(default=2000, ge=0)
    heads: Count | None = Field(
        default=None, description="ranks of a node that share heads; the best that plan.primitives allow if absent"
    )
    coalesce: Count | None = Field(default=None, description="rounds that run as one; the fewest that hide if absent")
    num_buffers: int = Field(default=3, ge=2, description="stages of received transfers that a rank holds at once")
    paced: bool = True


class PipelineOptions(Section):
    """Of `elastic-pipeline` (InfiniPipe, Wang et al., 2025).

    The defaults are the whole method; the others are its ablations. `recompute`: as memory asks of each stage and
    chunk, one number of layers for all, nothing, or everything. `order` 1f1b: the window never shrinks.
    """

    chunking: Literal["balanced", "fixed"] = Field(
        default="balanced", description="slices of equal backward time, or of equal tokens"
    )
    recompute: Literal["adaptive", "uniform", "none", "full"] = "adaptive"
    order: Literal["elastic", "1f1b"] = Field(
        default="elastic", description="fewer microbatches in flight as sequences get shorter, or as many all along"
    )
    slices: Count | None = Field(default=None, description="of the longest sequence; searched if absent")
    max_slices: Count = Field(default=64, description="most slices of the longest sequence that are tried")
    pipelines: Count = Field(default=4, description="most 1F1B pipelines that a batch is grouped into")
    candidates: Count = Field(default=12, description="of all tried, how many are replayed exactly")
    milp_nodes: int = Field(
        default=100,
        ge=0,
        description="of the search that betters recomputation beyond 2 % of its bound; 0: rounded only",
    )


class PlanConfig(Section):
    """How a global batch becomes a plan."""

    strategy: str = "flex-ring"
    auto_candidates: int = Field(
        default=3, ge=1, le=16, description="of plan.strategy=auto: how many of the best by prediction are simulated"
    )
    lookahead_steps: Count = 4
    planner_actors: Count = 1
    packing: Literal["joint", "bfd"] = Field(
        default="joint", description="cut, groups and degrees together, or the paper's best-fit decreasing"
    )
    degrees: Literal["exact", "dp"] = Field(
        default="exact", description="least degrees of the least makespan, or the paper's dynamic programme"
    )
    primitives: Annotated[tuple[Literal["ring", "ulysses"], ...], BeforeValidator(as_list)] = Field(
        default=("ring",), min_length=1, description="how groups may exchange what attention needs"
    )
    max_microbatches: Count = Field(default=8, description="how many more than the fewest are tried")
    refit: bool = Field(default=True, description="the cost model follows what steps take; losses do not change")
    blocks: BlockOptions = BlockOptions()
    pipeline: PipelineOptions = PipelineOptions()
    search_moves: Count = Field(
        default=300_000,
        description="trials of a sequence in a group by the joint search, for up to 512 sequences; more for more",
    )
