"""Write the text of options that type checkers read: `python .ci/signatures.py`. It prints the files that it changes.

In the package, it is between a comment `# keywords of CONFIG` (fields of a TypedDict) or `# parameters of CONFIG` (of a
method) and the comment `# end`.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import drivetrain
from drivetrain.common.options.config import Config, Option, options_of
from drivetrain.common.options.signatures import default_of, type_of

_REGION = re.compile(r"(?ms)^( *)# (keywords|parameters) of (\w+)\n(.*?)^ *# end\n")


def complete_text(text: str, module: object) -> str:
    """Return the source of a module with its marked regions written from the options."""

    def write(match: re.Match[str]) -> str:
        indent, what, name = match[1], match[2], match[3]
        config: type[Config] = getattr(module, name)
        keywords = {field.name for field in dataclasses.fields(config) if field.kw_only} - {config.EXTRA}
        lines = []
        for option in options_of(config).values():
            if option.name in keywords and (what != "keywords" or option.owner is config):
                lines.append(f"{indent}{_LINES[what](option)}\n".replace("'", '"'))  # as ruff's formatter
        return f"{indent}# {what} of {name}\n{''.join(lines)}{indent}# end\n"

    return _REGION.sub(write, text)


def _keyword(option: Option) -> str:
    return f"{option.name}: {f'Required[{type_of(option)}]' if option.required else type_of(option)}"


def _parameter(option: Option) -> str:
    default = default_of(option)
    shown = "FrozenDict()" if isinstance(default, Mapping) else repr(default)
    return f"{option.name}: {type_of(option)}{'' if option.required else f' = {shown}'},"


_LINES: dict[str, Callable[[Option], str]] = {"keywords": _keyword, "parameters": _parameter}


def outdated(root: Path, package: str) -> dict[Path, str]:
    """Return the files of a package whose marked regions are not what the options say, with what they should be."""
    found = {}
    for path in sorted([*root.glob("*.py"), *root.glob("[!.]*/**/*.py")]):  # not .venv, .build, .ci
        relative = path.relative_to(root)
        if relative.parts[0] == "tests":
            continue
        text = path.read_text()
        if _REGION.search(text):
            module = importlib.import_module(".".join((package, *relative.with_suffix("").parts)))
            new = complete_text(text, module)
            if _packed(new) != _packed(text):
                found[path] = new
    return found


def _packed(text: str) -> str:
    """Return source without what a formatter may change."""
    return re.sub(r"\s|,(?=\s*[\])])", "", text).replace("'", '"')


if __name__ == "__main__":
    for file, source in outdated(Path(drivetrain.__file__).parent, "drivetrain").items():
        file.write_text(source)
        print(file)
