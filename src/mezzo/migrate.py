"""Rewrite a script that uses torch.amp, torch.cuda.amp or Apex so that it uses Mezzo: the smallest correct change.

A use is a dotted name, such as `torch.cuda.amp.autocast`, whose first word an import of the script binds. An import of
the library's own name (`from torch.amp import autocast`) is redirected to Mezzo, and its uses stay. A use through
`import torch` becomes `mezzo.amp.autocast`. A use that may mean something else is left alone, with the reason.
"""

from __future__ import annotations

import difflib
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import libcst as cst
from libcst import matchers, metadata
from libcst.helpers import get_full_name_for_node

from mezzo.core.errors import UsageError

NAMES = {
    "mezzo.amp": "GradScaler autocast custom_bwd custom_fwd is_autocast_available",
    "mezzo.apex": "amp normalization optimizers parallel",
    "mezzo.apex.amp": "initialize scale_loss master_params state_dict load_state_dict init disable_casts _amp_state "
    "half_function float_function promote_function "
    "register_half_function register_float_function register_promote_function",
    "mezzo.apex.normalization": "FusedLayerNorm FusedRMSNorm MixedFusedLayerNorm MixedFusedRMSNorm",
    "mezzo.apex.optimizers": "FusedAdam FusedSGD",
    "mezzo.apex.parallel": "DistributedDataParallel SyncBatchNorm convert_syncbn_model",
}
"""Our modules, and the names that scripts may use of them."""

# Their module, a submodule of it, the name there, and its attributes.
_THEIRS = re.compile(
    r"(torch(?:\.cuda)?\.amp|apex(?:\.(?:amp|normalization|optimizers|parallel)(?!\w))?)"
    r"(?:\.(?:autocast_mode|grad_scaler|fused_\w+)(?=\.))?(?:\.(\w+)(.*))?"
)
_Reason: TypeAlias = tuple[str, str]  # why a use is left alone, and what to do by hand
_Edit: TypeAlias = tuple[int, int, str]  # the text for a span of the script's UTF-8 bytes


@dataclass(frozen=True)
class LeftAlone:
    """A use that was not changed: where, why, and what to do by hand."""

    line: int
    code: str
    reason: str
    fix: str


@dataclass(frozen=True)
class Migration:
    """A script before and after, as bytes, and what was left alone."""

    before: bytes
    after: bytes
    left: tuple[LeftAlone, ...]

    def diff(self, name: str) -> str:
        """A unified diff, which `patch -p0` applies; empty where nothing changes."""
        texts = (text.decode("utf-8", "surrogateescape") for text in (self.before, self.after))
        old, new = ([*io.StringIO(text, newline="\n")] for text in texts)
        lines = difflib.unified_diff(old, new, name, name)
        return "".join(
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
        )


def migrate(source: bytes, name: str) -> Migration:
    """What a script becomes; UsageError if it is not Python."""
    try:
        module = cst.parse_module(source)
    except (cst.ParserSyntaxError, UnicodeDecodeError, SyntaxError) as error:
        where = f" line {error.raw_line}" if isinstance(error, cst.ParserSyntaxError) else ""
        raise UsageError(
            f"{name}{where}: not readable as Python. Run `python {name}` to see the error."
        ) from error
    plan = _Plan(metadata.MetadataWrapper(module, unsafe_skip_copy=True))
    after = plan.after().encode(module.encoding) if plan.edits else source
    return Migration(source, after, tuple(sorted(plan.left, key=lambda one: one.line)))


@dataclass(frozen=True)
class _Ours:
    """What a dotted name of theirs is in Mezzo."""

    module: str
    name: str  # empty for the module itself
    rest: str  # its attributes
    is_cuda: bool = field(compare=False)  # the calls of torch.cuda.amp leave the device type out

    @property
    def full(self) -> str:
        return self.module + f".{self.name}" * bool(self.name) + self.rest


def _ours(dotted: str) -> _Ours | None:
    found = _THEIRS.fullmatch(re.sub(r"^torch\.(autocast|GradScaler)\b", r"torch.amp.\1", dotted))
    if found is None:
        return None
    theirs, name, rest = found.groups(default="")
    return _Ours("mezzo." + theirs.removeprefix("torch.").removeprefix("cuda."), name, rest, "cuda" in theirs)


@dataclass(frozen=True, eq=False)
class _Binding:
    """What an import statement binds to a name; `target` is the dotted name there."""

    statement: cst.Import | cst.ImportFrom
    alias: cst.ImportAlias
    target: str


class _Plan:
    """What to change in a module."""

    def __init__(self, wrapper: metadata.MetadataWrapper) -> None:
        self.left: list[LeftAlone] = []
        self.edits: list[_Edit] = []
        self._module, self._code = wrapper.module, wrapper.module.code.encode()
        self._spans = wrapper.resolve(metadata.ByteSpanPositionProvider)
        self._parents = wrapper.resolve(metadata.ParentNodeProvider)
        self._bindings: dict[tuple[Any, str], list[_Binding]] = {}  # by scope and name
        self._imports: dict[Any, dict[cst.ImportAlias, str]] = {}  # the modules of those that are redirected
        scopes = wrapper.resolve(metadata.ScopeProvider)
        for node in matchers.findall(wrapper, matchers.Import() | matchers.ImportFrom()):
            self._bind(scopes[node], node)
        uses: dict[tuple[Any, str], dict[cst.CSTNode, None]] = {}
        for access in (one for scope in {*scopes.values()} if scope for one in scope.accesses):
            if access.node in self._parents:  # else it is in an annotation in quotes
                use, word = self._dotted(access.node)
                for key in {(one.scope, word) for one in access.scope[word]} & self._bindings.keys():
                    uses.setdefault(key, {})[use] = None
        for key in self._bindings:
            self._decide(*key, uses.get(key, ()))
        for statement, modules in self._imports.items():
            self._redirect(statement, modules)

    def after(self) -> str:
        """The script with all edits."""
        made, at = list[bytes](), 0
        for start, end, text in sorted(self.edits, key=lambda edit: edit[:2]):
            made += [self._code[at:start], text.encode()]
            at = end
        return b"".join([*made, self._code[at:]]).decode()

    def _bind(self, scope: Any, node: Any) -> None:
        module = "" if isinstance(node, cst.Import) else f"{_text(node.module)}."
        if isinstance(node.names, cst.ImportStar):
            if _ours(module[:-1]):
                fix = "import the names that the script uses"
                self._leave(node, "a star import does not show its names", fix)
        elif not (module and node.relative):
            for alias in node.names:
                target = word = _text(alias.name)
                if alias.asname:
                    word = _text(alias.asname.name)
                elif not module:
                    target = word = target.partition(".")[0]  # import torch.cuda.amp
                self._bindings.setdefault((scope, word), []).append(_Binding(node, alias, module + target))

    def _span(self, node: cst.CSTNode) -> tuple[int, int]:
        span = self._spans[node]
        return span.start, span.start + span.length

    def _dotted(self, node: cst.CSTNode) -> tuple[cst.CSTNode, str]:
        """The longest dotted name that begins with the first word of this one, and that word."""
        word = _text(node).partition(".")[0]
        while isinstance(parent := self._parents[node], cst.Attribute) and parent.value is node:
            node = parent
        return node, word

    def _decide(self, scope: Any, word: str, uses: Iterable[cst.CSTNode]) -> None:
        """Plan the changes of one imported name: its imports, or else each use by itself."""
        bindings = self._bindings[scope, word]
        imported: list[Any] = [_ours(one.target) for one in bindings]
        found: dict[cst.CSTNode, list[Any]] = {
            use: [_ours(one.target + _text(use)[len(word) :]) for one in bindings] for use in uses
        }
        found = {use: ours for use, ours in found.items() if any(ours)}
        if not any(imported) and not found:
            return
        if why := self._other_meaning(scope, word) or (any(imported) and _absent(imported)):
            self._leave(bindings[0].statement, *why)
            return
        edits: dict[cst.CSTNode, list[_Edit]] = {}
        for use, ours in found.items():
            if why := _absent(ours) or self._unfit(use, ours):
                self._leave(use, *why)
            else:
                edits[use] = self._device_type(use, ours)
        if not any(imported):
            edits = {use: [*more, (*self._span(use), found[use][0].full)] for use, more in edits.items()}
            if edits and (scope, "mezzo") not in self._bindings:
                self._import(bindings)
        elif len(edits) < len(found):
            return
        for one, target in zip(bindings, imported):
            if target is not None:
                self._imports.setdefault(one.statement, {})[one.alias] = target.full
        self.edits += [edit for more in edits.values() for edit in more]

    def _import(self, bindings: list[_Binding]) -> None:
        """Import mezzo.amp before the first import of a name in each block."""
        blocks = {self._parents[self._parents[one.statement]]: one.statement for one in reversed(bindings)}
        for statement in blocks.values():
            at = self._span(statement)[0]
            self.edits.append((at, at, "import mezzo.amp" + self._between(statement)))

    def _between(self, statement: cst.CSTNode) -> str:
        """What goes between this statement and one beside it."""
        line, start = self._parents[statement], self._span(statement)[0]
        if not isinstance(line, cst.SimpleStatementLine) or len(line.body) > 1:
            return "; "
        return (
            self._module.default_newline + self._code[self._code.rfind(b"\n", 0, start) + 1 : start].decode()
        )

    def _redirect(self, statement: Any, moved: dict[cst.ImportAlias, str]) -> None:
        """Import these names from Mezzo."""
        if isinstance(statement, cst.Import):
            for alias, module in moved.items():
                name = alias.asname.name if alias.asname else alias.name
                self.edits.append((*self._span(alias), f"{module} as {_text(name).partition('.')[0]}"))
            return
        parts: dict[str, list[cst.ImportAlias]] = {}
        for alias in statement.names:
            module = moved.get(alias, "").rpartition(".")[0] or _text(statement.module)
            parts.setdefault(module, []).append(alias)
        if len(parts) == 1:
            self.edits.append((*self._span(statement.module), module))
            return
        made = []
        for module, names in sorted(parts.items()):
            names[-1] = names[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
            new = statement.with_changes(module=cst.parse_expression(module), names=names)
            made.append(self._module.code_for_node(new))
        self.edits.append((*self._span(statement), self._between(statement).join(made)))

    def _other_meaning(self, scope: Any, word: str) -> _Reason | None:
        for other in scope[word]:
            is_import = isinstance(other, metadata.ImportAssignment)
            if isinstance(other, metadata.Assignment) and not is_import and not self._is_none(other.node):
                where = f"{word} is bound to something else on line {self._line(other.node)}"
                return where, "rename one of the two"
        return None

    def _is_none(self, node: cst.CSTNode) -> bool:
        """Whether a name is assigned None here, as after an import that failed."""
        assign = self._parents.get(self._parents[node])
        return isinstance(assign, cst.Assign) and _text(assign.value) == "None"

    def _unfit(self, use: cst.CSTNode, ours: Sequence[_Ours]) -> _Reason | None:
        name, parent = ours[0].name, self._parents[use]
        if name == "autocast" and not _is_called(use, parent) and not isinstance(parent, cst.Decorator):
            return "Mezzo's autocast is a function, not a class", "call it here, or change it by hand"
        if name == "GradScaler" and isinstance(self._parents[parent], cst.ClassDef):
            return "Mezzo's GradScaler is another class than PyTorch's", "change it by hand, and test it"
        if name.startswith("custom_") and len({one.is_cuda for one in ours}) > 1:
            return "the imports take different arguments", "keep only the import from torch.amp"
        return None

    def _device_type(self, use: cst.CSTNode, ours: Sequence[_Ours]) -> list[_Edit]:
        """The device type for those calls of torch.cuda.amp where ours needs one."""
        name, parent = ours[0].name, self._parents[use]
        args = getattr(parent, "args", ()) if _is_called(use, parent) else ()
        if all(one.is_cuda for one in ours):
            if name == "GradScaler" and args and args[0].keyword is None and args[0].star != "**":
                at = self._span(args[0])[0]
                return [(at, at, '"cuda", ')]
            if name.startswith("custom_"):
                at = self._span(args[-1] if args else use)[1]
                without = at if args or not _is_called(use, parent) else self._span(parent)[1]
                return [(at, without, ', device_type="cuda"' if args else '(device_type="cuda")')]
        return []

    def _leave(self, node: cst.CSTNode, reason: str, fix: str) -> None:
        code = self._module.code_for_node(node).strip().splitlines()[0]
        self.left.append(LeftAlone(self._line(node), code, reason, fix))

    def _line(self, node: cst.CSTNode) -> int:
        return self._code.count(b"\n", 0, self._span(node)[0]) + 1


def _absent(found: Sequence[_Ours | None]) -> _Reason | None:
    """Why a name with these imports has no equivalent."""
    ours = found[0]
    if ours is None or any(one != ours for one in found):
        return "different imports bind this name", "keep one of them"
    names = NAMES[ours.module].split()
    if ours.name not in ("", *names):
        return f"{ours.module} does not have it", f"{ours.module} has {', '.join(names)}"
    return None


def _is_called(use: cst.CSTNode, parent: cst.CSTNode) -> bool:
    return isinstance(parent, cst.Call) and parent.func is use


def _text(node: cst.CSTNode | None) -> str:
    """A dotted name without its spaces; '' for other code."""
    return get_full_name_for_node(node) or "" if node else ""
