"""Python that PyTorch calls from C++ in the middle of an op, which Dynamo must run and not compile.

After a graph break Dynamo compiles every Python frame until the function ends, also those that the dispatcher, autograd
and saved-tensor hooks call: another graph for every shape, and copies for backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

_Function = TypeVar("_Function", bound=Callable[..., Any])


def not_traced(function: _Function) -> _Function:
    """`function` itself; Dynamo skips its frames and those that begin while one runs."""
    pieces: Any = eval_frame
    skip = pieces._FrameAction.SKIP
    code = function.__code__
    pieces.set_code_exec_strategy(code, pieces._FrameExecStrategy(skip, skip))
    return function
