"""Coefficients of the cost model and a hardware profile from timed passes: which passes are timed, and the fit.

Non-negative least squares on relative errors. Source: Flexible Context Parallelism, section 5, "Profiler Integration
and Cost Modeling": times over lengths and degrees, then a functional relationship (Eq. 8-10); the paper does not state
how that is fitted.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from rayfcp.cost.analytic import attention_passes, half_flops, host_layers, recomputed_flops, ring_bytes
from rayfcp.cost.encoder import EncoderCost
from rayfcp.cost.model import CostModel
from rayfcp.cost.shown import ABOUT, is_bound, kept_where_hidden, with_host, with_rounds
from rayfcp.values import (
    BatchPlan,
    EncoderShare,
    Group,
    HardwareProfile,
    Images,
    LayerKinds,
    MicrobatchPlan,
    ModelProfile,
    Primitive,
    SequenceSpec,
    VisionProfile,
)
from rayfcp.values.arrays import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of one forward, backward and reduction in which every group of `degree` ranks runs sequences of
    `num_tokens` tokens and `num_pairs` (query, key) pairs together, with `num_images` images of `num_patches` patches
    each, which one rank encodes."""

    degree: int
    num_tokens: int
    num_pairs: float
    seconds: float
    primitive: Primitive = Primitive.RING
    num_images: int = 0
    num_patches: int = 0


Points = tuple[tuple[int, float], ...]
"""(tokens or bytes, seconds)."""

MAX_HALF_TOKENS = 4096.0
"""A larger fitted value is noise, not a kernel that fills up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTimings:
    """Seconds of one layer's attention over a causal sequence and of its matrix products, forward and backward, by
    tokens; of one round of a ring over all ranks and of a gather, by bytes (empty on one rank)."""

    attention_s: Points
    linear_s: Points
    message_s: Points
    gather_s: Points


def slowest(timings: Sequence[PartTimings]) -> PartTimings:
    """The longest time of each part over ranks that were timed together."""
    parts = zip(*((each.attention_s, each.linear_s, each.message_s, each.gather_s) for each in timings), strict=True)
    attention_s, linear_s, message_s, gather_s = (
        tuple(max(points, key=lambda point: point[1]) for points in zip(*by_rank, strict=True)) for by_rank in parts
    )
    return PartTimings(attention_s=attention_s, linear_s=linear_s, message_s=message_s, gather_s=gather_s)


def line(points: Points) -> tuple[float, float]:
    """Constant seconds and units per second of the line with the least squares of relative errors.

    Raises:
        ValueError: no points.
    """
    if not points:
        raise ValueError("points is (), must hold at least 1 timing; time more sizes")
    constant_s, per_unit_s = _solve([(1.0, units) for units, _ in points], [seconds for _, seconds in points])
    return constant_s, 1.0 / per_unit_s if per_unit_s > 0 else math.inf


def half_tokens(points: Points) -> float:
    """`HardwareProfile.linear_half_tokens`: the tokens that take a product as long as its constant."""
    constant_s, tokens_per_s = line(points)
    return min(constant_s * tokens_per_s, MAX_HALF_TOKENS) if tokens_per_s < math.inf else 0.0


def attention_half_tokens(points: Points) -> float:
    """`CostModel.attention_half_tokens`: n tokens take as long as n (n + 1) / 2 pairs, and that / 2 pairs per token.

    A constant per kernel call is fitted beside it and left to the fixed cost.
    """
    rows = [(1.0, tokens / 2, tokens * (tokens + 1) / 2) for tokens, _ in points]
    _, per_token_s, per_pair_s = _solve(rows, [seconds for _, seconds in points])
    return min(per_token_s / per_pair_s, MAX_HALF_TOKENS) if per_pair_s > 0 else 0.0


def _solve(features: npt.ArrayLike, seconds: npt.ArrayLike, measured_s: npt.ArrayLike | None = None) -> list[float]:
    """Non-negative coefficients of `features` (rows of passes) that explain `seconds`, of passes that took `measured_s`
    in all (absent: `seconds`), with the least squares of errors relative to these."""
    rows, wanted = np.asarray(features, np.float64), np.asarray(seconds, np.float64)
    whole = wanted if measured_s is None else np.asarray(measured_s, np.float64)
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-300)
    solution, _ = nnls(rows / scale / whole[:, None], wanted / whole)
    coefficients: list[float] = (solution / scale).tolist()
    return coefficients


MANY = 16
"""Sequences per rank in the passes of many short ones."""
MIN_LOCAL_SHAPES = 3
"""Shapes without rings: attention, linear layers and the fixed cost are three unknowns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassShape:
    """Every group of `degree` ranks runs sequences of `lengths` tokens together, each with `images`, which the first
    rank of its group encodes. The head runs on `head_fraction` of the tokens."""

    degree: int
    lengths: tuple[int, ...]
    primitive: Primitive = Primitive.RING
    layer_kinds: LayerKinds = ()
    images: Images | None = None
    head_fraction: float = 1.0

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def num_images(self) -> int:
        """Images of a group."""
        return self.images.count * len(self.lengths) if self.images else 0

    @property
    def num_patches(self) -> int:
        """Patches of an image."""
        return self.images.num_patches if self.images else 0

    @property
    def num_pairs(self) -> float:
        """Visible pairs of a group, in the mean over layers."""
        return sum(sequence.attention_pairs for sequence in self.sequences)

    @property
    def sequences(self) -> tuple[SequenceSpec, ...]:
        """Sequences of one group."""
        images = (self.images,) if self.images else ()
        return tuple(
            SequenceSpec(
                id=index, num_tokens=length, num_targets=length - 1, layer_kinds=self.layer_kinds, images=images
            )
            for index, length in enumerate(self.lengths)
        )


def few_shapes(num_ranks: int, *, max_tokens: int) -> list[PassShape]:
    """Shapes timed before a run starts: few and many tokens, long and short sequences, alone and in rings of 2 and of
    all ranks. No rank holds more than `max_tokens`, except `MANY` sequences of one token. On one rank, three passes
    have few tokens, for the host, and four have many, for the three unknowns of the device."""
    short, half = max(max_tokens // MANY, 1), max(max_tokens // 2, 1)
    fewest, few, most = max(max_tokens // MANY**2, 1), max(max_tokens // MANY // 4, 1), max(3 * max_tokens // 4, 1)
    alone = [[fewest], [few], [short], [short] * MANY, [half] * 2, [most], [max_tokens]]
    shapes = [(1, tuple(lengths)) for lengths in alone]
    for degree in sorted({min(2, num_ranks), num_ranks} - {1}):
        shapes += [(degree, (short,)), (degree, (max_tokens,) * degree)]
    return [PassShape(degree=degree, lengths=lengths) for degree, lengths in dict.fromkeys(shapes)]


def many_shapes(num_ranks: int, *, max_tokens: int) -> list[PassShape]:
    """Shapes that `rayfcp profile` times: tokens per rank by powers of two, in one, 4 and `MANY` sequences, alone and
    in rings over powers of two of the ranks and over all of them (of lengths up to `max_tokens` x degree). Where
    `max_tokens` is too little for that, `few_shapes`."""
    degrees = sorted({num_ranks, *(1 << power for power in range(num_ranks.bit_length()))})
    sizes = [max_tokens >> power for power in range(max_tokens.bit_length())]
    shapes = []
    for degree in degrees:
        for tokens_per_rank in (size for size in sizes if size >= min(64, max_tokens)):
            for count in (1, 4, MANY) if degree == 1 else (1, 4 * degree):
                length = tokens_per_rank * degree // count
                if length >= max(MANY, degree):
                    shapes.append(PassShape(degree=degree, lengths=(length,) * count))
    num_local = sum(shape.degree == 1 for shape in shapes)
    if num_local >= MIN_LOCAL_SHAPES and {shape.degree for shape in shapes} == set(degrees):
        return shapes
    return few_shapes(num_ranks, max_tokens=max_tokens)


def exchange_shapes(degrees: Sequence[int], *, max_tokens: int) -> list[PassShape]:
    """Few and many tokens on Ulysses groups of the least and the largest of `degrees`; empty without degrees."""
    short = max(max_tokens // MANY, 1)
    return [
        PassShape(degree=degree, lengths=lengths, primitive=Primitive.ULYSSES)
        for degree in sorted({min(degrees, default=1), max(degrees, default=1)} - {1})
        for lengths in ((short,), (max_tokens,) * degree)
    ]


def pass_plan(
    shape: PassShape, *, num_ranks: int, recomputed_layers: int, keeps_attention: bool = False
) -> tuple[BatchPlan, tuple[SequenceSpec, ...]]:
    """Plan of one microbatch in which as many groups as fit each run the shape, and its sequences."""
    size, num_groups = len(shape.lengths), num_ranks // shape.degree
    sequences = tuple(replace(each, id=index) for index, each in enumerate(shape.sequences * num_groups))
    groups = tuple(
        Group(
            ranks=tuple(range(first, first + shape.degree)),
            sequences=tuple(range(group * size, (group + 1) * size)),
            primitive=shape.primitive,
        )
        for group, first in enumerate(range(0, num_groups * shape.degree, shape.degree))
    )
    encoding = tuple(
        EncoderShare(rank=group.ranks[0], sequence=sequence, first=0, last=shape.images.count)
        for group in groups
        for sequence in group.sequences
        if shape.images
    )
    plan = BatchPlan(
        strategy="calibration",
        num_ranks=num_ranks,
        generation=0,
        microbatches=(MicrobatchPlan(groups=groups, group_s=(0.0,) * num_groups, predicted_s=0.0, encoding=encoding),),
        recomputed_layers=recomputed_layers,
        keeps_attention=keeps_attention,
        predicted_s=0.0,
        lower_bound_s=0.0,
        reason="times are not known yet",
    )
    return plan, sequences


MAX_PATCHES = 1024
"""Patches of all images of a pass: one large image, or many small ones."""
LARGE = 4
"""How many times as high and wide the large image is."""
MORE = 2
"""How many times as many patches a pass of `rayfcp profile` has at most."""
PER_REFERENCE = 3
"""Passes with images per pass of the same tokens without."""

MIN_ENCODER_SHARE = 0.1
"""Share of the guessed seconds of an encoder that stays where passes show none."""


def image_shapes(vision: VisionProfile, *, max_tokens: int) -> list[PassShape]:
    """One sequence per rank: without images, with the smallest image, with many small ones, with one as large as all
    of these. Images are squares of patches whose tokens fit into `max_tokens`.

    >>> from rayfcp.values import VisionProfile
    >>> sizes = {"num_layers": 1, "hidden_size": 8, "num_heads": 1, "ffn_size": 8, "patch_values": 8, "merger_size": 8}
    >>> shapes = image_shapes(VisionProfile(**sizes, merged_patches=4), max_tokens=100)
    >>> [(each.lengths, each.num_images, each.num_patches) for each in shapes]
    [((100,), 0, 0), ((100,), 1, 4), ((100,), 25, 16), ((100,), 1, 400)]
    """
    step, small, _, large = _sides(vision, max_tokens=max_tokens)
    return _with_references([(1, step), (large**2 // small**2, small), (1, large)], vision=vision)


def many_image_shapes(vision: VisionProfile, *, max_tokens: int) -> list[PassShape]:
    """Shapes that `rayfcp profile` times: images of three sizes, few and many of each, and none again and again, so
    that no coefficient hangs on one pass. Images are squares of patches whose tokens fit into `max_tokens`.

    >>> from rayfcp.values import VisionProfile
    >>> sizes = {"num_layers": 1, "hidden_size": 8, "num_heads": 1, "ffn_size": 8, "patch_values": 8, "merger_size": 8}
    >>> shapes = many_image_shapes(VisionProfile(**sizes, merged_patches=4), max_tokens=2048)
    >>> [(each.num_images, each.num_patches) for each in shapes][:7]
    [(0, 0), (1, 4), (4, 64), (1, 256), (0, 0), (16, 64), (4, 256)]
    """
    step, *sides = _sides(vision, max_tokens=max_tokens)
    large = sides[-1] ** 2
    most = min(MORE * large, max_tokens * vision.merged_patches)
    runs = [(patches // side**2, side) for patches in (large // 4, large, most) for side in sides]
    return _with_references([(1, step), *((count, side) for count, side in runs if count)], vision=vision)


def _sides(vision: VisionProfile, *, max_tokens: int) -> tuple[int, int, int, int]:
    """Patches along a side of the smallest image, a small, a middling and a large one."""
    step = math.isqrt(vision.merged_patches)
    large = max(math.isqrt(min(max_tokens * vision.merged_patches, MAX_PATCHES)) // step, 1)
    return step, max(large // LARGE, 1) * step, max(large // 2, 1) * step, large * step


def _with_references(runs: Sequence[tuple[int, int]], *, vision: VisionProfile) -> list[PassShape]:
    """A pass for each (number, side) of images, and before every `PER_REFERENCE` of them one without images."""
    most = max(count * side**2 for count, side in runs)
    reference = PassShape(degree=1, lengths=(most // vision.merged_patches,))
    shapes = []
    for number, (count, side) in enumerate(dict.fromkeys(runs)):
        tokens = side**2 // vision.merged_patches
        stride = tokens if count > 1 else 0
        images = Images(start=0, num_tokens=tokens, num_patches=side**2, count=count, stride=stride)
        shapes += [reference] if number % PER_REFERENCE == 0 else []
        shapes.append(replace(reference, images=images))
    return shapes


def fit_encoder(
    guess: EncoderCost, timings: Sequence[Timing], *, link: float = 1.0, latency: float = 1.0
) -> EncoderCost:
    """Replace the seconds of `guess` by those that explain passes with images beside passes of the same tokens without.

    Passes contain the traffic of shards, which is therefore not counted again. Where noise hides patches or pairs, both
    are scaled alike. `link`, `latency`: measured over guessed seconds of a message's bytes and of an empty message.

    Raises:
        ValueError: a pass with images has no counterpart without.
    """
    without = {(each.num_tokens, each.num_pairs): each.seconds for each in timings if not each.num_images}
    seen = [each for each in timings if each.num_images]
    if any((each.num_tokens, each.num_pairs) not in without for each in seen):
        raise ValueError("timings: passes with images have none beside them without; time `image_shapes`")
    measured_s = np.array([each.seconds for each in seen])
    left_s = np.array([max(each.seconds - without[each.num_tokens, each.num_pairs], 0.0) for each in seen])
    patches = np.array([each.num_images * each.num_patches for each in seen], np.float64)
    pairs = patches * (np.array([each.num_patches for each in seen]) + guess.half_patches)
    once = np.ones_like(patches)
    fixed_s, per_patch_s, per_pair_s = _solve(np.stack([once, patches, pairs], axis=1), left_s, measured_s)
    if per_patch_s == 0.0 or per_pair_s == 0.0:
        guessed_s = guess.s_per_patch * patches + guess.s_per_pair * pairs
        fixed_s, scale = _solve(np.stack([once, guessed_s], axis=1), left_s, measured_s)
        scale = scale or MIN_ENCODER_SHARE
        per_patch_s, per_pair_s = scale * guess.s_per_patch, scale * guess.s_per_pair
    return replace(
        guess,
        s_per_patch=per_patch_s,
        s_per_pair=per_pair_s,
        fixed_s=fixed_s,
        row_intra_s=link * guess.row_intra_s,
        row_inter_s=link * guess.row_inter_s,
        round_s=latency * guess.round_s,
        shard_s=0.0,
        reduce_s=0.0,
        exposed_s=0.0,
        reduce_exposed_s=0.0,
    )


OVERLAPS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of communication hidden behind attention that a fit tries."""

MIN_SHARE = 0.25
"""Share of its analytic value that a term which vanished in noise keeps."""

ROUNDS = 6
"""Iterations of telling in which passes the ring is longer than the attention beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A cost model and the mean of |predicted - measured| / measured over the timings that it was fitted to. `notes`:
    which passes the host bounds, and which coefficients no pass shows."""

    cost: CostModel
    mean_error: float
    notes: tuple[str, ...] = ()


def fit_cost(cost: CostModel, timings: Sequence[Timing], *, overlaps: Sequence[float] = OVERLAPS) -> Fit:
    """Replace the coefficients of `cost` by those that explain `timings` best.

    With a given overlap every timing is linear in fixed cost, tokens, pairs, ring volume and rounds (Eq. 8-10), once it
    is known in which passes the ring is longer than the attention beside it; so each overlap is fitted repeatedly with
    what the last fit says of that, from both extremes, and the best is taken. Timed passes contain the traffic of
    shards, which is therefore not counted again. Without timings of rings, ring coefficients and overlap stay, without
    timings of Ulysses groups theirs; `attention_half_tokens` and the shares of forward always stay.

    Noise can make a term vanish, and a plan that ignores attention is worthless: then the term is held at `MIN_SHARE`
    of what `cost` says of it beside the other, unless the timings contradict that.

    Raises:
        ValueError: fewer than three timings of degree 1, two without attention, or one that is not positive.
    """
    local = [timing for timing in timings if timing.degree == 1]
    # Without attention no pair has a cost: one term less.
    least = MIN_LOCAL_SHAPES if any(timing.num_pairs for timing in local) else MIN_LOCAL_SHAPES - 1
    if len(local) < least or any(timing.seconds <= 0 for timing in timings):
        raise ValueError(
            f"timings of degree 1 are {len(local)}, must be at least {least} and positive; measure more shapes"
        )
    base = cost.with_coefficients(shard_s=0.0, reduce_s=0.0, exposed_s=0.0, reduce_exposed_s=0.0)
    start, untold = with_host(base, local, fit_device=lambda passes: _fit_local(base, cost, local=passes))
    start = with_rounds(start, [each for each in timings if each.degree > 1 and each.primitive is Primitive.RING])
    bound = [timing for timing in timings if is_bound(start, timing)]
    linked = [timing for timing in timings if timing.degree > 1 and timing not in bound]
    exchanges = [timing for timing in linked if timing.primitive is Primitive.ULYSSES]
    rings = [timing for timing in linked if timing.primitive is Primitive.RING]
    fits = [start]
    if rings:
        fits = [each for overlap in overlaps for each in _fit_links(start.with_coefficients(overlap=overlap), rings)]
    best = min(fits, key=lambda fitted: mean_error(fitted, [*local, *rings]))
    if exchanges:
        *_, best = _fit_links(best, exchanges)
        if best.ulysses_intra_s_per_token == 0.0:  # nothing that moves bytes is free
            least_s = MIN_SHARE * cost.ulysses_intra_s_per_token
            best = best.with_coefficients(ulysses_intra_s_per_token=least_s, ulysses_inter_s_per_token=least_s)
    best, kept = kept_where_hidden(best, cost, timings=timings)
    notes = _notes(best, num_bound=len(bound), num_timings=len(timings), kept=kept)
    return Fit(cost=best, mean_error=mean_error(best, timings), notes=notes + untold)


def _notes(cost: CostModel, *, num_bound: int, num_timings: int, kept: Sequence[str]) -> tuple[str, ...]:
    notes = []
    if num_bound:
        pass_ms, round_ms = 1e3 * cost.host_s, 1e3 * cost.host_s_per_round
        notes.append(
            f"{num_bound} of {num_timings} passes are bound by the host, which enqueues a pass in {pass_ms:.4g} ms and "
            f"a further round of a ring in {round_ms:.4g} ms; what the device takes is fitted to the others"
        )
    if kept:
        notes.append(
            f"{', '.join(kept)}: analytic, since no pass shows more of it than noise; time more tokens to measure it"
        )
    return tuple(notes)


def _fit_local(start: CostModel, guess: CostModel, *, local: Sequence[Timing]) -> CostModel:
    """`start` with fixed cost, linear layers and attention from passes of single ranks; a vanished term at `MIN_SHARE`
    of the guess, if that explains the timings about as well."""
    measured_s = [timing.seconds for timing in local]
    half = guess.attention_half_tokens / 2
    features = [(1.0, each.num_tokens, each.num_pairs + half * each.num_tokens) for each in local]
    fixed_s, linear_s, attention_s = _solve(features, measured_s)
    fitted = start.with_coefficients(fixed_s=fixed_s, linear_s_per_token=linear_s, attention_s_per_pair=attention_s)
    if linear_s > 0.0 and attention_s > 0.0:
        return fitted
    vanished = "linear_s_per_token" if linear_s == 0.0 else "attention_s_per_pair"
    held = guess.with_coefficients(**{vanished: MIN_SHARE * getattr(guess, vanished)})
    computed = [(1.0, held.compute_s(timing.num_pairs, timing.num_tokens)) for timing in local]
    fixed_s, scale = _solve(computed, measured_s)
    least = fitted.with_coefficients(
        fixed_s=fixed_s,
        linear_s_per_token=scale * held.linear_s_per_token,
        attention_s_per_pair=scale * held.attention_s_per_pair,
    )
    return least if mean_error(least, local) <= ABOUT * mean_error(fitted, local) + 0.01 else fitted


def _fit_links(cost: CostModel, timings: Sequence[Timing]) -> Iterator[CostModel]:
    """Seconds per token and latency of a primitive from what computation does not explain: all fits on the way.

    A pass is the largest of three planes (`Terms.lines`), each affine in both coefficients.
    """
    primitive = timings[0].primitive
    measured_s = np.array([timing.seconds for timing in timings])

    def planes(per_token_s: float, latency_s: float) -> Floats:
        """Seconds by [plane, pass, timing]."""
        passes = _with_links(cost, primitive, per_token_s, latency_s).terms(degrees, primitive=primitive)
        return np.array([[pair * pairs + token * tokens + s for pair, token, s in each.lines()] for each in passes])

    degrees = [timing.degree for timing in timings]
    tokens = np.array([timing.num_tokens for timing in timings], np.float64)
    pairs = np.array([timing.num_pairs for timing in timings], np.float64)
    both = planes(1.0, 1.0)
    slopes = np.stack([planes(2.0, 1.0) - both, planes(1.0, 2.0) - both], axis=-1)
    computed_s = both - slopes.sum(axis=-1)
    passes, columns = np.indices((2, len(timings)))
    for extreme in (1, 0):
        plane = np.full((2, len(timings)), extreme)
        for _ in range(ROUNDS):
            features = slopes[passes, plane, columns].sum(axis=0)
            left_s = np.maximum(measured_s - computed_s[passes, plane, columns].sum(axis=0), 0.0)
            coefficients = _solve(features, left_s, measured_s)
            yield _with_links(cost, primitive, *coefficients)
            found = np.argmax(computed_s + slopes @ coefficients, axis=1)
            if cost.overlap == 0.0 or np.array_equal(plane, found):
                break
            plane = found


def _with_links(cost: CostModel, primitive: Primitive, per_token_s: float, latency_s: float) -> CostModel:
    if primitive is Primitive.RING:
        names = ("ring_intra_s_per_token", "ring_inter_s_per_token", "ring_s_per_round")
    else:
        names = ("ulysses_intra_s_per_token", "ulysses_inter_s_per_token", "ulysses_s")
    return cost.with_coefficients(**dict(zip(names, (per_token_s, per_token_s, latency_s), strict=True)))


def predicted_s(cost: CostModel, timing: Timing) -> float:
    """Seconds of a timed pass by the cost model."""
    pairs, tokens = timing.num_pairs, timing.num_tokens
    seconds = float(cost.group_s(pairs, tokens, degree=timing.degree, primitive=timing.primitive))
    if cost.encoder is None or not timing.num_images:
        return seconds
    return seconds + float(timing.num_images * sum(cost.encoder.passes_s(timing.num_patches))) + cost.encoder.fixed_s


def mean_error(cost: CostModel, timings: Sequence[Timing]) -> float:
    """Mean of |predicted - measured| / measured; 0 without timings."""
    errors = [abs(predicted_s(cost, timing) - timing.seconds) / timing.seconds for timing in timings]
    return sum(errors) / len(errors) if errors else 0.0


def measured_hardware(
    base: HardwareProfile,
    cost: CostModel,
    *,
    model: ModelProfile,
    name: str,
    peak_flops: float,
    memory_bytes: int,
    bytes_per_element: int,
    linear_half_tokens: float = 0.0,
    num_nodes: int = 1,
) -> HardwareProfile:
    """`base` with the efficiencies, links and overheads that `cost` implies for a device that runs `model`.

    Efficiencies are the shares of `peak_flops` that whole passes reached; where they reached more, that is the peak.
    Bandwidth and latency are a ring's; gathers are part of `microbatch_overhead_s`. Values of `base` stay where nothing
    was measured: links inside nodes of one rank, links between nodes of a single node, both without rings; bandwidth
    where a ring's bytes vanished in noise, and attention's efficiency where its time did. `linear_half_tokens` takes
    its part of the fixed cost, at most all of it.

    Raises:
        ValueError: linear layers take no time, which no efficiency explains.
    """
    if cost.linear_s_per_token <= 0:
        raise ValueError(f"linear_s_per_token is {cost.linear_s_per_token}, must be above 0; time more shapes")
    attention_flops, linear_flops = recomputed_flops(model, again=cost.recomputed_layers)
    attention_rate = attention_flops / cost.attention_s_per_pair if cost.attention_s_per_pair > 0 else 0.0
    linear_rate = linear_flops / cost.linear_s_per_token
    peak_flops = max(peak_flops, attention_rate, linear_rate)
    half_s = half_flops(model, again=cost.recomputed_layers) / linear_rate  # of each of the half tokens
    half_tokens = min(linear_half_tokens, cost.fixed_s / half_s)
    enqueued, with_rounds = host_layers(model, again=cost.recomputed_layers)
    return replace(
        base,
        name=name,
        peak_flops=peak_flops,
        memory_bytes=memory_bytes,
        linear_efficiency=linear_rate / peak_flops,
        attention_efficiency=attention_rate / peak_flops or base.attention_efficiency,
        microbatch_overhead_s=max(0.0, cost.fixed_s - half_tokens * half_s),
        dtype_bytes=bytes_per_element,
        overlap=cost.overlap,
        attention_half_tokens=cost.attention_half_tokens,
        linear_half_tokens=half_tokens,
        host_layer_s=cost.host_s / enqueued,
        host_round_s=cost.host_s_per_round / (with_rounds or 1),
        source="",
        **_measured_links(cost, model, bytes_per_element=bytes_per_element, num_nodes=num_nodes),  # type: ignore[arg-type]
    )


def _measured_links(
    cost: CostModel, model: ModelProfile, *, bytes_per_element: int, num_nodes: int
) -> dict[str, float]:
    """Bandwidths and latency of the links that a ring was timed on."""
    measured = {"intra_node_bandwidth": cost.ranks_per_node > 1, "inter_node_bandwidth": num_nodes > 1}
    links, again = [name for name, is_measured in measured.items() if is_measured], cost.recomputed_layers
    if not links or cost.ring_intra_s_per_token == cost.ring_s_per_round == 0:
        return {}
    latency = {"latency_s": cost.ring_s_per_round / (attention_passes(model, again=again) or 1)}
    if cost.ring_intra_s_per_token == 0:
        return latency
    _, hop_bytes, _ = ring_bytes(model, again=again, bytes_per_element=bytes_per_element)
    return latency | dict.fromkeys(links, hop_bytes / cost.ring_intra_s_per_token)
