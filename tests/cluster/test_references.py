"""Which sums of the reference model are computed: those that a run draws and no earlier one has computed, by the same
model on the same samples. The run that computes them is replaced by numbers of samples; `test_preferences` has it."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rayfcp.cluster.checkpoints.folder import REFERENCE, CheckpointFolder, Manifest
from rayfcp.cluster.dataset import TRAINING, Dataset, Evaluation, References, Sums, open_dataset, open_evaluation
from rayfcp.cluster.driver import references
from rayfcp.cluster.driver.preparing import prepared_data, prepared_sets
from rayfcp.cluster.driver.references import reference_sums
from rayfcp.cluster.jobs.evaluate import Evaluated
from rayfcp.cluster.runtime.on_ray import RayRuntime
from rayfcp.config import Config, ConfigError
from rayfcp.data.index import LengthIndex
from tests.cluster.recovering import Trouble
from tests.cluster.runs import run_config
from tests.cluster.test_preferences import write_pairs
from tests.examples import examples

PAIRS, PER_STEP = 20, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("references")
    write_pairs(folder, count=PAIRS)
    write_pairs(folder, name="others.jsonl", seed=1, count=7)
    sizes = {"num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape = AutoConfig.for_model("qwen3", **sizes, head_dim=12, intermediate_size=96, vocab_size=258)
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder / "model")
    return folder


def config_of(folder: Path, **sections: Any) -> Config:
    given = {
        "loss": {"type": "dpo"},
        "data": {"paths": [str(folder / "pairs.jsonl")], "global_batch_sequences": 2 * PER_STEP},
    }
    for section, values in sections.items():
        given[section] = given.get(section, {}) | values
    return run_config(folder, name="run", **given)


class Computed:
    """In place of the run that computes sums: the sum of sample i is `factor` times i. `asked`: pairs by set."""

    def __init__(self, cache: Path, *, factor: float = 1.0) -> None:
        self._cache, self._factor = cache, factor
        self.asked: dict[str, list[int]] = {}
        self.configs: list[Config] = []
        self.wanted: list[Evaluation] = []

    def __call__(self, config: Config, wanted: Evaluation, **given: Any) -> Evaluated:
        data = open_evaluation(config, wanted)
        assert data.evaluation is not None
        sums = {each.name: np.full(len(each.index), np.nan) for each in data.evaluation.sets}
        for number in range(1, len(data.evaluation) + 1):
            name = data.evaluation.set_of(number).name
            for sample in data.evaluation.batch(number).samples:
                assert np.isnan(sums[name][sample.id]), "once each"
                sums[name][sample.id] = self._factor * sample.id
        self.asked = {name: np.flatnonzero(~np.isnan(each[::2])).tolist() for name, each in sums.items()}
        self.configs.append(config)
        self.wanted.append(wanted)
        return Evaluated(step=0, results={}, seconds=0.0, sums=sums, terms={})

    def of(self, config: Config) -> Sums:
        """The sums that a run gets."""
        return self.references_of(config).sums

    def references_of(self, config: Config) -> References:
        self.said: list[str] = []
        self.asked = {}
        quiet: dict[str, Any] = {"log": lambda _: None}
        data_dir, eval_dirs = prepared_data(config, **quiet), prepared_sets(config, **quiet)
        data = open_dataset(config, data_dir=data_dir, eval_dirs=eval_dirs)
        given: dict[str, Any] = {"runtime": RayRuntime(), "watcher": Trouble()}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(references, "evaluate", self)
            found = reference_sums(config, data, cache_dir=str(self._cache), **given)
        self.said = given["watcher"].lines
        return found


def empty(folder: Path) -> Path:
    """A new folder for sums."""
    return folder / f"cache-{os.urandom(4).hex()}"


def drawn(config: Config, data: Dataset) -> set[int]:
    steps = range(1, config.train.steps + 1)
    return {sample.id // 2 for step in steps for sample in data.sampler.batch(step).samples}


@examples(6)
@given(steps=st.lists(st.integers(1, 12), min_size=1, max_size=4), lora=st.booleans())
def test_each_sum_is_computed_once(folder: Path, steps: list[int], lora: bool) -> None:
    """Whatever the runs differ in that changes no sum."""
    known: set[int] = set()
    cache = empty(folder)
    computed = Computed(cache)
    for number, count in enumerate(steps):
        adapted = {"model": {"lora": {"rank": 2 + number}}} if lora and number % 2 else {}
        config = config_of(folder, loss={"beta": 0.1 + number}, train={"steps": count}, **adapted)
        data = open_dataset(config, data_dir=prepared_data(config, log=lambda _: None))
        wanted = drawn(config, data)
        sums = computed.of(config)[TRAINING]
        assert computed.asked.get("training", []) == sorted(wanted - known)
        known |= wanted
        assert np.flatnonzero(np.isfinite(sums[::2])).tolist() == sorted(known)
        batch = data.with_references({TRAINING: sums}).sampler.batch(count)
        assert batch.reference == tuple(float(each.id) for each in batch.samples)


def test_what_changes_a_sum_computes_it_again(folder: Path) -> None:
    model = folder / "model"
    cache = empty(folder)
    computed = Computed(cache)
    base = config_of(folder, train={"steps": 1})
    loaded = config_of(
        folder, train={"steps": 1}, model={"path": str(model), "init": "pretrained"}, data={"tokenizer": "bytes"}
    )
    for config in (
        base,
        base.changed(run={"seed": 1}),
        base.changed(model={"dtype": "float64"}),
        base.changed(model={"architecture": {**dict(base.model.architecture), "num_layers": 3}}),
        base.changed(data={"max_seqlen": 100, "max_bad_fraction": 1.0}),  # the cut makes some pairs equal
        base.changed(data={"paths": [str(folder / "others.jsonl")]}),
        base.changed(loss={"reference": str(model)}),
    ):
        for is_new in (True, False):
            computed.of(config)
            assert bool(computed.asked) == is_new, config
    computed.of(loaded)
    assert not computed.asked, "the same model on the same samples, whether it is trained or not"
    weights = model / "model.safetensors"
    os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 10**9))
    computed.of(loaded)
    assert not computed.asked, "the same contents"


def test_evaluation_sets_have_sums_of_what_is_evaluated(folder: Path) -> None:
    """The same data under two names are computed for both, and kept once."""
    sets = {"val": {"paths": [str(folder / "others.jsonl")]}, "train": {"paths": [str(folder / "pairs.jsonl")]}}
    cache = empty(folder)
    computed = Computed(cache)
    config = config_of(folder, train={"steps": 1}, eval={"sets": sets, "batches": 1})
    sums = computed.of(config)
    assert {name: len(pairs) for name, pairs in computed.asked.items()} == {
        "training": PER_STEP,
        "eval.val": PER_STEP,
        "eval.train": PER_STEP,
    }
    assert set(sums) == {TRAINING, "val", "train"} and len(list(cache.iterdir())) == 2
    assert (sums["train"] == sums[TRAINING])[np.isfinite(sums[TRAINING])].all()
    computed.of(config.changed(eval={"batches": 2}))
    assert {name: len(pairs) for name, pairs in computed.asked.items()}.get("eval.val") == PER_STEP
    folders = {each.run_dir for each in computed.configs}
    assert {str(Path(each).parent.parent) for each in folders} == {str(Path(config.run_dir) / ".reference")}
    assert len(folders) == len(computed.configs), "one each"
    assert not any(each.checkpoint for each in computed.wanted), "never of trained weights"


def test_broken_files_and_numbers(folder: Path) -> None:
    cache = empty(folder)
    config, computed = config_of(folder, train={"steps": 1}), Computed(cache)
    computed.of(config)
    (file,) = cache.iterdir()
    for content in (b"", b"no array", np.zeros(3).tobytes()):
        file.write_bytes(content)
        computed.of(config)
        assert computed.asked
    np.save(file, np.zeros(5), allow_pickle=False)
    computed.of(config)
    assert computed.asked
    np.save(file, np.array([{}], dtype=object), allow_pickle=True)
    computed.of(config)
    assert computed.asked, "nothing is unpickled"
    with pytest.raises(ConfigError, match=r"loss.reference is absent \(the initial model\), it gives 3 of 3 pairs"):
        Computed(cache / "nan", factor=np.inf).of(config)
    assert not (cache / "nan").exists()


def test_a_sample_without_a_sum_is_an_error(folder: Path) -> None:
    config = config_of(folder)
    data = open_dataset(config, data_dir=prepared_data(config, log=lambda _: None))
    assert isinstance(data.index, LengthIndex)
    data = data.with_references({TRAINING: np.full(len(data.index), np.nan)})
    with pytest.raises(RuntimeError, match=r"batch 1: sample \d+ has no sum by the reference model"):
        data.sampler.batch(1)


def test_pairs_of_a_mixture(folder: Path) -> None:
    sources = {
        name: {"paths": [str(folder / f"{name}.jsonl")], "weight": weight}
        for name, weight in (("pairs", 3), ("others", 1))
    }
    config = config_of(folder, data={"paths": (), "sources": sources}, train={"steps": 2})
    computed = Computed(empty(folder))
    sums = computed.of(config)[TRAINING]
    data = open_dataset(config, data_dir=prepared_data(config, log=lambda _: None)).with_references({TRAINING: sums})
    assert computed.asked == {"training": sorted(drawn(config, data))}
    assert {name for step in (1, 2) for name in data.sampler.batch(step).by_source} == {"pairs", "others"}
    assert data.sampler.batch(2).reference == tuple(float(each.id) for each in data.sampler.batch(2).samples)


def checkpoint_of(config: Config, weights: Mapping[str, str] | None) -> None:
    """Write the manifest of a checkpoint of a run, by an earlier release without `weights`."""
    folders = CheckpointFolder(Path(config.run_dir) / "checkpoints", keep=1)
    folders.open()
    unfinished = folders.unfinished(3)
    unfinished.mkdir()
    held = {} if weights is None else {"loss": {"type": "dpo"}, "weights": {REFERENCE: dict(weights)}}
    folders.commit(unfinished, Manifest(step=3, world_size=1, model={}, data={}, files=(), **held))


@pytest.mark.parametrize("key", ["model", "loss"])
def test_a_run_keeps_its_reference_model(folder: Path, tmp_path: Path, key: str) -> None:
    """Contents are compared before anything is computed: a copy elsewhere is the same model, another seed gives
    another."""
    computed = Computed(empty(folder))
    base = tmp_path / "base"
    shutil.copytree(folder / "model", base)

    def config_at(path: Path) -> Config:
        given = {"model": {"path": str(path)}} if key == "model" else {"loss": {"reference": str(path)}}
        return config_of(folder, data={"tokenizer": "bytes"}, **given).changed(run={"dir": str(tmp_path / "run")})

    config = config_at(base)
    first = computed.references_of(config)
    assert computed.asked and len(first.weights) > 10
    checkpoint_of(config, first.weights)
    base.rename(tmp_path / "moved")
    moved = config_at(tmp_path / "moved")
    assert computed.references_of(moved).weights == first.weights
    assert not computed.asked and not computed.said
    file = tmp_path / "moved" / "model.safetensors"
    tensors, times = load_file(file), file.stat()
    tensors["model.norm.weight"].view(torch.int32)[7] ^= 1
    save_file(tensors, file, metadata={"format": "pt"})
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    name = "model.path" if key == "model" else "loss.reference"
    with pytest.raises(
        ConfigError, match=rf"^{name} is '.*moved', with other weights than the run began with \(model\.norm"
    ):
        computed.of(moved)
    assert not computed.asked
    computed.of(moved.changed(checkpoint={"accept_other_weights": True}))
    assert computed.asked, "sums of another model"
    assert [line for line in computed.said if "accepted by checkpoint.accept_other_weights" in line]
    checkpoint_of(config, None)
    computed.of(moved)
    assert computed.said == ["step-00000003 does not say which reference model it had: this one is taken for the same"]


def test_another_seed_is_another_reference(folder: Path, tmp_path: Path) -> None:
    config = config_of(folder).changed(run={"dir": str(tmp_path / "run")})
    computed = Computed(empty(folder))
    checkpoint_of(config, computed.references_of(config).weights)
    computed.of(config)
    with pytest.raises(
        ConfigError, match=r"^run\.seed is 5, with other weights than the run began with \(run\.seed, 1 in all"
    ):
        computed.of(config.changed(run={"seed": 5}))
