"""Gradients of embeddings: the sum over a word's tokens, however many, rounded once."""

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from rayfcp.models.build import random_model
from rayfcp.models.embedding import sum_widely
from tests.models.helpers import library_config

WORDS, SIZE, TOKENS = 40, 24, 20_000
KINDS: dict[str, nn.Embedding] = {
    "plain": nn.Embedding(WORDS, SIZE),
    "padded": nn.Embedding(WORDS, SIZE, padding_idx=3),
    "scaled": Gemma3TextScaledWordEmbedding(WORDS, SIZE, padding_idx=0, embed_scale=0.5),
}


def gradient(module: nn.Embedding, ids: Tensor, *, of_output: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(module(ids), module.weight, of_output.to(module.weight.dtype))
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_are_rounded_once(kind: str, dtype: torch.dtype) -> None:
    """Of frequent words too, of which torch's own loses most in bf16."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.multinomial(1.0 / torch.arange(1, WORDS + 1), TOKENS, replacement=True, generator=generator)
    of_output = (torch.randn(TOKENS, SIZE, generator=generator) + 0.3).to(dtype)
    module = KINDS[kind].double()
    exact = gradient(module, ids, of_output=of_output)
    module.to(dtype)
    plain = gradient(module, ids, of_output=of_output)
    sum_widely(module)
    found = gradient(module, ids, of_output=of_output)
    del vars(module)["forward"]
    error, once, of_torch = (float((each.double() - exact).norm()) for each in (found, exact.to(dtype), plain))
    assert found.dtype is dtype
    bound = 1e-6 * float(exact.norm()) if dtype is torch.float32 else 1.05 * once
    assert error < bound and (dtype is torch.float32 or of_torch > 20 * once)


def test_embeddings_of_models_sum_widely() -> None:
    model = random_model(library_config("qwen3"), dtype="float32", seed=0).bfloat16()
    embedding = model.model.get_input_embeddings()
    ids = torch.zeros(5000, dtype=torch.int64)
    embedding(ids).sum().backward()
    assert embedding.weight.grad[0].tolist() == [4992.0] * embedding.weight.shape[1]  # 5000 in bf16
