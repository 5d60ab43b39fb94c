"""What every test finds: a machine whose CPU has native bf16, whatever this one has.

Which kernels serve a format depends on the CPU's instructions (`mezzo.pytorch.machine.native_formats`), and no
result of a test may. Tests of other machines set the variable themselves; `test_machine.py` takes it away.
"""

from __future__ import annotations

import os

os.environ.setdefault("MEZZO_ASSUME_NATIVE", "bf16")
