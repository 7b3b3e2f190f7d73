"""The frozen values that pass between rooms. Plain Python: no tensors, no handles."""

from rayfcp.values.bands import Band, Edge, Windows
from rayfcp.values.batch import GlobalBatch, Sample
from rayfcp.values.cluster import ClusterSpec
from rayfcp.values.decision import Decision, Move
from rayfcp.values.pictures import Pictures
from rayfcp.values.pipeline import Action, PipelinePlan, Slice
from rayfcp.values.plan import (
    BatchPlan,
    Block,
    Context,
    EncoderShare,
    Group,
    InfeasiblePlanError,
    Layout,
    MicrobatchPlan,
    Pacing,
    Primitive,
    Round,
    Transfer,
)
from rayfcp.values.profile import HardwareProfile, ModelProfile, VisionProfile
from rayfcp.values.report import Imbalance, StepReport
from rayfcp.values.sequence import Mask, SequenceSpec, bands_of
from rayfcp.values.span import Span, SpanKind
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
