"""Export a checkpoint of every family that runs by the command, and open it:
`python -m tests.models.exported_families [FAMILY ...]`, minutes for all. Prints what does not open, and a count.
"""

import copy
import sys
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig

from rayfcp.config import ConfigError
from rayfcp.config.architecture import VISION_FAMILIES
from rayfcp.models.families import CAUSAL_FAMILIES, family_config, results
from rayfcp.models.library import library_name, make_library_model, narrowed
from tests.models.test_export_command import export, written_run
from tests.models.vlm import vlm_config


def write_base(family: str, folder: Path) -> None:
    """A tiny model of the family with random weights.

    Raises:
        ConfigError: the family does not run.
    """
    config = vlm_config(family) if family in VISION_FAMILIES else narrowed(family_config(family), 2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        make_library_model(copy.deepcopy(config)).float().save_pretrained(folder)


def problem_of(family: str, folder: Path) -> str:
    """Return what is wrong with the export; empty if nothing is.

    Raises:
        ConfigError: the family does not run.
    """
    write_base(family, folder / "base")
    _, held = written_run(folder, "base")
    out = export(folder, "out")
    opened = getattr(transformers, AutoConfig.from_pretrained(out).architectures[0]).from_pretrained(out)
    want = {library_name(name): each for name, each in held.model.state_dict().items()}
    found = opened.state_dict()
    other = sorted(name for name in {*want, *found} if name not in want or not torch.equal(found[name], want[name]))
    if other:
        return f"{len(other)} of {len(want)} tensors differ, e.g. {other[0]}"
    ids = opened.eval().generate(torch.arange(3, 9)[None], max_new_tokens=2, min_new_tokens=2, do_sample=False)
    return "" if ids.shape == (1, 8) else f"generates {tuple(ids.shape)}"


def main(families: Sequence[str]) -> int:
    """Return the number of families whose exports do not open."""
    count, failed = 0, 0
    for family in families or (*CAUSAL_FAMILIES, *VISION_FAMILIES):
        hidden = StringIO()
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(hidden), redirect_stderr(hidden):
            try:
                problem = problem_of(family, Path(folder))
            except ConfigError as error:
                problem = f"refused: {error}"
            except AssertionError:
                problem = f"the command failed: {hidden.getvalue().strip()[-300:]!r}"
            except BaseException as error:  # as that of torch's checkpoints is
                if isinstance(error, KeyboardInterrupt):
                    raise
                problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        is_refused = problem.startswith("refused")
        if problem and not is_refused and family in CAUSAL_FAMILIES:
            is_refused = not next(results([family], dtype="float32")).runs  # by the check of its numbers, which is slow
        count += not is_refused
        failed += bool(problem) and not is_refused
        if problem and not is_refused:
            sys.stdout.write(f"{family}: {problem}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{count - failed} of {count} families that run are exported and opened\n")
    return failed


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    sys.exit(main(sys.argv[1:]))
