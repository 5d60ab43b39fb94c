"""`params=`, `masters=` and `state=` of MixedPrecision: first the policy that they ask for, then the model and the
optimizer put into it.

Choosing touches nothing, so that everything a user can get wrong in words is refused before a weight is
rounded. Putting it into force is undone if it fails halfway.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.core.errors import UnsupportedPrecisionError, UsageError, unknown_name
from mezzo.core.formats import dtype_name
from mezzo.core.policy import Policy
from mezzo.pytorch import auto
from mezzo.pytorch.dtypes import name_of
from mezzo.pytorch.optim.adopt import Adopted, adopt
from mezzo.pytorch.optim.fused import FusedOptimizer
from mezzo.pytorch.optim.with_masters import WithMasters, with_masters
from mezzo.pytorch.step import parameters
from mezzo.pytorch.training.accumulation import SIXTEEN_BITS
from mezzo.pytorch.weights.lowering import lower_weights, take_master

# The words of `weights=`, as it was up to version 0.1 -> the keyword that says it now.
_FORMER = {
    "fp32": {"params": "fp32"},
    "split": {"masters": "split"},
    "split8": {"masters": "split8"},
    "masters": {"masters": "fp32"},
}


def former(weights: str, params: str | None, masters: str | None) -> tuple[str | None, str | None]:
    """`params` and `masters` for a former `weights=`, with a DeprecationWarning that shows them.

    Raises:
        UsageError: an unknown word, or `params` or `masters` as well.
    """
    if weights not in _FORMER:
        raise unknown_name("kind of weights", str(weights), _FORMER, where="MixedPrecision: ")
    words = _FORMER[weights]
    now = ", ".join(f"{key}={word!r}" for key, word in words.items())
    if params is not None or masters is not None:
        raise UsageError(f"MixedPrecision: weights={weights!r} is now {now}. Leave weights out.")
    warnings.warn(
        f"MixedPrecision: weights={weights!r} is deprecated. Use {now}.", DeprecationWarning, stacklevel=3
    )
    return words.get("params"), words.get("masters")


def chosen(
    policy: Policy, params: str | None, masters: str | None, state: str | None, device_type: str
) -> tuple[Policy, str]:
    """The policy with the parameters, masters and optimizer state that were asked for.

    The words mean what they mean in the policy's text. `auto` with masters is settled here, without a trial: FP32
    masters go with either 16-bit format, so the hardware decides; the others go with bf16.

    Args:
        policy: as the user gave it.
        params, masters, state: words of `Policy` (a `torch.dtype` for a format), or None for the policy's own.
        device_type: ``"cpu"``, ``"cuda"``, ...

    Returns:
        The policy, and why `auto` became what it is ("" where it did not).

    Raises:
        UsageError: storage that the precision can't have, or that contradicts the policy.
        UnsupportedPrecisionError: `auto` with masters, where the hardware has no 16-bit format.
    """
    if state is not None:
        policy = replace(policy, state=dtype_name(state))
    if params is None and masters is None:
        return _settled(policy)
    lowered = policy.params != "fp32"
    if params is None:
        params = policy.params if lowered else "auto"
    params = dtype_name(params)
    if masters is None:
        masters = policy.masters if lowered and params == policy.params else "auto"
    compute, why = policy.compute, ""
    if compute == "auto" and params == "auto" and masters == "fp32":
        found, why = auto.resolve(policy, device_type)
        compute = found.compute
        if found.activations == "fp32":
            raise UnsupportedPrecisionError(
                "MixedPrecision: masters='fp32' stores parameters in the compute format, and this "
                f"{device_type} device has no fast 16-bit format. Name one (precision='bf16'), or leave masters out."
            )
    elif compute == "auto" and params == "auto" and masters != "auto":
        compute, why = "bf16", f"bf16: masters={masters!r} go with bf16 parameters, so nothing was timed"
    asked = replace(policy, compute=compute, params=params, masters=masters)
    if lowered and (asked.params, asked.masters) != (policy.params, policy.masters):
        raise UsageError(
            f"MixedPrecision: policy '{policy}' says params={policy.params}, masters={policy.masters}, and the "
            f"arguments say params={asked.params}, masters={asked.masters}. Leave one of the two out."
        )
    settled, settled_why = _settled(asked)
    return settled, why or settled_why


def _settled(policy: Policy) -> tuple[Policy, str]:
    """A policy whose own words store parameters in 16 bits, with its compute known.

    Raises:
        UsageError: it computes in another format than it stores.
    """
    if policy.params in ("fp32", policy.activations):
        return policy, ""
    if policy.compute == "auto":
        why = f"{policy.params}: parameters are stored in it, so nothing was timed"
        return replace(policy, compute=policy.params), why
    raise UsageError(
        f"MixedPrecision: policy '{policy}' stores parameters in {policy.params} and computes in "
        f"{policy.compute}, which would not see the rest of them. Use compute={policy.params}."
    )


_NEEDS_FUSED = (
    "MixedPrecision: release_gradients=True steps inside backward, a parameter at a time, which only a "
    "mezzo.optim optimizer can do (or torch.optim.AdamW, Adam or SGD, which is made into one), and this is "
    "{got}."
)


def apply(
    model: nn.Module,
    optimizer: Optimizer,
    policy: Policy,
    others: Iterable[Tensor] = (),
    *,
    fused: bool = False,
) -> Optimizer:
    """Store the model's weights as the policy says, and give them an optimizer that knows their masters.

    Args:
        model: FP32, or 16-bit already.
        optimizer: a FusedOptimizer of these modes, a WithMasters, one that was adopted before, or one of
            torch's to be adopted.
        policy: from `chosen`.
        others: parameters that somebody else trains; they stay as they are.
        fused: whether only a FusedOptimizer will do.

    Returns:
        The optimizer whose `step` is to be called.

    Raises:
        UsageError: the optimizer can't have such weights, or can't be fused. Model and optimizer are as before.
    """
    own = own_optimizer(optimizer)
    if isinstance(own, FusedOptimizer):
        _modes_agree(own, policy)
    elif has_separate_masters(own) and (policy.masters != "fp32" or policy.state != "fp32"):
        raise UsageError(
            f"MixedPrecision: the optimizer keeps separate FP32 masters, and policy '{policy}' says "
            f"masters={policy.masters}, state={policy.state}. Use masters='fp32', or hand in "
            "torch.optim.AdamW, Adam or SGD."
        )
    elif has_separate_masters(own) and fused:
        raise UsageError(_NEEDS_FUSED.format(got="with_masters(...)"))
    lowered = _lower(model, policy, {id(p) for p in others}) if policy.params != "fp32" else []
    try:
        plain = policy.params == "fp32" and policy.state == "fp32"
        if isinstance(own, FusedOptimizer) or has_separate_masters(own) or (plain and not fused):
            return own
        try:
            return adopt(optimizer, masters=policy.masters, state=policy.state)
        except UsageError as error:
            if fused:
                raise UsageError(f"{_NEEDS_FUSED.format(got=type(optimizer).__name__)} {error}") from None
            if policy.masters == "fp32" and policy.state == "fp32":
                return with_masters(optimizer)
            raise
    except BaseException:
        raise_weights(lowered)
        raise


def has_16_bit(optimizer: Optimizer) -> bool:
    """Whether an optimizer has 16-bit parameters."""
    return any(param.dtype in SIXTEEN_BITS for param in parameters(optimizer))


def stored_as(optimizer: Optimizer) -> tuple[str, str]:
    """The format of the parameters and the kind of their masters, in a policy's words."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.dtype in SIXTEEN_BITS:
                return name_of(param.dtype), group.get("masters", "fp32")
    return "fp32", "fp32"


def clears_plainly(optimizer: Optimizer) -> bool:
    """Whether `zero_grad(set_to_none=True)` only sets every parameter's gradient to None."""
    own = own_optimizer(optimizer)
    return (
        type(own).zero_grad is Optimizer.zero_grad
        and "zero_grad" not in vars(own)
        and "zero_grad" not in vars(optimizer)
    )


def own_optimizer(optimizer: Optimizer) -> Optimizer:
    """The optimizer behind an adopted one's alias; any other is its own."""
    return optimizer.fused if isinstance(optimizer, Adopted) else optimizer


def has_separate_masters(optimizer: Optimizer) -> bool:
    """Whether it is a WithMasters, or the optimizer inside one."""
    return isinstance(optimizer, WithMasters) or hasattr(optimizer.step, "_goes_through_masters")


def raise_weights(lowered: Iterable[Tensor]) -> None:
    """Make parameters FP32 again, to the last bit, whose masters no optimizer has taken yet."""
    for param in lowered:
        master = take_master(param)
        grad, param.grad = param.grad, None
        param.data = param.detach().float() if master is None else master  # 16 bits held it exactly
        if grad is not None:
            param.grad = grad.float()


def _lower(model: nn.Module, policy: Policy, others: set[int]) -> list[Tensor]:
    keep = [name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in others]
    names = lower_weights(model, policy, keep=keep)
    lowered: list[Tensor] = [model.get_parameter(name) for name in names]
    if lowered and isinstance(model, nn.parallel.DistributedDataParallel):
        raise_weights(lowered)
        raise UsageError(
            "MixedPrecision: DistributedDataParallel has laid out its buckets for FP32 gradients, and these "
            f"weights would become {policy.params}. Lower them before you wrap the model: "
            f"mezzo.lower_weights(model, {policy.params!r})."
        )
    return lowered


def _modes_agree(optimizer: FusedOptimizer, policy: Policy) -> None:
    for group in optimizer.param_groups:
        masters, state = group["masters"], group["state"]
        if policy.params != "fp32" and masters != policy.masters:
            raise UsageError(
                f"MixedPrecision: policy '{policy}' wants masters={policy.masters!r}, and this "
                f"{type(optimizer).__name__} has masters={masters!r}. Make it with "
                f"masters={policy.masters!r}, or hand in torch.optim.AdamW, Adam or SGD."
            )
        if policy.state not in ("fp32", state):
            raise UsageError(
                f"MixedPrecision: policy '{policy}' wants state={policy.state!r}, and this "
                f"{type(optimizer).__name__} has state={state!r}. Make it with state={policy.state!r}, or "
                "hand in torch.optim.AdamW, Adam or SGD."
            )


def formats_agree(optimizer: Optimizer, policy: Policy, why: str = "") -> tuple[Policy, str]:
    """The policy, once 16-bit weights that are there already have been held against it.

    Returns:
        It, with a compute that was `auto` settled by such weights; and why it became what it is.

    Raises:
        UsageError: weights of another 16-bit format than is computed in, or without masters to be had.
    """
    own = own_optimizer(optimizer)
    has_masters = isinstance(own, FusedOptimizer) or has_separate_masters(own) or policy.params != "fp32"
    for param in parameters(own):
        if param.dtype not in SIXTEEN_BITS:
            continue
        fmt = name_of(param.dtype)
        if policy.compute == "auto":
            policy, why = policy.resolved(fmt), f"{fmt}: weights are stored in it, so nothing was timed"
        if not has_masters:
            raise UsageError(
                f"MixedPrecision: a parameter is {fmt}. Updates smaller than half a unit in its last place would "
                "be lost: keep the model FP32 (no .half(), no .bfloat16()). masters='fp32' (for bf16 also "
                "'split', 'split8') then stores it in 16 bits and keeps the FP32 values. Or keep the model as it is, "
                "and give masters= or a mezzo.optim optimizer."
            )
        if policy.activations != fmt:
            raise UsageError(
                f"MixedPrecision: a parameter is {fmt}, and policy '{policy}' computes in {policy.compute}. Use "
                f"precision={fmt!r}, or keep the model FP32."
            )
    return policy, why
