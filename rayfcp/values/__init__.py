"""The frozen values that pass between rooms. Plain Python: no tensors, no handles."""

from rayfcp.values.batch import GlobalBatch, Sample
from rayfcp.values.cluster import ClusterSpec
from rayfcp.values.plan import (
    BatchPlan,
    Block,
    Group,
    InfeasiblePlanError,
    Layout,
    MicrobatchPlan,
    Pipeline,
    Primitive,
    Round,
    Transfer,
)
from rayfcp.values.profile import HardwareProfile, ModelProfile
from rayfcp.values.report import Imbalance, StepReport
from rayfcp.values.sequence import Mask, SequenceSpec
from rayfcp.values.span import Span, SpanKind

__all__ = [
    "BatchPlan",
    "Block",
    "ClusterSpec",
    "GlobalBatch",
    "Group",
    "HardwareProfile",
    "Imbalance",
    "InfeasiblePlanError",
    "Layout",
    "Mask",
    "MicrobatchPlan",
    "ModelProfile",
    "Pipeline",
    "Primitive",
    "Round",
    "Sample",
    "SequenceSpec",
    "Span",
    "SpanKind",
    "StepReport",
    "Transfer",
]
