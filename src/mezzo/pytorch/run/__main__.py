"""`python -m mezzo.pytorch.run REQUEST.json`: a child process that runs one request and ends as its script ended."""

import sys

from mezzo.pytorch.run.session import run
from mezzo.runner import lifecycle

if __name__ == "__main__":
    sys.exit(lifecycle.main(sys.argv[1:], run, "mezzo.pytorch.run"))
