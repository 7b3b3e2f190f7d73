"""Where sequences are cut, and which buckets the short ones go to (InfiniPipe, Algorithm 1)."""

import numpy as np

from rayfcp.cost.compiled import compiled, inner
from rayfcp.values.arrays import Floats, Ints

HALVINGS = 60


@inner
def _reach(start: float, seconds: float, cell_s: float, token_s: float, context_s: float) -> float:
    """End of the slice from `start` that takes `seconds`: its cells, its tokens, and what meeting its context costs."""
    line = cell_s / 2 + token_s
    total = seconds + (cell_s / 2 * start + line - context_s) * start
    if cell_s == 0.0:
        return total / line
    reached: float = (np.sqrt(line * line + 2 * cell_s * max(total, 0.0)) - line) / cell_s
    return reached


@compiled
def mesh_ends(num_tokens: float, count: int, cell_s: float, token_s: float, context_s: float) -> Floats:
    """Ends of `count` slices of a causal sequence that all take as long, the last one `num_tokens`."""
    ends = np.empty(count)
    low = 0.0
    high = (cell_s / 2 * num_tokens + cell_s / 2 + token_s + count * context_s) * num_tokens
    for _ in range(HALVINGS):
        middle, at = (low + high) / 2, 0.0
        for _ in range(count):
            at = max(_reach(at, middle, cell_s, token_s, context_s), at)
        if at < num_tokens:
            low = middle
        else:
            high = middle
    at = 0.0
    for number in range(count):
        at = max(_reach(at, high, cell_s, token_s, context_s), at)
        ends[number] = min(at, num_tokens)
    ends[count - 1] = num_tokens
    return ends


@compiled
def pack_balanced(
    bucket_s: Floats, bucket_tokens: Floats, seconds: Floats, tokens: Floats, limit_s: float, room: float
) -> Ints:
    """The bucket of each sequence, which come most seconds first; `bucket_s` and `bucket_tokens` are what buckets
    begin with and, in the end, hold. They have space for one bucket more for each sequence: unopened, of -1 tokens.

    Of buckets with room and time left, the one with the least seconds per token gets the sequence. When none has
    time left, the time is the least that suffices; when none has room, a bucket is opened.
    """
    owners = np.empty(len(seconds), np.int64)
    opened = 0
    while opened < len(bucket_s) and bucket_tokens[opened] >= 0.0:
        opened += 1
    for at in range(len(seconds)):
        best, best_ratio, least, least_s = -1, np.inf, -1, np.inf
        for bucket in range(opened):
            if bucket_tokens[bucket] + tokens[at] > room:
                continue
            after_s = bucket_s[bucket] + seconds[at]
            if after_s < least_s:
                least, least_s = bucket, after_s
            ratio = bucket_s[bucket] / bucket_tokens[bucket] if bucket_tokens[bucket] > 0.0 else 0.0
            if after_s <= limit_s and ratio < best_ratio:
                best, best_ratio = bucket, ratio
        if least < 0:
            best = opened
            bucket_tokens[best] = 0.0
            opened += 1
        elif best < 0:
            best, limit_s = least, least_s
        bucket_s[best] += seconds[at]
        bucket_tokens[best] += tokens[at]
        owners[at] = best
    return owners


@compiled
def pack_equal(bucket_tokens: Floats, tokens: Floats, room: float) -> Ints:
    """Best-fit decreasing by tokens into buckets of `room` tokens; `bucket_tokens` as in `pack_balanced`. A sequence
    longer than `room` has a bucket to itself."""
    owners = np.empty(len(tokens), np.int64)
    opened = 0
    while opened < len(bucket_tokens) and bucket_tokens[opened] >= 0.0:
        opened += 1
    for at in range(len(tokens)):
        best, left = -1, np.inf
        for bucket in range(opened):
            after = room - bucket_tokens[bucket] - tokens[at]
            if 0.0 <= after < left:
                best, left = bucket, after
        if best < 0:
            best = opened
            bucket_tokens[best] = 0.0
            opened += 1
        bucket_tokens[best] += tokens[at]
        owners[at] = best
    return owners
