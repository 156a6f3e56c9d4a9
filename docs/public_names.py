"""A Sphinx extension for the API reference: docstrings as we write them, and the directive `public-names`.

`.. public-names:: PACKAGE` describes each public name of a package. A name that `drivetrain` itself has, too, is
described there, and elsewhere refers to it.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config, GoogleDocstring
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective

SEVERAL = re.compile(r"^:(?:ivar|param) [^:]+, [^:]+:")
"""A field of several names."""
TOP = "drivetrain"
PACKAGES = (TOP, *(f"{TOP}.{name}" for name in ("loaders", "transforms", "strategies", "pipeline")))


@functools.cache
def public_names(package: str) -> dict[str, str]:
    """Return the public names of a package, each with the module that defines it.

    These are the names that its file imports as `from .module import Name as Name`, which is what type checkers
    consider re-exported, and the functions and constants that it defines.
    """
    module = importlib.import_module(package)
    names = {}
    for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            source = importlib.util.resolve_name(f"{'.' * node.level}{node.module}", package)
            names |= {alias.name: source for alias in node.names if alias.asname == alias.name}
    for name, value in vars(module).items():
        if inspect.isfunction(value) and value.__module__ == package:
            names[name] = package
    names |= {name: package for _, name in ModuleAnalyzer.for_module(package).find_attr_docs()}
    return {name: names[name] for name in sorted(names, key=str.lower) if not name.startswith("_")}


def described(package: str, name: str, home: str) -> list[str]:
    """Return the reStructuredText of one entry."""
    value: Any = getattr(importlib.import_module(package), name)
    if isinstance(value, type):
        kind = "exception" if issubclass(value, BaseException) else "class"
    else:
        kind = "function" if inspect.isroutine(value) else "data"
    if package != TOP and name in public_names(TOP):
        return [f".. py:{kind}:: {package}.{name}", "", f"   The same as :py:obj:`{TOP}.{name}`.", ""]
    if kind == "data":
        return [
            f".. py:data:: {package}.{name}",
            "",
            *(f"   {line}" for line in attribute_docs(name, home)),
            "",
        ]
    options = ["   :members:", "   :show-inheritance:", *inherited(value)] if isinstance(value, type) else []
    return [f".. auto{kind}:: {package}.{name}", *options, ""]


def inherited(value: type) -> list[str]:
    """Return the option that adds what a class inherits from classes that are not public, such as PipelineSpec."""
    bases = value.__mro__[1:]
    elsewhere = [
        base for base in bases if not base.__module__.startswith(f"{TOP}.") or is_public(base.__name__)
    ]
    if issubclass(value, BaseException) or len(elsewhere) == len(bases):
        return []
    return [f"   :inherited-members: {', '.join(base.__name__ for base in elsewhere)}"]


def is_public(name: str) -> bool:
    """Return whether a package of `PACKAGES` has this name."""
    return any(name in public_names(package) for package in PACKAGES)


def attribute_docs(name: str, home: str) -> list[str]:
    """Return the docstring below the definition of a constant or a type, following imports to it."""
    found = ModuleAnalyzer.for_module(home).find_attr_docs().get(("", name))
    if found is not None:
        return found
    further = public_names(home).get(name, home) if home != public_names(home).get(name) else home
    return attribute_docs(name, further) if further != home else []


class PublicNames(SphinxDirective):
    """Describes the public names of the package that is its argument."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the entries."""
        (package,) = self.arguments
        lines = [
            line for name, home in public_names(package).items() for line in described(package, name, home)
        ]
        return self.parse_text_to_nodes(StringList(lines, source=package))


def sections(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Replace the sections of a docstring (Args, Returns, …) by reStructuredText, in place.

    Not with Napoleon's own handler: of a property's "Whether it is sharded: True if …" it would take the words before
    the colon for a type, and of "train, val: the loaders" the first name.
    """
    kind = "function" if what in ("attribute", "data", "property") else what
    parsed = GoogleDocstring(lines, Config(napoleon_use_ivar=True), app, kind, name, value, options).lines()
    lines[:] = [SEVERAL.sub(lambda names: names.group().replace(", ", ","), line) for line in parsed]


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the directive, and read docstrings."""
    app.add_directive("public-names", PublicNames)
    app.connect("autodoc-process-docstring", sections)
    return {"parallel_read_safe": True}
