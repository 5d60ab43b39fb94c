"""Python that PyTorch calls from C++ in the middle of an op, which Dynamo must run and not compile.

Once a compiled function has broken its graph, Dynamo looks at every Python frame that begins before the function is
over, whoever calls it: also at those that the dispatcher, the autograd engine and saved-tensor hooks call. Compiled,
such a frame is another graph for every shape, and what it keeps for backward is told of a tensor's copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

_Function = TypeVar("_Function", bound=Callable[..., Any])


def unseen(function: _Function) -> _Function:
    """`function` itself; its frames, and all that begin while one of them runs, are plain Python from now on.

    It is still traced where a compiled function calls it by name. What `torch.compiler.disable` would do at each
    call, done once to the code object, without a wrapper and without importing a compiler.
    """
    pieces: Any = eval_frame
    skip = pieces._FrameAction.SKIP
    code = function.__code__
    pieces.set_code_exec_strategy(code, pieces._FrameExecStrategy(skip, skip))
    return function
