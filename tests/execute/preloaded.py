"""What most processes of tests import, for the server that forks them. No thread may run when it does."""

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import transformers.models.qwen3.modeling_qwen3  # noqa: F401

import rayfcp.models.build  # noqa: F401
import tests.execute.generations  # noqa: F401
