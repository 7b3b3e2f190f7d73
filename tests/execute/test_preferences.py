"""Losses of pairs on any ranks: loss, rewards and gradients of the published formula on whole sequences in one process;
and the forward passes of training programs, by which sums of sequences are found."""

import math
import threading
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from rayfcp.cluster.actors.planner import sequences_of
from rayfcp.cluster.dataset import TRAINING, Dataset, open_dataset
from rayfcp.cluster.jobs.evaluate import result_of
from rayfcp.config import Config
from rayfcp.config.adapting import LoraConfig
from rayfcp.data import TokenReader
from rayfcp.data.prepare import prepare_local
from rayfcp.execute.interpreter import BatchTokens, Interpreter, Tokens, TokenSource
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.losses.base import BatchLoss, Loss, PairValues, pair_values
from rayfcp.execute.losses.cross_entropy import CrossEntropy
from rayfcp.execute.losses.dpo import DirectPreference
from rayfcp.models.build import WITHOUT_ADAPTERS, random_model
from rayfcp.models.causal_lm import CausalLM
from rayfcp.plan import plan_batch
from rayfcp.program import Programs, lower
from rayfcp.values import ClusterSpec, EvalResult, GlobalBatch, PairStats, SequenceSpec, SpanKind
from tests.cluster.runs import run_config
from tests.data.makers import write_rows
from tests.examples import examples
from tests.execute.cases import SEED, VOCAB, CaseTokens, Gradients
from tests.execute.dense import run_ranks
from tests.execute.gloo import on_processes, wait_for_all
from tests.execute.live import UncountedTransport
from tests.execute.pipelined import pipelined
from tests.execute.staged import Fabrics, StagedCase, random_case, summed
from tests.execute.test_evaluation import SMALL, Evaluated
from tests.plan.helpers import UNIT

BETA = 0.3
LORA = LoraConfig(rank=4)
LAYERS = {1: (3,), 2: (1, 2)}


class Pairs:
    """Random tokens of sequences 2i (chosen) and 2i+1 (rejected), of which the first `prompt` are no targets."""

    def __init__(self, lengths: list[tuple[int, int]]) -> None:
        rng = np.random.default_rng(len(lengths))
        self.rows = [rng.integers(0, VOCAB, tokens) for tokens, _ in lengths]
        self.prompts = [prompt for _, prompt in lengths]
        self.reference = (10 * rng.random(len(lengths))).tolist()  # sums of negative log-probabilities

    def read(self, sequence: int, *, start: int, stop: int) -> tuple[Tokens, Tokens]:
        row = self.rows[sequence]
        following = np.where(np.arange(1, row.size + 1) < self.prompts[sequence], -100, np.append(row[1:], -100))
        return row[start:stop], following[start:stop]

    def case(self, *, ranks: int, stages: int, tokens: int, recomputed: int, lora: LoraConfig) -> StagedCase:
        """A plan in which a rank holds so many tokens, so that sequences are cut and microbatches several."""
        sequences = [
            SequenceSpec(id=at, num_tokens=row.size, num_targets=max(row.size - max(prompt, 1), 0))
            for at, (row, prompt) in enumerate(zip(self.rows, self.prompts, strict=True))
        ]
        if stages > 1:
            layers = tuple(min(recomputed, each) for each in LAYERS[stages])
            plan = pipelined(sequences, num_stages=stages, num_ranks=ranks, recomputed=layers)
        else:
            longest = max(each.num_tokens for each in sequences)
            cluster = ClusterSpec(num_ranks=ranks, max_tokens_per_rank=max(tokens, -(-longest // ranks)))
            plan = replace(plan_batch(sequences, cluster=cluster, cost=UNIT), recomputed_layers=recomputed)
        return StagedCase(
            plan=plan, sequences=tuple(sequences), layers_of_stage=LAYERS[stages], is_tied=stages > 1, lora=lora
        )


def with_adapters(model: CausalLM) -> CausalLM:
    """The model with adapters that do something, the same in each of its stages."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def trained(model: CausalLM) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def log_probability(model: Any, ids: Tensor, *, prompt: int) -> Tensor:
    """Of what follows the prompt, by the library's own attention on the whole sequence."""
    logits = model(input_ids=ids[None]).logits[0, :-1].double()
    each = logits.log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)
    return each[max(prompt - 1, 0) :].sum()


def plain(rewards: Tensor) -> tuple[Tensor, tuple[float, float, float]]:
    """Rafailov et al., equation 7, by the rewards of sequences; with both means of rewards, and the accuracy."""
    chosen, rejected = rewards[::2], rewards[1::2]
    accuracy = float((chosen > rejected).double().mean())
    means = float(chosen.detach().mean()), float(rejected.detach().mean())
    return -F.logsigmoid(chosen - rejected).mean(), (*means, accuracy)


def expected(pairs: Pairs, case: StagedCase) -> tuple[float, tuple[float, float, float], Gradients]:
    model = with_adapters(random_model(case.library, dtype="float64", seed=SEED, lora=case.lora))
    model.model.set_attn_implementation("sdpa")
    found = [
        log_probability(model.model, torch.from_numpy(row), prompt=prompt)
        for row, prompt in zip(pairs.rows, pairs.prompts, strict=True)
    ]
    loss, figures = plain(BETA * (torch.stack(found) + torch.tensor(pairs.reference, dtype=torch.float64)))
    loss.backward()
    return float(loss.detach()), figures, {name: each.grad for name, each in trained(model).items()}


class Threads:
    """Models of all devices of a case, each run by a thread."""

    def __init__(self, case: StagedCase) -> None:
        self.num_stages, self.num_ranks = len(case.layers_of_stage), case.plan.num_ranks
        self.models = [[with_adapters(model) for model in case.models("float64")] for _ in range(self.num_ranks)]
        self._size = len(case.sequences)

    def run(self, programs: Programs, tokens: TokenSource, *, loss: Loss, reference: list[float]) -> PairValues | None:
        """Both passes as a device does them, the sums of the first in `sums`; without `reference` the second has the
        loss itself, and its sums are in `trained`."""
        count = self.num_stages * self.num_ranks
        fabrics, ready = Fabrics(num_stages=self.num_stages, num_ranks=self.num_ranks), threading.Barrier(count)
        own = torch.zeros(2, count, self._size, dtype=torch.float64)
        found: list[PairValues] = []
        scores = programs.forward_part()

        def work(device: int) -> None:
            stage, rank = divmod(device, self.num_ranks)
            interpreter = Interpreter(
                transport=UncountedTransport(fabrics.attend[stage], rank),
                kernel=pick_kernel("cpu"),
                model=self.models[rank][stage],
                pipes=fabrics.pipes_of(rank, stage=stage, dtype="float64") if self.num_stages > 1 else None,
            )
            by_row = BatchLoss(loss=loss, row_of=range(self._size), num_rows=self._size)
            own[0, device] = interpreter.score(scores[device], tokens, loss=by_row).row_sums
            ready.wait(timeout=60)
            if not reference:
                own[1, device] = interpreter.enqueue(programs[device], tokens, loss=by_row).row_sums
            else:
                assert isinstance(loss, DirectPreference)
                values = pair_values(loss, own[0].sum(0), reference=reference)
                weighted = BatchLoss(loss=loss, weights=values.weights)
                interpreter.enqueue(programs[device], tokens, loss=weighted).read()
                found.append(values)

        run_ranks(work, num_ranks=count, fabric=fabrics)
        self.sums, self.trained = own.sum(1)
        return found[0] if found else None


ROWS = st.tuples(st.integers(1, 60), st.integers(0, 20))


@examples(12)
@given(
    rows=st.lists(st.tuples(ROWS, ROWS), min_size=1, max_size=3),
    ranks=st.sampled_from([1, 2, 3, 5]),
    stages=st.sampled_from([1, 1, 2]),
    tokens=st.sampled_from([12, 30, 500]),
    recomputed=st.integers(0, 3),
    lora=st.sampled_from([WITHOUT_ADAPTERS, WITHOUT_ADAPTERS, LORA]),
)
@example(
    rows=[((61, 5), (9, 5)), ((14, 3), (40, 3)), ((2, 1), (33, 8))],
    ranks=2,
    stages=1,
    tokens=12,
    recomputed=2,
    lora=LORA,
)
@example(
    rows=[((70, 5), (55, 5)), ((14, 3), (40, 3))],
    ranks=2,
    stages=2,
    tokens=12,
    recomputed=1,
    lora=WITHOUT_ADAPTERS,
)
def test_dpo_is_the_formula_on_whole_sequences(
    rows: list[tuple[tuple[int, int], tuple[int, int]]],
    ranks: int,
    stages: int,
    tokens: int,
    recomputed: int,
    lora: LoraConfig,
) -> None:
    pairs = Pairs([row for pair in rows for row in pair])
    case = pairs.case(ranks=ranks, stages=stages, tokens=tokens, recomputed=recomputed, lora=lora)
    loss, figures, gradients = expected(pairs, case)
    threads = Threads(case)
    found = threads.run(case.programs, pairs, loss=DirectPreference(beta=BETA), reference=pairs.reference)
    assert found is not None
    assert float(found.loss) == pytest.approx(loss, rel=1e-10)
    assert found.figures.tolist() == pytest.approx(figures, rel=1e-10, abs=1e-12)
    assert found.stats().num_pairs == len(rows)
    have = summed([trained(model) for models in threads.models for model in models])
    assert have.keys() == gradients.keys()
    for name, gradient in have.items():
        assert float((gradient - gradients[name]).norm()) <= 1e-10 * float(gradients[name].norm()) + 1e-15, name


@examples(6)
@given(seed=st.integers(0, 100_000), num_stages=st.integers(1, 3), num_ranks=st.integers(1, 3))
def test_forward_parts_have_the_sums_of_training(seed: int, num_stages: int, num_ranks: int) -> None:
    case = random_case(seed, num_ranks=num_ranks, layers_of_stage={1: (3,), 2: (1, 2), 3: (2, 1, 1)}[num_stages])
    threads = Threads(case)
    threads.run(case.programs, CaseTokens(case), loss=CrossEntropy(), reference=[])
    torch.testing.assert_close(threads.sums, threads.trained, rtol=1e-12, atol=1e-12)
    assert (threads.sums > 0).tolist() == [length > 1 for length in case.lengths]


WORLDS = ((1, 1, 1), (1, 3, 1), (2, 2, 1), (1, 2, 2))
"""Stages, ranks, tensor-parallel devices."""

SIZE = max(math.prod(world) for world in WORLDS)


def config_of(folder: Path) -> Config:
    architecture = {"num_layers": 3, "hidden_size": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 12}
    model = {"architecture": architecture | {"ffn_size": 96, "tied_embeddings": True}, "dtype": "float64"}
    return run_config(
        folder,
        name="preferred",
        model=model,
        loss={"type": "dpo", "beta": BETA},
        data={"paths": [str(folder / "pairs.jsonl")], "max_seqlen": 128, "global_batch_sequences": 8},
        train={"steps": 4, "recompute_layers": 1, "learning_rate": 1e-2},
        eval={"sets": {"val": {"paths": str(folder / "pairs.jsonl")}}, "batches": 1},
    )


def opened(folder: Path) -> tuple[Config, Dataset]:
    """The data with sums of a reference model that is made up."""
    config = config_of(folder)
    dirs = {"data_dir": str(folder / "shards"), "eval_dirs": {"val": str(folder / "val")}}
    data = open_dataset(config, **dirs)
    sums = 100 + 10 * np.random.default_rng(0).random(len(data.index))
    return config, data.with_references({TRAINING: sums, "val": sums})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rng = tmp_path_factory.mktemp("preferred"), np.random.default_rng(1)
    columns: dict[str, list[str]] = {
        name: ["".join(map(chr, rng.integers(97, 123, rng.integers(low, high)))) for _ in range(14)]
        for name, low, high in (("prompt", 1, 40), ("chosen", 1, 80), ("rejected", 1, 80))
    }
    write_rows(folder / "pairs.jsonl", columns)
    for name in ("shards", "val"):
        prepare_local(config_of(folder).data, out_dir=str(folder / name))
    return folder


class Preferring(Evaluated):
    """An engine that tells what it finds of pairs."""

    def pair_step(self, number: int) -> tuple[float, ...]:
        batch = self._data.sampler.batch(number)
        sequences = sequences_of(batch, layer_kinds=self._data.model.layer_kinds)
        plan = self._plan(sequences, SMALL)
        if self.position.num_ranks == 3:  # what is to be shown here
            microbatches = [{name for group in each.groups for name in group.sequences} for each in plan.microbatches]
            assert any((name in each) != (name + 1 in each) for each in microbatches for name in range(0, 8, 2))
            assert any(len(group.ranks) > 1 for each in plan.microbatches for group in each.groups)
        programs, place = lower(plan, sequences), self.position.stage * self.position.num_ranks + self.position.rank
        scores = programs.forward_part()[place]
        report = self.engine.run_step(programs[place], batch, plan_hash=programs.plan_hash, scores=scores)
        assert report.pairs is not None and report.spans[0].kind is SpanKind.SCORE and self.num_gathered == 0
        return report.loss, report.grad_norm, report.pairs.chosen, report.pairs.rejected, report.pairs.accuracy


def alone(data: Dataset, folder: Path) -> tuple[list[float], EvalResult]:
    """A step, and an evaluation before it, of the initial model, by the formula."""
    assert data.evaluation is not None
    model = random_model(data.library, dtype="float64", seed=0)
    model.model.set_attn_implementation("sdpa")

    def of_batch(batch: GlobalBatch, name: str) -> tuple[Tensor, tuple[float, float, float]]:
        tokens, found = BatchTokens(TokenReader.open(str(folder / name)), batch), []
        for number, sample in enumerate(batch.samples):
            ids, targets = tokens.read(number, start=0, stop=sample.num_tokens)
            found.append(log_probability(model.model, torch.from_numpy(ids), prompt=int((targets == -100).sum())))
        return plain(BETA * (torch.stack(found) + torch.tensor(batch.reference, dtype=torch.float64)))

    batch = data.evaluation.batch(1)
    loss, (chosen, rejected, accuracy) = of_batch(batch, "val")
    pairs = PairStats(num_pairs=4, chosen=chosen, rejected=rejected, accuracy=accuracy)
    evaluated = EvalResult(loss=float(loss.detach()), tokens=batch.num_targets, pairs=pairs)
    loss, figures = of_batch(data.sampler.batch(1), "shards")
    loss.backward()
    norm = math.sqrt(sum(float(each.grad.norm()) ** 2 for each in trained(model).values()))
    return [float(loss.detach()), norm, *figures], evaluated


def test_steps_and_evaluations_are_those_of_the_formula_on_any_world(folder: Path) -> None:
    """And the next step, after the update, is that of one device. On real gloo processes."""
    results = on_processes(_on_worlds, folder, size=SIZE)[0]
    config, data = opened(folder)
    assert data.evaluation is not None
    step, want = alone(data, folder)
    reference, num_targets = data.evaluation.batch(1).reference, data.evaluation.batch(1).num_targets
    for world, (first, second, sums) in zip(WORLDS, results, strict=True):
        assert first == pytest.approx(step, rel=1e-9, abs=1e-12), world
        assert second == pytest.approx(results[0][1], rel=1e-8, abs=1e-10), world
        assert second[0] != pytest.approx(first[0], rel=1e-3)
        found = result_of(config.loss, sums, reference=reference, num_targets=num_targets)
        assert found.pairs is not None and want.pairs is not None
        assert found.loss == pytest.approx(want.loss, rel=1e-9), world
        assert found.pairs.margin == pytest.approx(want.pairs.margin, rel=1e-9), world
        assert (found.tokens, found.pairs.num_pairs) == (want.tokens, want.pairs.num_pairs)
        assert found.pairs.accuracy == want.pairs.accuracy


def _on_worlds(number: int, client: dist.Store, folder: Path) -> list[Any]:
    config, data = opened(folder)
    found = []
    for index, world in enumerate(WORLDS):
        if number < math.prod(world):
            made = Preferring(config, data, number=number, world=world)
            made.join(dist.PrefixStore(str(index), client))
            sums = made.evaluate(1).by_sequence
            found.append([*(made.pair_step(step) for step in (1, 2)), sums])
            made.engine.close()
        wait_for_all(client, f"left-{index}", number=number, size=SIZE)
    return found
