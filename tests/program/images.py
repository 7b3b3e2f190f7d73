"""Batches with images, and costs of a model that sees."""

from dataclasses import replace

from hypothesis import strategies as st

from rayfcp.plan import CostModel, hardware_profile, model_profile
from rayfcp.values import Images, ModelProfile, SequenceSpec, VisionProfile

VISION = VisionProfile(
    num_layers=6,
    hidden_size=256,
    num_heads=4,
    ffn_size=1024,
    patch_values=1536,
    merged_patches=4,
    merger_size=1024,
    num_mergers=2,
)


def seeing(*, frozen: bool = False) -> ModelProfile:
    """Qwen3-1.7B with a small encoder."""
    return replace(model_profile("qwen3-1.7b"), vision=replace(VISION, frozen=frozen))


def seeing_cost(
    num_ranks: int, *, frozen: bool = False, hardware: str = "h100", reduce_every: str = "step"
) -> CostModel:
    return CostModel.from_profiles(
        seeing(frozen=frozen),
        hardware_profile(hardware),
        num_ranks=num_ranks,
        bytes_per_element=2,
        reduce_every=reduce_every,  # type: ignore[arg-type]
    )


@st.composite
def sequence_with_images(draw: st.DrawFn, ident: int) -> SequenceSpec:
    """Text with images and runs of frames anywhere; at times text alone, at times images alone."""
    runs: list[Images] = []
    at = 0
    for _ in range(draw(st.integers(0, 3))):
        tokens, count = draw(st.integers(1, 24)), draw(st.integers(1, 6))
        start, stride = at + draw(st.integers(0, 9)), tokens + draw(st.integers(0, 5))
        runs.append(Images(start=start, num_tokens=tokens, num_patches=4 * tokens, count=count, stride=stride))
        at = runs[-1].stop
    length = max(at + draw(st.integers(0, 30)), 1)
    return SequenceSpec(id=ident, num_tokens=length, num_targets=length - 1, images=tuple(runs))


@st.composite
def batches_with_images(draw: st.DrawFn, *, max_sequences: int = 6) -> list[SequenceSpec]:
    return [draw(sequence_with_images(at)) for at in range(draw(st.integers(1, max_sequences)))]
