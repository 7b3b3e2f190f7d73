"""Our attention inside the library's models: the same loss and gradients as theirs, recomputed or not."""

import copy
import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM

from rayfcp.models import causal_lm
from rayfcp.models.attention_hook import KEYWORD
from rayfcp.models.build import random_model
from rayfcp.models.causal_lm import CausalLM
from tests.models.helpers import FAMILIES, NUM_LAYERS, context_of, library_config, loss_sum, rows_of, shifted

LENGTHS = (23, 1, 38)
EXACT = {"rtol": 1e-9, "atol": 1e-13}


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_packed_sequences_as_the_library_computes_each_alone(family: str, tied: bool) -> None:
    """The library's model is made by the library, so that its buffers (rotary frequencies) are compared too."""
    config = library_config(family, tied=tied)
    ours = random_model(config, dtype="float64", seed=3)
    theirs = AutoModelForCausalLM.from_config(library_config(family, tied=tied), attn_implementation="sdpa").double()
    theirs.load_state_dict(ours.model.state_dict())
    context = context_of(LENGTHS)
    found = loss_sum(ours, rows_of(LENGTHS), context=context)
    found.backward()
    assert context.stats.pairs > 0, "the library keeps the choice of attention in the configuration, models share it"
    want = torch.zeros((), dtype=torch.float64)
    for row in rows_of(LENGTHS):
        logits = theirs(input_ids=row[None]).logits[0]
        want = want + torch.nn.functional.cross_entropy(logits, shifted(row), reduction="sum")
    want.backward()
    torch.testing.assert_close(found, want, **EXACT)
    have = gradients(ours.model)
    for name, gradient in gradients(theirs).items():
        torch.testing.assert_close(have[name], gradient, **EXACT, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_layers_change_nothing_but_the_work(family: str) -> None:
    first = random_model(library_config(family), dtype="float64", seed=1)
    pairs, want = {}, {}
    for recomputed in range(NUM_LAYERS + 1):
        model, context = copy.deepcopy(first), context_of(LENGTHS, recomputed_layers=recomputed)
        loss_sum(model, rows_of(LENGTHS), context=context).backward()
        pairs[recomputed] = context.stats.pairs
        found = gradients(model)
        want = want or found
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, want[name], rtol=0.0, atol=0.0, msg=f"{recomputed} {name}")
    batch_pairs = sum(length * (length + 1) // 2 for length in LENGTHS)
    assert pairs == {layers: batch_pairs * (2 * NUM_LAYERS + layers) for layers in range(NUM_LAYERS + 1)}


def test_attention_under_autocast_is_in_its_dtype() -> None:
    """Norms of heads leave queries and keys in float32 beside values in bfloat16, which attention would refuse."""
    model, context = random_model(library_config("qwen3"), dtype="float32", seed=1), context_of(LENGTHS)
    with torch.no_grad():
        want = loss_sum(model, rows_of(LENGTHS), context=context)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = loss_sum(model, rows_of(LENGTHS), context=context)
    assert found != want
    torch.testing.assert_close(found.float(), want, rtol=1e-2, atol=0.0)


def test_losses_in_chunks_are_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """More tokens than have logits at a time."""
    model = random_model(library_config("qwen3"), dtype="float64", seed=1)
    monkeypatch.setattr(causal_lm, "loss_chunk_tokens", lambda _hidden_size, *, bytes_per_element: 24)
    lengths = (19, 60)
    rows = rows_of(lengths)
    found = loss_sum(model, rows, context=context_of(lengths))
    found.backward()
    whole = {name: gradient.clone() for name, gradient in gradients(model).items()}
    model.zero_grad()
    want = 0.0
    for row in rows:
        loss = loss_sum(model, [row], context=context_of((len(row),)))
        loss.backward()
        want += float(loss.detach())
    assert float(found.detach()) == pytest.approx(want, rel=1e-12)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(whole[name], gradient, **EXACT)


def test_a_model_called_without_the_context_says_so() -> None:
    model: CausalLM = random_model(library_config("llama"), dtype="float32", seed=1)
    with pytest.raises(ValueError, match="was called without rayfcp_attention=; pass the AttentionContext"):
        model.model(input_ids=torch.zeros(1, 3, dtype=torch.int64))


def test_torch_looks_at_no_field_of_the_context() -> None:
    """FSDP2 searches dataclasses among a layer's arguments for tensors, and compiled code is for one value of a frozen
    one: a context has the lengths of all sequences."""
    model = random_model(library_config("qwen3"), dtype="float32", seed=1)
    seen: list[object] = []
    for module in (model.decoder, *model.layers, model.layers[0].self_attn):
        module.register_forward_pre_hook(lambda _, __, given: seen.append(given[KEYWORD]), with_kwargs=True)
    loss_sum(model, rows_of((5,)), context=context_of((5,)))
    assert len(seen) == NUM_LAYERS + 2 and not any(dataclasses.is_dataclass(each) for each in seen)


def test_gradients_of_gradients_are_refused() -> None:
    """They would be wrong: the backward's messages are not part of the graph."""
    model = random_model(library_config("qwen3"), dtype="float32", seed=1)
    weight = model.layers[0].self_attn.q_proj.weight
    loss = loss_sum(model, rows_of((5,)), context=context_of((5,)))
    (first,) = torch.autograd.grad(loss, weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
