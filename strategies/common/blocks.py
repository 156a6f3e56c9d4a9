"""Find a model's blocks: the units that a sharding strategy gathers one at a time."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator

from torch import nn

from ...common.errors import StrategyError, suggest

LARGE = 1_000_000
"""Parameters from which a layer or nested block is worth a message: below 4 MB, its cost is mostly latency."""


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of `model`, inner ones first: modules with children, in a container or at the top level, whose
    class occurs there at least twice. Inside a block, only those with at least `LARGE` parameters count. Outside, a
    single layer of that size in a Sequential, such as VGG's first linear layer, counts too."""
    blocks = _repeated(model)
    inside = {module for block in blocks for module in block.modules()}
    # A Sequential certainly calls its layers; other containers may only read their weights.
    stacks = (module for module in model.modules() if isinstance(module, nn.Sequential))
    layers = (layer for stack in stacks for layer in stack.children() if not any(layer.children()))
    blocks += [layer for layer in layers if _size(layer) >= LARGE and layer not in inside]
    return without_cut_ties(model, dict.fromkeys(blocks))


def without_cut_ties(model: nn.Module, modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules that share no parameter with a module outside; separated, it would become two."""
    holders: dict[nn.Parameter, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(parameter, set()).add(module)
    inside = {module: set(module.modules()) for module in modules}
    return [m for m, own in inside.items() if not any(each & own and each - own for each in holders.values())]


def _repeated(module: nn.Module) -> list[nn.Module]:
    candidates = list(_candidates(module))
    counts = Counter(type(candidate) for candidate in candidates)
    blocks: list[nn.Module] = []
    for candidate in candidates:
        inner = _repeated(candidate)
        if counts[type(candidate)] > 1:
            blocks += [*(block for block in inner if _size(block) >= LARGE), candidate]
        else:
            blocks += inner
    return blocks


def _candidates(module: nn.Module) -> Iterator[nn.Module]:
    seen: set[nn.Module] = set()

    def walk(parent: nn.Module) -> Iterator[nn.Module]:
        for child in parent.children():
            if child in seen:
                continue
            seen.add(child)
            at_top = parent is module and not _is_list(child)
            if (_is_list(parent) or at_top) and any(child.children()) and not _is_stack(child):
                if _size(child):
                    yield child
            else:
                yield from walk(child)

    return walk(module)


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)


def _is_stack(module: nn.Module) -> bool:
    """Whether it only contains modules that are themselves composite, as a ResNet's layer contains its blocks."""
    if isinstance(module, nn.Sequential):
        return any(any(child.children()) for child in module.children())
    return _is_list(module)  # most other lists have no forward before which to gather


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


ModuleFilter = bool | Collection[str] | Callable[[str, nn.Module], bool]
"""Which modules: True for the model's blocks (see `blocks.find_blocks`), class names such as `["Bottleneck"]`, or a
function of a module's name and the module; False for none."""


def check_filter(module_filter: ModuleFilter, place: str) -> None:
    """Raise `StrategyError` for an invalid filter, such as a string, whose letters would count as names."""
    given: object = module_filter
    if isinstance(given, str) or not (isinstance(given, bool | Collection) or callable(given)):
        raise StrategyError(
            f"{place}={module_filter!r} must be a list of class names, True for the model's blocks, or a function of "
            f"name and module."
        )


def choose(module_filter: ModuleFilter, model: nn.Module, place: str) -> dict[str, nn.Module]:
    """Return the selected modules by name, outer ones first. Raise `StrategyError` if a filter selects none."""
    if module_filter is False:
        return {}
    selects = _predicate(module_filter, model)
    chosen = {name: module for name, module in model.named_modules() if selects(name, module)}
    if not chosen:
        raise StrategyError(_nothing_chosen(module_filter, model, place))
    return chosen


def _predicate(module_filter: ModuleFilter, model: nn.Module) -> Callable[[str, nn.Module], bool]:
    if isinstance(module_filter, bool):
        blocks = set(find_blocks(model))
        return lambda _, module: module in blocks
    if callable(module_filter):
        return module_filter
    names = set(module_filter)
    return lambda _, module: type(module).__name__ in names


def _nothing_chosen(module_filter: ModuleFilter, model: nn.Module, place: str) -> str:
    kinds = {type(module).__name__ for module in model.modules() if any(module.children())}
    if isinstance(module_filter, bool):
        return (
            f"{place}=True found no repeated blocks in {type(model).__name__}. Pass the classes of the modules "
            f"instead, such as {sorted(kinds)[:3]}."
        )
    names = [] if callable(module_filter) else sorted(module_filter)
    hint = suggest(names[0] if names else "", kinds)
    return f"{place}: {names or 'the function'} selects no module of the model.{hint}"
