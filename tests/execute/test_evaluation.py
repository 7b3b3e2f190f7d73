"""Losses of evaluation: those of one process on any world, between steps that they do not change. On real gloo
processes."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from rayfcp.cluster.actors.planner import sequences_of
from rayfcp.cluster.dataset import Dataset, open_dataset
from rayfcp.config import Config
from rayfcp.data import TokenReader
from rayfcp.data.evaluation import open_sets
from rayfcp.data.prepare import prepare_local
from rayfcp.execute.interpreter import BatchTokens
from rayfcp.execute.parallel.sharding import parameter_groups, sharded_modules
from rayfcp.execute.reports import BatchLosses
from rayfcp.models.build import random_model
from rayfcp.plan import plan_batch
from rayfcp.program import lower
from rayfcp.values import BatchPlan, ClusterSpec, GlobalBatch, SequenceSpec
from tests.cluster.runs import run_config, write_texts
from tests.execute.gloo import on_processes, wait_for_all
from tests.execute.pipelined import pipelined
from tests.execute.test_worlds import LAYERS, Engine
from tests.plan.helpers import UNIT

WORLDS = ((1, 1, 1), (1, 2, 1), (1, 3, 1), (1, 4, 1), (2, 2, 1), (3, 1, 1), (1, 2, 2))
"""Stages, ranks, tensor-parallel devices."""

SMALL, LARGE = 40, 4096
"""Tokens that a rank holds: plans with rings and several microbatches, and with one microbatch."""


def config_of(folder: Path, *, gather_every: str = "microbatch") -> Config:
    architecture = {"num_layers": 3, "hidden_size": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 12}
    return run_config(
        folder,
        name="evaluated",
        model={"architecture": architecture | {"ffn_size": 96, "tied_embeddings": True}},
        data={"max_seqlen": 128, "global_batch_sequences": 8},
        train={"steps": 4, "gather_every": gather_every, "recompute_layers": 1, "learning_rate": 1e-2},
        eval={"sets": {"val": {"paths": str(folder / "texts.jsonl")}}, "batches": 2},
    )


class Evaluated(Engine):
    """An engine that evaluates too, by plans of its own."""

    def __init__(self, config: Config, data: Dataset, *, number: int, world: tuple[int, int, int]) -> None:
        super().__init__(config, data, number=number, world=world)
        self._folder = str(Path(config.run_dir).parent / "val")
        self._batches = open_sets(config, {"val": self._folder}, vocab_size=data.vocab_size)

    def evaluate(self, number: int, *, tokens: int = SMALL, by_token: bool = False) -> BatchLosses:
        position, batch = self.position, self._batches.batch(number)
        sequences = sequences_of(batch, layer_kinds=self._data.model.layer_kinds)
        programs = lower(self._plan(sequences, tokens), sequences, forward_only=True)
        program = programs[position.stage * position.num_ranks + position.rank]
        given = {"plan_hash": program.plan_hash, "folder": self._folder, "by_token": by_token}
        return self.engine.evaluate(program, batch, **given)

    def _plan(self, sequences: tuple[SequenceSpec, ...], tokens: int) -> BatchPlan:
        stages, ranks = self.position.num_stages, self.position.num_ranks
        if stages > 1:
            return pipelined(sequences, num_stages=stages, num_ranks=ranks, recomputed=LAYERS[stages])
        longest = max(each.num_tokens for each in sequences)
        cluster = ClusterSpec(num_ranks=ranks, max_tokens_per_rank=max(tokens, -(-longest // ranks)))
        return plan_batch(sequences, cluster=cluster, cost=UNIT)

    @property
    def num_gathered(self) -> int:
        groups = [group for part in sharded_modules(self.model) for group in parameter_groups(part)]
        return sum(group.is_unsharded for group in groups) + sum(len(group._post_forward_indices) for group in groups)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluated")
    write_texts(folder)
    config = config_of(folder)
    for name in ("shards", "val"):
        prepare_local(config.data, out_dir=str(folder / name))
    return folder


def alone(config: Config, folder: Path, batch: GlobalBatch) -> list[list[float]]:
    """Losses of the initial model by sequence and token, by the library's attention, in one process."""
    data = open_dataset(config, data_dir=str(folder / "shards"))
    model = random_model(data.library, dtype="float32", seed=0).model
    model.set_attn_implementation("sdpa")
    tokens, found = BatchTokens(TokenReader.open(str(folder / "val")), batch), []
    for number, sample in enumerate(batch.samples):
        ids, targets = (torch.from_numpy(each) for each in tokens.read(number, start=0, stop=sample.num_tokens))
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0].double()
        found.append(F.cross_entropy(logits, targets, ignore_index=-100, reduction="none").tolist())
    return found


def test_losses_are_those_of_one_process_on_any_world(folder: Path) -> None:
    """By sequence, and by token, each of which one device reports."""
    config = config_of(folder)
    want = alone(config, folder, open_sets(config, {"val": str(folder / "val")}, vocab_size=300).batch(1))
    by_process = on_processes(_on_worlds, folder, size=4)
    for case, whole in by_process[0].items():
        assert whole.by_sequence == pytest.approx([sum(each) for each in want], rel=1e-6, abs=1e-6), case
        found = [np.full(len(each), np.nan) for each in want]
        for report in (process[case] for process in by_process if case in process):
            if report.terms is None:  # a device before the last stage, or without tokens
                continue
            parts = np.split(report.terms, np.cumsum([each.num_tokens for each in report.pieces])[:-1])
            for piece, part in zip(report.pieces, parts, strict=True):
                assert np.isnan(found[piece.sequence][piece.start : piece.stop]).all(), "one device has a token"
                found[piece.sequence][piece.start : piece.stop] = part
        for mine, own in zip(found, want, strict=True):
            assert mine == pytest.approx(own, rel=1e-5, abs=1e-5), case


def _on_worlds(number: int, client: dist.Store, folder: Path) -> dict[tuple[tuple[int, int, int], int], BatchLosses]:
    config = config_of(folder)
    data = open_dataset(config, data_dir=str(folder / "shards"))
    found = {}
    for index, world in enumerate(WORLDS):
        if number < math.prod(world):
            made = Evaluated(config, data, number=number, world=world)
            made.join(dist.PrefixStore(str(index), client))
            for tokens in (SMALL, LARGE):
                report = found[world, tokens] = made.evaluate(1, tokens=tokens, by_token=True)
                assert report.number == number and bool(report.by_sequence) == (number == 0)
                assert report.num_targets == made._batches.batch(1).num_targets
                assert made.num_gathered == 0
            assert made.evaluate(1).terms is None
            made.engine.close()
        wait_for_all(client, f"left-{index}", number=number, size=4)
    return found


@pytest.mark.parametrize("gather_every", ["microbatch", "step"])
def test_training_goes_on_as_without_evaluation(folder: Path, gather_every: str) -> None:
    """Bit for bit, and evaluation sees the weights of its step."""
    for process in on_processes(_train, folder, gather_every, size=4):
        for plain, evaluated, losses in process:
            assert plain == evaluated
            first, *later = losses
            assert all(before[0] == before[1] for before in losses), "the same state gives the same"
            assert later[-1][0] < first[0], "it learns"


def _train(number: int, client: dist.Store, folder: Path, gather_every: str) -> list[Any]:
    config = config_of(folder, gather_every=gather_every)
    data = open_dataset(config, data_dir=str(folder / "shards"))
    found = []
    for world in ((1, 2, 1), (2, 2, 1)):
        if number >= math.prod(world):
            continue
        runs = []
        for evaluates in (False, True):
            made = Evaluated(config, data, number=number, world=world)
            made.join(dist.PrefixStore(f"{world} {evaluates}", client))
            steps, losses = [], []
            for step in range(1, 4):
                if evaluates:
                    losses.append([made.evaluate(1, tokens=tokens).by_sequence for tokens in (SMALL, SMALL)])
                report = made.step(step)
                steps.append((report["loss"], report["norm"], report["gathers"]))
            made.engine.close()
            runs.append(steps)
        found.append((*runs, [[sum(each) for each in some] for some in losses] if number == 0 else [[1, 1], [0, 0]]))
    return found


def test_slices_keep_no_more_than_later_ones_read() -> None:
    """Kept keys and values are copies, so that the rest of a microbatch's is freed at once."""
    from rayfcp.execute.attention.slots import ContextStore

    key, value = torch.ones(2, 100, 1, 4).unbind()
    for alone in (False, True):
        store = ContextStore(alone=alone)
        store.put((0, 0), [(0, 10)], parts=(key, value), recomputed=False)
        kept, _ = store.read((0, 0), (0, 10))
        assert (kept.untyped_storage().nbytes() == kept.nbytes) == alone


def test_a_program_of_another_plan_is_refused(folder: Path) -> None:
    config = config_of(folder)
    made = Evaluated(config, open_dataset(config, data_dir=str(folder / "shards")), number=0, world=(1, 1, 1))
    made.join(dist.HashStore())
    batch = made._batches.batch(1)
    sequences = sequences_of(batch)
    (program,) = lower(made._plan(sequences, SMALL), sequences, forward_only=True)
    with pytest.raises(ValueError, match="evaluation batch 1: program of plan"):
        made.engine.evaluate(program, batch, plan_hash="0", folder=made._folder)
    made.engine.close()
