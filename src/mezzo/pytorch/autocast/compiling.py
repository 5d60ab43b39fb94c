"""Two settings of PyTorch's compiler while it compiles: the tag of its caches, and no autocast in backward passes.

A cache key has the label but not its meaning, so the tag is a hash of what each label of this process stands for. By
default a backward pass is compiled under the forward's autocast, and the products of an FP32 `linear` in a 16-bit
context would be computed in 16 bits, unlike in eager mode. (`torch.amp` has this bug.)
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from mezzo.pytorch.autocast import active_policy, patches
from mezzo.pytorch.kernels.not_traced import not_traced
from mezzo.runner.patches import ImportWatch

_DEFAULT, _OFF = "same_as_forward", "off"
_imports: ImportWatch | None = None
handler: Any = None  # of Dynamo's callbacks, once Dynamo is imported
_before: tuple[str, Any] | None = None  # the user's settings, during a compilation


def set_up() -> None:
    """Have each later compilation call `begin` and `end`. `torch._dynamo.reset` undoes this."""
    global _imports
    if handler is not None:
        if begin not in handler.start_callbacks:
            handler.register_start_callback(begin)
            handler.register_end_callback(end)
    elif _imports is None:
        _imports = ImportWatch()
        _imports.install()
        _imports.when("torch._dynamo.callback", _dynamo_imported)


def _dynamo_imported(module: ModuleType | Any) -> None:
    global handler
    handler = module.callback_handler
    set_up()
    if _imports is not None:
        _imports.remove()


@not_traced  # Dynamo holds a lock meanwhile: compiling this would deadlock
def begin(*_: object) -> None:
    """A compilation begins, or a label is made in one."""
    global _before
    import torch._functorch.config
    import torch.compiler.config as config

    if _before is None:
        patches.suspend()
        _before = config.cache_key_tag, torch._functorch.config.backward_pass_autocast
    config.cache_key_tag = _before[0] + active_policy.fingerprint()
    if _before[1] == _DEFAULT:  # what the user has set stays
        torch._functorch.config.backward_pass_autocast = _OFF


@not_traced
def end(*_: object) -> None:
    """The compilation is over: restore both settings."""
    global _before
    import torch._functorch.config
    import torch.compiler.config as config

    if _before is not None:
        config.cache_key_tag, torch._functorch.config.backward_pass_autocast = _before
        _before = None
        patches.resume()
