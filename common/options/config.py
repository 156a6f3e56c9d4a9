"""Options: fields of frozen dataclasses, from which checks, signatures, documentation, recipes and flags derive.

An option is declared once, beside the code that uses it:

    @dataclass(frozen=True, kw_only=True)
    class LoaderOptions(Config):
        batch_size: Positive
        \"\"\"Global batch size, in images. Step k trains on the same samples on one device or on eight.\"\"\"
        workers: Annotated[int | None, Whole(0)] = None
        \"\"\"Threads; None: one per core.\"\"\"

The type carries the check. The text under it begins with the help, one sentence; what follows are details. `options_of`
lists a config's options. torch is not imported: names that a module imports for type checkers only mean any value.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import inspect
import re
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from functools import cache, cached_property
from inspect import Parameter
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, Union, cast, get_args, get_origin

from ..checks import ANY, is_flag, is_number, is_whole, number_text, plain, whole_text
from ..errors import DrivetrainError, PlanError, suggest
from ..frozen import FrozenDict


@dataclass(frozen=True)
class Kind:
    """One type of value that an option takes; as a mark in `Annotated`, it replaces those of the annotated type."""

    fits: Callable[[Any], bool]
    name: str  # completes "must be …" in messages
    json: bool = True  # whether recipes and the command line can contain such values
    choices: tuple[Any, ...] = ()  # all values, if there are few

    @property
    def names(self) -> list[str]:
        return [repr(choice) for choice in self.choices] or [self.name]


@dataclass(frozen=True)
class Whole:
    """A mark: the integer is from `low` to `high`."""

    low: int | None = None
    high: int | None = None


@dataclass(frozen=True)
class Within:
    """A mark: the number is in `interval`, written as `"(0, 1]"`; `unit` follows it in messages."""

    interval: str = ANY
    unit: str = ""


@dataclass(frozen=True)
class Check:
    """A mark: `check(name, value)` raises an error for an invalid value, which has one of the kinds of the type."""

    check: Callable[[str, Any], None]


@dataclass(frozen=True)
class Raises:
    """A mark: the error for an invalid value, if it is not that of the class."""

    error: type[DrivetrainError]


@dataclass(frozen=True)
class Key:
    """A mark: the key in recipes, if it is not the field's name; "": none."""

    name: str


IN_WORDS = Key("in words")  # a mark: the plan describes the option, instead of printing `name=value`
BY_CALLER = Key("by caller")  # a mark: the keyword may also be None, its default: the class decides

Positive = Annotated[int, Whole(1)]
Natural = Annotated[int, Whole(0)]
SEED = Kind(lambda value: is_whole(value, 0, 2**63 - 1), "an integer from 0 to 2**63 - 1")
Seed = Annotated[int, SEED]
PathText = Annotated[str, Kind(lambda value: isinstance(value, str) and value != "", "text that is not empty")]


@dataclass(frozen=True)
class Option:
    name: str
    owner: type[Config]  # the class that declares it
    field: dataclasses.Field[Any]
    kinds: tuple[Kind, ...]  # what values it takes
    marks: tuple[Any, ...]  # what `Annotated` adds to its type
    source: str  # the text of its type
    listed: bool  # whether tuples are among its values

    @cached_property
    def default(self) -> Any:
        """Its default; `inspect.Parameter.empty`: it is required."""
        if self.field.default_factory is not MISSING:
            return self.field.default_factory()
        return Parameter.empty if self.field.default is MISSING else self.field.default

    @cached_property
    def text(self) -> str:
        """Its documentation: the docstring under the field, in its class or the first base that has one."""
        owners: Any = (owner for owner in self.owner.__mro__ if issubclass(owner, Config))
        return next(filter(None, (_texts(owner).get(self.name, "") for owner in owners)), "")

    @property
    def help(self) -> str:
        """The first sentence, as a phrase without a final period."""
        first = re.split(r"\.(?=\s|$)", self.text, maxsplit=1)[0]
        return first[:1].lower() + first[1:] if first[1:2].islower() else first

    @property
    def details(self) -> str:
        return "".join(re.split(r"\.(?:\s+|$)", self.text, maxsplit=1)[1:])

    @property
    def required(self) -> bool:
        return self.default is Parameter.empty

    @property
    def key(self) -> str:
        """The key in recipes; "" for none."""
        marks = (mark for mark in self.marks if isinstance(mark, Key))
        keys = (mark.name for mark in marks if mark not in (IN_WORDS, BY_CALLER))
        return next(keys, self.name)

    @property
    def choices(self) -> tuple[Any, ...]:
        return tuple(value for kind in self.kinds for value in kind.choices)

    def normal(self, value: Any) -> Any:
        """Return a value with Python's numbers, a tuple for JSON's list, and a dict that does not change."""
        if isinstance(value, list) and self.listed:
            value = tuple(value)
        if isinstance(value, Mapping) and not isinstance(value, FrozenDict):
            return FrozenDict(value)
        return plain(value)

    def check(self, value: Any, given: Any) -> None:
        """Raise the owner's error for a value that is not valid; `given` is what the user wrote, for the message."""
        if not any(kind.fits(value) for kind in self.kinds):
            errors = [mark.error for mark in self.marks if isinstance(mark, Raises)]
            raise (errors or [self.owner.error])[0](self.rejection(given))
        for mark in self.marks:
            if isinstance(mark, Check):
                mark.check(self.name, value)

    def rejection(self, value: Any) -> str:
        kinds = [kind for kind in self.kinds if kind is not NONE]
        if all(kind.choices and kind is not FLAG for kind in kinds):
            return f"{self.name}={value!r:.80} is not known.{suggest(str(value), map(str, self.choices))}"
        allowed = either([name for kind in kinds for name in kind.names])
        if NONE in self.kinds:
            meaning = re.search(r"\bNone: ([^;,.]*)", self.text)
            allowed = allowed.replace(" or False", ", False") + ", or None"
            allowed += f" for {meaning[1]}" if meaning and meaning[1] != "none" else ""
        return f"{self.name}={value!r:.80} must be {allowed}."


def either(names: Sequence[str]) -> str:
    """Return alternatives in words: `a`, `a or b`, `a, b or c`."""
    return " or ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def one_of(names: Iterable[str]) -> Kind:
    known = tuple(names)
    return Kind(lambda value: isinstance(value, str) and value in known, "one of the names", choices=known)


@dataclass(frozen=True)
class Config:
    """Base of the classes with options. Creating one checks each value by its type."""

    error: ClassVar[type[DrivetrainError]] = PlanError
    place: ClassVar[str] = ""  # who takes the options, in messages about unknown ones
    EXTRA: ClassVar[str] = ""  # the field with options of the loader, the optimizer or the strategy

    def __post_init__(self) -> None:
        for option in options_of(type(self)).values():
            given = getattr(self, option.name)
            value = option.normal(given)
            object.__setattr__(self, option.name, value)
            option.check(value, given)

    def changed(self) -> dict[str, Any]:
        return {
            name: getattr(self, name)
            for name, option in options_of(type(self)).items()
            if name != self.EXTRA and getattr(self, name) != option.default
        }

    def for_plan(self) -> str:
        """Return `, name=value` for each option whose value is not the default and which is not described in words."""
        marks = {name: option.marks for name, option in options_of(type(self)).items()}
        return "".join(f", {name}={value}" for name, value in self.changed().items() if IN_WORDS not in marks[name])

    @classmethod
    def split(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return keywords of the constructor; those that it does not have are its additional options."""
        known = options_of(cls).keys() - {cls.EXTRA}
        own = {name: value for name, value in given.items() if name in known}
        return own | {cls.EXTRA: {name: value for name, value in given.items() if name not in known}}

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Return the config of these options; raise its error for one that it does not have, with the closest name."""
        known = options_of(cls)
        for name in given:
            if name not in known:
                raise cls.error(f"{cls.place} has no option {name!r}.{suggest(name, known)}")
        return cls(**given)


def options_of(config: type[Config]) -> dict[str, Option]:
    """Return the options of a config by name: its own before those that it inherits."""
    return _read(cast(Any, config))


@cache
def _read(config: Any) -> dict[str, Option]:
    declared: dict[str, tuple[type[Config], str]] = {}
    for owner in config.__mro__:
        for name, source in inspect.get_annotations(owner).items():
            declared.setdefault(name, (owner, source))
    fields = {field.name: field for field in dataclasses.fields(config) if field.init}
    options = {}
    for name, (owner, source) in declared.items():
        if name in fields:
            hint = eval(source, vars(sys.modules[owner.__module__]), names_of(owner))
            kinds, marks = tuple(_kinds(hint)), tuple(_marks(hint))
            options[name] = Option(name, owner, fields[name], kinds, marks, source, _listed(hint))
    return options


class _AnyType(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class _Unknown(metaclass=_AnyType):
    """Stands for a type that a module imports for type checkers only."""

    def __class_getitem__(cls, _: Any) -> Any:
        return cls


class _Names(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        return _Unknown


def names_of(owner: type) -> Mapping[str, Any]:
    """Return what names mean in the module of a class, with a placeholder for what is not imported."""
    return _Names(vars(builtins) | vars(sys.modules[owner.__module__]))


def _listed(hint: Any) -> bool:
    origin = get_origin(hint)
    inner = get_args(hint)[:1] if origin is Annotated else get_args(hint)
    if origin in (Annotated, Union, types.UnionType):
        return any(map(_listed, inner))
    return origin in (tuple, Sequence, Collection)


def _marks(hint: Any) -> list[Any]:
    inner = [mark for each in get_args(hint) if get_origin(each) is Annotated for mark in _marks(each)]
    return [*getattr(hint, "__metadata__", ()), *inner]


def _kinds(hint: Any, marks: Sequence[Any] = ()) -> list[Kind]:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        explicit = [mark for mark in hint.__metadata__ if isinstance(mark, Kind)]
        return explicit or _kinds(inner[0], hint.__metadata__)
    if origin in (Union, types.UnionType):
        return [kind for each in inner for kind in _kinds(each, marks)]
    if origin is Literal:
        return [Kind(lambda value: _is_choice(value, inner), "one of the values", choices=inner)]
    if origin is tuple:
        return [_tuple(inner, marks)]
    if hint in (int, float):
        return [_number(hint, marks)]
    if inner == (str,) and origin in (Sequence, Collection):
        return [TEXTS]
    if origin is Sequence:
        return [_tuple((*inner, ...), marks)]
    return [_SIMPLE.get(origin or hint) or _instance(hint)]


def _is_choice(value: Any, choices: tuple[Any, ...]) -> bool:
    return any(type(value) is type(choice) and value == choice for choice in choices)


def _number(hint: type, marks: Sequence[Any]) -> Kind:
    if hint is int:
        whole = next((mark for mark in marks if isinstance(mark, Whole)), Whole())
        return Kind(lambda value: is_whole(value, whole.low, whole.high), whole_text(whole.low, whole.high))
    within = next((mark for mark in marks if isinstance(mark, Within)), Within())
    return Kind(lambda value: is_number(value, within.interval), number_text(within.interval) + within.unit)


def _tuple(inner: tuple[Any, ...], marks: Sequence[Any]) -> Kind:
    """Return the kind of a tuple of values of one type: `tuple[float, float]`, `tuple[str, ...]`."""
    each = _kinds(inner[0], marks)[0]
    count = None if inner[-1] is Ellipsis else len(inner)

    def fits(value: Any) -> bool:
        listed = isinstance(value, tuple | list) and count in (None, len(value))
        return listed and all(each.fits(one) for one in value)

    plural = re.sub(r"^an? ", "", each.name).replace("number", "numbers", 1).replace("integer", "integers", 1)
    plural = {"text": "texts", "dict": "dicts"}.get(plural, plural)
    return Kind(fits, f"{count} {plural}" if count else f"a list of {plural}")


def _instance(hint: Any) -> Kind:
    if isinstance(hint, type) and hint not in (object, Any, _Unknown) and get_origin(hint) is None:
        return Kind(lambda value: isinstance(value, hint), f"a {hint.__name__}", json=False)
    return Kind(lambda _: True, "an object", json=False)


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


def _is_texts(value: Any) -> bool:
    listed = isinstance(value, Collection) and not isinstance(value, str | Mapping)
    return listed and all(isinstance(each, str) for each in value)


NONE = Kind(lambda value: value is None, "None")
FLAG = Kind(is_flag, "True or False", choices=(True, False))
TEXT = Kind(lambda value: isinstance(value, str), "text")
TEXTS = Kind(_is_texts, "a list of texts")
LIST = Kind(lambda value: isinstance(value, list | tuple), "a list")
MAPPING = Kind(_is_mapping, "a dict")
_SIMPLE: dict[Any, Kind] = {
    type(None): NONE, bool: FLAG, str: TEXT, Mapping: MAPPING, dict: MAPPING,
    Path: Kind(lambda value: isinstance(value, Path), "a path", json=False),
}  # fmt: skip


@cache
def _texts(owner: type) -> dict[str, str]:
    """Return the docstrings under the fields of a class, by field; none if its source is not there."""
    # Only the lines before its first method are parsed: the rest takes longer than all else here.
    found = re.search(rf"(?ms)^class {owner.__name__}\b.*?(?=\n    (?:def |@)|\n\S|\Z)", _source(owner.__module__))
    body = ast.parse(found[0]).body[0] if found else None
    fields = body.body if isinstance(body, ast.ClassDef) else []
    texts = {}
    for node, after in pairwise(fields):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            value = after.value if isinstance(after, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                texts[node.target.id] = " ".join(inspect.cleandoc(value.value).split())
    return texts


@cache
def _source(module: str) -> str:
    try:
        return Path(sys.modules[module].__file__ or "").read_text(encoding="utf-8")
    except (OSError, AttributeError):  # a notebook's, or an installation without sources
        return ""
