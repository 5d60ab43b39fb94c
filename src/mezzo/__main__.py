"""`python -m mezzo` is `mezzo`."""

import sys

from mezzo.cli.main import main

sys.exit(main())
