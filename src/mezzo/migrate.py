"""Rewrite a script that uses torch.amp, torch.cuda.amp or Apex so that it uses Mezzo: the smallest correct change.

A use is a dotted name, such as `torch.cuda.amp.autocast`, whose first word an import of the script binds. An import of
the library's own name (`from torch.amp import autocast`) is redirected to Mezzo, and its uses stay. A use through
`import torch` becomes `mezzo.amp.autocast`. A use that may mean something else is left alone, with the reason.
"""

from __future__ import annotations

import difflib
import io
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

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

_SWITCHES = re.compile(r"torch\.(cpu\.amp\.\w+|set_autocast_(\w*enabled|\w*dtype))")
_AUTOCAST = matchers.Name("autocast")


class LeftAlone(NamedTuple):
    """A use that was not changed: where, why, and what to do by hand."""

    line: int
    code: str
    reason: str
    fix: str


class Migration(NamedTuple):
    """A script before and after, as bytes, and what was left alone."""

    before: bytes
    after: bytes
    left: tuple[LeftAlone, ...]
    # Lines of an autocast that was off on a computer without CUDA, and is on there now.
    on_cpu: tuple[int, ...]

    def diff(self, name: str) -> str:
        """A unified diff, which `patch -p0` applies; empty where nothing changes."""
        texts = (text.decode("utf-8", "surrogateescape") for text in (self.before, self.after))
        old, new = ([*io.StringIO(text, newline="\n")] for text in texts)
        end = "\n\\ No newline at end of file\n"
        lines = difflib.unified_diff(old, new, name, name)
        return "".join(line if line[-1] == "\n" else line + end for line in lines)


def migrate(source: bytes, name: str) -> Migration:
    """What a script becomes; UsageError if it is not Python."""
    try:
        module = cst.parse_module(source)
    except (cst.ParserSyntaxError, UnicodeDecodeError, SyntaxError) as error:
        where = f" line {error.raw_line}" if isinstance(error, cst.ParserSyntaxError) else ""
        fix = f"Run `python {name}` to see the error."
        raise UsageError(f"{name}{where}: not readable as Python. {fix}") from error
    plan = _Plan(metadata.MetadataWrapper(module, unsafe_skip_copy=True))
    after = plan.after().encode(module.encoding) if plan.edits else source
    left = tuple(sorted(plan.left, key=lambda one: one.line))
    return Migration(source, after, left, tuple(sorted(plan.on_cpu.difference(one.line for one in left))))


class _Ours(NamedTuple):
    """What a dotted name of torch or Apex is in Mezzo; `name` is empty for a module, and `rest` its attributes."""

    module: str
    name: str
    rest: str

    def __str__(self) -> str:
        return self.module + f".{self.name}" * bool(self.name) + self.rest


def _ours(dotted: str) -> _Ours | None:
    found = _THEIRS.fullmatch(re.sub(r"^torch\.(autocast|GradScaler)\b", r"torch.amp.\1", dotted))
    if found is None:
        return None
    theirs, name, rest = found.groups(default="")
    return _Ours("mezzo." + theirs.removeprefix("torch.").removeprefix("cuda."), name, rest)


class _Plan:
    """What to change in a module."""

    def __init__(self, wrapper: metadata.MetadataWrapper) -> None:
        self.left: list[LeftAlone] = []
        self.on_cpu: set[int] = set()
        self.edits: list[tuple[int, int, str]] = []  # the text for a span of the script's UTF-8 bytes
        self._module, self._code = wrapper.module, wrapper.module.code.encode()
        self._spans = wrapper.resolve(metadata.ByteSpanPositionProvider)
        self._parents = wrapper.resolve(metadata.ParentNodeProvider)
        self._stay: dict[str, int] = {}  # their names of which a use is left alone, with its line
        self._changed: list[Any] = []  # uses to change unless their imports stay, with these and the edits
        self._lacking: set[cst.CSTNode] = set()  # imports of torch where mezzo.amp is needed too
        uses: dict[cst.CSTNode, Any] = {}  # with their scopes
        for scope in {*wrapper.resolve(metadata.ScopeProvider).values()}:
            for access in scope.accesses if scope else ():
                if access.node in self._parents:  # else it is in an annotation in quotes
                    uses[self._dotted(access.node)] = scope
        tests = matchers.Call(func=matchers.Name("isinstance") | matchers.Name("issubclass"))
        found = [one for one in matchers.findall(wrapper, tests) if matchers.findall(one, _AUTOCAST)]
        self._tested = min(map(self._line, found), default=0)  # no object of another class passes this test
        for use in sorted(uses, key=self._span):
            self._decide(use, uses[use])
        for use, imported, edits in self._changed:
            if line := next((self._stay[name] for name in imported if name in self._stay), None):
                self._leave(use, f"line {line} needs the import as it is", "change that line first")
            else:
                self.edits += edits
        for statement in matchers.findall(wrapper, matchers.Import() | matchers.ImportFrom()):
            self._redirect(statement)
            if statement in self._lacking:
                at = self._span(statement)[0]
                self.edits.append((at, at, "import mezzo.amp" + self._between(statement)))

    def after(self) -> str:
        code = self._code
        for start, end, text in sorted(self.edits, reverse=True):
            code = code[:start] + text.encode() + code[end:]
        return code.decode()

    def _span(self, node: cst.CSTNode) -> tuple[int, int]:
        span = self._spans[node]
        return span.start, span.start + span.length

    def _dotted(self, node: cst.CSTNode) -> cst.CSTNode:
        """The longest dotted name that begins with the first word of this one."""
        while isinstance(parent := self._parents[node], cst.Attribute) and parent.value is node:
            node = parent
        return node

    def _decide(self, use: cst.CSTNode, scope: Any) -> None:
        """Plan the change of one use: of the use itself, or of its import."""
        word = _text(use).partition(".")[0]
        imports = [one for one in scope[word] if isinstance(one, metadata.ImportAssignment)]
        names, imported = (
            sorted({found.name for one in imports for found in one.get_qualified_names_for(text)})
            for text in (_text(use), word)
        )
        ours = [_ours(name) for name in names]
        if any(map(_SWITCHES.fullmatch, names)):
            fix = "use a torch.amp.autocast(device_type) context with it first"
            self._leave(use, "Mezzo has no such function", fix)
        if not any(ours):
            return
        if why := self._other_meaning(scope, word) or _absent(ours) or self._unfit(use, names):
            self._leave(use, *why)
            self._stay = {**dict.fromkeys(imported, self._line(use)), **self._stay}
        elif any(map(_ours, imported)):
            self._changed.append((use, imported, self._device_type(use, names)))
        else:  # through torch
            self.edits += [(*self._span(use), str(ours[0])), *self._device_type(use, names)]
            if "mezzo" not in scope:
                self._lacking.add(min((one.node for one in imports), key=self._span))

    def _between(self, statement: cst.CSTNode) -> str:
        """What goes between this statement and another one on the same level."""
        line, start = self._parents[statement], self._span(statement)[0]
        if not isinstance(line, cst.SimpleStatementLine) or len(line.body) > 1:
            return "; "
        before = self._code[:start]
        return self._module.default_newline + before[before.rfind(b"\n") + 1 :].decode()

    def _redirect(self, statement: Any) -> None:
        """Import from Mezzo what it has, if no use stays."""
        source = "" if isinstance(statement, cst.Import) else _text(statement.module)
        if getattr(statement, "relative", ()):
            return
        if isinstance(statement.names, cst.ImportStar):
            if _ours(source):
                fix = "import the names that the script uses"
                self._leave(statement, "a star import hides its names", fix)
            return
        parts: dict[str, list[cst.ImportAlias]] = {}
        for alias in statement.names:
            name = _text(alias.name)
            word = _text(alias.asname.name) if alias.asname else name.partition(".")[0]
            target = f"{source}.{name}" if source else name if alias.asname else word
            ours = None if target in self._stay else _ours(target)
            if ours and (why := _absent([ours])):
                self._leave(statement, *why)
                ours = None
            if ours and not source:
                self.edits.append((*self._span(alias), f"{ours} as {word}"))
            parts.setdefault(str(ours).rpartition(".")[0] if ours else source, []).append(alias)
        if not source or [*parts] == [source]:
            return
        if len(parts) == 1:
            self.edits.append((*self._span(statement.module), min(parts)))
            return
        made = []
        for module, names in sorted(parts.items()):
            names[-1] = names[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
            new = statement.with_changes(module=cst.parse_expression(module), names=names)
            made.append(self._module.code_for_node(new))
        self.edits.append((*self._span(statement), self._between(statement).join(made)))

    def _other_meaning(self, scope: Any, word: str) -> tuple[str, str] | None:
        for other in scope[word]:
            if isinstance(other, metadata.Assignment) and not isinstance(other, metadata.ImportAssignment):
                assign = self._parents.get(self._parents[other.node])
                # None after an import that failed is fine.
                if not (isinstance(assign, cst.Assign) and _text(assign.value) == "None"):
                    where = f"{word} is bound to something else on line {self._line(other.node)}"
                    return where, "rename one of the two"
        return None

    def _unfit(self, use: cst.CSTNode, names: list[str]) -> tuple[str, str] | None:
        name, parent = names[0].rpartition(".")[2], self._parents[use]
        args = parent.args if isinstance(parent, cst.Call) and parent.func is use else None
        call: Any = self._parents[parent]
        is_first = isinstance(call, cst.Call) and parent in call.args[:1]
        is_partial = is_first and _text(call.func).endswith("partial")
        if name == "autocast" and (line := self._tested):
            return f"line {line} tests for its class, and Mezzo's is a function", "change that test first"
        if name == "autocast" and args is None and not (is_partial or isinstance(parent, cst.Decorator)):
            return "Mezzo's autocast is a function, not a class", "call it here, or change it by hand"
        if name == "GradScaler" and isinstance(self._parents[parent], cst.ClassDef):
            return "Mezzo's GradScaler is another class than PyTorch's", "change it by hand, and test it"
        if (added := self._device_type(use, names)) and not all("cuda" in one for one in names):
            code = f"torch.amp.{name}({added[0][2].strip('(), ')})"
            return "Mezzo needs a device type here", f"use {code} with it first"
        return None

    def _device_type(self, use: cst.CSTNode, names: list[str]) -> list[tuple[int, int, str]]:
        """The edit that adds the device type, which torch.cuda.amp does not take and mezzo.amp needs."""
        name, parent = names[0].rpartition(".")[2], self._parents[use]
        call = parent if isinstance(parent, cst.Call) and parent.func is use else None
        args, text = call.args if call else (), 'device_type="cuda"'
        if "cuda" not in "".join(names):
            return []
        if name == "autocast":
            self.on_cpu.add(self._line(use))
        is_scale = bool(args) and args[0].keyword is None and args[0].star != "**"
        if name == "GradScaler" and is_scale and not isinstance(args[0].value, cst.SimpleString):
            at, text = self._span(args[0])[0], '"cuda", '
        elif not name.startswith("custom_") or "device_type" in (_text(one.keyword) for one in args):
            return []
        elif args:
            at, text = self._span(args[-1])[1], f", {text}"
        elif call:
            at = self._span(call)[1] - 1
        else:
            at, text = self._span(use)[1], f"({text})"
        return [(at, at, text)]

    def _leave(self, node: cst.CSTNode, reason: str, fix: str) -> None:
        code = self._module.code_for_node(node).strip().splitlines()[0]
        self.left.append(LeftAlone(self._line(node), code, reason, fix))

    def _line(self, node: cst.CSTNode) -> int:
        return self._code.count(b"\n", 0, self._span(node)[0]) + 1


def _absent(found: Sequence[_Ours | None]) -> tuple[str, str] | None:
    """Why a name with these imports has no equivalent, and what to do by hand."""
    ours = found[0]
    if ours is None or any(one != ours for one in found):
        return "different imports bind this name", "keep one of them"
    names = NAMES[ours.module].split()
    if ours.name not in ("", *names) and not ours.name.startswith("__"):
        return f"{ours.module} does not have it", f"{ours.module} has {', '.join(names)}"
    return None


def _text(node: cst.CSTNode | None) -> str:
    """A dotted name without its spaces; '' for other code."""
    return get_full_name_for_node(node) or "" if node else ""
