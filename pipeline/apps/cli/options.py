"""What the commands share: their class, the types of arguments, which a shell completes, common options, and the
pipeline of a recipe."""

from __future__ import annotations

import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from ....common.errors import PlanError
from ....common.storage.addresses import is_address

if TYPE_CHECKING:
    from ...pipeline import Pipeline
    from ...recipes.presets import Completed

F = TypeVar("F", bound=Callable[..., Any])


class Command(click.Command):
    """A command whose options are given once, unless they may be repeated. Its function returns the exit status, or
    None for 0. Drivetrain's warnings are printed like errors, as one line; with `--quiet`, not at all."""

    def get_short_help_str(self, limit: int = 0) -> str:  # noqa: ARG002  whole: the list of commands wraps it
        return " ".join((self.help or "").partition("\n\n")[0].split()).partition(". ")[0].rstrip(".")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            _, _, given = self.make_parser(ctx).parse_args(list(args))
            for param, times in Counter(given).items():
                repeated = times > 1 and isinstance(param, click.Option) and not param.multiple
                if repeated and not ctx.resilient_parsing:
                    raise PlanError(f"{param.opts[-1]} is given {times} times. Pass it once.")
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            takes_values = any(param.name == "overrides" for param in self.params)
            hint = _as_value(error.option_name) if takes_values else ""
            raise click.NoSuchOption(
                error.option_name, f"{error.message}{hint}", error.possibilities, error.ctx or ctx
            ) from None
        except click.UsageError as error:
            error.ctx = error.ctx or ctx  # click leaves it out of some errors
            raise

    def invoke(self, ctx: click.Context) -> Any:
        with _plain_warnings(hidden=ctx.params.get("quiet", False)), _posting_failures():
            return super().invoke(ctx)


class Text(click.ParamType[str]):
    """Text, which a shell completes with one of `words`, or else with a file; the command checks it."""

    name = "text"

    def __init__(self, *words: str, files: bool = False) -> None:
        self._words, self._files = words, files

    def words(self) -> Iterable[str]:
        return self._words

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str,  # noqa: ARG002
    ) -> list[CompletionItem[str]]:  # fmt: skip
        found = [CompletionItem(word) for word in self.words() if word.startswith(incomplete)]
        return found or [CompletionItem(incomplete, type="file")] * self._files


class Json(Text):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ARG002
        from ...recipes.files import json_or_text

        return json_or_text(f"{param and param.name}", value)


class RecipeName(Text):
    def __init__(self) -> None:
        super().__init__(files=True)

    def words(self) -> Iterable[str]:
        from ...recipes.presets import RECIPES

        return RECIPES


class Override(Text):
    """`KEY=VALUE`, of which a shell completes the key. For bash, `train=x` is two words; for other shells, one."""

    def words(self) -> Iterable[str]:
        from ...recipes.presets import KEYS

        return (f"{key}=" for key in KEYS if key not in ("notes", "trained"))

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
        from ...recipes.presets import KEYS

        given: tuple[str, ...] = ctx.params["overrides"] or ()
        *_, key = ["", *given]
        if key in KEYS:  # in bash, the value follows as a word of its own
            return [CompletionItem(incomplete, type="file")] * (key in ("train", "val"))
        key, separator, start = incomplete.partition("=")
        if separator and key in ("train", "val"):
            folder, slash, _ = start.rpartition("/")
            found = sorted(Path(folder + slash).glob("*"))
            return [CompletionItem(f"{key}={path}") for path in found if str(path).startswith(start)]
        return super().shell_complete(ctx, param, incomplete)


class Files(Text):
    """Paths, addresses, patterns or names of data."""

    def __init__(self) -> None:
        super().__init__(files=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":  # Path("") is this folder; in a script, "" is usually an unset variable
            self.fail("it is empty. Pass a path; '.' for this folder.", param, ctx)
        return value


class File(Files):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        super().convert(value, param, ctx)
        if is_address(value):
            self.fail(f"{value} is an address. Pass a path of this machine.", param, ctx)
        return Path(value)


class Place(File):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if is_address(value) else super().convert(value, param, ctx)


def option(spec: str, help: str, type: Any = None, *, name: str | None = None, **more: Any) -> Callable[[F], F]:
    """Return the decorator of an option: `--name METAVAR`, or a flag `--name`; `name` is the parameter, if another."""
    flag, _, metavar = spec.partition(" ")
    more |= {"metavar": metavar, "type": type} if metavar else {"is_flag": True}
    return click.option(flag, *filter(None, [name]), help=help, **more)


def argument(name: str, help: str, type: Any = None, **more: Any) -> Callable[[F], F]:
    return click.argument(name, help=help, type=type, **more)


def _as_value(option: str) -> str:
    """Return how a value of the recipe is passed, for an option such as `--epochs` or `--lr`; "" for others."""
    from ...recipes.presets import KEYS
    from ...recipes.schema import WITHIN

    key = option.lstrip("-").replace("-", "_")
    key = WITHIN.get(key, key)
    return f" Values of the recipe are passed as {key}=…." if key.partition(".")[0] in KEYS else ""


RECIPE = RecipeName()
FILES = Files()


REPLACED = (
    "Values of the recipe to replace, e.g. epochs=36 batch_size=512 optimizer.lr=0.5. Valid JSON is parsed as JSON; "
    "anything else is text. List the keys with: drivetrain recipes --keys."
)


def recipe_arguments(
    values: str = REPLACED, metavar: str = "[KEY=VALUE]...", *, required: bool = True
) -> Callable[[F], F]:
    each = [
        argument(
            "recipe", "Name of a recipe (see: drivetrain recipes), or a .yaml or .json file.", RECIPE, required=required
        ),
        argument("overrides", values, Override(), nargs=-1, metavar=metavar),
        option("--train DATA", "Training data: a .beton file, or a name such as cifar10:train.", FILES),
        option("--val DATA", "Validation data, likewise.", FILES),
    ]  # fmt: skip
    return lambda function: reduce(lambda made, one: one(made), reversed(each), function)


out_folder = option(
    "--out FOLDER", "Folder for the results, created if missing; or an address, such as s3://bucket/run.", Place()
)
workers = option("--workers N", "Threads. Default: one per core.", int)
trust_code = option(
    "--trust-code", "Execute the file script_….py in the run's folder, what its training script defined. Read it first."
)
quiet = option("--quiet", "Print only errors, the result and what was requested: no progress, no warnings.")


def check_sources(keys: Collection[str], train: str | None, val: str | None) -> dict[str, str]:
    """Return the data of --train and --val by key; these must not be among the `keys` that are given, too."""
    given = {key: value for key, value in (("train", train), ("val", val)) if value is not None}
    for key in given:
        if key in keys:
            raise PlanError(f"--{key} and {key}= are both given. Pass only one of them.")
    return given


def completed_recipe(recipe: str, overrides: Sequence[str], train: str | None, val: str | None) -> Completed:
    """Return a recipe with its overrides, checked before torch is imported."""
    from ...recipes.presets import completed, parse_overrides

    values = parse_overrides(overrides)
    return completed(recipe, values | check_sources(values, train, val))


@contextmanager
def pipeline_of(recipe: str, overrides: Sequence[str], train: str | None, val: str | None) -> Iterator[Pipeline]:
    """Inside the block, the modules that the recipe names can be imported."""
    checked = completed_recipe(recipe, overrides, train, val)
    from ...pipeline import Pipeline
    from ...recipes.files import modules_of

    with modules_of(recipe):
        yield Pipeline.from_recipe(checked)


def say(head: str, text: str) -> None:
    colored = sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    print(f"\033[1;31m{head}:\033[0m {text}" if colored else f"{head}: {text}", file=sys.stderr)


def _posting_failures() -> AbstractContextManager[None]:
    """Let the other ranks of a job know of an error, e.g. a recipe that this machine does not have."""
    if "WORLD_SIZE" not in os.environ:  # saves the time of importing torch
        return nullcontext()
    from ....strategies.launching.meeting import failures_posted

    return failures_posted()


@contextmanager
def _plain_warnings(*, hidden: bool) -> Iterator[None]:
    """Inside the block, print Drivetrain's warnings like its errors: one line, without source code; or hide them."""
    with warnings.catch_warnings():
        others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any) -> None:
            if category.__module__.startswith(f"{__package__.partition('.')[0]}."):
                if not hidden:
                    say(category.__name__, str(message))
            else:
                others(message, category, *args, **kwargs)

        warnings.showwarning = show
        yield
