"""`drivetrain completion`: a script that lets a shell complete commands, options, recipes and files.

The script is static: completing starts no Python.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ....common.errors import PlanError, suggest
from .parser import Argument, Parser

Functions = Mapping[str, Callable[..., Any]]


def script(shell: str, commands: Functions, overview: Callable[..., Any]) -> str:
    """Return the completion script for a shell.

    Args:
        shell: `"bash"`, `"zsh"` or `"fish"`.
        commands: the commands by name.
        overview: the function of the program without a command.

    Raises:
        PlanError: for another shell.
    """
    if shell not in SHELLS:
        raise PlanError(f"There is no completion for the shell {shell!r}.{suggest(shell, SHELLS)}")
    arguments = {name: Parser(name, function).arguments for name, function in commands.items()}
    about = {name: f"{function.__doc__}".partition("\n")[0] for name, function in commands.items()}
    return SHELLS[shell](arguments, Parser("", overview).arguments, about)


def _words(argument: Argument) -> tuple[str, ...]:
    """Return what an argument can be, as far as it is known."""
    from ...recipes.presets import KEYS, RECIPES

    if argument.completes == "recipes":
        return tuple(RECIPES)
    if argument.completes == "keys":
        return tuple(f"{key}=" for key in KEYS if key not in ("notes", "trained"))
    return () if isinstance(argument.completes, str) else argument.completes


def _files(argument: Argument) -> bool:
    """Return whether an argument can be a file."""
    return argument.completes in ("files", "recipes")


_BASH = """\
# Completion of drivetrain for bash; written by: drivetrain completion bash
_drivetrain() {
    local word="${COMP_WORDS[COMP_CWORD]}" command="${COMP_WORDS[1]}"
    local words="" files="" option="" place=0 pending=0 number
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "@COMMANDS@" -- "$word"))
        return
    fi
    # The place among the arguments: words that are neither options nor their values. Bash splits at "=".
    for ((number = 2; number < COMP_CWORD; number++)); do
        if [ "${COMP_WORDS[number]}" = "=" ]; then
            continue
        elif [ "$pending" -gt 0 ]; then
            pending=$((pending - 1))
            continue
        fi
        option="${COMP_WORDS[number]}"
        case "$command $option" in
@VALUES@
            *" -"*) ;;
            *) place=$((place + 1)) ;;
        esac
    done
    if [ "$pending" -gt 0 ]; then
        case "$command $option" in
@OPTIONS@
        esac
        [ "$word" = "=" ] && word=""
    elif [ "$word" = "=" ] || [ "${COMP_WORDS[COMP_CWORD-1]}" = "=" ]; then
        [ "$word" = "=" ] && word=""
        case "$option" in train | val) files=1 ;; esac
    elif [[ "$word" == -* ]]; then
        case "$command" in
@FLAGS@
        esac
    else
        case "$command $place" in
@PLACES@
        esac
    fi
    if [ -n "$words" ]; then
        COMPREPLY=($(compgen -W "$words" -- "$word"))
        case "${COMPREPLY[0]}" in *=) compopt -o nospace 2>/dev/null ;; esac
    fi
    if [ -n "$files" ]; then
        local IFS=$'\\n'
        compopt -o filenames 2>/dev/null
        COMPREPLY+=($(compgen -f -- "$word"))
    fi
}
"""


def _bash(arguments: Mapping[str, list[Argument]], overview: list[Argument], _: Mapping[str, str]) -> str:
    """Return the script for bash, which counts arguments and takes words from tables."""
    flags, values, options, places = [], [], [], []
    for command, given in arguments.items():
        flags.append(f'            {command}) words="{" ".join(one.name for one in given if one.option)}" ;;')
        with_values = [one for one in given if one.option and one.values]
        values += [f'            "{command} {one.name}") pending={one.values} ;;' for one in with_values]
        options += [f'            "{command} {one.name}") {_found(one)} ;;' for one in with_values]
        for place, one in enumerate(one for one in given if not one.option):
            pattern = f'"{command} "*' if one.several else f'"{command} {place}"'
            places.append(f"            {pattern}) {_found(one)} ;;")
    return _filled(
        _BASH + "complete -F _drivetrain drivetrain\n",
        COMMANDS=" ".join([*arguments, *(one.name for one in overview if one.option)]),
        FLAGS="\n".join(flags), VALUES="\n".join(values), OPTIONS="\n".join(options), PLACES="\n".join(places),
    )  # fmt: skip


def _found(argument: Argument) -> str:
    """Return the assignments of what an argument can be."""
    words = " ".join(_words(argument))
    return (
        " ".join(filter(None, [f'words="{words}"' if words else "", "files=1" if _files(argument) else ""]))
        or ":"
    )


def _filled(template: str, **texts: str) -> str:
    for name, text in texts.items():
        template = template.replace(f"@{name}@", text)
    return template


_ZSH = """\
(( $+functions[compdef] )) || { autoload -U compinit && compinit }
autoload -U +X bashcompinit && bashcompinit
"""


def _zsh(arguments: Mapping[str, list[Argument]], overview: list[Argument], about: Mapping[str, str]) -> str:
    """Return the script for zsh, which runs bash's."""
    text = _bash(arguments, overview, about).replace("bash", "zsh")
    return f"{_ZSH}{text}"


def _fish(arguments: Mapping[str, list[Argument]], overview: list[Argument], about: Mapping[str, str]) -> str:
    """Return the script for fish."""
    lines = ["# Completion of drivetrain for fish; written by: drivetrain completion fish",
             "complete -c drivetrain -f"]  # fmt: skip
    none = "-n __fish_use_subcommand"
    lines += [f"complete -c drivetrain {none} -a {name} -d {_quoted(text)}" for name, text in about.items()]
    lines += [f"complete -c drivetrain {none} {_flag(one)}" for one in overview if one.option]
    for command, given in arguments.items():
        seen = f'-n "__fish_seen_subcommand_from {command}"'
        for one in given:
            if one.option:
                lines.append(f"complete -c drivetrain {seen} {_flag(one)}")
                continue
            if words := _words(one):
                lines.append(f"complete -c drivetrain {seen} -a {_quoted(' '.join(words))}")
            if _files(one):
                lines.append(f"complete -c drivetrain {seen} -F")
    return "\n".join(lines) + "\n"


def _flag(option: Argument) -> str:
    """Return fish's description of an option."""
    parts = [f"-l {option.name.removeprefix('--')}"]
    if option.values:
        words = _words(option)
        parts += ["-r", "-F" if _files(option) else "-f"] + (
            [f"-a {_quoted(' '.join(words))}"] if words else []
        )
    return " ".join([*parts, f"-d {_quoted(option.help)}"])


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


SHELLS: dict[str, Callable[[Mapping[str, list[Argument]], list[Argument], Mapping[str, str]], str]] = {
    "bash": _bash,
    "zsh": _zsh,
    "fish": _fish,
}
