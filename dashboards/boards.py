"""All boards."""

from dashboards.balance import balance
from dashboards.elasticity import elasticity
from dashboards.frame import as_json
from dashboards.planning import planning
from dashboards.training import training


def texts() -> dict[str, str]:
    """JSON of each board by its file's name."""
    makers = {"training": training, "balance": balance, "planning": planning, "elasticity": elasticity}
    return {f"{name}.json": as_json(make()) for name, make in makers.items()}
