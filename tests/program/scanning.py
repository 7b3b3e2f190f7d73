"""Recurrences run message by message on symbols, to compare what programs of ranks bring with plain sequences.

A state is the tokens that it has seen, so that `T S + U` puts the tokens of a part behind those of S; the gradient of a
state is the tokens that read it. Halos are tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rayfcp.program import Load, RankProgram
from rayfcp.program.instructions import Range, of_kind
from rayfcp.program.scan import Chain, ScanProgram, StateRound
from tests.program.helpers import forwards

Token = tuple[int, int]
"""(sequence, position); those of padding have a sequence below 0."""

Heads = dict[int, tuple[Token, ...]]
"""A state by head, of which each has two columns that are numbered as heads here."""

Key = tuple[int, int]
"""(chain, part)."""


@dataclass
class Kept:
    """What a rank keeps of a sequence in a microbatch: state and last tokens, then the gradient."""

    state: Heads
    halo: list[Token]
    gradient: Heads = field(default_factory=dict)


def run(programs: Sequence[RankProgram], lengths: Mapping[int, int], *, num_heads: int, kind: int = 0) -> None:
    """Run all microbatches, forward then backward in the reverse order, and compare all states, gradients of states
    and halos with those of sequences of these lengths."""
    kept: dict[tuple[int, int, int], Kept] = {}
    microbatches = [
        _Microbatch(at, programs, kind=kind, kept=kept, lengths=lengths, num_heads=num_heads)
        for at in range(len(forwards(programs[0])))
    ]
    for each in microbatches:
        each.forward()
    for each in reversed(microbatches):
        each.backward()


class _Microbatch:
    def __init__(
        self,
        number: int,
        programs: Sequence[RankProgram],
        *,
        kind: int,
        kept: dict[tuple[int, int, int], Kept],
        lengths: Mapping[int, int],
        num_heads: int,
    ) -> None:
        self.number, self.kept, self.lengths, self.num_heads = number, kept, lengths, 2 * num_heads
        self.scans: list[ScanProgram] = [forwards(each)[number].scans[kind] for each in programs]
        loads = [of_kind(each, Load)[number] for each in programs]
        self.tokens = [
            [(each.sequence, at) for each in load.pieces for at in range(each.start, each.stop)] or [(-1 - rank, 0)]
            for rank, load in enumerate(loads)
        ]
        self.parts: list[dict[Key, tuple[Token, ...]]] = [{} for _ in programs]
        for rank, scan in enumerate(self.scans):
            assert (scan.rank, scan.num_tokens) == (rank, len(self.tokens[rank]))
            at = 0
            for each in scan.segments:
                assert each.rows[0] == at < each.rows[1]
                at = each.rows[1]
                mine = self.tokens[rank][slice(*each.rows)]
                if each.chain < 0:
                    assert mine == [(mine[0][0], position) for position in range(self.lengths.get(mine[0][0], 1))]
                else:
                    self.parts[rank][each.chain, each.part] = tuple(mine)
            assert at == scan.num_tokens

    def forward(self) -> None:
        for rank, scan in enumerate(self.scans):
            for head in scan.heads:
                state = self.kept[rank, head.microbatch, head.sequence].state
                self.parts[rank][head.chain, head.part] = state[0]
                assert all(each == state[0] for each in state.values())
        folded = self._folded("summaries", "states", backward=False)
        buffers = self._halos()
        for rank, scan in enumerate(self.scans):
            for part in scan.segments:
                first = self.tokens[rank][part.rows[0]]
                before = [(first[0], at) for at in range(first[1])]
                assert buffers[rank][slice(*part.halo)] == before[max(0, len(before) - scan.kind.halo) :]
                if part.chain >= 0 and part.part > 0:
                    self._compare(folded[rank][part.chain, part.part], before)
            for tail in scan.tails:
                state = folded[rank][tail.chain, tail.part]
                self._compare(state, [(tail.sequence, at) for at in range(len(state[0]))])
                halo = buffers[rank][slice(*tail.rows)]
                assert halo == list(state[0])[max(0, len(state[0]) - scan.kind.halo) :]
                self.kept[rank, self.number, tail.sequence] = Kept(state, halo)

    def backward(self) -> None:
        for rank, scan in enumerate(self.scans):
            for tail in scan.tails:
                gradient = self.kept.pop((rank, self.number, tail.sequence)).gradient
                self.parts[rank][tail.chain, tail.part] = gradient[0]
        folded = self._folded("adjoints", "state_grads", backward=True)
        for rank, scan in enumerate(self.scans):
            for part in scan.segments:
                last = len(scan.chains[part.chain].ranks) - 1 if part.chain >= 0 else 0
                if part.chain >= 0 and part.part < last:
                    sequence, at = self.tokens[rank][part.rows[1] - 1]
                    after = [(sequence, each) for each in range(at + 1, self.lengths[sequence])]
                    self._compare(folded[rank][part.chain, part.part], after)
            for head in scan.heads:
                kept = self.kept[rank, head.microbatch, head.sequence]
                assert not kept.gradient
                kept.gradient = folded[rank][head.chain, head.part]
                after = [(head.sequence, at) for at in range(len(kept.state[0]), self.lengths[head.sequence])]
                self._compare(kept.gradient, after)

    def _compare(self, state: Heads, due: list[Token]) -> None:
        assert state == dict.fromkeys(range(self.num_heads), tuple(due))

    def _folded(self, there: str, back: str, *, backward: bool) -> list[dict[Key, Heads]]:
        """What reaches the owner of each part: the state before it, or the gradient of that behind it."""
        known = self._exchanged(there, [{key: {0: own} for key, own in parts.items()} for parts in self.parts])
        folded: list[dict[Key, Heads]] = [{} for _ in self.scans]
        wanted: list[dict[Key, Heads]] = [{} for _ in self.scans]
        for rank, scan in enumerate(self.scans):
            for number, chain in scan.chains.items():
                assert rank in chain.folders and set(chain.folders) == set(chain.ranks)
                state: tuple[Token, ...] = ()
                heads = self._share(chain, rank)
                parts = range(len(chain.ranks))
                for part in reversed(parts) if backward else parts:
                    folded[rank][number, part] = dict.fromkeys(heads, state)
                    if part != parts[0 if backward else -1]:
                        mine = {**self.parts[rank], **{key: each[0] for key, each in known[rank].items()}}[number, part]
                        state = mine + state if backward else state + mine
        returned = self._exchanged(back, folded)
        for rank, scan in enumerate(self.scans):
            for key in self.parts[rank].keys() | {(each.chain, each.part) for each in scan.tails}:
                mine = folded[rank][key] if rank in scan.chains[key[0]].folders else {}
                wanted[rank][key] = {**mine, **returned[rank].get(key, {})}
        return wanted

    def _share(self, chain: Chain, rank: int) -> list[int]:
        """Numbers of heads, or of columns of heads: of each two."""
        share = chain.share(rank, num_heads=self.num_heads // 2, num_columns=2)
        return [2 * head + column for head in range(*share.heads) for column in range(*share.columns)]

    def _exchanged(self, name: str, have: list[dict[Key, Heads]]) -> list[dict[Key, Heads]]:
        """Messages of a round: of items the heads that both ends expect, once."""
        rounds: list[StateRound] = [getattr(scan, name) for scan in self.scans]
        sent = {(rank, each.peer): each.items for rank, step in enumerate(rounds) for each in step.sends}
        due = {(each.peer, rank): each.items for rank, step in enumerate(rounds) for each in step.receives}
        assert sent == due and all(source != target for source, target in sent)
        found: list[dict[Key, Heads]] = [{} for _ in self.scans]
        for (source, target), items in sent.items():
            assert items and list(items) == sorted(set(items))
            for key in items:
                mine = found[target].setdefault(key, {})
                assert not mine.keys() & have[source][key].keys()
                mine.update(have[source][key])
        return found

    def _halos(self) -> list[list[Token | None]]:
        """The halo buffers of all ranks."""
        rows = [list(each) for each in self.tokens]
        for rank, scan in enumerate(self.scans):
            for head in scan.heads:
                assert head.rows[0] == len(rows[rank])
                rows[rank] += self.kept[rank, head.microbatch, head.sequence].halo
                assert head.rows[1] == len(rows[rank])
        buffers: list[list[Token | None]] = [[None] * scan.num_halo_rows for scan in self.scans]
        for rank, scan in enumerate(self.scans):
            for copy in scan.halos:
                assert rank in (copy.sender, copy.receiver) and copy in self.scans[copy.receiver].halos
                if copy.receiver == rank:
                    assert copy in self.scans[copy.sender].halos
                    source, target = _rows(copy.source), _rows(copy.target)
                    for row, place in zip(source, target, strict=True):
                        assert buffers[rank][place] is None
                        buffers[rank][place] = rows[copy.sender][row]
        assert all(row is not None for buffer in buffers for row in buffer)
        return buffers


def _rows(ranges: Sequence[Range]) -> list[int]:
    return [row for start, stop in ranges for row in range(start, stop)]
