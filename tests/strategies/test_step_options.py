"""Step options that every strategy supports: activation checkpointing, in-place compilation, half precision."""

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
from drivetrain import StrategyError, strategies
from drivetrain.strategies.common.placement import compile_model, recompute_activations
from drivetrain.strategies.options import Options
from parity_jobs import Case, Run, train
from step_option_jobs import ALL, OPTIONS, QUICK, check_run, close, run_all, without_options
from strategy_jobs import make_optimizer
from torch import nn

pytestmark = [pytest.mark.timeout(280), pytest.mark.process]


class Block(nn.Module):
    """With all that a second forward could get wrong: dropout, statistics, and a buffer that the output uses."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(0.3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count += 1
        return x + self.drop(torch.tanh(self.norm(self.conv(x)))) * self.count.clone()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), Block(), Block(), nn.Flatten(), nn.Linear(4 * 36, 5))


def gradients(model: nn.Module) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """After two forwards and a backward of both."""
    torch.manual_seed(1)
    x = torch.randn(6, 3, 8, 8)
    (model(x).square().mean() + model(x + 1).square().mean()).backward()
    return [p.grad for p in model.parameters() if p.grad is not None], model.state_dict()


POLICIES: list[Any] = [True, ["Block"], lambda name, _: name == "1", lambda name, _: name == ""]


@pytest.mark.parametrize("policy", POLICIES, ids=["blocks", "class", "function", "whole"])
def test_recomputing_changes_no_number_and_no_name(policy: Any) -> None:
    plain, model = net(), net()
    assert recompute_activations(model, policy)
    (expected, state), (found, own) = gradients(plain), gradients(model)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert list(state) == list(own)
    assert all(torch.equal(state[name], own[name]) for name in state)


def saved_bytes(model: nn.Module, images: torch.Tensor) -> int:
    """What autograd keeps between forward and backward."""
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(images)
    return sum(seen.values())


def test_recomputing_keeps_less() -> None:
    plain, model = models.resnet(), models.resnet()
    recompute_activations(model, True)
    images = torch.zeros(2, 3, 32, 32)
    assert saved_bytes(model, images) < 0.6 * saved_bytes(plain, images)


def test_a_recomputed_model_is_copied_whole_and_chosen_once() -> None:
    model = net()
    assert recompute_activations(model, True) == recompute_activations(model, ["RecomputedBlock"]) == ("1", "2")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[1].conv.weight.zero_()
    x = torch.randn(2, 3, 8, 8)
    assert not torch.equal(model(x), twin(x))  # a patched forward would still be the first model's
    assert type(model[1]).__mro__.count(Block) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation_checkpointing": ["Bloc"]}, r"\['Bloc'\] selects no module.*Did you mean 'Block'"),
        (
            {"activation_checkpointing": "Block"},
            r"must be True, False, a list of class names, a fraction in \(0, 1\) or a function",
        ),
        ({"activation_checkpointing": lambda *_: False}, "the function selects no module"),
        ({"compile": "max-autotun"}, "no mode 'max-autotun'.*Did you mean 'max-autotune'"),
        (
            {"activation_checkpointing": 3},
            "activation_checkpointing=3 must be True, False, a list of class names, a fraction in",
        ),
        ({"activation_checkpointing": 1.0, "compile": True}, r"1.0 must be .* a fraction in \(0, 1\)"),
        (
            {"activation_checkpointing": 0.5},
            r"=0.5 is a memory budget, which only the compiler keeps. Add compile=True, or pass .*=True",
        ),
        ({"compile": "region"}, "no mode 'region'.*Did you mean 'regions'"),
        ({"compile": 3}, "compile=3 must be True, False or the name of a mode"),
        ({"precision": "fp61"}, "'fp61' is not known.*Did you mean 'fp16'"),
        ({"accumulate": 1.5}, "accumulate=1.5 must be a positive integer"),
        ({"accumulate": "2"}, "accumulate='2' must be a positive integer"),
        ({"accumulate": True}, "accumulate=True must be a positive integer"),
        ({"accumulate": 0}, "accumulate=0 must be a positive integer"),
        ({"clip_norm": 0.0}, "clip_norm=0.0 must be a finite number"),
        ({"clip_norm": "1"}, "clip_norm='1' must be a finite number"),
        ({"clip_norm": float("nan")}, "clip_norm=nan must be a finite number"),
        ({"clipnorm": 1.0}, "prepare\\(\\) has no option 'clipnorm'.*Did you mean 'clip_norm'"),
    ],
)
def test_what_cannot_be_done_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        strategies.get("single", device="cpu").prepare(net(), make_optimizer("sgd"), **options)


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(StrategyError, match=r"found no repeated blocks in Sequential. Pass the classes"):
        recompute_activations(nn.Sequential(nn.Linear(2, 2)), True)


def test_a_forward_on_the_instance_is_refused() -> None:
    """It would have run as before, and kept all activations."""
    model = net()
    model[2].forward = model[2].forward
    with pytest.raises(StrategyError, match="the forward of 2, a Block, was replaced on the instance"):
        recompute_activations(model, True)
    assert type(model[1]) is Block


@pytest.fixture(scope="module")
def runs() -> dict[str, Any]:
    """What rank 0 of two found in all cases; they are started once."""
    return strategies.launch(run_all, QUICK, devices=2, timeout=270)[0]


@pytest.mark.parametrize(("strategy", "name"), QUICK)
def test_ranks_train_as_one_device(runs: dict[str, Any], strategy: str, name: str) -> None:
    check_run(runs, strategy, name, 2)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_strategy_trains_with_every_option(ranks: int) -> None:
    runs = strategies.launch(run_all, ALL, devices=ranks, timeout=270)[0]
    for strategy, name in ALL:
        check_run(runs, strategy, name, ranks)
    check_overflows(runs)


def test_an_overflow_on_one_rank_leaves_the_step_out_on_all(runs: dict[str, Any]) -> None:
    check_overflows(runs)


def check_overflows(runs: dict[str, Any]) -> None:
    """With clip_norm, too: a step that is skipped has no norm, and the next one a finite norm."""
    for name, found in runs["overflow"].items():
        assert found.same == [True, False], name
        assert found.skipped == [True, False], name
        assert found.scale == 32768, name
        first, second = found.norms
        assert first is None, name
        assert (second is None) == name.endswith("None"), name
        assert math.isfinite(second or 0.0), name


def test_deepspeed_refuses_fp16(runs: dict[str, Any]) -> None:
    refusals = runs["refused"]
    assert refusals
    assert all("precision='fp16'" in message for message in refusals.values())


@pytest.mark.parametrize("name", OPTIONS)
def test_one_device_trains_alike(name: str) -> None:
    case, options = OPTIONS[name]
    close(train("single", case, given=options), without_options(name, 1), 1e-5 if case.precision == "fp32" else 3e-2)


def test_dp_recomputes_too() -> None:
    """It ignored the option once."""
    engine = strategies.get("dp", device="cpu").prepare(net(), make_optimizer("sgd"), activation_checkpointing=True)
    assert type(engine.plain_model[1]).__name__ == "RecomputedBlock"


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(768, 5), nn.Tanh())


def compiled_and_not() -> dict[str, list[Run]]:
    """A model that compiles in seconds, compiled and not; FSDP compiles units, see `in_regions_and_not`."""
    case = Case("", layers, "adamw", 0.5, 2)
    name = "ddp" if dist.is_initialized() else "single"
    return {name: [train(name, case, given={"compile": how}) for how in (True, False)]}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_compiled_model_trains_alike_under_the_same_names(ranks: int) -> None:
    runs = compiled_and_not() if ranks == 1 else strategies.launch(compiled_and_not, devices=2, timeout=250)[0]
    for compiled, plain in runs.values():
        assert list(compiled.state) == ["1.weight", "1.bias"]
        close(compiled, plain, 1e-5)


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize("options", [{"compile": True}, {"compile": "regions", "activation_checkpointing": 0.5}])
def test_fsdp_refuses_to_compile_a_model_without_units(options: dict[str, Any]) -> None:
    """It compiled nothing, and kept no memory budget."""
    for name in ("fsdp", "hsdp"):
        with pytest.raises(StrategyError, match=f"'{name}': compile={options['compile']!r} .* but Sequential has none"):
            strategies.get(name, device="cpu").prepare(layers(), make_optimizer("sgd"), **options)


@pytest.mark.slow
def test_compile_compiles() -> None:
    """The graph is whole and it is the compiled one that runs."""
    torch._dynamo.reset()
    before = torch._dynamo.utils.counters["frames"]["ok"]
    train("single", Case("", layers, steps=1), given={"compile": True})
    assert torch._dynamo.utils.counters["frames"]["ok"] > before


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(torch.tanh(self.wide(self.norm(x))))


def deep() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(768, 16), *(Mix() for _ in range(4)), nn.Linear(16, 5))


HIDDEN = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
"""torch hides it, where it asks a block's input for its gradient, but pytest's filter makes it an error before."""
BUDGET = {"activation_checkpointing": 0.1}
REGIONS: list[dict[str, Any]] = [
    {"compile": "regions"},
    {"compile": "regions", **BUDGET},
    {"compile": True, **BUDGET},
]


def test_regions_are_the_blocks() -> None:
    def compiled(model: nn.Module) -> list[str]:
        engine = strategies.get("single", device="cpu").prepare(model, make_optimizer("sgd"), compile="regions")
        modules = engine.plain_model.named_modules()
        return [name for name, module in modules if module._compiled_call_impl is not None]

    assert compiled(deep()) == ["2", "3", "4", "5"]
    assert compiled(models.resnet()) == ["4", "5"]
    with pytest.raises(StrategyError, match=r"'regions' found no repeated blocks in Sequential. Use compile=True"):
        compiled(layers())


def in_regions_and_not() -> dict[str, list[Run]]:
    case = Case("", deep, "adamw", 0.5, 2)
    names = ("single",) if not dist.is_initialized() else ("ddp", "fsdp")
    return {name: [train(name, case, given=how) for how in (*REGIONS, {})] for name in names}


@HIDDEN
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_regions_and_a_memory_budget_train_alike(ranks: int) -> None:
    torch._dynamo.reset()
    runs = in_regions_and_not() if ranks == 1 else strategies.launch(in_regions_and_not, devices=2, timeout=270)[0]
    for *compiled, plain in runs.values():
        for run in compiled:
            assert list(run.state) == list(deep().state_dict())
            close(run, plain, 1e-5)


@HIDDEN
@pytest.mark.slow
@pytest.mark.parametrize("how", [True, "regions"])
def test_a_budget_keeps_less_and_equal_blocks_share_a_graph(how: Any) -> None:
    """The setting is torch's, and restored after each call."""
    kept, settings = [], torch._functorch.config
    for budget in (False, 0.9, 0.1):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        engine = strategies.get("single", device="cpu").prepare(
            deep(), make_optimizer("sgd"), compile=how, activation_checkpointing=budget
        )
        kept.append(saved_bytes(engine.model, torch.ones(64, 3, 16, 16)))
        assert settings.activation_memory_budget == 1.0
        # Of four blocks; that of the first one may be another, because of how its input lies in memory.
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= (1 if how is True else 2)
    assert kept[0] >= kept[1] > kept[2]


def overflowing(factory: Callable[[], nn.Module]) -> nn.Module:
    model = factory()
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad * torch.inf)
    return model


def test_a_step_that_overflows_in_fp16_is_left_out() -> None:
    model = overflowing(net)
    engine = strategies.get("single", device="cpu").prepare(model, make_optimizer("sgd"), precision="fp16")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    scales = []
    for _ in range(2):
        with engine.forward_context():
            loss = engine.model(torch.randn(4, 3, 8, 8)).float().square().mean()
        engine.backward(loss)
        engine.step()
        scales.append(engine.export_optimizer().loss_scale["scale"])
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert scales[1] < scales[0] < 65536


def test_gradients_in_fp16_are_true_ones_after_the_backward() -> None:
    def norm(precision: str) -> float:
        model = net()
        model.eval()
        engine = strategies.get("single", device="cpu").prepare(
            model, make_optimizer("sgd"), precision=precision, accumulate=2
        )
        for last in (False, True):
            with engine.forward_context():
                loss = engine.model(torch.ones(4, 3, 8, 8)).float().square().mean()
            engine.backward(loss, last)
        return nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()

    assert norm("fp16") == pytest.approx(norm("fp32"), rel=1e-2)


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_cuda_graphs_do_not_accumulate(mode: str) -> None:
    """The gradients of a microbatch are in memory that the next one writes."""
    for device in ("cpu", "cuda"):
        with nullcontext() if device == "cpu" else pytest.raises(StrategyError, match=r"accumulate=2 would add\. Use"):
            compile_model(net(), Options(compile=mode, accumulate=2), torch.device(device))
    for how in (True, "regions", "max-autotune-no-cudagraphs"):
        compile_model(net(), Options(compile=how, accumulate=2), torch.device("cuda"))


def test_what_cuda_graphs_return_in_evaluation_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.zeros(3)

    def compiled(self: nn.Module, mode: str) -> None:  # noqa: ARG001
        self._compiled_call_impl = lambda x: (memory.copy_(x), {"more": memory})

    monkeypatch.setattr(nn.Module, "compile", compiled)
    compile_model(model := nn.Identity(), Options(compile="reduce-overhead"), torch.device("cuda"))
    with torch.no_grad():
        first, _ = model(torch.ones(3)), model(torch.full((3,), 2.0))
    assert first[0].tolist() == first[1]["more"].tolist() == [1.0] * 3
    assert model(torch.ones(3))[0] is memory  # in training nothing is copied
