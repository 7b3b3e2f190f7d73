"""Reward models: the library's classifiers of one label on any ranks and stages, trained on pairs, their first weights,
their sizes and their files."""

import copy
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, PreTrainedConfig

from rayfcp.bench.alone import random_shards
from rayfcp.cluster.tools.preview import OfflinePlan
from rayfcp.config import Config, ConfigError
from rayfcp.config.adapting import LoraConfig
from rayfcp.config.architecture import ArchitectureConfig
from rayfcp.config.models import ModelConfig
from rayfcp.cost.analytic import model_flops
from rayfcp.cost.memory import loss_bytes
from rayfcp.cost.stages import outer_parameters
from rayfcp.data import LengthIndex, Sampler, TokenReader
from rayfcp.execute.interpreter import BatchTokens, Interpreter, Tokens
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.losses.base import BatchLoss, PairValues, pair_values
from rayfcp.execute.losses.reward import RewardModel
from rayfcp.execute.parallel.transport import Fabric
from rayfcp.models.build import random_model
from rayfcp.models.causal_lm import CausalLM
from rayfcp.models.describe import configured_model, model_config, profile_of
from rayfcp.models.export import export_checkpoint
from rayfcp.models.pretrained import check_weights
from rayfcp.models.selfcheck import check_supported
from rayfcp.models.stages import stages_of
from rayfcp.program import lower
from tests.examples import examples
from tests.execute.cases import SEED, Case, CaseTokens, Gradients
from tests.execute.dense import run_ranks
from tests.execute.threads import InProcessTransport
from tests.models.adapted import TARGETS
from tests.models.families import disturb, disturbed
from tests.models.folders import saved
from tests.models.helpers import VOCAB, architecture
from tests.models.test_families import library

CASES = (
    Case(num_ranks=1, lengths=(33, 1), microbatches=((((0,), (0, 1)),),)),
    Case(
        num_ranks=2,
        lengths=(41, 1, 17, 2),
        microbatches=((((0, 1), (0,)),), (((1,), (1, 2)), ((0,), (3,)))),
        recomputed=2,
    ),
    Case(
        num_ranks=3,
        lengths=(61, 17, 1, 25, 7, 30),
        microbatches=((((2, 0, 1), (0, 2)),), (((1, 2), (1, 3)), ((0,), (4, 5)))),
        reduce_every="microbatch",
    ),
)
"""Pairs in one microbatch or two, cut over ranks; sequences of one token."""

BOUNDS = {"float64": (1e-9, 1e-9), "float32": (2e-6, 5e-6)}
"""Of loss and gradients, each relative. In fp32 the library's own gradients are 2e-6 off, and one reward 1e-6."""


class EndTokens(CaseTokens):
    """Tokens of a case of which the last of each sequence counts."""

    def read(self, sequence: int, *, start: int, stop: int) -> tuple[Tokens, Tokens]:
        tokens, targets = super().read(sequence, start=start, stop=stop)
        targets[:] = -100
        targets[len(self.rows[sequence]) - 1 - start :] = 0
        return tokens, targets


def reward_library(what: str = "qwen3, tied") -> PreTrainedConfig:
    config = library(what)
    config.num_labels = 1
    return config


def plain_loss(rewards: Tensor, *, center: float) -> Tensor:
    """That of TRL's `RewardTrainer`, for rewards of chosen and rejected sequences by turns."""
    chosen, rejected = rewards[::2], rewards[1::2]
    return (-logsigmoid(chosen - rejected) + center * (chosen + rejected) ** 2).mean()


def made(config: PreTrainedConfig) -> Any:
    """The library's own model, with its own attention."""
    return AutoModelForSequenceClassification.from_config(copy.deepcopy(config), attn_implementation="sdpa")


def plainly(model: Any, case: Case, *, center: float) -> tuple[Tensor, Tensor]:
    """Rewards of whole sequences, one at a time, and their loss, by the library alone; gradients stay on `model`."""
    rewards = torch.cat([model(input_ids=torch.from_numpy(row)[None]).logits[0] for row in CaseTokens(case).rows])
    loss = plain_loss(rewards, center=center)
    loss.backward()
    return rewards.detach(), loss.detach()


def trained_of(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def assert_same(found: Gradients, want: Gradients, *, bound: float) -> None:
    """Relative to their norms."""
    assert found.keys() == want.keys()
    for name, gradient in found.items():
        assert float((gradient - want[name]).norm() / want[name].norm()) <= bound, name


def on_ranks(first: CausalLM, case: Case, *, center: float) -> tuple[PairValues, Gradients]:
    """The same by the two passes of threads that hold whole copies of a model."""
    loss, count, fabric = RewardModel(center=center), len(case.lengths), Fabric(case.num_ranks)
    models = [copy.deepcopy(first) for _ in range(case.num_ranks)]
    programs = lower(case.plan(), case.sequences, reduce_every=case.reduce_every)
    sums: list[Tensor] = [torch.zeros(())] * case.num_ranks
    values: list[PairValues] = []
    interpreters = [
        Interpreter(transport=InProcessTransport(fabric, rank), kernel=pick_kernel("cpu"), model=model)
        for rank, model in enumerate(models)
    ]

    def score(rank: int) -> None:
        scored = BatchLoss(loss=loss, row_of=range(count), num_rows=count)
        sums[rank] = interpreters[rank].score(programs.forward_part()[rank], EndTokens(case), loss=scored).row_sums

    def learn(rank: int) -> None:
        weighted = BatchLoss(loss=loss, weights=values[0].weights)
        interpreters[rank].enqueue(programs[rank], EndTokens(case), loss=weighted)

    run_ranks(score, num_ranks=case.num_ranks, fabric=fabric)
    values.append(pair_values(loss, torch.stack(sums).sum(0)))
    run_ranks(learn, num_ranks=case.num_ranks, fabric=fabric)
    gradients: Gradients = {}
    for model in models:
        for name, parameter in trained_of(model).items():
            gradients[name] = gradients.get(name, torch.zeros(())) + parameter.grad
    return values[0], gradients


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.num_ranks)
@pytest.mark.parametrize("what", ["qwen3, tied", "gpt_neox, head renamed"])
def test_loss_and_gradients_of_whole_sequences(what: str, case: Case, dtype: str) -> None:
    config, (bound, of_gradients) = reward_library(what), BOUNDS[dtype]
    ours, theirs = (each.to(getattr(torch, dtype)) for each in (disturbed(config), made(config)))
    theirs.load_state_dict(ours.model.state_dict())
    rewards, loss = plainly(theirs, case, center=0.3)
    values, found = on_ranks(ours, case, center=0.3)
    assert float(values.loss) == pytest.approx(float(loss), rel=bound)
    chosen, rejected = rewards[::2], rewards[1::2]
    stats = values.stats()
    assert (stats.chosen, stats.rejected) == pytest.approx((float(chosen.mean()), float(rejected.mean())), rel=bound)
    assert stats.accuracy == pytest.approx(float((chosen > rejected).double().mean()))
    assert_same(found, {f"model.{name}": each.grad for name, each in trained_of(theirs).items()}, bound=of_gradients)


LENGTHS = (1, 2, 17, 40)


@pytest.fixture(scope="module")
def end_tokens(tmp_path_factory: pytest.TempPathFactory) -> BatchTokens:
    folder = tmp_path_factory.mktemp("ends")
    random_shards(folder, LENGTHS, vocab_size=VOCAB, seed=0)
    index = LengthIndex.open(str(folder / "shards"), max_seqlen=32, long_sequences="cut")
    batch = Sampler(index, seed=0, global_batch=len(LENGTHS)).batch(1)
    return BatchTokens(TokenReader.open(str(folder / "shards")), batch, scores_end=True)


@examples(40)
@given(at=st.integers(0, len(LENGTHS) - 1), cuts=st.sets(st.integers(1, 31)))
def test_the_last_token_counts_whatever_piece_holds_it(end_tokens: BatchTokens, at: int, cuts: set[int]) -> None:
    length = end_tokens._batch.samples[at].num_tokens
    bounds = [0, *sorted(each for each in cuts if each < length), length]
    targets: list[int] = []
    for start, stop in pairwise(bounds):
        targets += end_tokens.read(at, start=start, stop=stop)[1].tolist()
    assert targets == [*[-100] * (length - 1), 0]


@pytest.mark.parametrize("split", [(3,), (1, 2), (1, 1, 1)])
def test_stages_have_the_weights_of_the_whole(split: tuple[int, ...]) -> None:
    """The head is on the last one, and no matrix of the embedding, though that is tied in causal models."""
    config = reward_library()
    weights = dict(random_model(config, dtype="float32", seed=3).named_parameters())
    stages = [random_model(config, dtype="float32", seed=3, stage=stage) for stage in stages_of(split)]
    held = {name: each for stage in stages for name, each in stage.named_parameters()}
    assert held.keys() == weights.keys() and sum(len(list(stage.parameters())) for stage in stages) == len(held)
    assert all(torch.equal(each, weights[name]) for name, each in held.items())
    assert weights["model.score.weight"].shape == (1, config.hidden_size)
    assert [name for name, _ in stages[-1].named_parameters()][-1] == "model.score.weight"
    assert all(stage.shared_matrix is None for stage in stages)


@pytest.mark.parametrize("what", ["llama", "qwen3_moe", "gemma", "phi3, fused"])
def test_families_are_checked_by_rewards(what: str) -> None:
    check_supported(reward_library(what), num_stages=3)


def test_a_head_that_differs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Qwen3ForSequenceClassification as Classifier

    plain = Classifier.forward

    def scaled(self: Any, *args: Any, **keywords: Any) -> Any:
        found = plain(self, *args, **keywords)
        found.logits = found.logits * 1.01
        return found

    monkeypatch.setattr(Classifier, "forward", scaled)
    with pytest.raises(ConfigError, match=r"loss of a tiny one is .* with packed sequences"):
        check_supported(reward_library())


def first_weights(folder: Path, *, seed: int, **keys: Any) -> dict[str, Tensor]:
    run = ModelConfig(path=str(folder), init="pretrained")
    config = model_config(run, vocab_size=VOCAB, is_reward=True)
    check_weights(str(folder), config)
    model = random_model(config, dtype="float32", seed=seed, path=str(folder), **keys)
    return {name.removeprefix("model."): each.detach() for name, each in model.named_parameters()}


@pytest.mark.parametrize("what", ["qwen3, tied", "llama", "gpt_neox, head renamed", "qwen3_moe"])
def test_a_causal_model_lends_all_but_the_head(what: str, tmp_path: Path) -> None:
    """The head is drawn by the seed; another head of theirs is left."""
    _, want = saved(tmp_path, what)
    found, other = first_weights(tmp_path, seed=1), first_weights(tmp_path, seed=2)
    heads = {name for name in found if name not in want}
    assert heads == {"score.weight"}
    for name, each in found.items():
        assert torch.equal(each, other[name]) == (name not in heads), name
        assert name in heads or torch.equal(each, want[name].float()), name
    deviation = float(found["score.weight"].std())
    assert 0.01 < deviation < 0.04, "initializer_range of the family is 0.02"


def as_classifier(folder: Path, *, num_labels: int = 1) -> dict[str, Tensor]:
    """Save a classifier by the library; its weights."""
    config = library("qwen3, tied")
    config.num_labels = num_labels
    model = AutoModelForSequenceClassification.from_config(config)
    disturb(model.double())
    model.float().save_pretrained(folder)
    return dict(model.state_dict())


def test_a_reward_model_goes_on_from_its_own_files(tmp_path: Path) -> None:
    want = as_classifier(tmp_path)
    found = first_weights(tmp_path, seed=1)
    assert found.keys() == want.keys() and all(torch.equal(each, want[name]) for name, each in found.items())
    stages = [first_weights(tmp_path, seed=1, stage=stage) for stage in stages_of((1, 2))]
    assert all(torch.equal(each, want[name]) for stage in stages for name, each in stage.items())


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    weights = as_classifier(tmp_path / "one")
    del weights["score.weight"]
    save_file(weights, tmp_path / "one" / "model.safetensors")
    with pytest.raises(ConfigError, match=r"its files lack score\.weight"):
        first_weights(tmp_path / "one", seed=1)
    run = ModelConfig(path=str(tmp_path / "one"), init="pretrained")
    with pytest.raises(
        ConfigError, match="a classifier with num_labels 1, must be a causal LM, or one with num_labels 1 and loss"
    ):
        model_config(run, vocab_size=VOCAB)
    as_classifier(tmp_path / "three", num_labels=3)
    with pytest.raises(
        ConfigError, match="a classifier with num_labels 3, must be a causal LM, or one with num_labels 1 and loss"
    ):
        first_weights(tmp_path / "three", seed=1)


@pytest.mark.parametrize(
    ("family", "why"), [("granite", "has no sequence classifier"), ("qwen3_vl", "a vision encoder")]
)
def test_families_without_the_head_are_refused(family: str, why: str) -> None:
    run = ModelConfig(architecture=ArchitectureConfig(model_type=family))
    with pytest.raises(ConfigError, match=f"^loss.type is 'reward', which does not run with {family}: it .*{why}"):
        model_config(run, vocab_size=VOCAB, is_reward=True)


def test_costs_are_those_of_one_output() -> None:
    """Parameters, FLOPs and memory; the embedding is not tied to the head."""
    run = ModelConfig(architecture=architecture("qwen3"))
    plain, profile = (
        profile_of(model_config(run, vocab_size=VOCAB, is_reward=each), name="tiny") for each in (False, True)
    )
    assert plain.tied_embeddings and not profile.tied_embeddings
    model = random_model(model_config(run, vocab_size=VOCAB, is_reward=True), dtype="float32", seed=0)
    assert profile.num_parameters == sum(each.numel() for each in model.parameters() if each.ndim > 1)
    hidden = profile.hidden_size
    assert plain.linear_flops_per_token - profile.linear_flops_per_token == 2 * (VOCAB - 1) * hidden
    assert outer_parameters(profile, num_stages=1) == (VOCAB * hidden + hidden,)
    assert outer_parameters(profile, num_stages=3) == (VOCAB * hidden, 0, hidden)
    assert loss_bytes(plain, bytes_per_element=2) == VOCAB * loss_bytes(profile, bytes_per_element=2)
    sequences = CASES[0].sequences
    assert model_flops(plain, sequences) - model_flops(profile, sequences) == 6 * 34 * (VOCAB - 1) * hidden


def trained(folder: Path, *, lora: dict[str, Any] | None = None, **data: Any) -> tuple[Config, Any]:
    """A run of a reward model, and the model that its checkpoint, `folder / "checkpoint"`, holds."""
    saved(folder / "base", "qwen3, tied")
    model = {"path": str(folder / "base"), "init": "pretrained", "lora": lora or {}}
    data = {"paths": ["."], "tokenizer": "bytes", "global_batch_sequences": 2} | data
    config = Config.model_validate({"data": data, "model": model, "loss": {"type": "reward"}})
    known, path = configured_model(config, vocab_size=VOCAB), config.model.path
    held = random_model(known, dtype="float32", seed=config.run.seed, lora=config.model.lora, path=path)
    with torch.no_grad():
        for parameter in trained_of(held).values():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.05)
    dcp.save({"model": trained_of(held)}, checkpoint_id=folder / "checkpoint", no_dist=True)
    return config, held


def rewards_of(model: Any, **keys: Any) -> Tensor:
    rows = torch.randint(0, VOCAB, (3, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return torch.cat([model(input_ids=row[None], **keys).logits[:, 0] for row in rows])


def test_an_export_gives_the_same_rewards(tmp_path: Path) -> None:
    config, held = trained(tmp_path)
    export_checkpoint(config, tmp_path / "checkpoint", out_dir=tmp_path / "out", vocab_size=VOCAB)
    opened = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["architectures"] == ["Qwen3ForSequenceClassification"]
    assert opened.config.num_labels == 1 and opened.config.problem_type is None
    held.model.set_attn_implementation("sdpa")
    torch.testing.assert_close(rewards_of(opened), rewards_of(held.model), rtol=1e-6, atol=1e-6)
    found = first_weights(tmp_path / "out", seed=1)
    want = {name.removeprefix("model."): each for name, each in held.named_parameters()}
    assert all(torch.equal(each, want[name]) for name, each in found.items())
    assert not (tmp_path / "out" / "generation_config.json").exists()


LORA = {"rank": 2, "alpha": 8}


def test_the_head_is_trained_beside_adapters(tmp_path: Path) -> None:
    """Whole; what PEFT makes of the files gives the same rewards, apart and merged."""
    config, held = trained(tmp_path, lora=LORA)
    assert {name for name in trained_of(held) if ".lora_" not in name} == {"model.score.weight"}
    held.model.set_attn_implementation("sdpa")
    want = rewards_of(held.model)
    for merge in (False, True):
        out = tmp_path / str(merge)
        export_checkpoint(config, tmp_path / "checkpoint", out_dir=out, vocab_size=VOCAB, merge=merge)
        if merge:
            opened = AutoModelForSequenceClassification.from_pretrained(out)
        else:
            base = AutoModelForSequenceClassification.from_pretrained(
                tmp_path / "base", num_labels=1, dtype=torch.float32
            )
            opened = peft.PeftModel.from_pretrained(base, out)
            settings = json.loads((out / "adapter_config.json").read_text())
            assert settings["task_type"] == "SEQ_CLS" and settings["modules_to_save"] == ["score"]
            assert "base_model.model.score.weight" in load_file(out / "adapter_model.safetensors")
        torch.testing.assert_close(rewards_of(opened), want, rtol=1e-5, atol=1e-6)


def test_gradients_beside_adapters_are_peft_s() -> None:
    """Of adapters and head, on two ranks."""
    config, case, lora = reward_library(), CASES[1], LoraConfig(**LORA)
    model = random_model(copy.deepcopy(config), dtype="float64", seed=SEED, lora=lora)
    disturb(model)
    settings = peft.LoraConfig(r=2, lora_alpha=8, target_modules=list(TARGETS["lora"]), task_type="SEQ_CLS")
    theirs: Any = peft.get_peft_model(made(config), settings).double()
    theirs.load_state_dict({in_peft(name): each for name, each in model.named_parameters()}, strict=False)
    _, loss = plainly(theirs, case, center=0.0)
    values, found = on_ranks(model, case, center=0.0)
    assert float(values.loss) == pytest.approx(float(loss), rel=1e-9)
    want = trained_of(theirs)
    assert len(want) == len(found)
    assert_same(found, {name: want[in_peft(name)].grad for name in found}, bound=1e-9)


def in_peft(name: str) -> str:
    """A parameter's name in PEFT's model, which wraps the head."""
    name = name.replace("model.score.", "model.score.modules_to_save.default.")
    return f"base_model.model.{name.removeprefix('model.')}"


@pytest.mark.parametrize(("pad", "want"), [("<pad>", "<pad>"), ("<end>", None), (None, None)])
def test_padding_is_noted_unless_it_ends_sequences(pad: str | None, want: str | None, tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {"a": 0, "<pad>": 1, "<end>": 2, "b": 3}
    inner = Tokenizer(WordLevel(words, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token=pad).save_pretrained(
        tmp_path / "words"
    )
    config, _ = trained(tmp_path, tokenizer=str(tmp_path / "words"))
    export_checkpoint(config, tmp_path / "checkpoint", out_dir=tmp_path / "out", vocab_size=VOCAB)
    opened: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    assert opened.config.pad_token_id == (None if want is None else words[want])
    row = torch.tensor([[3, 4, 2]])
    if want is not None:
        padded = torch.cat([row, torch.tensor([[1, 1]])], dim=1)
        both = torch.cat([padded, torch.tensor([[5, 6, 7, 8, 2]])])
        with torch.no_grad():
            assert float(opened(both).logits[0]) == pytest.approx(float(opened(row).logits[0]), rel=1e-5)


@pytest.mark.parametrize("model", [{"name": "qwen3-1.7b"}, {"path": "/nowhere/qwen3-1.7b"}])
def test_plans_without_a_cluster_have_the_head(model: dict[str, str]) -> None:
    """And the pass before those with gradients: a step takes 4/3 of the time of its plan."""
    data = {"paths": ["."], "tokenizer": "bytes", "max_seqlen": 4096, "global_batch_sequences": 8}
    planned = [
        OfflinePlan.of(
            Config.model_validate(
                {
                    "data": data,
                    "model": model,
                    "loss": {"type": loss},
                    "cluster": {"device": "cuda", "num_workers": 2},
                    "plan": {"search_moves": 500},
                }
            ),
            lengths="dist:github",
        )
        for loss in ("cross_entropy", "reward")
    ]
    plain, reward = (each.model for each in planned)
    assert reward.head_parameters == plain.hidden_size and not reward.tied_embeddings
    assert reward.embedding_parameters == plain.embedding_parameters == plain.head_parameters
    assert planned[0].step_s == planned[0].plan.predicted_s
    assert planned[1].step_s == pytest.approx(planned[1].plan.predicted_s * 4 / 3)
    assert planned[1].mfu < 0.8 * planned[0].mfu
