"""Modules that most processes of tests import, for servers that fork them, and kernels of planners, which take as long
to load. The last that a server imports; no thread may run when it forks."""

import gc

import hypothesis  # noqa: F401
import pandas  # noqa: F401
import pyarrow.compute  # noqa: F401
import pytest  # noqa: F401
import torch.distributed.checkpoint  # noqa: F401
import transformers.models.qwen3.modeling_qwen3  # noqa: F401

import rayfcp.models.build  # noqa: F401
import tests.execute.generations  # noqa: F401
from rayfcp.execute.parallel import membership
from rayfcp.plan import plan_batch
from rayfcp.values import ClusterSpec
from tests.plan.helpers import UNIT, batch_of

CLUSTER = ClusterSpec(num_ranks=2, max_tokens_per_rank=64)
for strategy in ("flex-ring", "flex-block"):
    plan_batch(batch_of([50, 9]), cluster=CLUSTER, cost=UNIT, strategy=strategy)

# Forks need not look at all of this whenever they collect garbage, which recovery does often. What is frozen is not
# found among the collector's objects either: caches that recovery clears are handed over.
KNOWN, find_caches = membership._sharding_caches(), membership._sharding_caches
membership._sharding_caches = lambda: [*KNOWN, *find_caches()]
gc.collect()
gc.freeze()
