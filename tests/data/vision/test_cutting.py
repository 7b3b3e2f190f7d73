"""Long rows with images: no mark is left without its image, no answer without the images before it, and all adds up."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.data import LengthIndex, PreparedManifest
from rayfcp.data.balance import CUT, DROPPED, IMAGE_CUT, IMAGE_TOO_LONG, SINGLE_TOKENS, TRAINED, USED
from rayfcp.data.manifest import write_manifest
from rayfcp.data.rows import IGNORED, TokenRow, make_row
from rayfcp.data.shards import ShardWriter
from rayfcp.data.vision.layout import RowImages
from rayfcp.data.vision.processors import ImageTokenizer
from tests.data.makers import few_examples

Segment = tuple[int, bool, bool]
"""Tokens, whether they are an image with its marks, and whether they are targets."""
SEGMENTS = st.lists(st.tuples(st.integers(1, 7), st.booleans(), st.booleans()), min_size=1, max_size=7)


OPENING = {"qwen": "<|vision_start|>", "intern": ("<img>", "Frame1: <img>")}


class Row:
    """A row of segments."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        sizes = [size + 2 * is_image for size, is_image, _ in segments]
        stops = np.cumsum([0, *sizes]).tolist()
        self.length = stops[-1]
        self.spans = [span for span, (_, is_image, _) in zip(pairwise(stops), segments, strict=True) if is_image]
        targets = [is_target for size, (_, _, is_target) in zip(sizes, segments, strict=True) for _ in range(size)]
        self.labels = np.where(targets, 1, IGNORED)
        text = [not is_image for size, (_, is_image, _) in zip(sizes, segments, strict=True) for _ in range(size)]
        self.is_document = all(self.labels[at] != IGNORED for at in range(1, self.length) if text[at])

    @property
    def made(self) -> TokenRow:
        from dataclasses import replace

        items = [(0, 1, 1, 1, start, stop, 1) for start, stop in self.spans]
        runs = [(start + 1, stop - start - 2, 1, 1, 0) for start, stop in self.spans]
        images = RowImages(items=np.array(items), runs=np.array(runs), parts=(b"x",) * len(items))
        row = make_row(np.ones(self.length, dtype=np.int64), labels=self.labels)
        return replace(row, images=images if items else None)

    def num_targets(self, start: int, stop: int) -> int:
        return int(np.count_nonzero(self.labels[start + 1 : stop] != IGNORED))

    def may_end(self, stop: int) -> bool:
        return not any(first < stop < last for first, last in self.spans)


def indexed(folder: str, rows: Sequence[Row], **keys: Any) -> LengthIndex:
    with ShardWriter(folder, prefix="shard", images=True) as writer:
        for row in rows:
            writer.add(row.made)
    texts = dict.fromkeys(("fingerprint", "tokenizer", "tokenizer_fingerprint"), "")
    made = PreparedManifest(
        folder=folder, tokenizer_vocab_size=9, max_token_id=1, shards=writer.shards, **texts, num_files=1
    )
    write_manifest(made)
    return LengthIndex(made, vocab_size=None, **keys)


@few_examples
@given(
    rows=st.lists(SEGMENTS.map(Row), min_size=1, max_size=5),
    max_seqlen=st.integers(2, 16),
    way=st.sampled_from(["auto", "cut", "split", "drop"]),
)
def test_long_rows_with_images(
    rows: list[Row], max_seqlen: int, way: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    index = indexed(str(tmp_path_factory.mktemp("rows")), rows, max_seqlen=max_seqlen, long_sequences=way)
    pieces: dict[int, list[tuple[int, int]]] = {number: [] for number in range(len(rows))}
    for number, start, stop in zip(index.rows, index.starts, index.stops, strict=True):
        pieces[int(number)].append((int(start), int(stop)))
    skipped: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    images: Counter[str] = Counter()
    for number, row in enumerate(rows):
        own, is_cut = pieces[number], row.length > max_seqlen and bool(row.spans) and way in ("cut", "split")
        check_pieces(row, own, max_seqlen=max_seqlen, way=way, is_cut=is_cut)
        trained = sum(row.num_targets(*piece) for piece in own)
        within = sum(any(first <= start and stop <= last for first, last in own) for start, stop in row.spans)
        tokens[TRAINED] += trained
        if own:
            rest = row.length - sum(stop - start for start, stop in own)
            tokens[SINGLE_TOKENS if way == "split" and not is_cut else CUT] += rest
            images += Counter({USED: within, CUT: len(row.spans) - within})
            continue
        is_long = any(stop - start > max_seqlen for start, stop in row.spans)
        reason = DROPPED if not is_cut else IMAGE_TOO_LONG if is_long else IMAGE_CUT
        skipped[reason] += 1
        tokens[reason] += row.length
        images[reason] += len(row.spans)
    balance = index.balance
    assert balance.skipped == +skipped
    assert balance.images == +images
    assert {fate: count for fate, count in balance.tokens.items() if fate != "not targets"} == +tokens
    assert balance.num_tokens == sum(row.length for row in rows)
    assert sum(balance.images.values()) == sum(len(row.spans) for row in rows)
    assert balance.num_rows == balance.num_used + sum(balance.skipped.values()) == len(rows)
    assert str(balance).count("image") >= bool(balance.images)
    samples = index.samples(range(len(index)))
    assert sum(run.count for sample in samples for run in sample.images) == balance.images.get(USED, 0)


def check_pieces(row: Row, pieces: list[tuple[int, int]], *, max_seqlen: int, way: str, is_cut: bool) -> None:
    """Pieces are in order, cut no image, and are as long as they may be."""
    if row.length <= max_seqlen:
        assert pieces == [(0, row.length)]
        return
    if way == "drop" or (way == "auto" and row.spans):
        assert not pieces
        return
    behind = 0
    for start, stop in pieces:
        assert behind <= start < stop <= start + max_seqlen
        assert row.may_end(start) and row.may_end(stop)
        assert not any(row.may_end(longer) for longer in range(stop + 1, min(start + max_seqlen, row.length) + 1))
        behind = stop
        if is_cut:
            assert row.num_targets(start, stop)
        if is_cut and not row.is_document:
            assert all(start <= first for first, _ in row.spans if first < stop), "an image before it is missing"
    if way == "cut":
        assert [start for start, _ in pieces] in ([], [0])


def test_text_is_cut_where_rows_with_images_are_dropped(tmp_path: Any) -> None:
    text, shown = Row([(9, False, True)]), Row([(4, True, False), (9, False, True)])
    index = indexed(str(tmp_path / "both"), [text, shown], max_seqlen=6, long_sequences="auto")
    assert (index.long_sequences, index.rows.tolist(), index.balance.skipped) == ("auto", [0], {DROPPED: 1})
    assert str(index.balance).endswith(
        "1 image = 1 in rows skipped as dropped; raise data.max_seqlen, or use data.long_sequences: split"
    )
    plain = indexed(str(tmp_path / "text"), [text], max_seqlen=6, long_sequences="auto")
    assert (plain.long_sequences, plain.balance.images) == ("cut", {})


@pytest.mark.parametrize("family", ["qwen", "intern"])
def test_items_have_the_marks_around_them(request: pytest.FixtureRequest, family: str) -> None:
    tokenizer: ImageTokenizer = request.getfixturevalue(family)
    rules = tokenizer.family
    grids = [rules.image_grid((40, 40)), rules.image_grid((40, 40)), rules.video_grid((40, 40), 3)]
    text = f"a<b{rules.image_marker}{rules.image_marker}c seconds>{rules.video_marker}d"
    found = tokenizer.encode_images(text, grids)
    tokens, items = found.ids, found.items
    expanded = rules.expanded(text, grids, fps=None).text
    spanned = tokenizer.encode_spans(expanded, is_document=True)
    np.testing.assert_array_equal(tokens, spanned.ids)
    spans = [expanded[spanned.starts[item.start] : spanned.stops[item.stop - 1]] for item in items]
    left = expanded
    for span in spans:
        before, _, left = left.partition(span)
        assert before in ("a<b", "", "c seconds>")
        assert span.startswith(OPENING[family]) and span.endswith(
            rules.expanded(rules.image_marker, grids[:1], fps=None).text[-6:]
        )
    assert left == "d"
