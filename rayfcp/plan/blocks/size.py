"""How long a block is: the three rules of FCP with blocks (Zhao et al., section 7)."""

from rayfcp.plan.costs.model import CostModel

KERNEL_SHARE = 0.9  # of the best efficiency that a block's attention reaches: 2K on GPU-X, as the paper has it
BLOCKS_PER_RANK = 8  # at least, so that compute and communication can be levelled; 4K at 32K tokens a rank
FEWEST_BLOCKS = 4
TILE = 128  # blocks are whole tiles of a kernel


def block_tokens(cost: CostModel, *, tokens_per_rank: float, crosses: bool) -> int:
    """Tokens of a block, a power of two of at least `TILE`.

    (1) A kernel over blocks of n tokens reaches n / (n + attention_half_tokens) of its efficiency, at least
    `KERNEL_SHARE`. (2) Attention of n queries to n keys takes as long as these keys and values take to come:
    n >= seconds a token / seconds a cell, over the links between nodes if ranks `crosses` nodes.
    (3) A rank has `BLOCKS_PER_RANK` blocks, so that loads can be levelled; this bounds the others.
    """
    saturating = cost.attention_half_tokens * KERNEL_SHARE / (1 - KERNEL_SHARE)
    link_s = cost.ring_inter_s_per_token if crosses else cost.ring_intra_s_per_token
    hiding = link_s / cost.attention_s_per_cell if cost.attention_s_per_cell > 0 else 0.0
    wanted = min(max(saturating, hiding), tokens_per_rank / BLOCKS_PER_RANK)
    size = TILE
    while size * 2 <= wanted * 2**0.5:  # the nearest power of two
        size *= 2
    return size


def sizes(first_tokens: int, *, tokens_per_rank: float) -> tuple[int, ...]:
    """Sizes worth a try, from the one that the rules give to the largest of which a rank has `FEWEST_BLOCKS`.

    Larger blocks are better for kernels, smaller ones hide better; what a given batch wants is seen by planning it.

    >>> sizes(2048, tokens_per_rank=32768.0)
    (2048, 4096, 8192)
    """
    tried = [first_tokens]
    while tried[-1] * 2 * FEWEST_BLOCKS <= tokens_per_rank:
        tried.append(tried[-1] * 2)
    return tuple(tried)
