"""Data of a run as the controller opens them: refused without targets, and accounted for once."""

import json
from pathlib import Path
from typing import Any

import pytest

from rayfcp.cluster.dataset import open_dataset
from rayfcp.config import Config, ConfigError
from rayfcp.data import cached_prepare
from tests.cluster.runs import run_config

MASKED = {"input_ids": [5, 6, 7], "labels": [-100, -100, -100]}
TRAINED = {"input_ids": [5, 6, 7]}


def config_of(folder: Path, rows: list[Any], **keys: Any) -> tuple[Config, str]:
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = run_config(folder, name="rows", **keys).changed(data={"max_bad_fraction": 0.9})
    return config, cached_prepare(config.data, cache_dir=str(folder / "cache")).folder


def test_data_that_train_nothing_are_refused(tmp_path: Path) -> None:
    config, folder = config_of(tmp_path, [MASKED, MASKED])
    with pytest.raises(ConfigError, match=r"^data.paths: 2 sequences without a single target, must have one"):
        open_dataset(config, data_dir=folder)


def test_the_account_names_bad_rows_once_and_holds_all_of_them(tmp_path: Path) -> None:
    config, folder = config_of(tmp_path, [TRAINED, TRAINED, *[{"text": ""}] * 5])
    account, skipped = open_dataset(config, data_dir=folder).account(tmp_path / "bad.jsonl")
    assert account.startswith("account: 1 file, 7 rows (5 skipped: empty 5), 2 sequences; 6 tokens = 4 trained")
    assert skipped.count("row ") == 3 and skipped.endswith(f"and more, see {tmp_path / 'bad.jsonl'}")
    assert [json.loads(line)["row"] for line in (tmp_path / "bad.jsonl").read_text().splitlines()] == [2, 3, 4, 5, 6]


def test_accounts_of_evaluation_sets_name_their_own_keys(tmp_path: Path) -> None:
    sets = {"val": {"paths": str(tmp_path / "texts.jsonl"), "max_seqlen": 2}}
    config, folder = config_of(tmp_path, [TRAINED], eval={"sets": sets})
    (account,) = open_dataset(config, data_dir=folder, eval_dirs={"val": folder}).evaluation_accounts()
    assert account.startswith("evaluation set val: account: 1 file, 1 row, 1 sequence; 3 tokens = 1 trained")
    assert "cut by eval.sets.val.max_seqlen=2" in account and "data." not in account
