"""The section `elastic`: what a run does when devices come and go."""

from pydantic import Field, PositiveFloat

from rayfcp.config.section import Count, Fraction, Section


class ElasticConfig(Section):
    """How long the run waits for what it lacks, and what it keeps against losses."""

    start_timeout_s: PositiveFloat = Field(default=300.0, description="for workers to start")
    collective_timeout_s: PositiveFloat = Field(default=600.0, description="for one exchange between ranks")
    snapshot_every_steps: int = Field(
        default=1, ge=0, description="steps from one copy of all shards on other nodes to the next; 0: none"
    )
    snapshot_chunk_mib: Count = Field(default=32, description="of a copy that travels at once")
    min_workers: Count | None = Field(
        default=None, description="devices to go on with; the least of num_workers' range, or of one rank, if absent"
    )
    wait_s: PositiveFloat = Field(default=600.0, description="for a replacement when too few devices are left")
    max_recoveries: Count = Field(default=5, description="without a finished step in between; one more ends the run")
    hang_factor: PositiveFloat = Field(default=10.0, description="times the usual step, after which a rank is hung")
    hang_min_s: PositiveFloat = Field(default=30.0, description="and never sooner than this")
    grow: bool = Field(default=True, description="take devices that appear, up to num_workers, at the next step")
    look_every_s: PositiveFloat = Field(default=1.0, description="for nodes that came, leave or are drained")
    balance_speeds: bool = Field(default=True, description="ranks that are slower than others get less work")
    slow_ratio: Fraction = Field(default=0.8, description="speed over the usual one below which a rank is reported")
    orphan_s: PositiveFloat = Field(default=300.0, description="that workers wait for a controller that is gone")
    controller_restarts: int = Field(default=2, ge=0, description="of the controller after its process was lost")
