"""A Sphinx extension for the API reference: docstrings as we write them, a page for each class and function, and the
directive `public-names`.

`.. public-names:: PACKAGE` lists the public names of a package with a sentence about each, and describes its exceptions
and constants. A name that `drivetrain` itself has, too, is described there, and elsewhere refers to it. The pages of
classes and functions are written into `docs/reference/PACKAGE/` before the build, and are not committed.
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
PACKAGES = (
    TOP,
    *(f"{TOP}.{name}" for name in ("loaders", "transforms", "strategies", "pipeline")),
)


@functools.cache
def public_names(package: str) -> dict[str, str]:
    """Return the public names of a package, each with the module that defines it.

    These are the names that its file imports as `from .module import Name as Name`, which is what type checkers
    consider re-exported, and the functions and constants that it defines.
    """
    module = importlib.import_module(package)
    names = {}
    for node in ast.walk(
        ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    ):
        if isinstance(node, ast.ImportFrom) and node.level:
            source = importlib.util.resolve_name(
                f"{'.' * node.level}{node.module}", package
            )
            names |= {
                alias.name: source for alias in node.names if alias.asname == alias.name
            }
    for name, value in vars(module).items():
        if inspect.isfunction(value) and value.__module__ == package:
            names[name] = package
    names |= {
        name: package for _, name in ModuleAnalyzer.for_module(package).find_attr_docs()
    }
    return {
        name: names[name]
        for name in sorted(names, key=str.lower)
        if not name.startswith("_")
    }


def kind_of(value: Any) -> str:
    if isinstance(value, type):
        return "exception" if issubclass(value, BaseException) else "class"
    return "function" if inspect.isroutine(value) else "data"


def has_page(package: str, name: str) -> bool:
    own = package == TOP or name not in public_names(TOP)
    return own and kind_of(getattr(importlib.import_module(package), name)) in (
        "class",
        "function",
    )


def write_pages(app: Sphinx) -> None:
    """Write a page for each class and function, and remove those of names that are gone."""
    folder = Path(app.srcdir) / "docs" / "reference"
    for package in PACKAGES if folder.is_dir() else ():
        own = folder / package.rpartition(".")[2]
        own.mkdir(exist_ok=True)
        pages = {
            name: page(package, name, home)
            for name, home in public_names(package).items()
            if has_page(package, name)
        }
        for path in own.glob("*.md"):
            if path.stem not in pages:
                path.unlink()
        for name, text in pages.items():
            path = own / f"{name}.md"
            if (
                not path.exists() or path.read_text(encoding="utf-8") != text
            ):  # else Sphinx would read it again
                path.write_text(text, encoding="utf-8")


def page(package: str, name: str, home: str) -> str:
    lines = "\n".join(described(package, name, home))
    back = f"[`{package}`](../{package.rpartition('.')[2]}.md)"
    return f"---\norphan: true\n---\n\n# `{name}`\n\nOf {back}.\n\n```{{eval-rst}}\n{lines}\n```\n"


def summary(package: str, name: str, home: str) -> str:
    """Return the first sentence about a name."""
    value = getattr(importlib.import_module(package), name)
    text = (
        "\n".join(attribute_docs(name, home))
        if kind_of(value) == "data"
        else inspect.getdoc(value) or ""
    )
    whole = " ".join(text.partition("\n\n")[0].split())
    first = re.split(r"(?<=[.:])\s", whole)[0].rstrip(":")
    return first if first.count("`") % 2 == 0 else whole


def described(package: str, name: str, home: str) -> list[str]:
    """Return the reStructuredText of one entry."""
    value: Any = getattr(importlib.import_module(package), name)
    kind = kind_of(value)
    if package != TOP and name in public_names(TOP):
        return [
            f".. py:{kind}:: {package}.{name}",
            "",
            f"   The same as :py:obj:`{TOP}.{name}`.",
            "",
        ]
    if kind == "data":
        return [
            f".. py:data:: {package}.{name}",
            "",
            *(f"   {line}" for line in attribute_docs(name, home)),
            "",
        ]
    options = (
        ["   :members:", "   :show-inheritance:", *inherited(value)]
        if isinstance(value, type)
        else []
    )
    return [f".. auto{kind}:: {package}.{name}", *options, ""]


def inherited(value: type) -> list[str]:
    """Return the option that adds what a class inherits from classes that are not public, such as PipelineSpec."""
    bases = value.__mro__[1:]
    elsewhere = [
        base
        for base in bases
        if not base.__module__.startswith(f"{TOP}.") or is_public(base.__name__)
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
    further = (
        public_names(home).get(name, home)
        if home != public_names(home).get(name)
        else home
    )
    return attribute_docs(name, further) if further != home else []


class PublicNames(SphinxDirective):
    """Lists the public names of the package that is its argument, and describes those without a page."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the entries."""
        (package,) = self.arguments
        names = public_names(package)
        lines = [".. list-table::", "   :widths: 30 70", "   :class: names", ""]
        for name, home in names.items():
            place = TOP if name in public_names(TOP) else package
            lines += [
                f"   * - :py:obj:`{name} <{place}.{name}>`",
                f"     - {summary(package, name, home)}",
            ]
        lines.append("")
        for name, home in names.items():
            lines += [] if has_page(package, name) else described(package, name, home)
        return self.parse_text_to_nodes(StringList(lines, source=package))


def sections(
    app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Replace the sections of a docstring (Args, Returns, …) by reStructuredText, in place.

    Not with Napoleon's own handler: of a property's "Whether it is sharded: True if …" it would take the words before
    the colon for a type, and of "train, val: the loaders" the first name.
    """
    kind = "function" if what in ("attribute", "data", "property") else what
    parsed = GoogleDocstring(
        lines, Config(napoleon_use_ivar=True), app, kind, name, value, options
    ).lines()
    lines[:] = [
        SEVERAL.sub(lambda names: names.group().replace(", ", ","), line)
        for line in parsed
    ]


def plain_types(*given: Any) -> tuple[str | None, str | None]:
    """Return a signature without the checks of options: of `Annotated[float, Within(…)]`, `float`."""
    *_, arguments, returns = given
    return arguments and without_checks(arguments), returns


def without_checks(text: str) -> str:
    before, found, rest = text.partition("Annotated[")
    if not found:
        return text
    depth = comma = 0
    for place, sign in enumerate(rest):
        depth += (sign in "[({") - (sign in "])}")
        if depth == 0 and sign == "," and not comma:
            comma = place
        if depth < 0:
            return (
                before.removesuffix("~typing.")
                + without_checks(rest[:comma])
                + without_checks(rest[place + 1 :])
            )
    return text


def public_bases(*given: Any) -> None:
    """Replace private bases by theirs, in place."""
    bases = given[-1]
    while any(getattr(base, "__name__", "").startswith("_") for base in bases):
        bases[:] = [
            further
            for base in bases
            for further in (
                base.__bases__
                if getattr(base, "__name__", "").startswith("_")
                else (base,)
            )
        ]


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the directive, and read docstrings."""
    app.add_directive("public-names", PublicNames)
    app.connect("builder-inited", write_pages)
    app.connect("autodoc-process-docstring", sections)
    app.connect("autodoc-process-signature", plain_types)
    app.connect("autodoc-process-bases", public_bases)
    return {"parallel_read_safe": True}
