"""Batches of evaluation sets: every sample once, whatever else a run does."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.config import Config, ConfigError
from rayfcp.data.evaluation import EvalBatches, open_sets
from rayfcp.data.prepare import prepare_local
from tests.cluster.runs import run_config, write_texts
from tests.examples import examples

LABELLED = 3
"""Row that is not among the first in the order of a set of eight."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sets")
    write_texts(folder)
    (folder / "few.jsonl").write_text('{"text": "a few words"}\n{"text": "and others"}\n')
    config = config_of(folder)
    for name, each in config.eval.sets.items():
        prepare_local(each.source(config.data), out_dir=str(folder / name))
    return folder


def config_of(folder: Path, **keys: object) -> Config:
    sets = {"val": {"paths": str(folder / "texts.jsonl")}, "few": {"paths": str(folder / "few.jsonl"), "max_seqlen": 9}}
    return run_config(folder, name="sets", eval={"sets": sets, **keys})


def opened(folder: Path, *, sequences: int, **keys: object) -> EvalBatches:
    config = config_of(folder, **keys).changed(data={"global_batch_sequences": sequences})
    return open_sets(config, {name: str(folder / name) for name in config.eval.sets}, vocab_size=300)


@examples(20)
@given(sequences=st.integers(1, 70))
def test_every_sample_is_in_one_batch(folder: Path, sequences: int) -> None:
    batches = opened(folder, sequences=sequences)
    for own in batches.sets:
        numbers = [number for number in range(1, len(batches) + 1) if batches.set_of(number) is own]
        found = [sample.id for number in numbers for sample in batches.batch(number).samples]
        assert sorted(found) == list(range(len(own.index))) and len(numbers) == -(-len(found) // sequences)
    assert [each.name for each in batches.sets] == ["val", "few"]
    assert max(sample.num_tokens for sample in batches.batch(len(batches)).samples) <= 9
    with pytest.raises(ValueError, match="must be in"):
        batches.batch(len(batches) + 1)


def test_the_first_batches_are_those_of_all(folder: Path) -> None:
    some, every = opened(folder, sequences=7, batches=2), opened(folder, sequences=7)
    assert len(some) == 3 and [some.batch(number) for number in (1, 2)] == [every.batch(number) for number in (1, 2)]
    assert some.batch(3).samples == every.batch(len(every)).samples


def test_batches_without_targets_are_refused(folder: Path) -> None:
    rows = [{"input_ids": [1, 2], "labels": [1, 2 if row == LABELLED else -100]} for row in range(8)]
    (folder / "rare.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = {"rare": {"paths": str(folder / "rare.jsonl")}}
    config = config_of(folder).changed(data={"global_batch_sequences": 1}, eval={"sets": sets, "batches": 1})
    prepare_local(config.eval.sets["rare"].source(config.data), out_dir=str(folder / "rare"))
    with pytest.raises(ConfigError, match=r"eval.batches is 1, must give eval.sets.rare a sequence with targets; r"):
        open_sets(config, {"rare": str(folder / "rare")}, vocab_size=300)
    assert len(open_sets(config.changed(eval={"batches": 8}), {"rare": str(folder / "rare")}, vocab_size=300)) == 8


def test_a_set_without_targets_is_refused(folder: Path) -> None:
    config = config_of(folder).changed(eval={"sets": {"one": {"paths": str(folder / "few.jsonl"), "max_seqlen": 1}}})
    with pytest.raises(ConfigError, match=r"^eval.sets.one: paths: 2 seq.* beyond eval.sets.one.max_seqlen=1; raise"):
        open_sets(config, {"one": str(folder / "few")}, vocab_size=300)
    with pytest.raises(ConfigError, match=r"eval.sets.one: .*must be a folder of prepared data"):
        open_sets(config, {"one": str(folder)}, vocab_size=300)
