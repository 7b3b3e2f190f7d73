"""Short sequences into buckets of about equal seconds (InfiniPipe, Algorithm 1)."""

import numpy as np

from rayfcp.cost.compiled import compiled
from rayfcp.values.arrays import Floats, Ints


@compiled
def pack_balanced(
    bucket_s: Floats, bucket_tokens: Floats, seconds: Floats, tokens: Floats, limit_s: float, max_tokens: float
) -> Ints:
    """The bucket of each sequence, which come most seconds first; `bucket_s` and `bucket_tokens` are what buckets
    begin with and, in the end, hold. They have space for one bucket more for each sequence: unopened, of -1 tokens.

    Of buckets with tokens and time left, the one with the least seconds per token gets the sequence. When none has
    time left, the limit becomes the least that suffices; when none has tokens left, a bucket is opened.
    """
    owners = np.empty(len(seconds), np.int64)
    opened = 0
    while opened < len(bucket_s) and bucket_tokens[opened] >= 0.0:
        opened += 1
    for at in range(len(seconds)):
        best, best_ratio, least, least_s = -1, np.inf, -1, np.inf
        for bucket in range(opened):
            if bucket_tokens[bucket] + tokens[at] > max_tokens:
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
