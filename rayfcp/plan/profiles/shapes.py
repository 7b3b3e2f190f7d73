"""Which passes are timed: shapes from which all terms of Eq. 8-10 can be told apart."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rayfcp.values import BatchPlan, EncoderShare, Group, MicrobatchPlan, Pictures, Primitive, SequenceSpec, Windows

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
