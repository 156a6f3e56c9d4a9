"""Signatures from options: what `help()` shows, what type checkers read, and the documentation of arguments.

`.ci/signatures.py` writes what type checkers must find as text.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar, cast, get_origin

from ..errors import PlanError
from .config import BY_CALLER, Config, Option, names_of, options_of

T = TypeVar("T", bound=Callable[..., Any])
P = ParamSpec("P")
C = TypeVar("C")
S = TypeVar("S")
R = TypeVar("R")


def documented(*configs: type[Config]) -> Callable[[T], T]:
    """Return a decorator that completes docstring and signature of what takes the options of `configs` as keywords."""

    def complete(target: T) -> T:
        options = {name: option for config in configs for name, option in options_of(config).items()}
        open_ended = configs[0].EXTRA if len(configs) == 1 else ""
        if len(configs) > 1:
            options.pop(configs[0].EXTRA, None)
        text, raises, errors = inspect.cleandoc(target.__doc__ or "").partition("Raises:")
        head = "" if "Args:" in text else "\nArgs:\n"
        described = "\n".join(map(_described, options.values()))
        target.__doc__ = f"{text.rstrip()}\n{head}{described}\n\n{raises}{errors}".rstrip()
        function = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
        signature = inspect.signature(function)
        named = [p for p in signature.parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
        extra = [p for p in signature.parameters.values() if p.name == open_ended]
        taken = {parameter.name for parameter in (*named, *extra)}
        new = [
            Parameter(option.name, Parameter.KEYWORD_ONLY, default=default_of(option), annotation=type_of(option))
            for option in options.values()
            if option.name not in taken
        ]
        vars(function)["__signature__"] = signature.replace(parameters=[*named, *new, *extra])
        return target

    return complete


def built_from(
    config: Callable[P, C], defaults: Callable[[Any], Mapping[str, Any]]
) -> Callable[[Callable[[S, C], R]], Callable[Concatenate[S, P], R]]:
    """Return a decorator that turns `method(self, config)` into a documented `method(self, **options)`, whose signature
    for type checkers is the config's constructor. `defaults(self)` has the options that are not given."""

    def complete(function: Callable[[S, C], R]) -> Callable[Concatenate[S, P], R]:
        kind = cast(type[Config], config)

        def method(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            if args:
                first = next(iter(options_of(kind)))
                wrong = f"{kind.place} takes options by name, such as {first}=…, not {args[0]!r:.80}."
                raise PlanError(wrong)
            return function(self, cast(C, kind.of({**defaults(self), **kwargs})))

        for name in ("__doc__", "__name__", "__module__", "__qualname__"):
            setattr(method, name, getattr(function, name))
        method.__annotations__ = {"return": function.__annotations__["return"]}
        return documented(kind)(method)

    return complete


def _described(option: Option) -> str:
    return textwrap.fill(
        f"{option.name}: {option.help}. {option.details}".strip(), 110, initial_indent="    ",
        subsequent_indent="        ", break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def default_of(option: Option) -> Any:
    return None if BY_CALLER in option.marks else option.default


def type_of(option: Option) -> str:
    tree = _Plain(names_of(option.owner)).visit(ast.parse(option.source, mode="eval"))
    return ast.unparse(tree) + " | None" * (BY_CALLER in option.marks)


class _Plain(ast.NodeTransformer):
    def __init__(self, names: Mapping[str, Any]) -> None:
        self._names = names

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id == "Annotated":
            return self.visit(node.slice.elts[0])  # type: ignore[attr-defined, no-any-return]
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        meant: Any = self._names.get(node.id)
        if get_origin(meant) is Annotated:
            return ast.Name(meant.__origin__.__name__)
        return node
