"""Planning: from sequence lengths, a cluster and a cost model to a plan. Pure: numbers in, values out."""

from rayfcp.cost.analytic import attention_flops, model_flops
from rayfcp.cost.bound import lower_bound
from rayfcp.cost.memory import max_tokens_per_rank
from rayfcp.cost.model import CostModel
from rayfcp.cost.profiles import HARDWARE, MODELS, hardware_profile, model_profile
from rayfcp.plan.batch import plan_batch
from rayfcp.plan.grid import render_grid
from rayfcp.plan.imbalance import imbalance
from rayfcp.plan.layout import lay_out
from rayfcp.plan.strategies.registry import names as strategy_names

__all__ = [
    "HARDWARE",
    "MODELS",
    "CostModel",
    "attention_flops",
    "hardware_profile",
    "imbalance",
    "lay_out",
    "lower_bound",
    "max_tokens_per_rank",
    "model_flops",
    "model_profile",
    "plan_batch",
    "render_grid",
    "strategy_names",
]
