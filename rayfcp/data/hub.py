"""Models, tokenizers and processors by folder or by their name on the Hugging Face hub."""

from functools import lru_cache
from pathlib import Path

from rayfcp.config import ConfigError

_HUB_TIMEOUT_S = 10.0
"""For the one request that tells whether the hub answers; the library's own retries take 23 s per file."""


def locate(name: str, *, key: str) -> tuple[str, bool]:
    """Folder or hub name for `from_pretrained`, and its `local_files_only`.

    A folder is used as it is. A name that looks like a path never goes to the hub; the hub is asked once, and where it
    does not answer only files fetched before are used.

    Raises:
        ConfigError: `name` looks like a path and does not exist.
    """
    folder = Path(name).expanduser()
    if folder.exists():
        return str(folder), True
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigError(f"{key} is {name!r}, there is no such folder; give a folder, or a hub name such as org/model")
    return name, not _hub_answers(name)


@lru_cache(maxsize=16)
def _hub_answers(name: str) -> bool:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=_HUB_TIMEOUT_S)
    except HfHubHTTPError:  # an answer: the library reports it with more context
        return True
    except Exception:  # no network, offline mode, or no valid name
        return False
    return True
