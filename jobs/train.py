"""Ray job entry point: `ray job submit --working-dir . -- python jobs/train.py jobs/quickstart.yaml [key=value ...]`.

The same as `rayfcp train`; inside a job it joins the job's cluster. `rayfcp submit` does without it, and gives a
stopped job time for its checkpoint; here that is said by
`--runtime-env-json '{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "600"}}'`, 3 seconds otherwise.
"""

import sys

from rayfcp.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
