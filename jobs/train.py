"""Ray job entry point: `ray job submit --working-dir . -- python jobs/train.py jobs/quickstart.yaml [key=value ...]`.

The same as `rayfcp train`; inside a job it joins the job's cluster.
"""

import sys

from rayfcp.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
