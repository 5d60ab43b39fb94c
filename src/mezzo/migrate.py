"""Rewrite a script that uses torch.amp, torch.cuda.amp or Apex so that it uses Mezzo: the smallest correct change.

A use is a dotted name, such as `torch.cuda.amp.autocast`, whose first word an import of the script binds. An import of
the library's own name (`from torch.amp import autocast`) is redirected to Mezzo, and its uses stay. A use through
`import torch` becomes `mezzo.amp.autocast`. A use that may mean something else is left alone, with the reason.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import libcst as cst
from libcst import metadata
from libcst.helpers import get_full_name_for_node

from mezzo.core.errors import UsageError

_TORCH = ("GradScaler", "autocast", "custom_bwd", "custom_fwd", "is_autocast_available")
_APEX_AMP = (
    *("_amp_state", "disable_casts", "float_function", "half_function", "init", "initialize"),
    *("load_state_dict", "master_params", "promote_function", "register_float_function"),
    *("register_half_function", "register_promote_function", "scale_loss", "state_dict"),
)
_FUSED_NORMS = ("FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm")
NAMES = {
    "mezzo.amp": _TORCH,
    "mezzo.apex": ("amp", "normalization", "optimizers", "parallel"),
    "mezzo.apex.amp": _APEX_AMP,
    "mezzo.apex.normalization": _FUSED_NORMS,
    "mezzo.apex.optimizers": ("FusedAdam", "FusedSGD"),
    "mezzo.apex.parallel": ("DistributedDataParallel", "SyncBatchNorm", "convert_syncbn_model"),
}
"""Our modules, and the names that scripts may use of them."""

# Their module -> ours, and the device type that its calls leave out.
_MODULES = {
    "torch.amp": ("mezzo.amp", ""),
    "torch.cuda.amp": ("mezzo.amp", "cuda"),
    "torch.cpu.amp": ("mezzo.amp", "cpu"),
    **{name.removeprefix("mezzo."): (name, "") for name in NAMES if name.startswith("mezzo.apex.")},
}
# Other names of the same things.
_SAME = {
    r"^torch\.(autocast|GradScaler)\b": r"torch.amp.\1",
    r"(?<=\bamp\.)(?:autocast_mode|grad_scaler)\.(autocast|GradScaler)\b": r"\1",
    r"^apex\.(normalization|optimizers)\.fused_\w+\.": r"apex.\1.",
}
_BY_HAND = re.compile(r"torch\.set_autocast_\w+")
_IN_STRING = re.compile(r"(?:\b|^)(torch\.(c\w+\.)?amp\b|torch\.autocast\b|apex\.amp\b|from apex import)")
_ORDER = ("enabled", "dtype", "cache_enabled")  # of the arguments of torch.cuda.amp.autocast
_Dotted: TypeAlias = cst.Name | cst.Attribute
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
        old, new = (re.findall(r"[^\n]*\n|[^\n]+", text) for text in texts)
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
    return Migration(source, after, tuple(plan.left))


@dataclass(frozen=True, eq=False)
class _Binding:
    """A name that an import statement binds; `target` is its dotted name there."""

    statement: cst.Import | cst.ImportFrom
    alias: cst.ImportAlias
    target: str


def _binding(one: metadata.ImportAssignment) -> _Binding | None:
    statement = one.node
    if isinstance(statement, cst.Import | cst.ImportFrom) and not isinstance(statement.names, cst.ImportStar):
        for alias in statement.names:
            if one.as_name is (alias.asname.name if alias.asname else alias.name):
                target = _text(alias.name) if alias.asname else one.name
                if isinstance(statement, cst.Import):
                    return _Binding(statement, alias, target)
                if not statement.relative and statement.module:
                    return _Binding(statement, alias, f"{_text(statement.module)}.{_text(alias.name)}")
    return None


@dataclass(frozen=True)
class _Ours:
    """The place of a dotted name in Mezzo; `name` is empty for a module, and None if Mezzo has no such name."""

    module: str
    name: str | None
    rest: str = ""  # its attributes
    device: str = ""

    @property
    def full(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module

    @property
    def source(self) -> str:
        """What to import it from."""
        return self.module if self.name else self.module.rpartition(".")[0]

    @property
    def package(self) -> str:
        """What to import for a use of the full name."""
        return ".".join(self.module.split(".")[:2])


def _ours(dotted: str) -> _Ours | None:
    for pattern, same in _SAME.items():
        dotted = re.sub(pattern, same, dotted)
    for theirs, (module, device) in _MODULES.items():
        if dotted == theirs:
            return _Ours(module, "", device=device)
        if dotted.startswith(theirs + "."):
            name, _, rest = dotted[len(theirs) + 1 :].partition(".")
            return _Ours(module, name if name in NAMES[module] else None, rest, device)
    return _Ours("mezzo.apex", None) if dotted.startswith("apex.") else None


def _text(node: cst.CSTNode) -> str:
    """A dotted name without its spaces; that of the function for a call; '' for other code."""
    return get_full_name_for_node(node) or ""


class _RefusedError(Exception):
    """Why a use is left alone, and what to do by hand."""


class _Plan:
    """What to change in a module, by node."""

    def __init__(self, wrapper: metadata.MetadataWrapper) -> None:
        self.left: list[LeftAlone] = []
        self.edits: list[_Edit] = []
        self._code, self._newline = wrapper.module.code.encode(), wrapper.module.default_newline
        self._spans = wrapper.resolve(metadata.ByteSpanPositionProvider)
        self._imports: dict[cst.Import | cst.ImportFrom, dict[cst.ImportAlias, str]] = {}  # our modules
        self._parents = wrapper.resolve(metadata.ParentNodeProvider)
        self._positions = wrapper.resolve(metadata.PositionProvider)
        scopes = {scope for scope in wrapper.resolve(metadata.ScopeProvider).values() if scope is not None}
        self._bindings: dict[tuple[Any, str], list[_Binding]] = {}
        for one in (one for scope in scopes for one in scope.assignments):
            if isinstance(one, metadata.ImportAssignment) and (found := _binding(one)) is not None:
                self._bindings.setdefault((one.scope, one.name), []).append(found)
        uses: dict[tuple[Any, str], dict[_Dotted, None]] = {}
        for scope in scopes:
            for access in scope.accesses:
                if access.node in self._parents:  # else it is in an annotation in quotes
                    dotted, name = self._dotted(access.node)
                    for key in {(one.scope, name) for one in scope[name]} & self._bindings.keys():
                        uses.setdefault(key, {})[dotted] = None
        for key in self._bindings:
            self._decide(*key, list(uses.get(key, {})))
        for statement, modules in self._imports.items():
            self._redirect(statement, modules)
        for node in self._parents:
            self._look(node)
        self.left.sort(key=lambda one: one.line)

    def after(self) -> str:
        """The script with all edits."""
        made, at = list[bytes](), 0
        for start, end, text in sorted(self.edits, key=lambda edit: edit[:2]):
            made += [self._code[at:start], text.encode()]
            at = end
        return b"".join([*made, self._code[at:]]).decode()

    def _span(self, node: cst.CSTNode) -> tuple[int, int]:
        span = self._spans[node]
        return span.start, span.start + span.length

    def _dotted(self, node: cst.CSTNode) -> tuple[_Dotted, str]:
        """The longest dotted name that begins with the first word of this one, and that word."""
        while isinstance(node, cst.Attribute):
            node = node.value
        assert isinstance(node, cst.Name)
        name, dotted = node.value, cast(_Dotted, node)
        while isinstance(parent := self._parents[dotted], cst.Attribute) and parent.value is dotted:
            dotted = parent
        return dotted, name

    def _decide(self, scope: Any, name: str, uses: list[_Dotted]) -> None:
        """Plan the changes of one imported name: its imports, or each use by itself."""
        bindings = self._bindings[scope, name]
        imports = [ours for one in bindings if (ours := _ours(one.target)) is not None]
        found = {use: [_ours(one.target + _text(use)[len(name) :]) for one in bindings] for use in uses}
        found = {use: all_ours for use, all_ours in found.items() if any(all_ours)}
        changes: dict[_Dotted, tuple[_Ours, list[_Edit]]] = {}
        refused = False
        if imports or found:
            try:
                self._check(scope, name)
                _same([_ours(one.target) for one in bindings] if imports else imports)
            except _RefusedError as why:
                self._leave(bindings[0].statement, *why.args)
                return
        for use, all_ours in found.items():
            try:
                ours = _same(all_ours)
                changes[use] = (ours, self._arguments(use, ours, {one.device for one in all_ours if one}))
            except _RefusedError as why:
                refused = True
                self._leave(use, *why.args)
        if imports and refused:
            return
        for use, (ours, edits) in changes.items():
            start, end = self._span(use)
            self.edits += [*([] if imports else [(start, end, ours.full)]), *edits]
        if imports:
            for one, ours in zip(bindings, imports):
                module = ours.full if isinstance(one.statement, cst.Import) else ours.source
                self._imports.setdefault(one.statement, {})[one.alias] = module
        elif changes:
            packages = sorted({ours.package for ours, _ in changes.values()})
            self._import(scope, name, packages, len(changes) == len(uses), refused)

    def _import(self, scope: Any, name: str, modules: list[str], only: bool, refused: bool) -> None:
        """Plan the imports for uses that were rewritten; `only`: the name has no others."""
        blocks: dict[cst.CSTNode, list[_Binding]] = {}
        for one in self._bindings[scope, name]:
            blocks.setdefault(self._parents[self._parents[one.statement]], []).append(one)
        for block in blocks.values():
            amp = [
                one for one in block if isinstance(one.statement, cst.Import) and _ours(_text(one.alias.name))
            ]
            if only and name == "apex":
                amp, modules = block, ["mezzo.apex"]
            if amp and not refused and (amp is block or len(amp) < len(block)):  # another one imports torch
                for one in amp:
                    self._imports.setdefault(one.statement, {})[one.alias] = modules[0]
            elif (scope, "mezzo") not in self._bindings:
                self._append(block[0].statement, [f"import {module}" for module in modules])

    def _append(self, statement: cst.CSTNode, more: Sequence[str]) -> None:
        """Put statements after this one."""
        line, end, between = self._parents[statement], self._span(statement)[1], "; "
        if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1:
            start = self._span(line)[0]
            indent = self._code[self._code.rfind(b"\n", 0, start) + 1 : start].decode()
            between = self._newline + indent
            end += len(re.split(rb"[\r\n]", self._code[end:], maxsplit=1)[0])  # after a comment
        self.edits += [(end, end, between + one) for one in more]

    def _redirect(self, statement: cst.Import | cst.ImportFrom, modules: dict[cst.ImportAlias, str]) -> None:
        """Import these names from Mezzo."""
        names = list(statement.names) if not isinstance(statement.names, cst.ImportStar) else []
        if isinstance(statement, cst.Import):
            self.edits += [(*self._span(alias.name), module) for alias, module in modules.items()]
            return
        first, *others = sorted({modules.get(alias, "") for alias in names})
        if first and statement.module:
            self.edits.append((*self._span(statement.module), first))
        stays = [modules.get(alias, "") == first for alias in names]
        for at, alias in enumerate(names):
            start, end = self._span(alias)
            if not stays[at]:
                is_last = not any(stays[at:])
                span = (
                    (self._span(names[at - 1])[1], end) if is_last else (start, self._span(names[at + 1])[0])
                )
                self.edits.append((*span, ""))
        for module in others:
            moved = [
                self._code[slice(*self._span(alias))].decode()
                for alias in names
                if modules.get(alias) == module
            ]
            self._append(statement, [f"from {module} import {', '.join(moved)}"])

    def _check(self, scope: Any, name: str) -> None:
        """Raise _RefusedError if the name, or mezzo, may stand for something else."""
        for word in (name, "mezzo"):
            for other in scope[word]:
                is_import = isinstance(other, metadata.ImportAssignment)
                if isinstance(other, metadata.Assignment) and not is_import and not self._is_none(other.node):
                    line = self._line(other.node)
                    raise _RefusedError(
                        f"{word} is bound to something else on line {line}", "rename one of the two"
                    )

    def _is_none(self, node: cst.CSTNode) -> bool:
        """Whether a name is assigned None here, as after an import that failed."""
        target = self._parents.get(node)
        assign = self._parents.get(target) if isinstance(target, cst.AssignTarget) else None
        return isinstance(assign, cst.Assign) and _text(assign.value) == "None"

    def _arguments(self, node: _Dotted, ours: _Ours, devices: set[str]) -> list[_Edit]:
        """The edits of a use's arguments; _RefusedError if they are not seen."""
        parent, what = self._parents[node], ours.name
        if _is_test(node, parent):
            return []
        if not what:
            fix = f"write {ours.module}.NAME for each name that is used of it"
            raise _RefusedError(
                "the module is passed on as a value, so the uses of its names are not seen", fix
            )
        use = self._use(node)
        if use == "base" or ours.rest or (use == "type" and what == "autocast"):
            raise _RefusedError(
                f"Mezzo's {what} is another class than PyTorch's", "change it by hand, and test it"
            )
        if devices == {""} or what == "is_autocast_available" or use == "type":
            return []
        device, at = f'"{max(devices)}"', self._span(node)[1]
        if use == "decorator" and what.startswith("custom_"):
            return [(at, at, f"(device_type={device})")]
        if not isinstance(parent, cst.Call) or parent.func is not node:
            fix = f"call it here, with the arguments of torch.amp.{what}"
            raise _RefusedError("it is passed on as a value, so its arguments are not seen", fix)
        by_order = [arg for arg in parent.args if arg.keyword is None and arg.star != "**"]
        if (what == "GradScaler" and not by_order) or (what == "autocast" and len(devices) > 1):
            return []  # mezzo.amp.autocast takes the arguments of both
        if len(devices) > 1:
            raise _RefusedError("the imports take different arguments", "keep only the import from torch.amp")
        if what == "autocast" and any(arg.star for arg in by_order):
            fix = f"write the arguments out: autocast({device}, enabled=..., dtype=...)"
            raise _RefusedError("its arguments are in a list, whose length is not seen", fix)
        at = self._span(parent.args[0])[0] if parent.args else self._span(parent)[1] - 1
        after = ", " if parent.args else ""
        if what == "GradScaler":
            return [(at, at, device + after)]
        if what == "autocast":
            starts = [self._span(arg)[0] for arg in by_order]
            return [
                (at, at, device + after),
                *((start, start, f"{key}=") for start, key in zip(starts, _ORDER)),
            ]
        if by_order:
            at = self._span(by_order[-1])[1]
            return [(at, at, f", device_type={device}")]
        return [(at, at, f"device_type={device}{after}")]

    def _use(self, node: cst.CSTNode) -> str:
        """How a name is used: as a decorator, as a base of a class, as a type, or else ''."""
        parent = self._parents[node]
        if isinstance(parent, cst.Decorator):
            return "decorator"
        while not isinstance(parent, cst.BaseStatement | cst.BaseSmallStatement):
            if isinstance(parent, cst.Annotation):
                return "type"
            if isinstance(parent, cst.Call):
                return "type" if _text(parent.func) in ("isinstance", "issubclass") else ""
            parent = self._parents[parent]
        return "base" if isinstance(parent, cst.ClassDef) else ""

    def _look(self, node: cst.CSTNode) -> None:
        """Find the uses that no imported name shows: star imports, strings, autocast switched by hand."""
        if isinstance(node, cst.ImportFrom) and isinstance(node.names, cst.ImportStar):
            if not node.relative and node.module and _ours(_text(node.module)):
                self._leave(
                    node, "a star import does not show its names", "import the names that the script uses"
                )
        elif isinstance(node, cst.SimpleString) and not isinstance(self._parents[node], cst.Expr):
            text = str(node.evaluated_value)
            if _IN_STRING.search(text) and (" " not in text or "import " in text):
                self._leave(node, "the name is in a string", "change the string by hand")
        elif isinstance(node, cst.Call) and _BY_HAND.fullmatch(_text(node.func)):
            self._leave(node, "it switches autocast without a context", "use `with mezzo.autocast(...)`")

    def _leave(self, node: cst.CSTNode, reason: str, fix: str) -> None:
        code = cst.Module([]).code_for_node(node).strip().splitlines()[0]
        self.left.append(LeftAlone(self._line(node), code, reason, fix))

    def _line(self, node: cst.CSTNode) -> int:
        return int(self._positions[node].start.line)


def _same(found: Sequence[_Ours | None]) -> _Ours:
    """Ours for a name with these imports; _RefusedError if they differ, or Mezzo has no such thing."""
    ours = found[0] if found else _Ours("", "")
    if ours is None or any(
        one is None or (one.module, one.name) != (ours.module, ours.name) for one in found
    ):
        raise _RefusedError("different imports bind this name", "keep one of them")
    if ours.name is None:
        raise _RefusedError(
            f"{ours.module} does not have it", f"{ours.module} has {', '.join(NAMES[ours.module])}"
        )
    return ours


def _is_test(node: cst.CSTNode, parent: cst.CSTNode) -> bool:
    """Whether a name is only compared, as in `if amp is not None`."""
    if isinstance(parent, cst.If | cst.IfExp):
        return parent.test is node
    return isinstance(parent, cst.BooleanOperation | cst.Comparison | cst.UnaryOperation)
