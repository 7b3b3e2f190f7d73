"""An independent proof for tiny batches: programs run token by token, every pair and every gradient counted."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain

from rayfcp.program import Attend, Backward, Forward, HeadProgram, Load, Payload, RankProgram
from rayfcp.program.instructions import Range, of_kind
from rayfcp.values import LayerKind, SequenceSpec
from tests.masks import sees

Token = tuple[int, int]
Slots = dict[int, list[Token]]
Gradients = dict[int, list[Counter[Token]]]
"""By slot and row: the queries that add to the gradient of a key."""


def is_sound(programs: Sequence[RankProgram], sequences: Sequence[SequenceSpec]) -> bool:
    """Whether `run` ends."""
    try:
        run(list(programs), sequences)
    except (AssertionError, LookupError, ValueError):
        return False
    return True


def run(programs: Sequence[RankProgram], sequences: Sequence[SequenceSpec]) -> None:
    """Run the attention of all microbatches in layers of each kind, forward and backward, as all ranks' programs say.

    Raises:
        AssertionError: a token is not loaded once; a rank sends or attends to what it does not have, or a message does
            not meet its partner in its round; or some pair or its part of a gradient is missing or double.
    """
    num_ranks = programs[0].num_ranks
    loads = [of_kind(program, Load) for program in programs[:num_ranks]]
    own = [[_loaded(each[at], rank) for rank, each in enumerate(loads)] for at in range(len(loads[0]))]
    placed = Counter(token for tokens in chain(*own) for token in tokens if token[0] >= 0)
    assert placed == Counter((each.id, at) for each in sequences for at in range(each.num_tokens))
    done = set()
    for first in range(0, len(programs), num_ranks):
        forwards = [of_kind(program, Forward) for program in programs[first : first + num_ranks]]
        order = [item.microbatch for item in of_kind(programs[first], Backward)]
        for at, kind in enumerate(each.kind for each in forwards[0][0].kinds):
            if kind not in done:
                parts = [[item.kinds[at].attention for item in items] for items in zip(*forwards, strict=True)]
                _Layers(own, parts, kind=kind).run(order)
                done.add(kind)


def _loaded(load: Load, rank: int) -> list[Token]:
    tokens = [(piece.sequence, at) for piece in load.pieces for at in range(piece.start, piece.stop)]
    return tokens or [(-1 - rank, 0)]


class _Layers:
    """Layers of one kind. `own[m][r]`: the tokens that rank r loads in microbatch m, `parts[m][r]` its attention."""

    def __init__(self, own: Sequence[Sequence[list[Token]]], parts: Sequence[Sequence], *, kind: LayerKind) -> None:
        self.parts, self.kind = parts, kind
        self.tokens = list(dict.fromkeys(token for tokens in chain(*own) for token in tokens))
        self.homes: list[list[Slots]] = []
        read: list[dict[int, set[int]]] = [defaultdict(set) for _ in parts]
        for number, of_ranks in enumerate(parts):
            groups = [_group(part, rank) for rank, part in enumerate(of_ranks)]
            assert all(groups[peer] == groups[rank] for rank in range(len(groups)) for peer in groups[rank])
            self.homes.append([{0: [token for peer in group for token in own[number][peer]]} for group in groups])
            for rank, part in enumerate(of_ranks):
                sizes = [len(own[number][peer]) for peer in groups[rank]]
                assert part.num_tokens == len(own[number][rank]) and part.inner.num_tokens == sum(sizes)
                assert not isinstance(part, HeadProgram) or list(part.tokens) == sizes
                for slot in part.inner.context:
                    assert 0 <= slot.microbatch < number and slot.slot not in self.homes[-1][rank]
                    assert groups[rank] == _group(parts[slot.microbatch][rank], rank)
                    self.homes[-1][rank][slot.slot] = _at(self.homes[slot.microbatch][rank][0], [slot.span])
                    read[slot.microbatch][rank].update(range(*slot.span))
        for of_ranks, rows in zip(parts, read, strict=True):
            for rank, part in enumerate(of_ranks):
                assert [row for span in part.inner.kept for row in range(*span)] == sorted(rows[rank])

    def run(self, order: Sequence[int]) -> None:
        """Backward passes come in this order of microbatches."""
        more: list[list[Gradients]] = [[defaultdict(list) for _ in of_ranks] for of_ranks in self.parts]
        for number, homes in enumerate(self.homes):
            _Pass(self, number, backward=False)
            for rank, slots in enumerate(homes):
                more[number][rank][0] = [Counter() for _ in slots[0]]
        for number in order:
            found = _Pass(self, number, backward=True).gradients
            for rank, part in enumerate(self.parts[number]):
                for slot in part.inner.context:
                    target = more[slot.microbatch][rank][0][slice(*slot.span)]
                    for queries, added in zip(target, found[rank].pop(slot.slot, []), strict=False):
                        queries.update(added)
                for key, queries, added in zip(
                    self.homes[number][rank][0], more[number][rank][0], found[rank].pop(0), strict=True
                ):
                    queries.update(added)
                    assert queries == Counter(query for query in self.tokens if self.sees(query, key))
                assert not any(chain(*found[rank].values()))

    def sees(self, query: Token, key: Token) -> bool:
        return query[0] == key[0] and sees(query[1], key[1], window=self.kind.window, chunk=self.kind.chunk)


class _Pass:
    """The rounds of one microbatch on all ranks, in step. `gradients[r]` of rank r's slots, empty in a forward pass."""

    def __init__(self, layers: _Layers, number: int, *, backward: bool) -> None:
        self.parts, self.backward = layers.parts[number], backward
        self.slots: list[Slots] = [dict(slots) for slots in layers.homes[number]]
        self.gradients: list[Gradients] = [{slot: _empty(held) for slot, held in each.items()} for each in self.slots]
        self.pairs: list[Counter[tuple[Token, Token]]] = [Counter() for _ in self.parts]
        rounds = [part.inner.backward if backward else part.inner.forward for part in self.parts]
        for index in range(max(map(len, rounds))):
            self._step({rank: steps[index] for rank, steps in enumerate(rounds) if index < len(steps)})
        for rank, slots in enumerate(layers.homes[number]):
            due = {(query, key) for query in slots[0] for key in layers.tokens if layers.sees(query, key)}
            assert self.pairs[rank] == Counter(due)

    def _step(self, steps: dict) -> None:
        sent, due = defaultdict(list), defaultdict(list)
        for rank, step in steps.items():
            for message in step.sends:
                sent[rank, message.peer].append(message)
            for message in step.receives:
                due[message.peer, rank].append(message)
        assert sent.keys() == due.keys() and all(
            source != target and self._share(source) == self._share(target) for source, target in sent
        )
        met = [(*pair, *both) for pair in sent for both in zip(sent[pair], due[pair], strict=True)]
        carried = [self._leaving(source, one) for source, _, one, _ in met]
        for rank, step in steps.items():
            for attend in step.attends:
                self._attend(rank, attend)
        for (_, target, one, other), (tokens, partial) in zip(met, carried, strict=True):
            assert one.payload is other.payload and one.num_tokens == other.num_tokens
            if one.payload is Payload.KV:
                assert other.slot not in self.slots[target] and other.ranges == ((0, len(tokens)),)
                self.slots[target][other.slot], self.gradients[target][other.slot] = tokens, _empty(tokens)
            else:
                assert _at(self.slots[target][other.slot], other.ranges) == tokens
                for queries, added in zip(_at(self.gradients[target][other.slot], other.ranges), partial, strict=True):
                    queries.update(added)

    def _share(self, rank: int) -> tuple[int, int]:
        group = _group(self.parts[rank], rank)
        return len(group), group.index(rank)

    def _leaving(self, source: int, message) -> tuple[list[Token], list[Counter[Token]]]:
        tokens, partial = _at(self.slots[source][message.slot], message.ranges), []
        if message.payload is Payload.GRAD:
            rows = _at(self.gradients[source][message.slot], message.ranges)
            partial = [Counter(queries) for queries in rows]
            for queries in rows:
                queries.clear()
        return tokens, partial

    def _attend(self, rank: int, attend: Attend) -> None:
        queries, keys = _at(self.slots[rank][0], [attend.query]), _at(self.slots[rank][attend.slot], [attend.key])
        for query, at in _pairs(attend, len(queries), len(keys)):
            self.pairs[rank][queries[query], keys[at]] += 1
            if self.backward:
                self.gradients[rank][attend.slot][attend.key[0] + at][queries[query]] += 1


def _pairs(attend: Attend, num_queries: int, num_keys: int) -> Iterator[tuple[int, int]]:
    assert not attend.causal or num_queries == num_keys
    for query in range(num_queries):
        for key in range(num_keys):
            if not attend.causal or (key >= query if attend.flipped else key <= query):
                yield query, key


def _group(part: object, rank: int) -> tuple[int, ...]:
    if not isinstance(part, HeadProgram):
        return (rank,)
    assert rank in part.ranks
    return part.ranks


def _empty(tokens: Sequence[Token]) -> list[Counter[Token]]:
    return [Counter() for _ in tokens]


def _at(rows: list, ranges: Sequence[Range]) -> list:
    assert all(0 <= start < stop <= len(rows) for start, stop in ranges)
    return [row for start, stop in ranges for row in rows[start:stop]]
