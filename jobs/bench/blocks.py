"""Planning time of `flex-block` on one core, imbalance of its loads, and communication that it leaves exposed.

python jobs/bench/blocks.py --ranks 64 128 256 1024 --distribution long-tail --longest 524288

The ranks are filled with `--tokens-per-rank` each. Seconds are CPU time of whole plans, from sequences to BatchPlan,
lower bound included, after one in the process that is not counted. Plain LPT: Algorithm 1 of the paper with zig-zag
pairs, blocks of the size that the paper's rules give, no moves.
"""

import argparse
import statistics
import sys
import time

import numpy as np

from rayfcp.compare.distributions import DISTRIBUTIONS, distribution
from rayfcp.config.models import BlockOptions
from rayfcp.plan import CostModel, hardware_profile, model_profile, plan_batch
from rayfcp.plan.blocks.distributor import loads_of
from rayfcp.plan.blocks.planner import BlockPlan, batch_of, block_tokens, plan_blocks
from rayfcp.values import ClusterSpec, SequenceSpec


def main() -> None:
    """One line a batch, one of times for each number of ranks."""
    args = _parser().parse_args()
    for num_ranks in args.ranks:
        cost = CostModel.from_profiles(
            model_profile(args.model),
            hardware_profile(args.hardware),
            num_ranks=num_ranks,
            bytes_per_element=2,
            reduce_every="step",
        )
        room = int(args.tokens_per_rank * (1 + args.spare))
        cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=room)
        batches = [_batch(args, num_ranks=num_ranks, seed=args.seed + number) for number in range(args.batches)]
        plan_batch(batches[0], cluster=cluster, cost=cost, strategy="flex-block")
        took = []
        for batch in batches:
            start = time.process_time()
            plan = plan_batch(batch, cluster=cluster, cost=cost, strategy="flex-block")
            took.append(1e3 * (time.process_time() - start))
            sys.stdout.write(f"{_figures(batch, cluster=cluster, cost=cost)}; gap {plan.gap:.4f}\n")
        sys.stdout.write(
            f"{num_ranks} ranks, {args.distribution}: plans take {statistics.median(took):.0f} ms in the median, "
            f"{max(took):.0f} ms at most\n"
        )


def _figures(batch: list[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel) -> str:
    per_rank = sum(each.num_tokens for each in batch) / cluster.num_ranks
    size = block_tokens(cost, tokens_per_rank=per_rank, crosses=cluster.num_ranks > cost.ranks_per_node)
    found, same, plain = (
        _planned(batch, cluster=cluster, cost=cost, options=options)
        for options in (
            BlockOptions(),
            BlockOptions(block_tokens=size),
            BlockOptions(block_tokens=size, placement="lpt"),
        )
    )
    attention_s = found.traffic.attention_s
    slower_s = float(found.rounds.seconds.max()) - float((attention_s + found.traffic.linear_s).max())
    exposed = slower_s / float(attention_s.mean())
    return (
        f"{cluster.num_ranks} ranks, {len(batch)} sequences up to {max(each.num_tokens for each in batch)}, blocks of "
        f"{found.block_tokens}: {_loads(batch, found)} (LPT {_loads(batch, plain)}), seconds "
        f"{100 * _imbalance(attention_s):.2f} %, exposed {100 * exposed:.2f} % of attention, "
        f"{found.rounds.num_rounds} rounds by {found.rounds.pacing.coalesce}, busiest port {_port(found):.0f} "
        f"tokens, at {size} {_port(same):.0f} against LPT's {_port(plain):.0f}, imbalance of ports "
        f"{100 * _spread(found):.0f} %"
    )


def _planned(batch: list[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: BlockOptions) -> BlockPlan:
    return plan_blocks(batch_of(batch).pool(np.arange(len(batch))), cluster=cluster, cost=cost, options=options)


def _loads(batch: list[SequenceSpec], found: BlockPlan) -> str:
    pool = batch_of(batch).pool(np.arange(len(batch)))
    tokens, pairs = loads_of(pool, found.pieces)
    return f"imbalance of attention {100 * _imbalance(pairs):.2f} %, memory {100 * _imbalance(tokens):.2f} %"


def _imbalance(loads: np.ndarray) -> float:
    return float((loads.max() - loads.mean()) / loads.max())


def _ports(found: BlockPlan) -> np.ndarray:
    messages, count = found.traffic.messages, found.traffic.num_ranks
    sent, received = (
        np.bincount(each, messages.tokens, minlength=count) for each in (messages.source, messages.target)
    )
    return np.maximum(sent, received)


def _port(found: BlockPlan) -> float:
    return float(_ports(found).max())


def _spread(found: BlockPlan) -> float:
    ports = _ports(found)
    return _imbalance(ports) if ports.max() else 0.0


def _batch(args: argparse.Namespace, *, num_ranks: int, seed: int) -> list[SequenceSpec]:
    """Drawn until the ranks are full, the last one cut; `--longest` is one of them."""
    room = num_ranks * args.tokens_per_rank
    drawn = distribution(args.distribution).sample(room // 16, seed=seed)
    lengths = np.concatenate([[args.longest] if args.longest else [], drawn]).astype(np.int64)
    ends = np.cumsum(lengths)
    count = int(np.searchsorted(ends, room))
    kept = [*lengths[:count].tolist(), room - int(ends[count - 1] if count else 0)]
    return [SequenceSpec(id=at, num_tokens=each, num_targets=each) for at, each in enumerate(kept) if each]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--tokens-per-rank", type=int, default=32_768)
    parser.add_argument("--spare", type=float, default=0.1, help="memory beyond that, as a share of it")
    parser.add_argument("--distribution", choices=sorted(DISTRIBUTIONS), default="long-tail")
    parser.add_argument("--longest", type=int, default=0, help="length of one more sequence in each batch")
    parser.add_argument("--batches", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="llama3-70b")
    parser.add_argument("--hardware", default="gpu-x")
    return parser


if __name__ == "__main__":
    main()
