"""Names: the table of `available`, Lightning's names, and third-party strategies."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from drivetrain import Pipeline, strategies
from drivetrain.common.errors import StrategyError
from drivetrain.strategies import DDP, DP, Single
from drivetrain.strategies.options import Options
from drivetrain.strategies.single import DPEngine
from strategy_jobs import build, make_optimizer
from torch import nn

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
from drivetrain import StrategyError, strategies
path = list(sys.path)
for use in sys.argv[1:]:
    name, *sites = use.split(":")
    sys.path[:] = [*sites, *path]
    try:
        strategy = strategies.get(name, device="cpu")
        print(type(strategy).__module__, strategy.device, [r.summary for r in strategies.available()][-1])
    except StrategyError as error:
        print(f"refused: {error}")
"""


def install(folder: Path) -> Path:
    """A package with one strategy, built and installed into a folder of its own; gives that folder."""
    source, site = folder / "source", folder / "site"
    source.mkdir()
    (source / "pyproject.toml").write_text(PROJECT)
    (source / "their_strategies.py").write_text(MODULE)
    subprocess.run(
        [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--offline", "--no-deps", "--no-build-isolation",
         "--python", sys.executable, "--target", str(site), str(source)],
        check=True, timeout=100,
    )  # fmt: skip
    return site


def variant(site: Path, package: str, entry: str) -> Path:
    """The installed package as another one of that name, with that line of entry points."""
    other = shutil.copytree(site, site.parent / package)
    (info,) = other.glob("*.dist-info")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[drivetrain.strategies]\n{entry}\n")
    info.rename(other / f"{package}-1.dist-info")
    return other


@pytest.mark.process
def test_a_package_brings_a_strategy_by_an_entry_point(tmp_path: Path) -> None:
    site = install(tmp_path)
    second = variant(site, "second", "theirs = second_strategies:Theirs")
    broken = variant(site, "broken", "broken = their_strategies:Missing")
    greedy = variant(site, "greedy", "ddp = their_strategies:Theirs")
    uses = [f"theirs:{site}", f"theirs:{site}:{second}", f"broken:{broken}", f"theirs:{site}:{greedy}"]
    done = subprocess.run(
        [sys.executable, "-c", USE, *uses], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    found, twice, missing, taken = done.stdout.splitlines()
    assert found == "their_strategies cpu from another package"
    assert twice.startswith("refused: Two packages provide a strategy 'theirs'")
    assert "their_strategies" in twice
    assert "second" in twice
    assert "'broken' of the package broken (their_strategies:Missing) cannot be imported" in missing
    assert "'ddp' (their_strategies:Theirs) has the name of one of Drivetrain's" in taken
