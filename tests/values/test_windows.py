"""Pairs of masks with windows, and kinds of layers, against plain counts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.values import LayerKind, ModelProfile, SequenceSpec
from tests.masks import kinds, sees

windows_of_layers = st.lists(st.sampled_from([0, 0, 1, 3, 7]), min_size=1, max_size=6)


def profile(layer_windows: tuple[int, ...], num_layers: int) -> ModelProfile:
    return ModelProfile(
        name="any",
        num_layers=num_layers,
        hidden_size=8,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        ffn_size=16,
        vocab_size=11,
        kind_of_layer=kinds(*layer_windows),
    )


SIZES = st.integers(0, 24)


@given(st.integers(1, 20), st.builds(LayerKind, window=SIZES) | st.builds(LayerKind, chunk=SIZES), st.data())
def test_pairs_are_those_of_the_rows(length: int, kind: LayerKind, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, length))
    stop = data.draw(st.integers(start, length))
    rows, sizes = range(start, stop), {"window": kind.window, "chunk": kind.chunk}
    assert kind.work(start, stop).pairs == sum(sees(row, key, **sizes) for row in rows for key in range(length))
    for keys in range(length):
        due = sum(sees(row, key, **sizes) for row in range(stop) for key in range(keys))
        assert kind.visible_pairs(stop, keys) == due


@given(windows_of_layers, st.integers(1, 20))
def test_pairs_of_a_sequence_are_the_mean_over_layers(layers: list[int], length: int) -> None:
    model = profile(tuple(layers), len(layers))
    spec = SequenceSpec(id=0, num_tokens=length, num_targets=0, layer_kinds=model.layer_kinds)

    due = sum(kind.work(0, length).pairs for kind in kinds(*layers))
    assert spec.attention_pairs * len(layers) == pytest.approx(due)
    assert isinstance(spec.attention_pairs, int) or len(set(layers)) > 1


def test_layers_without_windows_are_no_kinds() -> None:
    assert profile((0, 0), 2).layer_kinds == profile((), 2).layer_kinds == ()


@given(windows_of_layers, st.integers(0, 6))
def test_kinds_of_stages_add_up_to_those_of_the_model(layers: list[int], cut: int) -> None:
    first = min(cut, len(layers))
    for windows in (tuple(layers), ()):
        stages = profile(windows, len(layers)).stage_kinds([first, len(layers) - first])
        assert [sum(count for _, count in own) for own in stages] == [first, len(layers) - first]
        found = {kind.window for own in stages for kind, _ in own}
        assert found == set(windows or [0])


@pytest.mark.parametrize("windows", [(4,), (4, 4, 4), (4, -1)])
def test_windows_that_are_not_those_of_the_layers_are_refused(windows: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"kind_of_layer has .* of each of 2 layers|window is -1, must be at least 0"):
        profile(windows, 2)


@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 14))
def test_visible_pairs_of_a_rectangle_are_counted_alike_for_numbers_and_arrays(
    queries: int, keys: int, window: int
) -> None:
    due = sum(sees(row, key, window=window) for row in range(queries) for key in range(keys))
    assert LayerKind(window=window).visible_pairs(queries, keys) == due
    assert LayerKind(window=window).visible_pairs(np.array([queries]), np.array([keys])).tolist() == [due]
