"""What a recipe names of the script or notebook that is running, as a module of its own in the folder of the run.

The module is the statements of the script's top level that define these names, and what those use: imports, functions,
classes and assignments, not the training. Its name has the digest of its text, so that it names one text forever. It is
executed on request only, or not at all where the running script defines the same."""

import ast
import hashlib
import importlib.util
import inspect
import linecache
import re
import symtable
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import psutil

from ...common.errors import CheckpointError, RecipeError
from ...common.names import script_named
from ...common.terminal import ipython_shell
from ..describe.pipeline_spec import PipelineSpec
from .convert import to_recipe

_NAME = re.compile(r"(__main__|script_[0-9a-f]{16}):(\w+)(.*)", re.DOTALL)
FILES = f"script_{'[0-9a-f]' * 16}.py"  # a pattern that no other script's name matches
_OF_A_RUN = {"fit": "trains", "parse_args": "reads the command line", "argv": "reads the command line"}
_SLACK = 2.0  # seconds by which the start of a process may be known too early
_texts: dict[str, str] = {}  # of the modules that were made here, by name


def recipe_and_files(spec: PipelineSpec) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the recipe, and the texts, by file name, of the modules that must be next to it."""
    with script_named():
        recipe = to_recipe(spec)
    files = {}
    for module, names in _named(recipe).items():
        if module == "__main__":
            text = definitions(names)
            module = _module_name(text)
            recipe = _renamed(recipe, module)
        else:
            text = _texts.get(module) or Path(str(sys.modules[module].__file__)).read_text("utf-8")
            if _module_name(text) != module:
                raise RecipeError(
                    f"{module}.py was changed, but its name has the digest of its text. Give it another name, such as "
                    "net.py, and write that in the recipe."
                )
        files[f"{module}.py"] = text
    return recipe, files


def provide(recipe: Mapping[str, Any], folder: Path, place: str | Path, *, trust: bool) -> None:
    """Make the modules importable that a recipe names and its run's folder has; see `load_run`."""
    for module, names in _named(recipe).items():
        if module in sys.modules:
            continue
        if _runs_here(module, names):
            made = ModuleType(module)
            vars(made).update({name: vars(sys.modules["__main__"])[name] for name in names})
            sys.modules[module] = made
            continue
        file, which = folder / f"{module}.py", ", ".join(sorted(names))
        if not trust:
            raise CheckpointError(
                f"{place} needs {which} of its {file.name}, which was saved from the script that trained it. It is not "
                "executed without your request. Read the file; then pass trust_code=True (--trust-code)."
            )
        try:
            text = file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"{place} needs {which} of its {file.name}, which cannot be read: {error}. Copy the whole folder."
            ) from error
        if _module_name(text) != module:
            raise CheckpointError(
                f"{place}: {file.name} is not as the run saved it: its name has the digest of another text. Restore it."
            )
        _execute(module, text, file)


def modules_named(recipe: Mapping[str, Any]) -> list[str]:
    return [*_named(recipe)]


def definitions(names: Iterable[str]) -> str:
    """Return the source of what the running script has defined by these names so far, and of what that uses.

    Raises RecipeError if the source cannot be read, or if it would not define the same again."""
    title, sources = _sources()
    main = vars(sys.modules["__main__"])
    every = [each for text, last in sources for each in _statements(text, last, main.get("__package__"))]
    modules = {name for each in every if each.imports for name in each.binds}
    kept, needed = _slice(every, names, modules)
    used = needed & main.keys() - modules
    outside = {name: how for each in every for name, how in each.outside.items()}
    known = {name for each in kept for name in each.binds} | {"__name__", "__doc__"}
    if not any(each.binds_unknown for each in kept):
        outside = dict.fromkeys(used - known, "its top level does not define") | outside
    reasons = [f"{name}, which {outside[name]}" for name in sorted(used & outside.keys())]
    reasons += [f"what line {each.line} defines, which {each.runs}" for each in kept if each.runs]
    if reasons:
        raise RecipeError(
            f"{', '.join(sorted(names))} of {title} cannot be saved with the run, because it uses {reasons[0]}. Pass "
            "the value as an argument, as in Pipeline(Net, width=64)."
        )
    first = f'"""What recipe.yaml names of {title}, and what that uses: saved by fit(out=…)."""\n\n'
    around = [
        "\n\n" if each.block or before.block else "" for before, each in zip([*kept[:1], *kept], kept, strict=False)
    ]
    return first + "".join(f"{space}{each.text}\n" for space, each in zip(around, kept, strict=True))


@dataclass(frozen=True)
class _Statement:
    """A statement of the top level: the names that it binds, reads, and changes in place; those that it binds only in
    the script, and how; of a function or class its decorators, and the names that its code changes in place, which a
    decorator does where it is used; what it does besides, which a copy should not."""

    text: str
    line: int
    binds: frozenset[str]
    uses: frozenset[str]
    changes: frozenset[str]
    outside: Mapping[str, str]
    always: bool = False
    imports: bool = False
    binds_unknown: bool = False  # from module import *
    block: bool = False
    decorators: frozenset[str] = frozenset()
    inside: frozenset[str] = frozenset()
    runs: str = ""


def _sources() -> tuple[str, list[tuple[str, int]]]:
    """Return the script's name, and its texts with the line that each has reached: one, or a notebook's cells."""
    main = sys.modules["__main__"]
    file, line = getattr(main, "__file__", None), _line_of(main)
    shell = ipython_shell()
    if file is not None:
        try:
            with tokenize.open(file) as opened:
                text = opened.read()
            saved = Path(file).stat().st_mtime
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            raise RecipeError(f"The source of the running script cannot be read: {error}.") from error
        after = saved > psutil.Process().create_time() + _SLACK  # or a file server's clock is ahead
        if shell is None and after and not _is_running(main, text):
            raise RecipeError(
                f"{file} was saved after this process had started: its text may not be what runs. Start it again."
            )
        return Path(file).name, [(text, line)]
    cells = [] if shell is None else [each for each in shell.user_ns.get("In", []) if each.strip()]
    if not cells:
        raise RecipeError(
            "The running program has no source: it is python -c, or an interactive session. Put it into a file."
        )
    return "a notebook", [(each, sys.maxsize) for each in cells[:-1]] + [(cells[-1], line)]


def _is_running(main: ModuleType, text: str) -> bool:
    frame = inspect.currentframe()
    while frame is not None and not (frame.f_globals is vars(main) and frame.f_code.co_name == "<module>"):
        frame = frame.f_back
    with suppress(SyntaxError, ValueError):
        return frame is not None and compile(text, "", "exec", dont_inherit=True) == frame.f_code
    return False


def _line_of(main: ModuleType) -> int:
    frame, line = inspect.currentframe(), sys.maxsize
    while frame is not None:
        if frame.f_globals is vars(main) and not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            line = frame.f_lineno
        frame = frame.f_back
    return line


def _statements(text: str, last: int, package: str | None) -> Iterator[_Statement]:
    try:
        nodes = [node for node in ast.parse(text).body if node.lineno <= last]
    except SyntaxError:  # a cell that failed
        return
    lines = text.split("\n")
    spans = [(min([n.lineno, *(d.lineno for d in getattr(n, "decorator_list", ()))]), n.end_lineno or 0) for n in nodes]
    for number, node in enumerate(nodes):
        first, end = spans[number]
        shares = first in {s[1] for s in spans[:number]} or end in {s[0] for s in spans[number + 1 :]}
        if isinstance(node, ast.ImportFrom) and node.level and package:
            name = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            node, shares = ast.ImportFrom(name, node.names, 0), True
        above = first
        while above > spans[number - 1][1] * bool(number) + 1 and lines[above - 2].startswith("#"):
            above -= 1
        yield _read(node, ast.unparse(node) if shares else "\n".join(lines[above - 1 : end]), first)


def _read(node: ast.stmt, text: str, line: int) -> _Statement:
    table = symtable.symtable(ast.unparse(node), "<script>", "exec")
    binds = {one.get_name() for one in table.get_symbols() if one.is_assigned() or one.is_imported()}
    imports = {one.get_name() for one in table.get_symbols() if one.is_imported()}
    uses, outside = set[str](), dict[str, str]()
    for scope in _scopes(table):
        for one in scope.get_symbols():
            if one.is_referenced() and (scope is table or one.is_global()):
                uses.add(one.get_name())
            if scope is not table and one.is_declared_global() and one.is_assigned():
                outside[one.get_name()] = f"{scope.get_name()}() sets"
    is_block = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    if isinstance(node, ast.If) and "__name__" in {getattr(each, "id", "") for each in ast.walk(node.test)}:
        own = {*(binds - imports), *_changed(node, calls=False)}
        guarded = dict.fromkeys(own, "is set under if __name__ == '__main__':")
        return _Statement(text, line, frozenset(), frozenset(), frozenset(), guarded)
    inner = [] if is_block else [*ast.walk(node)]
    words = [getattr(each, "attr", "") for each in inner]
    star = isinstance(node, ast.ImportFrom) and node.names[0].name == "*"
    around = [each.func if isinstance(each, ast.Call) else each for each in getattr(node, "decorator_list", ())]
    changes = {_base(each) for each in around if not isinstance(each, ast.Name)} if is_block else {*_changed(node)}
    return _Statement(
        text, line, frozenset(binds), frozenset(uses), frozenset(changes), outside,
        always=star or (isinstance(node, ast.ImportFrom) and node.module == "__future__"), binds_unknown=star,
        imports=isinstance(node, ast.Import | ast.ImportFrom), block=is_block,
        decorators=frozenset(each.id for each in around if isinstance(each, ast.Name)),
        inside=frozenset(uses.intersection(_changed(node)) if is_block else ()),
        runs=next((_OF_A_RUN[word] for word in words if word in _OF_A_RUN), ""),
    )  # fmt: skip


def _scopes(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _scopes(child)


def _changed(statement: ast.stmt, *, calls: bool = True) -> Iterator[str]:
    """Yield the names of objects that it changes in place: `Net.size = 3`, `SIZES["a"] = 3`, `NAMES.append("a")`,
    `setattr(Net, "size", 3)`."""
    targets: list[ast.AST] = []
    for node in ast.walk(statement):
        if isinstance(node, ast.Assign | ast.Delete):
            targets += node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets.append(node.target)
        elif calls and isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            targets.append(node.value.func)
            if isinstance(node.value.func, ast.Name) and node.value.func.id in ("setattr", "delattr"):
                yield from filter(None, map(_base, node.value.args[:1]))
    for target in targets:
        if isinstance(target, ast.Attribute | ast.Subscript) and (name := _base(target)):
            yield name


def _base(node: ast.AST) -> str:
    """Return the name of the object that an attribute, an item or a call is of; "" if it has none."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _slice(every: list[_Statement], names: Iterable[str], modules: set[str]) -> tuple[list[_Statement], set[str]]:
    """Return the statements that bind or change these names and those that they use, in order, and all these names."""
    needed, kept = set(names), {number for number, each in enumerate(every) if each.always}
    inside = {name: each.inside for each in every for name in each.binds}
    touched = [
        each.binds | (each.changes.union(*(inside.get(name, ()) for name in each.decorators)) - modules)
        for each in every
    ]
    grows = True
    while grows:
        found = {number for number, own in enumerate(touched) if needed & own} - kept
        for number in found:
            needed |= every[number].uses
        kept |= found
        grows = bool(found)
    return [every[number] for number in sorted(kept)], needed


def _runs_here(module: str, names: Iterable[str]) -> bool:
    """Whether the running script defines these names by the same text."""
    try:
        return vars(sys.modules["__main__"]).keys() >= set(names) and _module_name(definitions(names)) == module
    except RecipeError:
        return False


def _execute(module: str, text: str, file: Path) -> None:
    made = ModuleType(module)
    made.__file__ = str(file)
    sys.modules[module] = made
    try:
        exec(compile(text, str(file), "exec"), vars(made))  # not imported: bytecode next to it would be taken
    except (Exception, SystemExit) as error:
        del sys.modules[module]
        raise CheckpointError(
            f"{file} cannot be executed: {type(error).__name__}: {error}. It needs what the script needed: the same "
            "packages, files, and the folder of its own modules on PYTHONPATH."
        ) from error
    linecache.cache[str(file)] = len(text), None, text.splitlines(keepends=True), str(file)
    _texts[module] = text
    cloudpickle.register_pickle_by_value(made)  # ranks cannot import it


def _module_name(text: str) -> str:
    return f"script_{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _named(value: Any) -> dict[str, set[str]]:
    """Return the names of the running script, and of modules like these, that a recipe has, by module."""
    found: dict[str, set[str]] = {}
    for text in _strings(value):
        if match := _NAME.fullmatch(text):
            found.setdefault(match[1], set()).add(match[2])
    return found


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _strings(each)


def _renamed(value: Any, module: str) -> Any:
    if isinstance(value, Mapping):
        return {key: _renamed(each, module) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_renamed(each, module) for each in value]
    return re.sub(r"^__main__:", f"{module}:", value) if isinstance(value, str) else value
