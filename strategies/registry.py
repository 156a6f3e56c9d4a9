"""The strategies by name: `get` creates one, `available` lists them all, `register` adds one.

Imports torch only with a strategy, so that `launch` can send what is registered to the ranks it starts.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, cast

from ..common.errors import DrivetrainError, StrategyError, suggest
from ..common.table import Table

if TYPE_CHECKING:
    from .base import Strategy

# name -> (file, class), or (file, class, options implied by the name).
STRATEGIES: dict[str, tuple[str, str] | tuple[str, str, dict[str, Any]]] = {
    "single": ("single", "Single"),
    "dp": ("single", "DP"),
    "ddp": ("ddp", "DDP"),
    "ddp_spawn": ("ddp", "DDP"),
    "ddp_notebook": ("ddp", "DDP"),
    "ddp_find_unused_parameters": ("ddp", "DDP", {"find_unused_parameters": True}),
    "fsdp": ("fsdp", "FSDP"),
    "fsdp_grad_op": ("fsdp", "FSDPGradOp"),
    "fsdp_cpu_offload": ("fsdp", "FSDPCPUOffload"),
    "hsdp": ("fsdp", "HSDP"),
    "deepspeed": ("deepspeed.strategy", "DeepSpeed"),
    "deepspeed_stage_1": ("deepspeed.strategy", "DeepSpeed", {"stage": 1}),
    "deepspeed_stage_1_offload": ("deepspeed.strategy", "DeepSpeed", {"stage": 1, "offload": "cpu"}),
    "deepspeed_stage_2": ("deepspeed.strategy", "DeepSpeed", {"stage": 2}),
    "deepspeed_stage_2_offload": ("deepspeed.strategy", "DeepSpeed", {"stage": 2, "offload": "cpu"}),
    "deepspeed_stage_3": ("deepspeed.strategy", "DeepSpeed", {"stage": 3}),
    "deepspeed_stage_3_offload": ("deepspeed.strategy", "DeepSpeed", {"stage": 3, "offload": "cpu"}),
    "deepspeed_stage_3_offload_nvme": ("deepspeed.strategy", "DeepSpeed", {"stage": 3, "offload": "nvme"}),
    "zero_redundancy": ("ddp", "ZeroRedundancy"),
    "fairscale_oss": ("fairscale", "FairScaleOSS"),
    "fairscale_sharded_ddp": ("fairscale", "FairScaleShardedDDP"),
    "fairscale_fsdp": ("fairscale", "FairScaleFSDP"),
    "auto": ("auto", "Auto"),
}

# Lightning's other names. Its ddp_fork is for notebooks, where our ranks are new interpreters: forking a process in
# which torch or numba has computed hangs.
ALIASES = {
    "single_device": "single",
    "ddp_fork": "ddp_notebook",
    **{f"{start}_find_unused_parameters_true": "ddp_find_unused_parameters"
       for start in ("ddp", "ddp_spawn", "ddp_fork", "ddp_notebook")},
    **{f"{start}_find_unused_parameters_false": "ddp"
       for start in ("ddp", "ddp_spawn", "ddp_fork", "ddp_notebook")},
}  # fmt: skip

GROUP = "drivetrain.strategies"
"""The entry-point group of packages with strategies. In a package's pyproject.toml:

    [project.entry-points."drivetrain.strategies"]
    mine = "my_package.my_module:MyStrategy"
"""

Kind = Callable[..., Any]
"""A strategy's class, or a function that creates one; its arguments are the strategy's options."""

REGISTERED: dict[str, Kind] = {}
"""The arguments of `register` in this process."""

TPU_NAMES = ("xla", "xla_debug", "xla_fsdp", "single_xla", "single_tpu")


def get(strategy: str | Strategy, **options: Any) -> Strategy:
    """Return a strategy by its name, or the given strategy object itself.

    Args:
        strategy: a name of `available()` or one of Lightning's, or an object with a strategy's `check` and `prepare`.
        options: the strategy's own options, for a name only: `get("ddp", device="cpu")`.

    Raises:
        StrategyError: for an unknown name or option, or an object that is not a strategy.

    Example::

        >>> get("ddp", device="cpu")
        DDP(device='cpu', find_unused_parameters=False)
    """
    if isinstance(strategy, str):
        return _make(strategy, options)
    if isinstance(strategy, type):
        raise StrategyError(
            f"strategies.get: {strategy.__name__} is a class. Pass an object: {strategy.__name__}(...)."
        )
    _check_parts(strategy)
    if options:
        raise StrategyError(
            f"strategies.get: options {sorted(options)} cannot be combined with a {strategy.name!r} strategy object. "
            f"Pass them to its constructor, or pass the name {strategy.name!r}."
        )
    return strategy


def register(name: str, kind: Kind) -> None:
    """Register a custom strategy in this process and the ranks it launches; packages use an entry point, see `GROUP`.

    Args:
        name: for `get`; its first word is the family by which a Pipeline checks compatibility.
        kind: the strategy's class, or a function that creates one; its arguments are the strategy's options.

    Raises:
        StrategyError: if the name is taken, or `kind` is not callable.

    Example::

        >>> register("frozen", strategies.Single)
        >>> get("frozen", device="cpu")
        Single(device='cpu')
    """
    if not callable(kind):
        raise StrategyError(
            f"strategies.register: {name!r} is a {type(kind).__name__}. Pass the strategy's class, or a function that "
            f"creates one."
        )
    if _is_ours(name) or name in REGISTERED or name in _of_packages():
        raise StrategyError(f"strategies.register: the name {name!r} is taken. Choose another.")
    REGISTERED[name] = kind


def call_with(registered: dict[str, Kind], function: Callable[..., Any], *args: Any) -> Any:
    """Call `function(*args)` on a rank, with the strategies registered as in the process that launched it."""
    for name, kind in registered.items():
        REGISTERED.setdefault(name, kind)
    return function(*args)


def _check_parts(strategy: Any) -> None:
    missing = [part for part in ("name", "summary", "check", "prepare") if not hasattr(strategy, part)]
    if missing:
        raise StrategyError(
            f"strategies.get: a {type(strategy).__name__} is not a strategy: it has no {', '.join(missing)}. "
            f"Pass a Strategy object or a name.{suggest('', STRATEGIES)}"
        )


def _make(name: str, options: dict[str, Any]) -> Strategy:
    kind, preset = _find(name)
    known = inspect.signature(kind).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    for option in options:
        if option in preset and options[option] != preset[option]:
            raise StrategyError(
                f"strategies.get: {option}={options[option]!r} contradicts the name {name!r}, which implies "
                f"{option}={preset[option]!r}. Remove the option, or use the plain name."
            )
        if option not in known and not takes_any:
            raise StrategyError(f"strategies.get: strategy {name!r} has no option {option!r}.{suggest(option, known)}")
    given = {**preset, **options}
    if needed := [key for key, one in known.items() if _required(one) and key not in given]:
        raise StrategyError(
            f"strategies.get: strategy {name!r} needs the option {needed[0]!r}, which has no default. Pass it, as in "
            f".distribute({name!r}, {needed[0]}=…)."
        )
    strategy = kind(**given)
    _check_parts(strategy)
    return cast("Strategy", strategy)


def _required(parameter: inspect.Parameter) -> bool:
    named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    return named and parameter.default is parameter.empty


def _find(name: str) -> tuple[Kind, dict[str, Any]]:
    name = ALIASES.get(name, name)
    if name in STRATEGIES:
        file, class_name, *preset = STRATEGIES[name]
        return getattr(importlib.import_module(f".{file}", __package__), class_name), dict(*preset)
    if name in REGISTERED:
        return REGISTERED[name], {}
    if name in TPU_NAMES:
        raise StrategyError(
            f"strategies.get: {name!r} trains on TPUs through XLA, which Drivetrain does not support. Use a strategy "
            f"for CPUs or CUDA GPUs."
        )
    theirs = _of_packages()
    if name in theirs:
        return _load(theirs[name]), {}
    raise StrategyError(f"strategies.get: unknown strategy {name!r}.{suggest(name, _names())}")


def _is_ours(name: str) -> bool:
    return name in STRATEGIES or name in ALIASES or name in TPU_NAMES


def _of_packages() -> dict[str, EntryPoint]:
    """Return the strategies of installed packages. Raise `StrategyError` if one uses the name of another."""
    theirs: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        other = theirs.setdefault(point.name, point)
        if other.value != point.value:  # a package that is on the path twice has the same value
            raise StrategyError(
                f"Two packages provide a strategy {point.name!r}: {_package(other)} ({other.value}) and "
                f"{_package(point)} ({point.value}). Uninstall one."
            )
        if _is_ours(point.name):
            raise StrategyError(
                f"The installed strategy {point.name!r} ({point.value}) has the name of one of Drivetrain's. Rename "
                f"it, or uninstall its package."
            )
    return theirs


def _load(point: EntryPoint) -> Kind:
    try:
        kind = point.load()
    except Exception as error:
        raise StrategyError(
            f"The strategy {point.name!r} of the package {_package(point)} ({point.value}) cannot be imported: "
            f"{type(error).__name__}: {error}. Update or uninstall that package."
        ) from error
    if not callable(kind):
        raise StrategyError(
            f"The strategy {point.name!r} of the package {_package(point)} is a {type(kind).__name__}. An entry point "
            f"of {GROUP!r} must name a class or a function that creates a strategy."
        )
    return kind  # type: ignore[no-any-return]


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unknown package"


def _names() -> list[str]:
    return list(dict.fromkeys([*STRATEGIES, *REGISTERED, *_of_packages()]))


@dataclass(frozen=True)
class StrategyRow:
    """One row of `available()`.

    Example::

        >>> next(row for row in available() if row.name == "single").runs_here
        True
    """

    name: str
    summary: str
    runs_here: bool
    """Whether it can run in this installation and on this machine, on at least one device."""
    why_not: str
    """The reason and remedy if it cannot run here; otherwise empty."""
    extra: str = ""
    """The extra of Drivetrain that it needs: `pip install 'drivetrain[extra]'`."""


class StrategyTable(list[StrategyRow]):
    """The rows of `available()`, which print as a table; as an HTML table in a notebook."""

    def _table(self) -> Table:
        rows = [(r.name, "yes" if r.runs_here else f"no: {r.why_not}", r.extra, r.summary) for r in self]
        return Table(("strategy", "runs here", "extra", "what it does"), rows, title="Strategies")

    def __repr__(self) -> str:
        return self._table().text(160)

    def _repr_html_(self) -> str:
        return self._table().html()


def available() -> StrategyTable:
    """Return every strategy: whether it can run here and why not, the extra it needs, and what it does, as a table.

    Raises `StrategyError` if two installed packages provide a strategy of the same name.

    Example::

        >>> [row.name for row in available() if row.name.startswith("fsdp")]
        ['fsdp', 'fsdp_grad_op', 'fsdp_cpu_offload']
    """
    return StrategyTable(_row(name) for name in _names())


def _row(name: str) -> StrategyRow:
    try:
        strategy = get(name)
    except Exception as error:  # a package that cannot be imported, or an option without a default; or others' code
        summary = getattr(REGISTERED.get(name), "summary", "")
        known = summary if isinstance(summary, str) and summary else "of an installed package"
        return StrategyRow(name, known, False, _reason(error))
    summary, extra = _summary(name, strategy), getattr(strategy, "extra", "")
    try:
        strategy.check(devices=1)
    except Exception as error:
        return StrategyRow(name, summary, False, _reason(error), extra)
    return StrategyRow(name, summary, True, "", extra)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, DrivetrainError) else f"it raised {type(error).__name__}: {error}"


def _summary(name: str, strategy: Strategy) -> str:
    if strategy.name == name or name not in STRATEGIES:
        return strategy.summary
    options = ", ".join(f"{key}={value}" for key, value in _find(name)[1].items())
    return f"{strategy.name} with {options}" if options else f"another name of {strategy.name}"
