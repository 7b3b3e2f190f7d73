"""Which source stands at a place of a run: in its share, found at once, the same whatever ran before."""

import json
from collections import Counter
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.config import Config, ConfigError, dump_config, load_config
from rayfcp.config.data import DataConfig
from rayfcp.data import LengthIndex, Sampler, TokenReader, cached_prepare, prepare
from rayfcp.data.mixture import MixtureSampler, Segment, floor_sum, make_segments, num_below
from tests.data.makers import few_examples, whole

STEP = 11400714819323198485
Weights = list[Fraction]

weights_of = (
    st.lists(st.integers(0, 50), min_size=1, max_size=5).filter(any).map(lambda each: list(map(Fraction, each)))
)


@few_examples
@given(
    count=st.integers(0, 60),
    modulus=st.integers(1, 50),
    factor=st.integers(-200, 200),
    offset=st.integers(-200, 200),
)
def test_sums_of_floors(count: int, modulus: int, factor: int, offset: int) -> None:
    expected = sum((factor * at + offset) // modulus for at in range(count))
    assert floor_sum(count, modulus=modulus, factor=factor, offset=offset) == expected


@few_examples
@given(count=st.integers(0, 300), bound=st.integers(0, 1 << 64))
def test_numbers_below_a_bound(count: int, bound: int) -> None:
    assert num_below(count, bound) == sum(at * STEP % (1 << 64) < bound for at in range(count))


@few_examples
@given(weights=weights_of, first=st.integers(0, 2000), count=st.integers(1, 50))
def test_any_place_is_found_without_those_before(weights: Weights, first: int, count: int) -> None:
    (segment,), _ = make_segments([(0, weights)], limits=[None] * len(weights))
    sources, numbers = segment.place(0, count=first + count)
    own_sources, own_numbers = segment.place(first, count=count)
    assert own_sources.tolist() == sources[first:].tolist()
    assert own_numbers.tolist() == numbers[first:].tolist()
    for source in range(len(weights)):
        assert numbers[sources == source].tolist() == list(range(int((sources == source).sum())))


@few_examples
@given(weights=weights_of)
def test_every_stretch_has_each_source_in_its_share(weights: Weights) -> None:
    """Within 4 samples of its share, at every place of the first 4,000 (random draws are 50 off there)."""
    (segment,), _ = make_segments([(0, weights)], limits=[None] * len(weights))
    sources, _ = segment.place(0, count=4000)
    places = np.arange(1, 4001)
    for source, weight in enumerate(weights):
        share = float(weight / sum(weights))
        assert np.abs(np.cumsum(sources == source) - share * places).max() <= 4.0
        assert weight or not (sources == source).any()


def walk(stretches: list[tuple[int, Weights]], limits: list[int | None], *, count: int) -> list[tuple[int, int]]:
    """Sources and numbers by a plain walk over segments."""
    taken, found = [0] * len(limits), []
    stretch, start, cuts = -1, 0, []
    for place in range(count):
        while stretch + 1 < len(stretches) and stretches[stretch + 1][0] == place:
            stretch += 1
            start, cuts = place, []
        left = [limit is None or have < limit for limit, have in zip(limits, taken, strict=True)]
        usable = [weight if room else Fraction(0) for weight, room in zip(stretches[stretch][1], left, strict=True)]
        if not sum(usable):
            return found
        now = [int(sum(usable[:at]) * (1 << 64) / sum(usable)) for at in range(len(usable) + 1)]
        if now != cuts:
            start, cuts = place, now
        point = (place - start) * STEP % (1 << 64)
        source = next(at for at, (low, high) in enumerate(pairwise(cuts)) if low <= point < high)
        found.append((source, taken[source]))
        taken[source] += 1
    return found


@few_examples
@given(data=st.data())
def test_limits_and_schedules_agree_with_a_walk(data: st.DataObject) -> None:
    num_sources = data.draw(st.integers(1, 4))
    weights = st.lists(st.integers(0, 9), min_size=num_sources, max_size=num_sources).filter(any)
    starts = [0, *sorted(data.draw(st.sets(st.integers(1, 150), max_size=3)))]
    stretches = [(start, list(map(Fraction, data.draw(weights)))) for start in starts]
    limits = [data.draw(st.none() | st.integers(1, 60)) for _ in range(num_sources)]
    segments, num_samples = make_segments(stretches, limits=limits)
    count = min(num_samples, 250)
    expected = walk(stretches, limits, count=250)
    assert len(expected) == count
    ends = [*(segment.first for segment in segments[1:]), num_samples]
    found: list[tuple[int, int]] = []
    for segment, end in zip(segments, ends, strict=True):
        sources, numbers = segment.place(0, count=max(0, min(end, count) - segment.first))
        found += zip(sources.tolist(), numbers.tolist(), strict=True)
    assert found == expected


def test_places_stay_what_they_were() -> None:
    """Golden values: runs of an older version must resume with the same samples."""
    (segment,), _ = make_segments([(0, [Fraction(5), Fraction(3), Fraction(2)])], limits=[None] * 3)
    assert segment == Segment(first=0, cuts=(0, 1 << 63, 14757395258967641292, 1 << 64), taken=(0, 0, 0))
    sources, numbers = segment.place(10**12, count=8)
    assert sources.tolist() == [2, 1, 0, 1, 0, 2, 1, 0]
    assert numbers.tolist() == [
        200000000016,
        299999999997,
        499999999987,
        299999999998,
        499999999988,
        200000000017,
        299999999999,
        499999999989,
    ]


def write_lines(folder: Path, **sizes: int) -> None:
    """JSON Lines of texts by name; lengths differ between and within sources."""
    for number, (name, size) in enumerate(sizes.items(), 1):
        rows = [json.dumps({"text": chr(96 + number) * (3 * number + row % 5)}) for row in range(size)]
        (folder / f"{name}.jsonl").write_text("\n".join(rows))


def mixture(folder: Path, *, sources: dict[str, Any], **keys: Any) -> DataConfig:
    made = {name: {"paths": str(folder / f"{name}.jsonl"), **own} for name, own in sources.items()}
    return DataConfig(sources=made, **{"global_batch_sequences": 8, "max_seqlen": 64, **keys})


def sampler_of(data: DataConfig, folder: Path, *, seed: int = 0) -> MixtureSampler:
    manifest = cached_prepare(data, cache_dir=str(folder / ".cache"))
    return MixtureSampler(LengthIndex.open(manifest.folder, max_seqlen=data.max_seqlen), data, seed=seed)


def counted(sampler: Sampler, *, steps: range) -> dict[str, tuple[int, ...]]:
    """Sequences, tokens and targets by source."""
    total: dict[str, list[int]] = {}
    for step in steps:
        for name, numbers in sampler.batch(step).by_source.items():
            total[name] = [have + more for have, more in zip(total.get(name, [0, 0, 0]), numbers, strict=True)]
    return {name: tuple(numbers) for name, numbers in total.items()}


def test_weights_count_sequences_and_shares_count_tokens(tmp_path: Path) -> None:
    write_lines(tmp_path, a=50, b=20, c=30)
    weighted = sampler_of(
        mixture(tmp_path, sources={"a": {"weight": 3}, "b": {"weight": 1}, "c": {"weight": 0}}), tmp_path
    )
    counts = counted(weighted, steps=range(1, 101))
    assert abs(counts["a"][0] - 600) <= 1
    assert (counts["a"][0] + counts["b"][0], counts["c"][0]) == (800, 0)
    shared = sampler_of(
        mixture(tmp_path, sources={"a": {"share": 0.5}, "b": {"share": 0.25}, "c": {"share": 0.25}}), tmp_path
    )
    counts = counted(shared, steps=range(1, 501))
    tokens = [counts[name][1] for name in "abc"]
    assert np.allclose(np.array(tokens) / sum(tokens), [0.5, 0.25, 0.25], atol=0.003)


@pytest.mark.parametrize("temperature", [1.0, 2.0, 100.0])
def test_sources_without_weights_count_by_their_tokens(tmp_path: Path, temperature: float) -> None:
    write_lines(tmp_path, a=80, b=20)
    data = mixture(tmp_path, sources={"a": {}, "b": {}}, temperature=temperature)
    sampler = sampler_of(data, tmp_path)
    lengths = sampler._index.lengths
    shares = np.array([lengths[:80].sum(), lengths[80:].sum()]) ** (1 / temperature)
    counts = counted(sampler, steps=range(1, 1001))
    tokens = np.array([counts["a"][1], counts["b"][1]])
    assert np.allclose(tokens / tokens.sum(), shares / shares.sum(), atol=0.003)


def test_sources_are_taken_epoch_after_epoch_in_orders_of_their_own(tmp_path: Path) -> None:
    write_lines(tmp_path, a=7, b=7)
    sampler = sampler_of(mixture(tmp_path, sources={"a": {"weight": 1}, "b": {"weight": 1}}), tmp_path)
    drawn: dict[int, list[int]] = {0: [], 1: []}
    for step in range(1, 9):
        batch = sampler.batch(step)
        for source, sample in zip(batch.source_of, batch.samples, strict=True):
            drawn[source].append(sample.id - 7 * source)
    for ids in drawn.values():
        epochs = [ids[start : start + 7] for start in range(0, 28, 7)]
        assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
        assert len(set(map(tuple, epochs))) == 4
    assert drawn[0] != drawn[1]


def test_epochs_end_a_source_and_the_run(tmp_path: Path) -> None:
    write_lines(tmp_path, a=10, b=6)
    sampler = sampler_of(
        mixture(tmp_path, sources={"a": {"weight": 1, "epochs": 2.5}, "b": {"weight": 1, "epochs": 1}}), tmp_path
    )
    assert (sampler.num_samples, sampler.num_steps) == (31, 3)
    drawn = Counter(sample.id for step in (1, 2, 3) for sample in sampler.batch(step).samples)
    assert [drawn[position] for position in range(10, 16)] == [1] * 6
    assert sum(drawn[position] for position in range(10)) == 18
    with pytest.raises(ValueError, match="step is 4, must be at most 3"):
        sampler.batch(4)


def test_a_schedule_changes_weights_at_its_steps(tmp_path: Path) -> None:
    write_lines(tmp_path, a=50, b=50)
    schedule = [{"from_step": 5, "weights": {"b": 1}}, {"from_step": 7, "weights": {"a": 1, "b": 1}}]
    data = mixture(tmp_path, sources={"a": {"weight": 1}, "b": {"weight": 0}}, schedule=schedule)
    sampler = sampler_of(data, tmp_path)
    counts = [[sampler.batch(step).by_source[name][0] for name in "ab"] for step in range(1, 9)]
    assert counts[:6] == [[8, 0]] * 4 + [[0, 8]] * 2
    assert all(3 <= count <= 5 for both in counts[6:] for count in both)


def test_tokens_are_those_of_the_sources(tmp_path: Path) -> None:
    write_lines(tmp_path, a=5, b=9)
    data = mixture(tmp_path, sources={"b": {"weight": 1}, "a": {"weight": 1}})
    sampler = sampler_of(data, tmp_path)
    reader = TokenReader(sampler._index.manifest)
    for step in (1, 2, 3):
        batch = sampler.batch(step)
        assert batch.sources == ("a", "b")
        for source, sample in zip(batch.source_of, batch.samples, strict=True):
            assert set(whole(reader, sample)[0][:-1]) == {97 if batch.sources[source] == "a" else 98}


def test_sources_share_what_is_prepared(tmp_path: Path) -> None:
    write_lines(tmp_path, a=5, b=9)
    one = cached_prepare(mixture(tmp_path, sources={"a": {}, "b": {}}), cache_dir=str(tmp_path / ".cache"))
    other = cached_prepare(mixture(tmp_path, sources={"b": {"weight": 1}}), cache_dir=str(tmp_path / ".cache"))
    assert {shard.name for shard in other.shards} < {shard.name for shard in one.shards}
    alone = cached_prepare(DataConfig(paths=str(tmp_path / "b.jsonl")), cache_dir=str(tmp_path / ".cache"))
    assert [f"{alone.folder}/{shard.name}" for shard in alone.shards] == [shard.name for shard in other.shards]
    out = prepare(mixture(tmp_path, sources={"a": {}, "b": {}}), out_dir=str(tmp_path / "out"))
    again = {name: {"paths": str(tmp_path / "out" / name), "format": "prepared"} for name in "ab"}
    assert cached_prepare(DataConfig(sources=again), cache_dir=str(tmp_path / ".other")).content == out.content


def test_checkpoints_refuse_another_mixture(tmp_path: Path) -> None:
    write_lines(tmp_path, a=5, b=9)
    sources = {"a": {"weight": 1}, "b": {"weight": 1}}
    saved = sampler_of(mixture(tmp_path, sources=sources), tmp_path).state(3)
    sampler_of(mixture(tmp_path, sources=dict(reversed(sources.items()))), tmp_path).check_state(
        json.loads(json.dumps(saved))
    )
    others = [
        {"sources": {"a": {"weight": 1}, "b": {"weight": 2}}},
        {"sources": {"a": {"weight": 1}, "b": {"weight": 1, "epochs": 9}}},
        {"sources": sources, "schedule": [{"from_step": 9, "weights": {"a": 1}}]},
        {"sources": {"a": {"weight": 1}}},
    ]
    for keys in others:
        with pytest.raises(ConfigError, match=r"the mixture of data\.sources, data\.temperature and data\.schedule is"):
            sampler_of(mixture(tmp_path, **keys), tmp_path).check_state(saved)
    plain = LengthIndex.open(
        cached_prepare(DataConfig(paths=str(tmp_path)), cache_dir=f"{tmp_path}-c").folder, max_seqlen=64
    )
    with pytest.raises(ConfigError, match="the mixture of"):
        Sampler(plain, seed=0, global_batch=8).check_state(saved)


def test_errors_name_the_source(tmp_path: Path) -> None:
    write_lines(tmp_path, a=5)
    (tmp_path / "b.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"data.sources.c.paths has '.*/c.jsonl', which does not exist"):
        sampler_of(mixture(tmp_path, sources={"a": {}, "c": {}}), tmp_path)
    with pytest.raises(ConfigError, match=r"data.max_bad_fraction allows 0.01; first: .*b.jsonl row 1"):
        sampler_of(mixture(tmp_path, sources={"a": {}, "b": {}}), tmp_path)
    with pytest.raises(ConfigError, match=r"data\.sources\.a has no sample, must have one of at most data.max_seqlen"):
        (tmp_path / "b.jsonl").write_text(json.dumps({"text": "b"}))
        data = mixture(tmp_path, sources={"a": {}, "b": {}})
        manifest = cached_prepare(data, cache_dir=str(tmp_path / ".cache"))
        MixtureSampler(LengthIndex.open(manifest.folder, max_seqlen=3, long_sequences="drop"), data, seed=0)


A = {"a": {"paths": "x"}}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, "data.paths is missing, must be given"),
        ({"paths": "x", "sources": A}, r"data.paths is \['x'\], must be absent beside sources"),
        ({"sources": {"a": {}}}, "data.sources.a.paths is missing, must be given"),
        ({"sources": {"a": {"paths": "x", "wieght": 1}}}, "data.sources.a.wieght is not a known key"),
        ({"sources": {"a b": {"paths": "x"}}}, "must start with a letter or digit"),
        ({"sources": {"a": {"paths": "x", "weight": -1}}}, "data.sources.a.weight is -1, must be at least 0"),
        ({"sources": {"a": {"paths": "x", "weight": 1}, "b": {"paths": "x"}}}, "data.sources must all have a weight"),
        ({"sources": {"a": {"paths": "x", "weight": 1, "share": 1}}}, "data.sources must all have a weight"),
        ({"sources": {"a": {"paths": "x", "weight": 0}}}, "data.sources must not all have a weight or share of 0"),
        ({"sources": {"a": {"paths": "x", "share": 1}}, "temperature": 2}, "data.temperature is 2, must be 1"),
        ({"sources": A, "schedule": [{"from_step": 5}]}, "weights must be given, or shares"),
        (
            {"sources": A, "schedule": [{"from_step": 5, "weights": {"b": 1}}]},
            "data.schedule names 'b', must be one of data.sources",
        ),
        ({"sources": A, "schedule": [{"from_step": 5, "weights": {"a": 0}}]}, "weights must not all be 0"),
        ({"sources": A, "schedule": 2 * [{"from_step": 5, "weights": {"a": 1}}]}, r"data.schedule has steps \[5, 5\]"),
    ],
)
def test_wrong_mixtures_have_one_line(data: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        load_config({"data": data})
    assert "\n" not in str(raised.value)


def test_a_mixture_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    overrides = ["data.sources.a.paths=x", "data.sources.a.weight=2", "data.schedule=[{from_step: 3, weights: {a: 1}}]"]
    config = load_config({}, overrides=overrides)
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "config.yaml") == config
    assert isinstance(config, Config) and config.data.sources["a"].weight == 2
