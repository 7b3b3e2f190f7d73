"""`rayfcp compare`: inputs of a comparison from a run's configuration, a prepared folder, or rows of text."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from rayfcp.config import Config, ConfigError, check_paths, load_config
from rayfcp.values.devices import AUTO, DEVICES

if TYPE_CHECKING:
    from rayfcp.compare.command import Progress
    from rayfcp.data import LengthIndex
    from rayfcp.values import SequenceSpec

LONGEST = 1 << 20
"""Tokens at which rows of text are cut if neither --max-seqlen nor a configuration says where."""


def run(arguments: argparse.Namespace) -> None:
    """Compare the strategies on the data and model of a configuration, or on given ones.

    Raises:
        ConfigError: Inputs that cannot be used, in one line.
    """
    from rayfcp.compare import command

    command.check_outputs(arguments)
    given = command.given_of(arguments)
    config = _config_of(arguments.overrides, given)
    if config is not None:
        given = _settings(config, given) | given
    with command.Progress(1) as progress:
        given |= _rows(config, given, progress=progress)
    command.run(command.inputs_of(given), arguments)


def _config_of(words: Sequence[str], given: dict[str, Any]) -> Config | None:
    """Return the configuration: the given one with the options that name its keys, or that of rows of text."""
    from rayfcp.compare.lengths import holds_text

    lengths, model = given.get("lengths", ""), given.get("model", "")
    is_text = holds_text(lengths)
    overrides = []
    if words:
        if "=" in words[0]:
            raise ConfigError(f"CONFIG is missing before {words[0]!r}, must be a YAML file; e.g. jobs/quickstart.yaml")
        source: Any = words[0]
        overrides = [*words[1:], *([f"data.paths={[lengths]}", "data.sources={}"] if is_text else [])]
    elif is_text and Path(model).is_dir() and "global_batch" in given:
        source = {"model": {"path": model}, "data": {"paths": [lengths], "max_seqlen": LONGEST}}
    else:
        return None  # reading the lengths says what is missing
    keys = {"max_seqlen": "data.max_seqlen", "global_batch": "data.global_batch_sequences", "seed": "run.seed"}
    overrides += [f"{key}={given[name]}" for name, key in keys.items() if name in given]
    return load_config(source, overrides=overrides, trains=False)


def _settings(config: Config, given: dict[str, Any]) -> dict[str, Any]:
    """Return what the configuration says of the fields of `Inputs`: its batches, and the choices that it sets."""
    from rayfcp.compare.arguments import DEFAULT_STRATEGIES, STAGED_STRATEGIES

    cluster, train, plan = config.cluster, config.train, config.plan
    found: dict[str, Any] = {
        "lengths": ", ".join(config.data.paths or config.data.sources),
        "model": config.model.path or config.model.name or config.model.architecture.model_type,
        "global_batch": config.data.global_batch_sequences,
        "seed": config.run.seed,
        "packing": plan.packing,
        "degrees": plan.degrees,
        "constraints": plan.constraints,
        "keep_attention": not train.recompute_attention,
        "config": config,
    }
    if config.data.max_seqlen != LONGEST:
        found["max_seqlen"] = config.data.max_seqlen
    if cluster.device != AUTO:
        found["hardware"] = DEVICES[cluster.device].base_hardware
    own = {"num_workers": "devices", "pipeline_stages": "stages", "tensor_parallel": "tensor_parallel"}
    own |= {} if "hardware" in given else {"memory_gib_per_device": "memory_gib"}  # of other devices
    found |= {own[key]: getattr(cluster, key) for key in own if key in cluster.model_fields_set}
    if "devices" in found:
        found["devices"] = cluster.max_workers
    choices = ("recompute_layers", "reduce_every", "gather_every")
    found |= {key: getattr(train, key) for key in choices if key in train.model_fields_set}
    staged = STAGED_STRATEGIES * ((given | found).get("stages", 1) != 1)
    found["strategies"] = tuple(dict.fromkeys((*DEFAULT_STRATEGIES, *staged, plan.strategy)))
    return found


def _rows(config: Config | None, given: dict[str, Any], *, progress: "Progress") -> dict[str, Any]:
    """Return the rows and the model, as far as they come from prepared or raw data."""
    lengths = given.get("lengths", "")
    found: dict[str, Any] = {}
    if config is None:
        return {"rows": _prepared_rows(lengths, given)} if _is_prepared(lengths) else {}
    if lengths == ", ".join(config.data.paths or config.data.sources):
        return _data_of(config, given, progress=progress)
    if given["model"] == _settings(config, given)["model"]:
        from rayfcp.cluster.tools.preview import model_of

        found["profile"] = model_of(config)
    return found | ({"rows": _prepared_rows(lengths, given)} if _is_prepared(lengths) else {})


def _data_of(config: Config, given: dict[str, Any], *, progress: "Progress") -> dict[str, Any]:
    """Return the sequences of a run's first batches, and its model. Data that are not prepared are tokenized into the
    run's cache, from which `rayfcp train` takes them."""
    check_paths(config)
    from rayfcp.cluster.actors.planner import sequences_of
    from rayfcp.cluster.dataset import open_dataset
    from rayfcp.cluster.driver.preparing import prepared_data
    from rayfcp.compare.arguments import DEFAULT_BATCHES
    from rayfcp.data import run_tokenizer

    progress.log("reading data")
    run_tokenizer(config)
    data = open_dataset(config, data_dir=prepared_data(config, log=progress.log))
    num_batches = given.get("batches", DEFAULT_BATCHES)
    batches = [sequences_of(data.sampler.batch(step)) for step in range(1, num_batches + 1)]
    found: dict[str, Any] = {"rows": tuple(chain.from_iterable(batches)), "batches": num_batches}
    if "max_seqlen" not in given:
        from rayfcp.models.library import text_of

        positions = getattr(text_of(data.library), "max_position_embeddings", None) or LONGEST
        found["max_seqlen"] = min(max(each.num_tokens for each in found["rows"]), positions)
    if given["model"] == _settings(config, given)["model"]:
        found["profile"] = replace(data.model, name=data.model.name.rstrip("/").rpartition("/")[2])
    return found


def _is_prepared(path: str) -> bool:
    if not Path(path).is_dir():
        return False
    from rayfcp.data.manifest import find_manifest

    return find_manifest(path) is not None


def _prepared_rows(folder: str, given: dict[str, Any]) -> "Sequence[int | SequenceSpec]":
    """Return rows that are drawn from a prepared folder."""
    from rayfcp.compare.arguments import DEFAULT_BATCHES
    from rayfcp.compare.lengths import draw
    from rayfcp.data import LengthIndex

    if "global_batch" not in given:
        return ()  # it is asked for afterwards
    rows = PreparedRows(LengthIndex.open(folder, max_seqlen=given.get("max_seqlen", LONGEST), long_sequences="cut"))
    size = given["global_batch"]
    batches = given.get("batches", max(min(DEFAULT_BATCHES, len(rows) // size), 1))
    return draw(rows, source=folder, num_batches=batches, global_batch=size, seed=given.get("seed", 0))


class PreparedRows(Sequence["SequenceSpec"]):
    """The samples of a prepared folder, made when they are drawn."""

    def __init__(self, index: "LengthIndex") -> None:
        self._index = index

    def __len__(self) -> int:
        return len(self._index)

    @overload
    def __getitem__(self, position: int) -> "SequenceSpec": ...
    @overload
    def __getitem__(self, position: slice) -> "Sequence[SequenceSpec]": ...
    def __getitem__(self, position: int | slice) -> "SequenceSpec | Sequence[SequenceSpec]":
        if isinstance(position, slice):
            return [self[each] for each in range(*position.indices(len(self)))]
        from rayfcp.values import SequenceSpec

        sample = self._index.sample(position)
        return SequenceSpec(
            id=position, num_tokens=sample.num_tokens, num_targets=sample.num_targets, images=sample.images
        )

    def __iter__(self) -> "Iterator[SequenceSpec]":
        return (self[position] for position in range(len(self)))
