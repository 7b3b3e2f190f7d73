"""The frozen values that pass between packages. Plain Python: no tensors, no handles."""

from rayfcp.values.batch import GlobalBatch, Sample
from rayfcp.values.cluster import ClusterSpec, Decision, Move
from rayfcp.values.layers import FULL, HybridKind, LayerKind, LayerKinds, RecurrentKind, TokenwiseKind, attends
from rayfcp.values.mixers import AttentionProfile, LayerProfile, MixerProfile, RecurrenceProfile
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
from rayfcp.values.profile import AdapterProfile, HardwareProfile, ModelProfile, VisionProfile
from rayfcp.values.report import EvalResult, Imbalance, PairStats, SourceReport, Span, SpanKind, StepReport
from rayfcp.values.sequence import Images, SequenceSpec, token_counts
from rayfcp.values.state import KeptStates, ShardHeader, StateId

__all__ = [
    "FULL",
    "Action",
    "AdapterProfile",
    "AttentionProfile",
    "BatchPlan",
    "Block",
    "ClusterSpec",
    "Context",
    "Decision",
    "EncoderShare",
    "EvalResult",
    "GlobalBatch",
    "Group",
    "HardwareProfile",
    "HybridKind",
    "Images",
    "Imbalance",
    "InfeasiblePlanError",
    "KeptStates",
    "LayerKind",
    "LayerKinds",
    "LayerProfile",
    "Layout",
    "MicrobatchPlan",
    "MixerProfile",
    "ModelProfile",
    "Move",
    "Pacing",
    "PairStats",
    "PipelinePlan",
    "Primitive",
    "RecurrenceProfile",
    "RecurrentKind",
    "Round",
    "Sample",
    "SequenceSpec",
    "ShardHeader",
    "Slice",
    "SourceReport",
    "Span",
    "SpanKind",
    "StateId",
    "StepReport",
    "TokenwiseKind",
    "Transfer",
    "VisionProfile",
    "attends",
    "token_counts",
]
