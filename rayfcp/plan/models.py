"""Named model profiles: Table 7 of Flexible Context Parallelism; vocabularies and heads as published."""

from rayfcp.plan.words import pick
from rayfcp.values import ModelProfile

QWEN3_VOCAB = 151_936
LLAMA3_VOCAB = 128_256


def _model(
    name: str, layers: int, *, heads: tuple[int, int, int], sizes: tuple[int, int, int], tied: bool
) -> ModelProfile:
    """`heads`: query heads, key/value heads, head dimension; `sizes`: hidden, MLP, vocabulary."""
    return ModelProfile(
        name=name,
        num_layers=layers,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        hidden_size=sizes[0],
        ffn_size=sizes[1],
        vocab_size=sizes[2],
        tied_embeddings=tied,
    )


_PROFILES = (
    _model("qwen3-1.7b", 28, heads=(16, 8, 128), sizes=(2048, 6144, QWEN3_VOCAB), tied=True),
    _model("qwen3-4b", 36, heads=(32, 8, 128), sizes=(2560, 9728, QWEN3_VOCAB), tied=True),
    _model("qwen3-8b", 36, heads=(32, 8, 128), sizes=(4096, 12288, QWEN3_VOCAB), tied=False),
    _model("llama3.2-1b", 16, heads=(32, 8, 64), sizes=(2048, 8192, LLAMA3_VOCAB), tied=True),
    _model("llama3.2-3b", 28, heads=(24, 8, 128), sizes=(3072, 8192, LLAMA3_VOCAB), tied=True),
    _model("llama3-8b", 32, heads=(32, 8, 128), sizes=(4096, 14336, LLAMA3_VOCAB), tied=False),
)

MODELS = {profile.name: profile for profile in _PROFILES}


def model_profile(name: str) -> ModelProfile:
    """The profile of that name.

    Raises:
        ValueError: unknown; names the nearest known one.
    """
    return MODELS[pick(name, MODELS, what="model")]
