"""Python that PyTorch calls from C++ in the middle of an op, which Dynamo must run and not compile.

After a graph break Dynamo compiles every Python frame until the function ends, also those that the dispatcher, autograd
and saved-tensor hooks call: another graph for every shape, and copies for backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

_Function = TypeVar("_Function", bound=Callable[..., Any])


def not_traced(function: _Function, inner: str = "SKIP") -> _Function:
    """`function` itself; Dynamo skips its frames and those that begin while one runs, unless `inner` is DEFAULT."""
    pieces: Any = eval_frame
    actions = (getattr(pieces._FrameAction, name) for name in ("SKIP", inner))
    pieces.set_code_exec_strategy(function.__code__, pieces._FrameExecStrategy(*actions))
    return function


def breaks_graph(function: _Function, inner: str = "SKIP") -> _Function:
    """`not_traced`; a graph ends before a call of it. As `torch.compiler.disable`, which would import Dynamo."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return not_traced(function, inner)
