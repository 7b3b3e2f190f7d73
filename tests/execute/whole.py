"""A model that is not sharded, as the interpreter runs it; tests sum gradients over ranks themselves."""

from rayfcp.execute.parallel.sharding import StageRunner


class WholeModel(StageRunner):
    """Runs a model that is not sharded; the caller sums gradients over ranks."""

    def set_reduce(self, reduce: bool) -> None:
        """Do nothing: there is nothing to reduce."""
