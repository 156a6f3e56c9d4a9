"""The strategies by name (Lightning's, and those of third parties), `Single`, what `auto` chooses, and what an engine
rejects, in this process."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from drivetrain import Pipeline, PlanError, strategies
from drivetrain.common.errors import StrategyError
from drivetrain.strategies import DDP, DP, Auto, Single
from drivetrain.strategies.auto import free_bytes
from drivetrain.strategies.options import Options
from drivetrain.strategies.single import Copies, DPEngine
from drivetrain.transforms import GradientClipping, LayerFreezing
from parity_jobs import BF16, CASES, Case, train
from pipeline_data import Toy
from process_state import output_of
from strategy_jobs import build, make_optimizer
from torch import nn


def prepare(model: nn.Module | None = None, **options: object) -> strategies.Engine:
    return Single("cpu").prepare(model or nn.Linear(2, 1, bias=False), make_optimizer("sgd"), **options)


def test_get_by_name_with_options() -> None:
    assert strategies.get("single", device="cpu") == Single("cpu")
    assert strategies.get("ddp") == DDP()


def test_get_returns_a_strategy_object_as_it_is() -> None:
    strategy = DDP("cpu")
    assert strategies.get(strategy) is strategy


@pytest.mark.parametrize(
    ("strategy", "options", "words"),
    [
        ("dddp", {}, "Did you mean 'ddp'"),
        ("ddp", {"devcie": "cpu"}, "Did you mean 'device'"),
        (DDP, {}, "Pass an object"),
        (DDP(), {"device": "cpu"}, "cannot be combined with a 'ddp' strategy object"),
        (42, {}, "a int is not a strategy"),
    ],
)
def test_get_refuses(strategy: object, options: dict[str, object], words: str) -> None:
    with pytest.raises(StrategyError, match=words):
        strategies.get(strategy, **options)


@pytest.mark.process
def test_importing_the_folder_does_not_import_torch() -> None:
    code = (
        "import drivetrain.strategies, drivetrain.strategies.launching.rank_main, sys; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_launch_stays_the_function_whatever_is_imported() -> None:
    import drivetrain.strategies.launching.launcher

    assert callable(strategies.launch)
    assert strategies.launch is drivetrain.strategies.launching.launcher.launch


CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize("devices", [0, 2])
def test_single_takes_one_device(devices: int) -> None:
    with pytest.raises(StrategyError, match=f"not {devices}"):
        Single().check(devices)


NOT_HERE = "use fewer devices" if torch.cuda.is_available() else "finds none here. Set device='cpu'"


@pytest.mark.parametrize(
    ("strategy", "devices", "words"),
    [
        (Single("tpu9"), 1, "not a torch device"),
        (Single("meta"), 1, "not supported"),
        (Single("cuda:99"), 1, NOT_HERE),
        (DDP("cuda"), 99, NOT_HERE),
        (DDP("cuda:1"), 2, "cannot be the same for all ranks"),
        (DDP("cpu"), 0, "a positive integer"),
        (
            DDP("cpu"),
            8 * CORES + 1,
            f"devices={8 * CORES + 1} .* on the {CORES} CPU core.*at most {8 * CORES}",
        ),
    ],
)
def test_check_refuses_devices_that_are_not_here(strategy: strategies.Strategy, devices: int, words: str) -> None:
    with pytest.raises(StrategyError, match=words):
        strategy.check(devices)


def test_the_cores_of_the_cpu_suffice_for_several_ranks_each() -> None:
    DDP("cpu").check(8 * CORES)


def test_prepare_refuses_a_model_that_cannot_train() -> None:
    with pytest.raises(StrategyError, match="Linear has no parameter that requires a gradient"):
        prepare(nn.Linear(2, 1).requires_grad_(False))


def test_frozen_parameters_do_not_reach_the_optimizer() -> None:
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    engine = prepare(model)
    assert [p.shape for g in engine.optimizer.param_groups for p in g["params"]] == [(1, 2)]


def test_step_clips_steps_and_zeroes() -> None:
    model = nn.Linear(2, 1, bias=False)
    engine = Single("cpu").prepare(model, lambda p: torch.optim.SGD(p, lr=1.0), clip_norm=1.0)
    before = model.weight.detach().clone()
    engine.backward(engine.model(torch.tensor([[3.0, 4.0]])).sum())
    assert engine.step() == pytest.approx(5.0)
    torch.testing.assert_close(before - model.weight, torch.tensor([[0.6, 0.8]]))
    assert model.weight.grad is None
    unclipped = prepare()
    unclipped.backward(unclipped.model(torch.ones(1, 2)).sum())
    assert unclipped.step() is None


def test_gradients_of_parameters_that_the_factory_leaves_out_do_not_count() -> None:
    """No step zeroes them: they would add up, and the norm by which the others are clipped would grow."""
    model = nn.Linear(2, 1)
    engine = Single("cpu").prepare(model, lambda p: torch.optim.SGD([*p][:1], lr=0.0), clip_norm=1.0)
    for _ in range(3):
        engine.backward(engine.model(torch.tensor([[3.0, 4.0]])).sum())
        assert list(engine.gradients()) == ["weight"]
        norm = engine.step()
        assert norm is not None
        assert norm.item() == pytest.approx(5.0)
    assert model.bias.grad is None
    engine.optimizer.add_param_group({"params": [model.bias]})
    engine.backward(engine.model(torch.tensor([[3.0, 4.0]])).sum())
    assert list(engine.gradients()) == ["weight", "bias"]


def test_backward_refuses_another_number_of_microbatches() -> None:
    engine = prepare(accumulate=2)
    loss = engine.model(torch.ones(1, 2)).sum()
    with pytest.raises(StrategyError, match="microbatch 1 of accumulate=2"):
        engine.backward(loss)
    engine.backward(loss, last_microbatch=False)
    with pytest.raises(StrategyError, match="1 of accumulate=2"):
        engine.step()


def test_bf16_keeps_fp32_weights() -> None:
    engine = prepare(precision="bf16")
    with engine.forward_context():
        assert engine.model(torch.ones(1, 2)).dtype == torch.bfloat16
    assert engine.plain_model.weight.dtype == torch.float32


def test_export_state_is_a_contiguous_copy() -> None:
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    engine = prepare(model)
    state = engine.export_state()
    assert list(state) == ["weight", "bias"]
    assert state["weight"].is_contiguous()
    torch.testing.assert_close(state["weight"], model.weight.detach(), rtol=0, atol=0)
    with torch.no_grad():
        model.bias.fill_(7)
    assert not (state["bias"] == 7).any()


def test_export_state_refuses_what_is_no_tensor() -> None:
    class Odd(nn.Linear):
        def get_extra_state(self) -> str:
            return "odd"

    with pytest.raises(StrategyError, match="'_extra_state' is a str"):
        prepare(Odd(2, 1)).export_state()


def test_reduce_on_one_rank_is_a_copy() -> None:
    engine = prepare()
    value = torch.tensor(3.0)
    result = engine.reduce(value, "sum")
    result += 1
    assert value == 3
    assert engine.reduce(value) == 3
    with pytest.raises(StrategyError, match="op='max'"):
        engine.reduce(value, "max")


@pytest.mark.parametrize("case", [*CASES, BF16[0]], ids=lambda case: case.name)
@pytest.mark.parametrize("name", ["ddp", "dp"])
def test_alone_in_a_process_it_is_single(name: str, case: Case) -> None:
    """`dp` on the CPU."""
    single, other = train("single", case), train(name, case)
    assert (other.losses, other.norms) == (single.losses, single.norms)


def test_accumulation_is_the_whole_batch_at_once() -> None:
    whole, parts = (train("single", replace(CASES[3], accumulate=number)) for number in (1, 2))
    assert parts.losses == pytest.approx(whole.losses, abs=1e-6)


OURS = [
    "single", "dp", "ddp", "ddp_spawn", "ddp_notebook", "ddp_find_unused_parameters",
    "fsdp", "fsdp_grad_op", "fsdp_cpu_offload", "hsdp", "zero_redundancy",
    "fairscale_oss", "fairscale_sharded_ddp",
]  # fmt: skip


class Mine(Single):
    """A strategy of a user's own."""

    name = "mine_own"
    summary = "what its user wrote"


def test_available_tells_name_summary_extra_and_whether_it_runs_here() -> None:
    table = strategies.available()
    rows = {row.name: row for row in table}
    assert set(OURS) <= set(rows)
    for name in OURS:
        assert rows[name].runs_here, rows[name].why_not
        assert rows[name].summary
        assert rows[name].extra == ("fairscale" if name.startswith("fairscale") else "")
    assert {row.extra for row in table if row.name.startswith("deepspeed")} == {"deepspeed"}
    lines = {line.split()[1]: line for line in repr(table).splitlines() if line.startswith("│ ")}
    cells = {name: [cell.strip() for cell in line.split("│")][2:4] for name, line in lines.items()}
    assert cells["zero_redundancy"] == ["yes", ""]
    assert cells["fairscale_oss"] == ["yes", "fairscale"]
    assert "ddp with find_unused_parameters=True" in lines["ddp_find_unused_parameters"]
    assert "another name of ddp" in lines["ddp_notebook"]
    page = table._repr_html_()
    assert page.count("<tr>") == len(table) + 1
    assert "&#x27;fsdp&#x27;" in page  # why fairscale_fsdp cannot run here: the remedy, escaped


def test_what_cannot_run_here_says_why() -> None:
    row = next(row for row in strategies.available() if row.name == "fairscale_fsdp")
    assert not row.runs_here
    assert "GPU" in row.why_not
    with pytest.raises(StrategyError, match=r"'fairscale_fsdp': .*Use 'fsdp'"):
        strategies.get("fairscale_fsdp").prepare(nn.Linear(2, 1), make_optimizer("sgd"))


def test_a_missing_extra_is_a_row_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fairscale.optim.oss", None)
    row = next(row for row in strategies.available() if row.name == "fairscale_oss")
    assert not row.runs_here
    assert "pip install 'drivetrain[fairscale]'" in row.why_not


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("single_device", Single()),
        ("dp", DP()),
        ("ddp_spawn", DDP()),
        ("ddp_fork", DDP()),
        ("ddp_notebook", DDP()),
        ("ddp_find_unused_parameters", DDP(find_unused_parameters=True)),
        ("ddp_find_unused_parameters_true", DDP(find_unused_parameters=True)),
        ("ddp_find_unused_parameters_false", DDP()),
        ("ddp_spawn_find_unused_parameters_false", DDP()),
        ("ddp_fork_find_unused_parameters_true", DDP(find_unused_parameters=True)),
        ("ddp_notebook_find_unused_parameters_true", DDP(find_unused_parameters=True)),
    ],
)
def test_lightnings_names(name: str, expected: object) -> None:
    assert strategies.get(name) == expected
    assert strategies.get(name, device="cpu").device == "cpu"


@pytest.mark.parametrize("name", ["xla", "xla_debug", "xla_fsdp", "single_xla", "single_tpu"])
def test_tpus_are_refused_by_name(name: str) -> None:
    with pytest.raises(StrategyError, match=f"'{name}' trains on TPUs .* CPUs or CUDA GPUs"):
        strategies.get(name)


def test_an_option_cannot_contradict_the_name() -> None:
    with pytest.raises(StrategyError, match="contradicts the name 'ddp_find_unused_parameters'"):
        strategies.get("ddp_find_unused_parameters", find_unused_parameters=False)


def test_the_names_under_data_parallel_are_plain() -> None:
    """The wrapper of several GPUs, here without any."""
    model = build(True)
    optimizer = make_optimizer("adamw")(model.parameters())
    engine = DPEngine(nn.DataParallel(model), optimizer, torch.device("cpu"), Options())
    engine.backward(engine.model(torch.randn(4, 3, 6, 6)).sum())
    engine.step()
    assert engine.plain_model is model
    assert list(engine.export_state()) == list(model.state_dict())
    assert set(engine.export_optimizer().entries) == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize(
    ("strategy", "devices", "words"),
    [
        (DP(), 2, "devices=2 must be 1"),
        (DP("cuda:1"), 1, "names a single device"),
        (DP("cpu", device_ids=(0,)), 1, "would train on the CPU"),
        (DP("cuda", device_ids=(99,)), 1, "finds"),
    ],
)
def test_dp_refuses(strategy: DP, devices: int, words: str) -> None:
    with pytest.raises(StrategyError, match=words):
        strategy.check(devices)


@pytest.mark.parametrize("name", ["ddp", "zero_redundancy"])
def test_a_text_is_no_flag(name: str) -> None:
    """As `find_unused_parameters=no` on the command line."""
    with pytest.raises(StrategyError, match="find_unused_parameters='no' must be True or False"):
        strategies.get(name, find_unused_parameters="no")


@pytest.mark.usefixtures("nothing_registered")
def test_a_registered_strategy_is_known() -> None:
    """On the ranks that are launched, too: see test_parity.py."""
    strategies.register("mine_own", Mine)
    assert strategies.get("mine_own", device="cpu") == Mine("cpu")
    assert "what its user wrote" in repr(strategies.available())
    assert Pipeline(nn.Module).distribute("mine_own", device="cpu").distribution.name == "mine_own"
    with pytest.raises(StrategyError, match=r"no option 'devcie'\. Did you mean 'device'"):
        strategies.get("mine_own", devcie="cpu")


@pytest.mark.usefixtures("nothing_registered")
@pytest.mark.parametrize("name", ["ddp", "single_device", "xla", "twice"])
def test_a_name_that_is_taken_is_refused(name: str) -> None:
    strategies.register("twice", Mine)
    with pytest.raises(StrategyError, match=f"the name '{name}' is taken"):
        strategies.register(name, Mine)


@pytest.mark.usefixtures("nothing_registered")
def test_an_option_without_a_default() -> None:
    """The table of all strategies, and `drivetrain doctor`, work with it; it is required by name."""

    class Frozen(Mine):
        name, summary = "frozen", "freezes a prefix"

        def __init__(self, prefix: str) -> None:
            self.prefix = prefix

    strategies.register("frozen", Frozen)
    (row,) = [row for row in strategies.available() if row.name == "frozen"]
    assert (row.summary, row.runs_here) == ("freezes a prefix", False)
    with pytest.raises(StrategyError, match=r"'frozen' needs the option 'prefix'.*distribute\('frozen', prefix=…\)"):
        strategies.get("frozen")
    assert strategies.get("frozen", prefix="0.").prefix == "0."  # type: ignore[attr-defined]


@pytest.mark.usefixtures("nothing_registered")
@pytest.mark.parametrize("method", ["__init__", "check"])
def test_a_strategy_that_fails_is_a_row(method: str) -> None:
    """One of another package must not take the table of all strategies away, nor `drivetrain doctor`."""

    def fails(*_: Any, **__: Any) -> None:
        raise ModuleNotFoundError("No module named 'theirs'")

    strategies.register("mine_own", type("Failing", (Mine,), {method: fails}))
    (row,) = [row for row in strategies.available() if row.name == "mine_own"]
    assert (row.summary, row.runs_here) == ("what its user wrote", False)
    assert row.why_not == "it raised ModuleNotFoundError: No module named 'theirs'"


@pytest.mark.usefixtures("nothing_registered")
def test_what_is_registered_must_make_strategies() -> None:
    with pytest.raises(StrategyError, match=r"'mine_own' is a Mine\. Pass the strategy's class"):
        strategies.register("mine_own", Mine())
    strategies.register("mine_own", lambda: 3)
    with pytest.raises(StrategyError, match="a int is not a strategy"):
        strategies.get("mine_own")


PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "their_strategies"
version = "1"
[project.entry-points."drivetrain.strategies"]
theirs = "their_strategies:Theirs"
[tool.setuptools]
py-modules = ["their_strategies"]
"""

MODULE = """
from drivetrain.strategies import Single
class Theirs(Single):
    name = "theirs"
    summary = "from another package"
"""

USE = """
import sys
from drivetrain import strategies
sys.path.insert(0, sys.argv[1])
strategy = strategies.get("theirs", device="cpu")
print(type(strategy).__module__, strategy.device, [row.summary for row in strategies.available()][-1])
"""
FOUND = "their_strategies cpu from another package"


@pytest.mark.slow
@pytest.mark.process
def test_a_package_that_is_built_and_installed_brings_a_strategy(tmp_path: Path) -> None:
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    (source / "pyproject.toml").write_text(PROJECT)
    (source / "their_strategies.py").write_text(MODULE)
    subprocess.run(
        [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--offline", "--no-deps", "--no-build-isolation",
         "--python", sys.executable, "--target", str(site), str(source)],
        check=True, timeout=100,
    )  # fmt: skip
    assert output_of(sys.executable, "-c", USE, str(site)).splitlines() == [FOUND]


def installed(folder: Path, package: str, entry: str) -> str:
    """What an installation leaves in a folder of its own: a module with a strategy, and that line of entry points."""
    site = folder / package
    info = site / f"{package}-1.dist-info"
    info.mkdir(parents=True)
    (site / "their_strategies.py").write_text(MODULE)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[drivetrain.strategies]\n{entry}\n")
    return str(site)


def used(name: str, *sites: str) -> str:
    """What becomes of a strategy's name, with these folders on the path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sites, *sys.path])
        try:
            strategy = strategies.get(name, device="cpu")
            return f"{type(strategy).__module__} {strategy.device} {strategies.available()[-1].summary}"
        except StrategyError as error:
            return f"refused: {error}"
        finally:
            sys.modules.pop("their_strategies", None)


@pytest.mark.usefixtures("nothing_registered")
def test_a_package_brings_a_strategy_by_an_entry_point(tmp_path: Path) -> None:
    site = installed(tmp_path, "their_strategies", "theirs = their_strategies:Theirs")
    second = installed(tmp_path, "second", "theirs = second_strategies:Theirs")
    broken = installed(tmp_path, "broken", "broken = their_strategies:Missing")
    greedy = installed(tmp_path, "greedy", "ddp = their_strategies:Theirs")
    assert used("theirs", site) == FOUND
    twice = used("theirs", site, second)
    assert twice.startswith("refused: Two packages provide a strategy 'theirs'")
    assert "their_strategies" in twice
    assert "second" in twice
    missing = used("broken", broken)
    assert "'broken' of the package broken (their_strategies:Missing) cannot be imported" in missing
    assert "'ddp' (their_strategies:Theirs) has the name of one of Drivetrain's" in used("theirs", site, greedy)


NEED = 16 * 1000 * 1001
"""Bytes of AdamW for the model below."""


def model() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(1000, 1000)


@pytest.mark.parametrize(
    ("devices", "times", "name", "words"),
    [
        (1, 100, "single", "there is one device"),
        (1, 0.01, "single", "there is one device"),
        (4, 1.01, "ddp", "each can hold all"),
        (4, 0.99, "fsdp", "each can hold its shard of 0.00 GiB, but not all"),
        (4, 0.26, "fsdp", "but not all"),
        (4, 0.24, "fsdp_cpu_offload", "not even a shard"),
    ],
)
def test_the_choice_follows_the_memory(devices: int, times: float, name: str, words: str) -> None:
    found, why = Auto("cpu")._choose(model(), devices, int(2 * times * NEED))  # of what is free, half may be used
    assert found == name
    assert words in why
    assert "1.0 M parameters need 0.01 GiB with AdamW" in why


def test_memory_is_the_machines_divided_by_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    found = free_bytes(torch.device("cpu"), 8)
    assert found == pytest.approx(psutil.virtual_memory().available / 2, rel=0.2)


def test_choose_needs_no_ranks() -> None:
    name, why = Auto("cpu").choose(model(), 2)
    assert name == "ddp"
    assert "are free for each of 2 device(s)" in why


def test_alone_it_is_single() -> None:
    single, auto = train("single", CASES[0]), train("auto", CASES[0])
    assert auto.losses == single.losses


def test_it_checks_its_devices() -> None:
    with pytest.raises(StrategyError, match="'auto': devices=0 must be a positive integer"):
        strategies.get("auto", device="cpu").check(0)
    with pytest.raises(StrategyError, match="devices=0"):
        Auto("cpu").choose(model(), 0)
    for devices in (0, "2", 2.5):
        with pytest.raises(StrategyError, match=f"launch: devices={devices!r} must be a positive integer"):
            strategies.launch(print, devices=devices)  # type: ignore[arg-type]


def test_a_plan_refuses_what_one_of_the_choices_cannot_do(toy: Toy) -> None:
    freezing = toy.pipeline().transform(LayerFreezing()).distribute("auto", devices=2)
    with pytest.raises(PlanError, match="'ddp_find_unused_parameters' or 'fsdp'"):
        freezing.plan()
    with pytest.raises(PlanError, match="'auto' might shard them"):
        toy.pipeline().transform(GradientClipping("adaptive")).distribute("auto", devices=2).plan()


def test_the_threads_of_dp_compute_in_the_dtype_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """DataParallel's own threads know that autocast is on, and not its dtype: theirs is fp16."""

    def in_a_thread(self: Any, replicas: Any, inputs: Any, kwargs: Any) -> list[Any]:  # noqa: ARG001
        with ThreadPoolExecutor(1) as pool:
            return [pool.submit(one, *given).result() for one, given in zip(replicas, inputs, strict=True)]

    monkeypatch.setattr(nn.DataParallel, "parallel_apply", in_a_thread)
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        found = Copies(nn.Identity()).parallel_apply([lambda _: torch.get_autocast_dtype("cuda")], [(0,)], [{}])
    finally:
        torch.set_autocast_dtype("cuda", before)
    assert found == [torch.bfloat16]
