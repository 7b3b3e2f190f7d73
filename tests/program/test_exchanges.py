"""The exchanges of Ulysses groups, run on numbers, against attention in one process."""

from collections import defaultdict

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.program import AttentionRound, HeadProgram, Payload, exchange_rounds, lower
from tests.examples import examples
from tests.program.helpers import heads_of, one_group


def head_rounds(program: HeadProgram, *, rank: int, backward: bool) -> tuple[AttentionRound, ...]:
    """The rounds of a rank: one exchange, the attention's rounds, the other exchange."""
    before, after = (Payload.OUT_GRAD, Payload.QKV_GRAD) if backward else (Payload.QKV, Payload.OUT)
    return (
        *exchange_rounds(program, rank=rank, payload=before),
        *(program.attention.backward if backward else program.attention.forward),
        *exchange_rounds(program, rank=rank, payload=after),
    )


def attention(query: np.ndarray, key: np.ndarray, value: np.ndarray, *, seen: np.ndarray) -> np.ndarray:
    """One head in one process: `[tokens, dim]` each, `seen[i, j]`: query i sees key j."""
    scores = np.where(seen, query @ key.T, -np.inf)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True) @ value


def exchanged(programs: dict[int, HeadProgram], qkv: np.ndarray) -> np.ndarray:
    """Runs the forward rounds of all ranks on `qkv` `[3, heads, tokens, dim]`, each rank from its own tokens."""
    steps = {rank: head_rounds(each, rank=rank, backward=False) for rank, each in programs.items()}
    order = next(iter(programs.values())).ranks
    per_rank = qkv.shape[1] // len(order)
    own = {rank: np.full_like(qkv, np.nan) for rank in order}
    out = {rank: np.full_like(qkv[0], np.nan) for rank in order}
    offsets = np.cumsum((0, *programs[order[0]].tokens))
    mine = {rank: slice(at * per_rank, (at + 1) * per_rank) for at, rank in enumerate(order)}
    for at, rank in enumerate(order):
        own[rank][:, :, offsets[at] : offsets[at + 1]] = qkv[:, :, offsets[at] : offsets[at + 1]]
    for index in range(len(steps[order[0]])):
        for rank in order:
            for sent in steps[rank][index].sends:
                received = steps[sent.peer][index].receives[0]
                assert (received.peer, received.payload, received.ranges) == (rank, sent.payload, sent.ranges)
                rows = slice(*sent.ranges[0])
                if sent.payload is Payload.QKV:
                    own[sent.peer][:, mine[sent.peer], rows] = own[rank][:, mine[sent.peer], rows]
                else:
                    out[sent.peer][mine[rank], rows] = out[rank][mine[rank], rows]
            for attend in steps[rank][index].attends:
                rows, keys = slice(*attend.query), slice(*attend.key)
                seen = np.ones((rows.stop - rows.start, keys.stop - keys.start), bool)
                for head in range(mine[rank].start, mine[rank].stop):
                    query, key, value = own[rank][0, head, rows], own[rank][1, head, keys], own[rank][2, head, keys]
                    mask = np.tril(seen) if attend.causal else seen
                    out[rank][head, rows] = attention(query, key, value, seen=mask)
    return np.concatenate([out[rank][:, offsets[at] : offsets[at + 1]] for at, rank in enumerate(order)], axis=1)


@examples(30)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.permutations(range(4)), st.integers(2, 4))
def test_exchanges_give_the_attention_of_one_process(lengths: list[int], ranks: list[int], degree: int) -> None:
    lengths[0] += degree  # no padding, so that tokens are those of the sequences
    plan, sequences = one_group(lengths, tuple(ranks[:degree]))
    heads = {rank: head for rank, _, head in heads_of(lower(plan, sequences))}
    rng = np.random.default_rng(sum(lengths))
    qkv = rng.normal(size=(3, 2 * degree, sum(lengths), 5))
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    position = np.concatenate([np.arange(length) for length in lengths])
    seen = (sequence[:, None] == sequence) & (position[:, None] >= position)
    due = [attention(*qkv[:, head], seen=seen) for head in range(qkv.shape[1])]
    np.testing.assert_allclose(exchanged(heads, qkv), np.stack(due), rtol=1e-9)


@examples(30)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=4), st.integers(2, 6), st.booleans())
def test_exchanges_are_matchings_that_bring_each_pair_together_once(
    lengths: list[int], degree: int, backward: bool
) -> None:
    plan, sequences = one_group(lengths, tuple(range(degree)))
    met: dict[Payload, list[tuple[int, int]]] = defaultdict(list)
    programs = heads_of(lower(plan, sequences))
    steps = [head_rounds(head, rank=rank, backward=backward) for rank, _, head in programs]
    for together in zip(*steps, strict=True):
        sent = [(rank, each) for rank, step in enumerate(together) for each in step.sends]
        assert len({each.peer for _, each in sent}) == len(sent) <= degree
        for rank, each in sent:
            met[each.payload].append((rank, each.peer))
    pairs = [(source, target) for source in range(degree) for target in range(degree) if source != target]
    payloads = [Payload.OUT_GRAD, Payload.QKV_GRAD] if backward else [Payload.QKV, Payload.OUT]
    assert list(met) == payloads and all(sorted(found) == pairs for found in met.values())
