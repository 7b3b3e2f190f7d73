"""The frozen values that pass between rooms. Plain Python: no tensors, no handles."""

from rayfcp.values.batch import GlobalBatch, Sample
from rayfcp.values.cluster import ClusterSpec, Decision, Move
from rayfcp.values.images import Pictures
from rayfcp.values.plan import (
    Action,
    BatchPlan,
    Block,
    Context,
    EncoderShare,
    Group,
    InfeasiblePlanError,
    Layout,
    MicrobatchPlan,
    Pacing,
    PipelinePlan,
    Primitive,
    Round,
    Slice,
    Transfer,
)
from rayfcp.values.profile import HardwareProfile, ModelProfile, VisionProfile
from rayfcp.values.report import Imbalance, Span, SpanKind, StepReport
from rayfcp.values.sequence import Band, Edge, Mask, SequenceSpec, Windows, bands_of
from rayfcp.values.state import Box, ShardEntry, ShardHeader, StateId

__all__ = [
    "Action",
    "Band",
    "BatchPlan",
    "Block",
    "Box",
    "ClusterSpec",
    "Context",
    "Decision",
    "Edge",
    "EncoderShare",
    "GlobalBatch",
    "Group",
    "HardwareProfile",
    "Imbalance",
    "InfeasiblePlanError",
    "Layout",
    "Mask",
    "MicrobatchPlan",
    "ModelProfile",
    "Move",
    "Pacing",
    "Pictures",
    "PipelinePlan",
    "Primitive",
    "Round",
    "Sample",
    "SequenceSpec",
    "ShardEntry",
    "ShardHeader",
    "Slice",
    "Span",
    "SpanKind",
    "StateId",
    "StepReport",
    "Transfer",
    "VisionProfile",
    "Windows",
    "bands_of",
]
