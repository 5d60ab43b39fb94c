"""`params=`, `masters=` and `state=` of MixedPrecision: which policy they ask for, and applying it.

`stored` touches no model: invalid arguments are refused before a weight is rounded. `apply` undoes itself if it fails.
`where` is the caller's name for errors: that of MixedPrecision, or of an integration.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.core.errors import UnsupportedPrecisionError, UsageError, unknown_name
from mezzo.core.policy import Policy
from mezzo.core.policy_text import precision_name
from mezzo.pytorch import auto
from mezzo.pytorch.dtypes import SIXTEEN_BITS, name_of
from mezzo.pytorch.module_paths import unwrapped
from mezzo.pytorch.optim.fused import FusedOptimizer
from mezzo.pytorch.optim.with_masters import WithMasters, put_masters
from mezzo.pytorch.step import parameters
from mezzo.pytorch.training.checks import refused
from mezzo.pytorch.weights.stored_parameters import lower_weights, take_master

_HERE = "MixedPrecision"

# The words of `weights=`, as it was up to version 0.1 -> `params` and `masters`.
_FORMER = dict(fp32=("fp32", None), split=(None, "split"), split8=(None, "split8"), masters=(None, "fp32"))


def former(weights: str, params: str | None, masters: str | None) -> tuple[str | None, str | None]:
    """`params` and `masters` for a former `weights=`, with a DeprecationWarning that shows them."""
    if weights not in _FORMER:
        raise unknown_name("kind of weights", str(weights), _FORMER, where="MixedPrecision: ")
    words = _FORMER[weights]
    now = ", ".join(f"{key}={word!r}" for key, word in zip(("params", "masters"), words) if word)
    if params is not None or masters is not None:
        raise refused(
            f"weights={weights!r} is deprecated and means {now}. Remove it, and keep params and masters."
        )
    warnings.warn(
        f"MixedPrecision: weights={weights!r} is deprecated. Use {now}.", DeprecationWarning, stacklevel=4
    )
    return words


def stored(
    policy: Policy,
    params: str | None,
    masters: str | None,
    state: str | None,
    device_type: str,
    where: str = _HERE,
) -> tuple[Policy, str]:
    """The policy with the storage that was asked for (None: the policy's own), and why `auto` became what it is."""
    why = ""
    if state is not None:
        policy = replace(policy, state=precision_name(state))
    if params is not None or masters is not None:
        policy, why = _with_storage(policy, params, masters, device_type, where)
    if policy.params not in ("fp32", policy.activations):
        if policy.compute != "auto":
            raise refused(
                f"policy '{policy}' stores parameters in {policy.params} and computes in {policy.compute}. Use one "
                f"format for both: compute={policy.params}.",
                where,
            )
        why = why or f"{policy.params}: parameters are stored in it, so nothing was timed"
        policy = replace(policy, compute=policy.params)
    return policy, why


def _with_storage(
    policy: Policy, params: str | None, masters: str | None, device_type: str, where: str
) -> tuple[Policy, str]:
    """`auto` with masters needs no trial: the hardware decides for FP32 masters, the others go with bf16."""
    lowered = policy.params != "fp32"
    if params is None:
        params = policy.params if lowered else "auto"
    params = precision_name(params)
    if masters is None:
        masters = policy.masters if lowered and params == policy.params else "auto"
    compute, why = policy.compute, ""
    if compute == "auto" and params == "auto" and masters == "fp32":
        found, why = auto.resolve(policy, device_type)
        compute = found.compute
        if found.activations == "fp32":
            raise UnsupportedPrecisionError(
                f"{where}: masters='fp32' stores parameters in the compute format, and auto found no fast "
                f"16-bit format on this {device_type} device. Name one, precision='bf16', or leave masters out."
            )
    elif compute == "auto" and params == "auto" and masters != "auto":
        compute, why = "bf16", f"bf16: masters={masters!r} go with bf16 parameters, so nothing was timed"
    asked = replace(policy, compute=compute, params=params, masters=masters)
    if lowered and (asked.params, asked.masters) != (policy.params, policy.masters):
        raise refused(
            f"policy '{policy}' has params={policy.params}, masters={policy.masters}, but the arguments are "
            f"params={asked.params}, masters={asked.masters}. Remove one of the two.",
            where,
        )
    return asked, why


def with_stored_format(
    policy: Policy, why: str, optimizer: Optimizer, where: str = _HERE
) -> tuple[Policy, str]:
    """Check the policy against parameters that are 16-bit already; they settle `auto`."""
    low = [param for param in parameters(optimizer) if param.dtype in SIXTEEN_BITS]
    if low and policy.compute == "auto":
        fmt = name_of(low[0].dtype)
        policy, why = policy.resolved(fmt), f"{fmt}: weights are stored in it, so nothing was timed"
    check_format(policy, low, where)
    if low and policy.params == "fp32" and not isinstance(optimizer, (FusedOptimizer, WithMasters)):
        raise refused(
            f"a parameter is {policy.activations}, which loses updates smaller than half a unit in the last place. Use "
            "masters='fp32' (or 'split', 'split8' for bf16), or a mezzo.optim optimizer, or keep the model in FP32.",
            where,
        )
    return policy, why


def check_format(policy: Policy, params: Iterable[Tensor], where: str = _HERE) -> None:
    """Raise UsageError unless the policy computes in the format of those parameters that are stored in 16 bits."""
    for fmt in (name_of(param.dtype) for param in params if param.dtype in SIXTEEN_BITS):
        if policy.activations != fmt:
            raise refused(
                f"a parameter is {fmt}, but policy '{policy}' computes in {policy.compute}. Use '{fmt},masters="
                f"{'split' if fmt == 'bf16' else 'fp32'}' ('{fmt}' if the optimizer has masters), or model.float().",
                where,
            )


def apply(
    model: nn.Module,
    optimizer: Optimizer,
    policy: Policy,
    others: Iterable[Tensor] = (),
    *,
    fused: bool = False,
    where: str = _HERE,
) -> Optimizer:
    """Store the model's weights as the policy says, and return the optimizer whose `step` updates their masters."""
    separate = isinstance(optimizer, WithMasters)
    if isinstance(optimizer, FusedOptimizer):
        _check_storage(optimizer, policy, where)
    elif separate and (policy.masters != "fp32" or policy.state != "fp32"):
        raise refused(
            f"the optimizer keeps separate FP32 masters, but policy '{policy}' has masters={policy.masters}, "
            f"state={policy.state}. Use masters='fp32', or torch.optim.AdamW, Adam or SGD.",
            where,
        )
    elif separate and fused:
        raise _not_fused("with_masters(...)")
    lowered = _lower(model, policy, {id(p) for p in others}, where) if policy.params != "fp32" else {}
    plain = policy.params == "fp32" and policy.state == "fp32"
    if isinstance(optimizer, FusedOptimizer) or separate or (plain and not fused):
        return optimizer
    try:
        exact = policy.masters == policy.state == "fp32"
        put_masters(optimizer, policy.masters, policy.state, separate=exact and not fused)
    except BaseException as error:
        _raise_weights(lowered)
        if not isinstance(error, UsageError):
            raise
        problem = str(error).removeprefix("adopt: ")
        raise (
            _not_fused(f"{type(optimizer).__name__}: {problem}") if fused else refused(problem, where)
        ) from None
    return optimizer


def _not_fused(given: str) -> UsageError:
    return refused(
        "release_gradients=True steps one parameter at a time, inside backward, which the optimizer does not support: "
        f"{given.rstrip('.')}. Use torch.optim.AdamW, Adam or SGD, or a mezzo.optim optimizer."
    )


def stored_as(optimizer: Optimizer) -> tuple[str, str]:
    """The format of the parameters and the kind of their masters, in a policy's words."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.dtype in SIXTEEN_BITS:
                return name_of(param.dtype), group.get("masters", "fp32")
    return "fp32", "fp32"


def _raise_weights(lowered: Mapping[Tensor, Tensor | None]) -> None:
    """Make parameters FP32 again, to the last bit, whose masters no optimizer has taken yet; and their gradients."""
    for param, grad in lowered.items():
        master, param.grad = take_master(param), None
        param.data = param.detach().float() if master is None else master  # 16 bits held it exactly
        param.grad = grad


def _lower(model: nn.Module, policy: Policy, others: set[int], where: str) -> Mapping[Tensor, Tensor | None]:
    """The parameters that are 16-bit now, each with its FP32 gradient."""
    named = unwrapped(model).named_parameters(remove_duplicate=False)
    keep = [name for name, p in named if id(p) in others]
    grads = {name: None if p.grad is None else p.grad.detach() for name, p in model.named_parameters()}
    names = lower_weights(model, policy, keep=keep)
    lowered: dict[Tensor, Tensor | None] = {model.get_parameter(name): grads[name] for name in names}
    if lowered and isinstance(model, nn.parallel.DistributedDataParallel):
        _raise_weights(lowered)
        raise refused(
            "DistributedDataParallel has created its buckets for FP32 gradients. Convert the weights before wrapping "
            f"the model: mezzo.lower_weights(model, {policy.params!r}).",
            where,
        )
    return lowered


def _check_storage(optimizer: FusedOptimizer, policy: Policy, where: str) -> None:
    """Raise UsageError unless the optimizer stores masters and states as the policy says."""
    wanted = {"masters": None if policy.params == "fp32" else policy.masters, "state": policy.state}
    if policy.state == "fp32":
        wanted["state"] = None  # the policy's default: it does not ask for a format
    for group in optimizer.param_groups:
        for key, value in wanted.items():
            if value not in (None, group[key]):
                raise refused(
                    f"policy '{policy}' needs {key}={value!r}, but this {type(optimizer).__name__} has "
                    f"{key}={group[key]!r}. Create it with {key}={value!r}, or use torch.optim's of the same name.",
                    where,
                )
