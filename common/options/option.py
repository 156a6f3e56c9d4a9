"""Options of a pipeline: fields of configs, from which signatures, documentation and recipes derive.

torch is not imported: `drivetrain recipes` prints the options and should start immediately.
"""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from inspect import Parameter
from pathlib import Path
from typing import Any, ClassVar, Concatenate, ParamSpec, Self, TypeGuard, TypeVar, cast

from ..checks import check_number, check_whole, is_flag, is_number, is_whole, make_plain, plain
from ..errors import PlanError, suggest
from ..frozen import FrozenDict

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
C = TypeVar("C")
S = TypeVar("S")
R = TypeVar("R")
_VARIABLE = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
Check = Callable[[str, Any], None]
"""Raises PlanError for an invalid value; called with the option's name and the value."""


@dataclass(frozen=True)
class Kind:
    """A type of value in a recipe: its test, and its name in messages."""

    fits: Callable[[object], bool]
    name: str


def _is_texts(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)


def _is_mapping(value: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


TEXT = Kind(lambda value: isinstance(value, str), "text")
PATH = Kind(lambda value: isinstance(value, str | Path) and value != "", "text that is not empty")
FLAG = Kind(is_flag, "true or false")
MAPPING = Kind(_is_mapping, "a dict")
WEIGHTS = Kind(
    lambda value: _is_mapping(value) and all(is_number(each, "(0, inf)") for each in value.values()),
    "a dict of sources and their weights, positive numbers",
)
NOTES = Kind(lambda value: _is_mapping(value) and _is_texts([*value.values()]), "a dict of texts")
TEXTS = Kind(_is_texts, "a list of texts")
LIST = Kind(lambda value: isinstance(value, list | tuple), "a list")
INTEGER = Kind(is_whole, "an integer")
NATURAL = Kind(lambda value: is_whole(value, 0), "an integer, 0 or more")
POSITIVE = Kind(lambda value: is_whole(value, 1), "a positive integer")
PAIR = Kind(
    lambda value: (
        isinstance(value, list | tuple) and len(value) == 2 and all(is_whole(each, 1) for each in value)
    ),
    "two positive integers",
)
NUMBER = Kind(is_number, "a number")
AUTO = Kind(lambda value: value == "auto", '"auto"')
NULL = Kind(lambda value: value is None, "null")


@dataclass(frozen=True)
class Option:
    """The metadata of a config's field.

    Attributes:
        help: the meaning, in one phrase without a final period; printed by documentation, recipes and errors.
        kinds: the types of its value in a recipe.
        key: the key in recipes; None: the field's name; "": none.
        more: additional sentences for the documentation.
        check: validates the value, independently of other options.
        in_plan: whether the plan prints `name=value` for a value other than the default; False if the plan describes it
            in words.
        name: the field's name.
        default: the field's default; `inspect.Parameter.empty`: required.
    """

    help: str
    kinds: tuple[Kind, ...] = ()
    key: str | None = None
    more: str = ""
    check: Check | None = None
    in_plan: bool = True
    name: str = ""
    default: Any = Parameter.empty

    @property
    def recipe_key(self) -> str:
        """The key in recipes; "" if there is none."""
        return self.name if self.key is None else self.key

    @property
    def recipe_help(self) -> str:
        """The meaning in YAML's and JSON's terms."""
        text = self.help.replace("`", "")
        return text.replace("None", "null").replace("True", "true").replace("False", "false")


def option(help: str, *kinds: Kind, **more: Any) -> dict[str, Option]:
    """Return the metadata of a config's field: `devices: int = field(default=1, metadata=option("…", POSITIVE))`.

    See `Option` for the arguments.
    """
    return {"option": Option(help, kinds, **more)}


@dataclass(frozen=True)
class Config:
    """Base of the configs: the options of one builder method, one field each.

    Attributes:
        EXTRA: the field with additional options, of the loader, the optimizer or the strategy; "" for none.
    """

    EXTRA: ClassVar[str] = ""

    def __post_init__(self) -> None:
        make_plain(self)
        if self.EXTRA:
            object.__setattr__(self, self.EXTRA, FrozenDict(getattr(self, self.EXTRA)))
        for one in options_of(type(self)).values():
            if one.check is not None:
                one.check(one.name, getattr(self, one.name))

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Return the config of a method's arguments, given as its `locals()`.

        Options that the method's signature does not name are taken from the additional options.
        """
        known = options_of(cls).keys() - {cls.EXTRA}
        extra = arguments[cls.EXTRA]
        given = {name: value for name, value in {**arguments, **extra}.items() if name in known}
        given[cls.EXTRA] = {name: value for name, value in extra.items() if name not in known}
        return cls(**given)

    def changed(self) -> dict[str, Any]:
        """Return the options whose values are not the defaults."""
        return {
            name: getattr(self, name)
            for name, one in options_of(type(self)).items()
            if name != self.EXTRA and getattr(self, name) != one.default
        }

    def for_plan(self) -> str:
        """Return `, name=value` for each option with `in_plan` whose value is not the default."""
        options = options_of(type(self))
        return "".join(f", {name}={value}" for name, value in self.changed().items() if options[name].in_plan)


def options_of(config: type[Config]) -> dict[str, Option]:
    """Return the options of a config by field name."""
    return {
        field.name: dataclasses.replace(field.metadata["option"], name=field.name, default=_default(field))
        for field in dataclasses.fields(config)
        if "option" in field.metadata
    }


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return Parameter.empty if field.default is MISSING else field.default


def documented(config: type[Config]) -> Callable[[F], F]:
    """Return a decorator that completes docstring and signature of a method that creates a config.

    The options' help describes the arguments. Options that the method does not name are added to its `__signature__`;
    it names them all for type checkers.
    """

    def complete(function: F) -> F:
        options = options_of(config)
        summary, raises, errors = inspect.cleandoc(function.__doc__ or "").partition("Raises:")
        described = "\n".join(_described(one) for one in options.values())
        function.__doc__ = f"{summary}Args:\n{described}\n\n{raises}{errors}".rstrip()
        signature = inspect.signature(function)
        named = [p for p in signature.parameters.values() if p.kind not in _VARIABLE]
        extra = [p for p in signature.parameters.values() if p.name == config.EXTRA]
        names = {parameter.name for parameter in (*named, *extra)}
        types = {field.name: field.type for field in dataclasses.fields(config)}
        new = [
            Parameter(one.name, Parameter.KEYWORD_ONLY, default=one.default, annotation=types[one.name])
            for one in options.values()
            if one.name not in names
        ]
        vars(function)["__signature__"] = signature.replace(parameters=[*named, *new, *extra])
        return function

    return complete


def built_from(config: Callable[P, C]) -> Callable[[Callable[[S, C], R]], Callable[Concatenate[S, P], R]]:
    """Return a decorator that turns `method(self, config)` into a documented `method(self, **options)`.

    Requires a config without additional options, whose constructor is the signature for type checkers.
    """

    def complete(function: Callable[[S, C], R]) -> Callable[Concatenate[S, P], R]:
        known = options_of(cast(type[Config], config))

        def method(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            place = f"{function.__name__}()"
            if args:
                raise PlanError(
                    f"{place} takes options by name, such as {next(iter(known))}=…, not {args[0]!r:.80}."
                )
            for name in kwargs:
                if name not in known:
                    raise PlanError(f"{place} has no option {name!r}.{suggest(name, known)}")
            return function(self, config(*args, **kwargs))

        method.__doc__, method.__name__ = function.__doc__, function.__name__
        method.__module__, method.__qualname__ = function.__module__, function.__qualname__
        method.__annotations__ = {"return": function.__annotations__["return"]}
        return documented(cast(type[Config], config))(method)

    return complete


def _described(one: Option) -> str:
    text = f"{one.name}: {one.help}. {one.more}".strip()
    return textwrap.fill(
        text, 110, initial_indent="    ", subsequent_indent="        ", break_long_words=False
    )


class OptionalGroups(FrozenDict):
    """Parameter groups whose patterns may match nothing.

    Those of a ledger's variants, which lack the parameters that the full pipeline's surgery adds or renames.
    """


def named_options(name: str, given: object) -> FrozenDict:
    """Return a mapping of options with tuples in place of lists, which JSON and YAML have instead.

    Raises:
        PlanError: if it is not a mapping of names.
    """
    if not _is_mapping(given):
        raise PlanError(f"{name}={given!r:.80} must be a dict of names and values.")
    kind = OptionalGroups if isinstance(given, OptionalGroups) else FrozenDict
    return kind({key: _with_tuples(value) for key, value in given.items()})


def _with_tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_tuples(each) for key, each in value.items()}
    return tuple(_with_tuples(each) for each in value) if isinstance(value, list | tuple) else plain(value)


class Source(str):
    """Text whose `repr` is itself: the name of a function in a pipeline's `repr`."""

    __repr__ = str.__str__


def whole(low: int, *, none: str = "") -> Check:
    """Return a check for an integer of at least `low`; with `none`, the meaning of None, None is valid, too."""

    def check(name: str, value: Any) -> None:
        if not (none and value is None):
            check_whole(name, value, PlanError, low, also=f", or None for {none}" if none else "")

    return check


def number(interval: str, *, unit: str = "", none: bool = False) -> Check:
    """Return a check for a number in `interval`, written as `"(0, 1]"`; with `none`, None is valid, too.

    Args:
        interval: the valid numbers.
        unit: completes "a finite number in (0, 1]" in the message.
        none: whether None is valid.
    """

    def check(name: str, value: Any) -> None:
        if not (none and value is None):
            check_number(name, value, PlanError, interval, also=unit + (", or None" if none else ""))

    return check


def known(what: str, names: Any) -> Check:
    """Return a check for one of `names`; `what` is what they name, e.g. `"loader"`."""

    def check(_: str, value: Any) -> None:
        if not isinstance(value, str) or value not in names:
            raise PlanError(f"No {what} is named {value!r}.{suggest(str(value), names)}")

    return check
