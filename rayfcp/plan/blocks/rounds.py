"""The communication planner: transfers, rounds and their order (FCP with blocks, Zhao et al., section 4.2)."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rayfcp.config.models import BlockOptions
from rayfcp.cost.kernels.flow import Flow, finish_s
from rayfcp.cost.model import CostModel
from rayfcp.plan.blocks.kernels.distribute import Pieces, Pool
from rayfcp.plan.blocks.kernels.rounds import Graph, Wishes, colours_of, max_degree
from rayfcp.plan.blocks.kernels.traffic import Needs, Packing, Parcels, loads_of, needs_of, own_sides, parcels_of
from rayfcp.values import Pacing
from rayfcp.values.arrays import Floats, Ints

GOOD_ENOUGH = 1e-3  # of the attention of the rank that has most
LINKS_SHARE = 0.6  # of it, from which on links may set the pace


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What must travel in a microbatch, and what each rank computes. `moved_s` and `work_s` of parcels: seconds of the
    transfer, and of the attention that it brings; by rank: attention to own keys, attention in all, linear layers, and
    the longer of sending and receiving."""

    needs: Needs
    parcels: Parcels
    moved_s: Floats
    work_s: Floats
    own_s: Floats
    attention_s: Floats
    linear_s: Floats
    port_s: Floats
    overlap: float

    @property
    def floor_s(self) -> float:
        """Seconds that the slowest rank takes at least, however its rounds are ordered."""
        exposed_s = self.port_s - self.overlap * np.minimum(self.port_s, self.attention_s)
        return float((self.attention_s + self.linear_s + exposed_s).max())

    @property
    def num_ranks(self) -> int:
        return len(self.own_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Parcels round by round: `order[bounds[r]]` to `order[bounds[r + 1]]` are round r's. `seconds`: of each rank
    over the microbatch, without the fixed cost; `exposed_s`: of that, communication that nothing hides."""

    order: Ints
    bounds: Ints
    seconds: Floats
    exposed_s: Floats
    how: Pacing

    @property
    def num_rounds(self) -> int:
        return len(self.bounds) - 1


def traffic_of(
    pool: Pool, pieces: Pieces, *, node: Ints, speeds: Floats, cost: CostModel, parcel_tokens: int
) -> Traffic:
    """Transfers of at most `parcel_tokens`, or of one block, between ranks on nodes `node` of speeds `speeds`; seconds
    by `cost`."""
    num_ranks = len(node)
    needs = needs_of(pool, pieces)
    parcels = parcels_of(needs, Packing(pieces, parcel_tokens))
    near = node[parcels.source] == node[parcels.target]
    hop_s: Floats = np.where(near, cost.ring_intra_s_per_token, cost.ring_inter_s_per_token).astype(np.float64)
    work_s = (
        cost.attention_s_per_cell
        * (parcels.cells + cost.attention_half_tokens * parcels.sides)
        / speeds[parcels.target]
    )
    tokens, cells = loads_of(pool, pieces)
    brought = np.bincount(parcels.target, parcels.cells, minlength=num_ranks)
    sides, _ = own_sides(pool, pieces)
    own = cells - brought + cost.attention_half_tokens * sides
    own_s = cost.attention_s_per_cell * own / speeds
    moved_s = hop_s * parcels.tokens + cost.ring_s_per_round
    port_s = np.maximum(*(np.bincount(end, moved_s, minlength=num_ranks) for end in (parcels.source, parcels.target)))
    return Traffic(
        needs=needs,
        parcels=parcels,
        moved_s=moved_s,
        work_s=work_s,
        own_s=own_s,
        attention_s=own_s + np.bincount(parcels.target, work_s, minlength=num_ranks),
        linear_s=cost.linear_s_per_token * tokens / speeds,
        port_s=port_s,
        overlap=cost.overlap,
    )


def _ordered(first: Ints, then: Ints) -> Ints:
    """Positions by `first`, then by `then`, ties in order: small numbers, which sort in linear time."""
    order = np.argsort(_small(then), kind="stable")
    return order[np.argsort(_small(first)[order], kind="stable")]


def _small(numbers: Ints) -> Ints | npt.NDArray[np.uint16]:
    return numbers.astype(np.uint16) if numbers.max(initial=0) < 2**16 else numbers


def schedule(traffic: Traffic, *, options: BlockOptions, most_coalesced: int) -> Schedule:
    """Congestion-free rounds, exactly as many as the busiest rank has parcels, and how many run as one.

    Where `options.coalesce` leaves that open: from the power of two below `most_coalesced` down as long as nothing is
    lost, so the fewest that are within `GOOD_ENOUGH` of the best.
    """
    enough_s, floor_s = GOOD_ENOUGH * float(traffic.attention_s.max()), traffic.floor_s
    parcels = traffic.parcels
    graph = Graph(parcels.source, parcels.target, traffic.num_ranks)
    num_rounds = max_degree(graph) if len(parcels.source) else 0
    best: Schedule | None = None
    for wishes in _wishes(traffic, num_rounds=num_rounds) if options.paced else [_first_fit(traffic)]:
        colour = colours_of(graph, wishes) if num_rounds else wishes.wanted
        order = np.argsort(_small(colour), kind="stable")
        for coalesce in [options.coalesce] if options.coalesce else _powers(min(most_coalesced, num_rounds)):
            how = Pacing(coalesce=coalesce, num_buffers=options.num_buffers)
            found = timed(traffic, order, rounds=colour[order], how=how)
            if best is not None and found.seconds.max() > best.seconds.max() + enough_s:
                break
            if best is None or found.seconds.max() <= max(best.seconds.max(), floor_s + enough_s):
                best = found
        assert best is not None  # the first at least
        if best.seconds.max() <= floor_s + enough_s:
            break
    assert best is not None  # one wish at least
    return best


def _powers(most: int) -> list[int]:
    """Powers of two up to `most`, the largest first."""
    return [2**each for each in reversed(range(max(most, 1).bit_length()))]


def _first_fit(traffic: Traffic) -> Wishes:
    """The lowest round for each, the longest first, so that few rounds wait for one long transfer."""
    return Wishes(np.argsort(-traffic.moved_s, kind="stable"), np.zeros(len(traffic.moved_s), np.int64))


def _wishes(traffic: Traffic, *, num_rounds: int) -> Iterator[Wishes]:
    """The round that each parcel wants, and who chooses first.

    A target gets its parcels from the ranks after it in turn, so that targets differ in whom they ask, each when
    those before are computed at an even pace. Parcels that bring much attention choose first: in the wrong place
    they hold up most. Second, where links take nearly as long as attention: parcels that take long.
    """
    parcels, ranks = traffic.parcels, traffic.num_ranks
    order = _ordered(parcels.target, (parcels.source - parcels.target) % ranks)
    target = parcels.target[order]
    bound_by_links = traffic.port_s.max() > LINKS_SHARE * traffic.attention_s.max()
    for weight in (traffic.work_s, traffic.moved_s) if bound_by_links else (traffic.work_s,):
        total = np.bincount(parcels.target, weight, minlength=ranks)
        before = np.cumsum(weight[order]) - weight[order] - (np.cumsum(total) - total)[target]
        wanted = np.empty(len(order), np.int64)
        wanted[order] = (num_rounds * before / np.maximum(total, 1e-300)[target]).astype(np.int64)
        yield Wishes(np.argsort(-weight, kind="stable"), np.clip(wanted, 0, max(num_rounds - 1, 0)))


def timed(traffic: Traffic, order: Ints, *, rounds: Ints, how: Pacing) -> Schedule:
    """What the order takes. The share `1 - overlap` of the communication hides behind nothing."""
    parcels = traffic.parcels
    flow = Flow(
        rounds // how.coalesce,
        parcels.source[order],
        parcels.target[order],
        traffic.moved_s[order],
        traffic.work_s[order],
        traffic.own_s,
        how.num_buffers,
    )
    waited_s = finish_s(flow) - traffic.attention_s
    exposed_s = traffic.overlap * waited_s + (1 - traffic.overlap) * np.maximum(traffic.port_s, waited_s)
    num_rounds = int(rounds[-1]) + 1 if len(rounds) else 0
    return Schedule(
        order=order,
        bounds=np.searchsorted(rounds, np.arange(num_rounds + 1)),
        seconds=traffic.attention_s + traffic.linear_s + exposed_s,
        exposed_s=exposed_s,
        how=how,
    )
