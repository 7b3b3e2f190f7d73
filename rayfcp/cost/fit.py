"""A timed pass.

Single parts of a pass as they were timed, and the lines through them.

Which passes are timed: shapes from which all terms of Eq. 8-10 can be told apart.

Passes from which an encoder's coefficients can be told: sequences with pictures beside one without.

Coefficients of the cost model from timed passes: non-negative least squares on relative errors.

Source: Flexible Context Parallelism, section 5, "Profiler Integration and Cost Modeling": times over lengths and
degrees, then a functional relationship (Eq. 8-10); how it is fitted is not said.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from rayfcp.cost.encoder import EncoderCost
from rayfcp.cost.model import CostModel
from rayfcp.values import (
    BatchPlan,
    EncoderShare,
    Group,
    MicrobatchPlan,
    Pictures,
    Primitive,
    SequenceSpec,
    VisionProfile,
    Windows,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of one forward, backward and reduction in which every group of `degree` ranks runs sequences of
    `num_tokens` tokens and `num_cells` mask cells together. In them are `num_pictures` of `num_patches` patches each,
    which a rank encodes."""

    degree: int
    num_tokens: int
    num_cells: float
    seconds: float
    primitive: Primitive = Primitive.RING
    num_pictures: int = 0
    num_patches: int = 0


Points = tuple[tuple[int, float], ...]
"""(tokens or bytes, seconds)."""

MOST_HALF_TOKENS = 4096.0
"""Beyond, what was timed is no kernel that fills up, but noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTimings:
    """Seconds of one layer's attention over a causal sequence and of its matrix products, forward and backward, by
    tokens; of one round of a ring over all ranks and of a gather, by bytes (none on one rank)."""

    attention_s: Points
    linear_s: Points
    message_s: Points
    gather_s: Points


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """`constant_s` + `per_unit_s` x units, both at least 0."""

    constant_s: float
    per_unit_s: float

    @property
    def units_per_s(self) -> float:
        return 1.0 / self.per_unit_s if self.per_unit_s > 0 else float("inf")


def slowest(timings: Sequence[PartTimings]) -> PartTimings:
    """Of the ranks that timed together, the longest time of each part."""

    def longest(name: str) -> Points:
        return tuple(
            max(points, key=lambda point: point[1]) for points in zip(*(getattr(t, name) for t in timings), strict=True)
        )

    return PartTimings(
        attention_s=longest("attention_s"),
        linear_s=longest("linear_s"),
        message_s=longest("message_s"),
        gather_s=longest("gather_s"),
    )


def line(points: Points) -> Line:
    """The line with the least squares of relative errors.

    Raises:
        ValueError: no points.
    """
    constant_s, per_unit_s = _weighted([(1.0, units) for units, _ in points], [seconds for _, seconds in points])
    return Line(constant_s=constant_s, per_unit_s=per_unit_s)


def half_tokens(points: Points) -> float:
    """`HardwareProfile.linear_half_tokens`: tokens whose time a product takes beside that of its own."""
    found = line(points)
    return min(found.constant_s / found.per_unit_s, MOST_HALF_TOKENS) if found.per_unit_s > 0 else 0.0


def attention_half_tokens(points: Points) -> float:
    """`CostModel.attention_half_tokens`: n tokens take as long as n (n + 1) / 2 cells and that / 2 more a token.

    A constant for each call of the kernel is fitted beside it and left to the fixed cost.
    """
    rows = [(1.0, tokens / 2, tokens * (tokens + 1) / 2) for tokens, _ in points]
    _, per_token_s, per_cell_s = _weighted(rows, [seconds for _, seconds in points])
    return min(per_token_s / per_cell_s, MOST_HALF_TOKENS) if per_cell_s > 0 else 0.0


def _weighted(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Non-negative least squares of relative errors."""
    if not rows:
        raise ValueError("no points were timed, must be at least 1; time more sizes")
    features = np.array(rows, np.float64)
    scale = features.max(axis=0)
    solution, _ = nnls(features / scale / np.array(seconds)[:, None], np.ones(len(rows)))
    fitted: list[float] = (solution / scale).tolist()
    return fitted


MANY = 16
"""Sequences that a rank holds where many short ones are timed."""
LEAST_ALONE = 3
"""Shapes without rings: attention, linear layers and the fixed cost are three."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassShape:
    """Every group of `degree` ranks runs sequences of `lengths` tokens together. Each of these has `pictures`, which
    the first rank of its group encodes."""

    degree: int
    lengths: tuple[int, ...]
    primitive: Primitive = Primitive.RING
    windows: Windows = ()
    pictures: Pictures | None = None

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def num_pictures(self) -> int:
        """Of a group."""
        return self.pictures.count * len(self.lengths) if self.pictures else 0

    @property
    def num_patches(self) -> int:
        """Of a picture."""
        return self.pictures.num_patches if self.pictures else 0

    @property
    def num_cells(self) -> float:
        """Cells of causal masks, in the mean over layers."""
        return sum(sequence.attention_cells for sequence in self.sequences)

    @property
    def sequences(self) -> tuple[SequenceSpec, ...]:
        """Those of one group."""
        pictures = (self.pictures,) if self.pictures else ()
        return tuple(
            SequenceSpec(id=index, num_tokens=length, num_targets=length - 1, windows=self.windows, pictures=pictures)
            for index, length in enumerate(self.lengths)
        )


def few_shapes(num_ranks: int, *, max_tokens: int) -> list[PassShape]:
    """Few and many tokens, long and short sequences, alone and in rings of 2 and all ranks: what is timed before
    a run starts. No rank holds more than `max_tokens`, but for `MANY` sequences of one token."""
    short, half = max(max_tokens // MANY, 1), max(max_tokens // 2, 1)
    found = [(1, [short]), (1, [short] * MANY), (1, [half] * 2), (1, [max_tokens])]
    for degree in sorted({min(2, num_ranks), num_ranks} - {1}):
        found += [(degree, [short]), (degree, [max_tokens] * degree)]
    return [PassShape(degree=degree, lengths=tuple(lengths)) for degree, lengths in found]


def many_shapes(num_ranks: int, *, max_tokens: int) -> list[PassShape]:
    """What `rayfcp profile` times: tokens per rank by powers of two, in one, 4 and `MANY` sequences, alone and in
    rings over powers of two of the ranks and over all of them (of lengths up to `max_tokens` x degree). Where
    `max_tokens` is too little for that, `few_shapes`."""
    found = []
    for degree in _degrees(num_ranks):
        for tokens_per_rank in _sizes(max_tokens):
            for count in (1, 4, MANY) if degree == 1 else (1, 4 * degree):
                length = tokens_per_rank * degree // count
                if length >= max(MANY, degree):
                    found.append(PassShape(degree=degree, lengths=(length,) * count))
    told_apart = sum(shape.degree == 1 for shape in found) >= LEAST_ALONE
    if told_apart and {shape.degree for shape in found} == set(_degrees(num_ranks)):
        return found
    return few_shapes(num_ranks, max_tokens=max_tokens)


def exchange_shapes(degrees: Sequence[int], *, max_tokens: int) -> list[PassShape]:
    """Few and many tokens on Ulysses groups of the least and the largest of `degrees`; none where there are none."""
    short = max(max_tokens // MANY, 1)
    return [
        PassShape(degree=degree, lengths=lengths, primitive=Primitive.ULYSSES)
        for degree in sorted({min(degrees, default=1), max(degrees, default=1)} - {1})
        for lengths in ((short,), (max_tokens,) * degree)
    ]


def pass_plan(
    shape: PassShape, *, num_ranks: int, recomputed_layers: int
) -> tuple[BatchPlan, tuple[SequenceSpec, ...]]:
    """One microbatch in which as many groups as fit each run the shape, and its sequences."""
    size, groups = len(shape.lengths), num_ranks // shape.degree
    sequences = tuple(replace(each, id=index) for index, each in enumerate(shape.sequences * groups))
    microbatch = MicrobatchPlan(
        groups=tuple(
            Group(
                ranks=tuple(range(group * shape.degree, (group + 1) * shape.degree)),
                sequences=tuple(range(group * size, (group + 1) * size)),
                primitive=shape.primitive,
            )
            for group in range(groups)
        ),
        group_s=(0.0,) * groups,
        predicted_s=0.0,
        encoding=tuple(
            EncoderShare(rank=index // size * shape.degree, sequence=index, first=0, last=shape.pictures.count)
            for index in (range(len(sequences)) if shape.pictures else ())
            if shape.pictures
        ),
    )
    plan = BatchPlan(
        strategy="calibration",
        num_ranks=num_ranks,
        generation=0,
        microbatches=(microbatch,),
        recomputed_layers=recomputed_layers,
        predicted_s=0.0,
        lower_bound_s=0.0,
        reason="times are not known yet",
    )
    return plan, sequences


def _degrees(num_ranks: int) -> list[int]:
    """1, powers of two, and N."""
    return sorted({1, num_ranks, *(1 << power for power in range(num_ranks.bit_length()) if 1 << power <= num_ranks)})


def _sizes(max_tokens: int) -> Iterator[int]:
    """`max_tokens` and its halves down to 64."""
    size = max_tokens
    while size >= min(64, max_tokens):
        yield size
        size //= 2
        if size == 0:
            return


MOST_PATCHES = 1024
"""Of all pictures of a pass: one large, or many small ones."""
LARGER = 4
"""How many times as high and wide the large one is."""
MORE = 2
"""How many times as many patches a pass of `rayfcp profile` has at most."""
BESIDE = 3
"""Its passes with pictures to one without."""

LEAST_ENCODER_SHARE = 0.1
"""Of the guessed seconds, where passes show none."""


def picture_shapes(vision: VisionProfile, *, max_tokens: int) -> list[PassShape]:
    """On every rank one sequence: without pictures, with the smallest, with many small ones, with one as large as all
    of these. Pictures are squares of patches, and their tokens fit into `max_tokens`.

    >>> from rayfcp.values import VisionProfile
    >>> sizes = {"num_layers": 1, "hidden_size": 8, "num_heads": 1, "ffn_size": 8, "patch_values": 8, "merger_size": 8}
    >>> shapes = picture_shapes(VisionProfile(**sizes, merged_patches=4), max_tokens=100)
    >>> [(each.lengths, each.num_pictures, each.num_patches) for each in shapes]
    [((100,), 0, 0), ((100,), 1, 4), ((100,), 25, 16), ((100,), 1, 400)]
    """
    step, small, _, large = _sides(vision, max_tokens=max_tokens)
    return _passes([(1, step), (large**2 // small**2, small), (1, large)], vision=vision)


def many_picture_shapes(vision: VisionProfile, *, max_tokens: int) -> list[PassShape]:
    """What `rayfcp profile` times: pictures of three sizes, few and many of each, and again and again none, so that no
    coefficient hangs on one pass. Pictures are squares of patches, and their tokens fit into `max_tokens`.

    >>> from rayfcp.values import VisionProfile
    >>> sizes = {"num_layers": 1, "hidden_size": 8, "num_heads": 1, "ffn_size": 8, "patch_values": 8, "merger_size": 8}
    >>> shapes = many_picture_shapes(VisionProfile(**sizes, merged_patches=4), max_tokens=2048)
    >>> [(each.num_pictures, each.num_patches) for each in shapes][:7]
    [(0, 0), (1, 4), (4, 64), (1, 256), (0, 0), (16, 64), (4, 256)]
    """
    step, *sides = _sides(vision, max_tokens=max_tokens)
    large = sides[-1] ** 2
    most = min(MORE * large, max_tokens * vision.merged_patches)
    runs = [(patches // side**2, side) for patches in (large // 4, large, most) for side in sides]
    return _passes([(1, step), *((count, side) for count, side in runs if count)], vision=vision)


def _sides(vision: VisionProfile, *, max_tokens: int) -> tuple[int, int, int, int]:
    """Of the smallest picture, a small, a middling and a large one."""
    step = math.isqrt(vision.merged_patches)
    large = max(math.isqrt(min(max_tokens * vision.merged_patches, MOST_PATCHES)) // step, 1)
    return step, max(large // LARGER, 1) * step, max(large // 2, 1) * step, large * step


def _passes(runs: Sequence[tuple[int, int]], *, vision: VisionProfile) -> list[PassShape]:
    """Of each (number, side) of pictures, and before every `BESIDE` of them one of the same tokens without."""
    most = max(count * side**2 for count, side in runs)
    alone = PassShape(degree=1, lengths=(most // vision.merged_patches,))
    found = [dataclasses.replace(alone, pictures=_run(*each, vision=vision)) for each in dict.fromkeys(runs)]
    turns = (found[at : at + BESIDE] for at in range(0, len(found), BESIDE))
    return [each for turn in turns for each in (alone, *turn)]


def _run(count: int, side: int, *, vision: VisionProfile) -> Pictures:
    tokens = side**2 // vision.merged_patches
    return Pictures(start=0, num_tokens=tokens, num_patches=side**2, count=count, stride=tokens if count > 1 else 0)


def fit_encoder(
    guess: EncoderCost, timings: Sequence[Timing], *, link: float = 1.0, latency: float = 1.0
) -> EncoderCost:
    """Replace the seconds of `guess` by those that explain the timings with pictures beside those without, of the same
    tokens. Traffic of shards is in them, and not counted apart. Where noise hides patches or cells, both are scaled
    alike. `link`, `latency`: how many times as long as guessed a message's bytes take, and one without any.

    Raises:
        ValueError: a pass with pictures has none beside it without.
    """
    alone = {(each.num_tokens, each.num_cells): each.seconds for each in timings if not each.num_pictures}
    seen = [each for each in timings if each.num_pictures]
    if any((each.num_tokens, each.num_cells) not in alone for each in seen):
        raise ValueError("timings: passes with pictures have none beside them without; time `picture_shapes`")
    left_s = np.array([max(each.seconds - alone[each.num_tokens, each.num_cells], 0.0) for each in seen])
    weights = 1.0 / np.array([each.seconds for each in seen])
    patches = np.array([each.num_pictures * each.num_patches for each in seen], np.float64)
    cells = patches * (np.array([each.num_patches for each in seen]) + guess.half_patches)
    once = np.ones_like(patches)
    fixed_s, per_patch_s, per_cell_s = _solved(np.stack([once, patches, cells], axis=1), left_s, weights)
    if per_patch_s == 0.0 or per_cell_s == 0.0:
        guessed_s = guess.s_per_patch * patches + guess.s_per_cell * cells
        fixed_s, scale = _solved(np.stack([once, guessed_s], axis=1), left_s, weights)
        scale = scale or LEAST_ENCODER_SHARE
        per_patch_s, per_cell_s = scale * guess.s_per_patch, scale * guess.s_per_cell
    return dataclasses.replace(
        guess,
        s_per_patch=per_patch_s,
        s_per_cell=per_cell_s,
        fixed_s=fixed_s,
        row_intra_s=link * guess.row_intra_s,
        row_inter_s=link * guess.row_inter_s,
        round_s=latency * guess.round_s,
        shard_s=0.0,
        reduce_s=0.0,
        exposed_s=0.0,
        reduce_exposed_s=0.0,
    )


def pictures_s(encoder: EncoderCost | None, timing: Timing) -> float:
    """What pictures add to a timed pass."""
    if encoder is None or not timing.num_pictures:
        return 0.0
    passes_s = encoder.passes_s(timing.num_patches)
    return float(timing.num_pictures * sum(passes_s)) + encoder.fixed_s


def _solved(features: np.ndarray, left_s: np.ndarray, weights: np.ndarray) -> tuple[float, ...]:
    scale = np.maximum(np.abs(features).max(axis=0), 1e-300)
    solution, _ = nnls(features / scale * weights[:, None], left_s * weights)
    return tuple(float(value) for value in solution / scale)


OVERLAPS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of communication hidden behind attention that a fit tries."""

LEAST_SHARE = 0.25
"""Of the analytic ratio of attention to linear seconds, or of its inverse."""

ABOUT = 1.25
"""How much larger an error counts as about the same."""

ROUNDS = 6
"""Of telling in which passes the ring is longer than the attention beside it."""

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A cost model and the mean of |predicted - measured| / measured over the timings that it was fitted to."""

    cost: CostModel
    mean_error: float


def fit_cost(cost: CostModel, timings: Sequence[Timing], *, overlaps: Sequence[float] = OVERLAPS) -> Fit:
    """Replace the coefficients of `cost` by those that explain `timings` best.

    With a given overlap every timing is linear in fixed cost, tokens, cells, ring volume and rounds (Eq. 8-10), as long
    as it is known in which passes the ring is longer than the attention beside it; so each overlap is fitted again and
    again with what the last fit says of that, from both extremes, and the best is taken. Timed passes contain the
    traffic of shards and what it is in the way of, which are therefore not counted again. Without timings of rings,
    ring coefficients and overlap stay, without timings of Ulysses groups theirs; `attention_half_tokens` and the shares
    of forward always do.

    Noise can make a term vanish, and a plan that ignores attention is worthless: then it is held at
    `LEAST_SHARE` of what `cost` says of it beside the other, unless the timings contradict that.

    Raises:
        ValueError: fewer than three timings of degree 1, or one that is not positive.
    """
    local = [timing for timing in timings if timing.degree == 1]
    if len(local) < 3 or any(timing.seconds <= 0 for timing in timings):
        raise ValueError(f"timings of degree 1 are {len(local)}, must be at least 3 and positive; measure more shapes")
    start = cost.apart().with_coefficients(shard_s=0.0, reduce_s=0.0, exposed_s=0.0, reduce_exposed_s=0.0)
    fixed_s, linear_s, attention_s = _least_squares(
        np.array([_local_features(each, half_tokens=cost.attention_half_tokens) for each in local]), local
    )
    start = start.with_coefficients(fixed_s=fixed_s, linear_s_per_token=linear_s, attention_s_per_cell=attention_s)
    if linear_s == 0.0 or attention_s == 0.0:
        start = _without_vanished(start, cost, local=local)
    exchanges = [timing for timing in timings if timing.degree > 1 and timing.primitive is Primitive.ULYSSES]
    rings = [timing for timing in timings if timing.degree > 1 and timing.primitive is Primitive.RING]
    fits = [each for overlap in overlaps for each in _fit_rings(start, rings, overlap=overlap)] if rings else [start]
    best = min(fits, key=lambda fitted: mean_error(fitted, [*local, *rings]))
    best = _with_exchanges(best, exchanges) if exchanges else best
    return Fit(cost=best, mean_error=mean_error(best, timings))


def _with_exchanges(cost: CostModel, exchanges: Sequence[Timing]) -> CostModel:
    """Coefficients of Ulysses from what computation does not explain of its passes. A transfer that vanished in noise
    is held at `LEAST_SHARE` of what `cost` said of it: nothing that moves bytes is free."""

    def moved_s(per_token_s: float, latency_s: float) -> npt.NDArray[np.float64]:
        unit = cost.with_coefficients(
            ulysses_intra_s_per_token=per_token_s, ulysses_inter_s_per_token=per_token_s, ulysses_s=latency_s
        )
        return np.array([predicted_s(unit, timing) for timing in exchanges])

    measured_s = np.array([timing.seconds for timing in exchanges])
    both_s = moved_s(1.0, 1.0)
    features = np.stack((moved_s(2.0, 1.0) - both_s, moved_s(1.0, 2.0) - both_s), axis=1)
    computed_s = both_s - features.sum(axis=1)
    scale = np.maximum(np.abs(features).max(axis=0), 1e-300)
    left_s = np.maximum(measured_s - computed_s, 0.0)
    solution, _ = nnls(features / scale / measured_s[:, None], left_s / measured_s)
    per_token_s, latency_s = (float(value) for value in solution / scale)
    if per_token_s == 0.0:
        per_token_s = LEAST_SHARE * cost.ulysses_intra_s_per_token
    return cost.with_coefficients(
        ulysses_intra_s_per_token=per_token_s, ulysses_inter_s_per_token=per_token_s, ulysses_s=latency_s
    )


def _without_vanished(fitted: CostModel, guess: CostModel, *, local: Sequence[Timing]) -> CostModel:
    """`fitted` with its vanished term at `LEAST_SHARE` of the guess, if that explains the timings about as well."""
    vanished = "linear_s_per_token" if fitted.linear_s_per_token == 0.0 else "attention_s_per_cell"
    held = guess.with_coefficients(**{vanished: LEAST_SHARE * getattr(guess, vanished)})
    computed_s = [held.compute_s(timing.num_cells, timing.num_tokens) for timing in local]
    fixed_s, scale = _least_squares(np.array([(1.0, each) for each in computed_s]), local)
    least = fitted.with_coefficients(
        fixed_s=fixed_s,
        linear_s_per_token=scale * held.linear_s_per_token,
        attention_s_per_cell=scale * held.attention_s_per_cell,
    )
    return least if mean_error(least, local) <= ABOUT * mean_error(fitted, local) + 0.01 else fitted


def predicted_s(cost: CostModel, timing: Timing) -> float:
    """What the model says of a timed pass."""
    cells, tokens = timing.num_cells, timing.num_tokens
    language_s = float(cost.group_s(cells, tokens, degree=timing.degree, primitive=timing.primitive))
    return language_s + pictures_s(cost.encoder, timing)


def mean_error(cost: CostModel, timings: Sequence[Timing]) -> float:
    """Mean of |predicted - measured| / measured; 0 without timings."""
    errors = [abs(predicted_s(cost, timing) - timing.seconds) / timing.seconds for timing in timings]
    return sum(errors) / len(errors) if errors else 0.0


def _fit_rings(cost: CostModel, rings: Sequence[Timing], *, overlap: float) -> Iterator[CostModel]:
    """Ring coefficients from what the computation of a ring does not explain: all fits on the way."""
    cost = cost.with_coefficients(overlap=overlap)
    parts = _RingParts(cost, rings)
    measured_s = np.array([timing.seconds for timing in rings])
    for extreme in (1, 0):
        limit = np.full(parts.moved.shape[:2], extreme)
        for _ in range(ROUNDS if overlap > 0 else 1):
            features, hidden_s = parts.linear(limit, overlap=overlap)
            ring_s = np.maximum(measured_s - parts.computed_s + hidden_s, 1e-9)
            scale = np.maximum(np.abs(features).max(axis=0), 1e-300)
            solution, _ = nnls(features / scale / measured_s[:, None], ring_s / measured_s)
            per_token_s, per_round_s = (float(value) for value in solution / scale)
            yield cost.with_coefficients(
                ring_intra_s_per_token=per_token_s, ring_inter_s_per_token=per_token_s, ring_s_per_round=per_round_s
            )
            found = parts.limits(per_token_s, per_round_s)
            if np.array_equal(limit, found):
                break
            limit = found


class _RingParts:
    """Rings' passes as the cost model has them: `computed_s[timing]`; what `moved[pass, timing, coefficient]`, in units
    of the two coefficients of a ring. What hides is the least of three: `can_hide[limit, pass, timing, coefficient]` in
    these units, and `covered_s[limit, pass, timing]` of attention."""

    def __init__(self, cost: CostModel, rings: Sequence[Timing]) -> None:
        degrees = [timing.degree for timing in rings]
        tokens = np.array([timing.num_tokens for timing in rings], np.float64)
        cells = np.array([timing.num_cells for timing in rings], np.float64)
        passes = cost.terms(degrees)
        attention_s = np.stack(
            [each.attention_s_per_cell * cells + each.attention_s_per_token * tokens for each in passes]
        )
        self.computed_s = attention_s.sum(axis=0) + sum(
            (each.linear_s_per_token * tokens + each.fixed_s for each in passes), np.zeros(len(rings))
        )
        none = np.zeros_like(attention_s)
        covered_s = np.stack([each.cover for each in passes]) * attention_s
        self.covered_s = np.stack([none, covered_s, np.stack([each.steady for each in passes]) * attention_s])
        moved, tail, edges = [], [], []
        for per_token_s, per_round_s in ((1.0, 0.0), (0.0, 1.0)):
            unit = cost.with_coefficients(
                ring_intra_s_per_token=per_token_s, ring_inter_s_per_token=per_token_s, ring_s_per_round=per_round_s
            ).terms(degrees)
            moved.append([each.moved_s_per_token * tokens + each.moved_s for each in unit])
            tail.append([each.tail_s_per_token * tokens + each.tail_s for each in unit])
            edges.append([each.edges_s_per_token * tokens + each.edges_s for each in unit])
        self.moved, last, edge = (np.moveaxis(np.array(each), 0, -1) for each in (moved, tail, edges))
        self.can_hide = np.stack([self.moved - last, np.zeros_like(edge), edge])

    def limits(self, per_token_s: float, per_round_s: float) -> npt.NDArray[np.int64]:
        """`[pass, timing]`: which of the three is the least."""
        can_hide_s = self.can_hide[..., 0] * per_token_s + self.can_hide[..., 1] * per_round_s
        return np.asarray(np.argmin(can_hide_s + self.covered_s, axis=0))

    def linear(self, limit: npt.NDArray[np.int64], *, overlap: float) -> tuple[Matrix, Matrix]:
        """Features of each timing, and seconds of attention behind which the ring hides, where these count."""
        passes, timings = np.indices(limit.shape)
        shown = self.moved - overlap * self.can_hide[limit, passes, timings]
        return shown.sum(axis=0), overlap * self.covered_s[limit, passes, timings].sum(axis=0)


def _local_features(timing: Timing, *, half_tokens: float) -> tuple[float, float, float]:
    return (1.0, timing.num_tokens, timing.num_cells + half_tokens * timing.num_tokens / 2)


def _least_squares(features: npt.NDArray[np.float64], timings: Sequence[Timing]) -> tuple[float, ...]:
    weights = 1.0 / np.array([timing.seconds for timing in timings])
    scale = np.abs(features).max(axis=0)
    solution, _ = nnls(features / scale * weights[:, None], np.ones(len(timings)))
    return tuple(float(value) for value in solution / scale)
