"""Models, tokenizers and processors by folder or by their name on the Hugging Face hub."""

from contextlib import suppress
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path

from rayfcp.config import ConfigError

ADAPTER_FILE = "adapter_config.json"
"""PEFT's settings of an adapter, in its folder."""

_HUB_TIMEOUT_S = 10.0
"""For the one request that tells whether the hub answers; the library's own retries take 23 s per file."""


def locate(name: str, *, key: str) -> tuple[str, bool]:
    """Return folder or hub name for `from_pretrained`, and its `local_files_only`.

    A folder is used as it is. A name that looks like a path never goes to the hub. The hub is asked once; unless it
    answers that it has this name, only files fetched before are used.

    Raises:
        ConfigError: `name` looks like a path and does not exist, or neither the hub nor its local cache has it.
    """
    folder = Path(name).expanduser()
    if folder.exists():
        return str(folder), True
    absent = f"{key} is {name!r}, there is no such folder{_nearest(folder)}"
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigError(f"{absent}; give a folder, or a hub name such as org/model")
    problem = _hub_problem(name)
    if problem and not _is_fetched(name):
        raise ConfigError(f"{absent}, and {problem}; give a folder, or a hub name such as org/model")
    return name, bool(problem)


def find_file(source: str, file: str, *, local_only: bool) -> Path | None:
    """Return the path of a file on this machine, fetched if it is on the hub; None if it does not exist. `source` and
    `local_only`: from `locate`."""
    from transformers.utils import cached_file

    options = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    found = cached_file(source, file, local_files_only=local_only, **options)
    return None if found is None else Path(found)


def check_no_adapter(name: str, *, key: str) -> None:
    """Refuse a folder with an adapter, alone or beside a model: transformers would open it with the adapter, which we
    do not train further.

    Raises:
        ConfigError: There is one, or as `locate`.
    """
    source, local_only = locate(name, key=key)
    if find_file(source, ADAPTER_FILE, local_only=local_only) is not None:
        raise ConfigError(
            f"{key} is {name!r}, which holds an adapter ({ADAPTER_FILE}): an adapter is neither continued nor read "
            "beside a model; merge it first (rayfcp export RUN OUT --merge of the run that trained it, or PEFT's "
            f"merge_and_unload) and give that folder, or remove {ADAPTER_FILE} to use the model without it"
        )


def reason_of(error: Exception) -> str:
    """Return one sentence on why `from_pretrained` failed. Code that files bring (`auto_map`) is never run."""
    text = " ".join(str(error).split())
    if "trust_remote_code" in text:
        return "it needs code of its own (auto_map), which is never run"
    return text.split(". ")[0].removesuffix(".") or type(error).__name__


def _nearest(folder: Path) -> str:
    """Name the existing folder that is closest in spelling to the first part of `folder` that is missing."""
    while not folder.parent.exists():
        folder = folder.parent
    near: list[str] = []
    with suppress(OSError):
        near = get_close_matches(folder.name, [each.name for each in folder.parent.iterdir() if each.is_dir()], n=1)
    return f" (nearest: {str(folder.with_name(near[0]))!r})" if near else ""


@lru_cache(maxsize=16)
def _hub_problem(name: str) -> str:
    """Return why the hub does not serve `name`; empty if it does."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=_HUB_TIMEOUT_S)
    except GatedRepoError:
        return "the hub asks to accept its terms first (then log in: hf auth login)"
    except RepositoryNotFoundError:
        return "the hub has no repository of this name that you can access (private ones need hf auth login)"
    except HfHubHTTPError:  # an answer, e.g. that the file is missing: the library reports it with more context
        return ""
    except Exception as error:  # no network, offline mode, or no valid name
        return f"the hub cannot be asked ({type(error).__name__})"
    return ""


def _is_fetched(name: str) -> bool:
    """True if the hub's local cache has files of `name`."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model") / "snapshots"
    return folder.is_dir() and any(folder.iterdir())
