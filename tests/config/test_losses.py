"""The section `loss`: what fits together, and one line for what does not."""

from typing import Any

import pytest

from rayfcp.config import Config, ConfigError
from rayfcp.config.losses import ROWS


def config_of(loss: dict[str, Any], **data: Any) -> Config:
    return Config(data={"paths": ["."], **data}, loss=loss)


@pytest.mark.parametrize(
    ("loss", "data", "message"),
    [
        ({"type": "ppo"}, {}, "loss.type is 'ppo', must be one of"),
        ({"beta": 0.2}, {}, "loss.beta is 0.2, must be absent with loss.type 'cross_entropy', as it is a key of dpo"),
        ({"type": "dpo", "beta": 0.0}, {}, "loss.beta is 0.0, must be greater than 0; raise it"),
        ({"type": "dpo", "share": 0.5}, {}, "loss.share is 0.5, must be absent with loss.type 'dpo'"),
        ({"type": "reward", "reference": "m"}, {}, "loss.reference is m, must be absent with loss.type 'reward'"),
        ({"type": "reward", "center": -1}, {}, "loss.center is -1, must be at least 0; raise it"),
        ({"type": "distillation", "share": 2}, {}, "loss.share is 2, must be at most 1; lower it"),
        ({"type": "dpo"}, {"rows": "sequences"}, "data.rows is 'sequences', must be 'pairs' with loss.type 'dpo'"),
        ({"type": "dpo"}, {"global_batch_sequences": 7}, "data.global_batch_sequences is 7, must be even"),
        ({"type": "dpo"}, {"long_sequences": "split"}, "loss.type is 'dpo', which does not run with data.long_sequen"),
        ({"type": "dpo"}, {"streaming": True}, "loss.type is 'dpo', which does not run with data.streaming"),
        ({"type": "distillation"}, {"processor": "p"}, "loss.type is 'distillation', which does not run with data.pro"),
    ],
)
def test_keys_that_do_not_fit_are_one_line(loss: dict[str, Any], data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(loss, **data)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ROWS)
def test_the_loss_says_what_rows_are(kind: str) -> None:
    config = config_of({"type": kind})
    assert config.data.rows == ROWS[kind]
    assert config.changed(train={"steps": 3}).data.rows == ROWS[kind]
