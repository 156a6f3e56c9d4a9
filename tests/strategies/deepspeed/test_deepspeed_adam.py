"""DeepSpeed's Adam for the CPU: where it replaces torch's, and the fallback where it cannot."""

from __future__ import annotations

import fcntl
import importlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed_adam_jobs import ADAMS, trained
from deepspeed_jobs import FEW, MOVED, moved
from deepspeed_methods import OFFLOAD
from drivetrain.common.errors import StrategyError
from drivetrain.strategies import launch
from drivetrain.strategies.deepspeed import adam as deepspeed_adam
from drivetrain.strategies.deepspeed import build as deepspeed_build
from drivetrain.strategies.deepspeed.backend import working
from drivetrain.strategies.deepspeed.config import (
    choose_zero,
    make_config,
    read_config,
    takes_cpu_adam,
)
from drivetrain.strategies.options import Options
from parity_jobs import Case, longer, same_run, train
from torch import nn
from torch.optim import SGD, Adam, AdamW

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


class Mine(AdamW):
    """A custom subclass, whose step may be another."""


def scheduled(params: Any) -> AdamW:
    optimizer = AdamW(params)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


def hooked(params: Any) -> AdamW:
    optimizer = AdamW(params)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def stepped(params: Any) -> AdamW:
    optimizer = AdamW(params)
    for parameter in params:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]


@pytest.mark.parametrize(
    ("factory", "fits"),
    [
        (AdamW, True),
        *((factory, True) for factory in ADAMS.values()),
        (lambda p: AdamW([{"params": p[:1]}, {"params": p[1:], "weight_decay": 0, "lr": 1}], foreach=True), True),
        (lambda p: SGD(p, lr=0.1), False),
        (Mine, False),
        (lambda p: AdamW(p, amsgrad=True), False),
        (lambda p: AdamW([{"params": p[:1]}, {"params": p[1:], "maximize": True}]), False),
        (lambda p: Adam(p, capturable=True), False),
        (lambda p: AdamW(p, differentiable=True), False),
        (lambda p: AdamW(p, fused=True), False),
        (lambda p: AdamW(p, lr=torch.tensor(0.1), foreach=False), False),
        (lambda p: Adam([{"params": p[:1]}, {"params": p[1:], "decoupled_weight_decay": True}]), False),
        (scheduled, False),
        (hooked, False),
        (stepped, False),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")
def test_what_computes_the_same_is_replaced(factory: Callable[[Any], Any], fits: bool) -> None:
    assert deepspeed_adam.replaceable(factory(weights())) is fits


@pytest.mark.parametrize(
    ("config", "takes"),
    [
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, True),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, True),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/"}}}, False),
        ({"zero_optimization": {"stage": 2}}, False),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}, False),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}}}, False),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "zenflow": {"x": 1}}}, False),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
          "zero_force_ds_cpu_optimizer": False}, False),
    ],
)  # fmt: skip
def test_it_is_taken_where_the_whole_optimizer_is_on_the_cpu(config: dict[str, Any], takes: bool) -> None:
    theirs = read_config(config)
    whole = make_config(choose_zero(None, None, None, theirs), Options(), theirs, "deepspeed")
    assert takes_cpu_adam(whole, theirs) is takes
    assert whole["zero_force_ds_cpu_optimizer"] is False


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of compiled modules, empty."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return tmp_path / "drivetrain"


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def fallen_back(words: str) -> None:
    """Assert that torch's optimizer stays, and that the note gives the reason in one sentence."""
    own = AdamW(weights())
    with working(CPU) as deepspeed:
        optimizer, note = deepspeed_adam.faster(own, deepspeed, CPU)
    assert optimizer is own
    assert note.startswith(
        "The CPU steps with torch's AdamW, which is slower than DeepSpeed's DeepSpeedCPUAdam: "
    )
    assert words in note
    assert note.endswith(".")
    assert "\n" not in note


@pytest.mark.long
@pytest.mark.usefixtures("one_rank")
def test_what_does_not_fit_the_machine_leaves_torchs(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with working(CPU):
        builder = type(importlib.import_module("deepspeed.ops.op_builder").CPUAdamBuilder())
    monkeypatch.setattr(builder, "is_compatible", lambda *_, **__: False)
    fallen_back("DeepSpeed reports that it is incompatible with this machine")
    assert not cache.exists()


@pytest.mark.process
@pytest.mark.usefixtures("one_rank")
def test_a_compiler_that_fails_leaves_torchs(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real build, with a compiler that always fails."""
    monkeypatch.setenv("CXX", "no-compiler")
    fallen_back("it cannot be compiled here (/bin/sh: ")
    assert not list(cache.glob("*.so"))


@pytest.mark.usefixtures("one_rank")
def test_a_damaged_module_leaves_torchs(cache: Path) -> None:
    with working(CPU) as deepspeed:
        made = cache / f"cpu_adam-{deepspeed_build._key(deepspeed.__version__)}.so"
    cache.mkdir()
    made.write_bytes(b"not a module")
    fallen_back(f"{made} cannot be loaded (")


@pytest.mark.usefixtures("one_rank")
def test_a_folder_that_cannot_be_made_leaves_torchs(cache: Path) -> None:
    cache.write_text("a file")
    fallen_back("File exists")


@pytest.mark.process
def test_a_build_that_takes_too_long_is_ended(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    popen = deepspeed_build.subprocess.Popen
    monkeypatch.setattr(
        deepspeed_build.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1]
    )
    monkeypatch.setattr(deepspeed_build, "SECONDS", 0.3)
    with pytest.raises(StrategyError, match=r"took longer than 0 s"):
        deepspeed_build.compiled("0")
    assert started[0].returncode is not None
    assert not list(cache.glob("*.so"))
    with pytest.raises(StrategyError, match="took longer"):  # a failure of the past is tried again
        deepspeed_build.compiled("0")


@pytest.mark.slow
def test_a_compiler_that_hangs_is_ended(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real build, with a compiler that begins and never ends; ninja gives it a process group of its own."""
    cache.mkdir()
    compiler, pids = cache / "compiler", cache / "pids"
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *cpu_adam*) echo $$ >> {pids}; exec sleep 300;; esac\nexec c++ "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(deepspeed_build, "SECONDS", 25.0)
    with pytest.raises(StrategyError, match="took longer than 25 s"):
        deepspeed_build.compiled("0")
    started = [int(pid) for pid in pids.read_text().split()]
    assert started
    end = time.monotonic() + 10
    while any(map(runs, started)):
        assert time.monotonic() < end, started
        time.sleep(0.1)


def runs(pid: int) -> bool:
    """Whether the process is there, and more than what is left of an ended one until it is asked about."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_build_of_another_process_is_waited_for_and_not_repeated(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir()
    made = cache / f"cpu_adam-{deepspeed_build._key('0')}.so"
    monkeypatch.setattr(deepspeed_build, "_build", lambda _: pytest.fail("it was built a second time"))

    def other(after: Callable[[Any], object]) -> None:
        time.sleep(0.5)
        after(file)
        file.flush()
        fcntl.flock(file, fcntl.LOCK_UN)

    for after in (lambda file: file.write("the compiler is missing"), lambda _: made.write_bytes(b"")):
        with made.with_suffix(".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            thread = threading.Thread(target=other, args=(after,))
            thread.start()
            try:
                found: object = deepspeed_build.compiled("0")
            except StrategyError as error:
                found = str(error)
            thread.join()
        assert found == (made if made.exists() else "the compiler is missing")


def test_a_build_that_does_not_end_is_waited_for_in_vain(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir()
    monkeypatch.setattr(deepspeed_build, "SECONDS", 0.3)
    lock = cache / f"cpu_adam-{deepspeed_build._key('0')}.lock"
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(StrategyError, match="another process has been compiling it"):
            deepspeed_build.compiled("0")


def check(ranks: list[dict[str, Any]], names: list[str], case: Case) -> None:
    """Ranks that stepped with DeepSpeed's Adam trained like one device with torch's, and gave it their state."""
    # One device does as many microbatches as two ranks.
    whole, state = moved("single", "single", replace(case, accumulate=case.accumulate * 2))
    for rank in ranks:
        for name in names:
            assert rank[f"{name} optimizer"] == ("DeepSpeedCPUAdam", "")
            exported = rank[f"{name} state"]
            assert "bias_correction" not in exported.groups[0]
            entry = exported.entries["weight"]
            assert set(entry) == {"step", "exp_avg", "exp_avg_sq"}
            torch.testing.assert_close(entry["step"], torch.tensor(1.0))
            assert "amsgrad=True, but this one False" in rank[f"{name} refusal"]
            for way in ("to", "from"):
                run, optimizer = rank[f"{way} {name}"]
                same_run(run, whole, 1e-5)
                assert optimizer.groups == state.groups
                for parameter, values in state.entries.items():
                    found = dict(optimizer.entries[parameter])
                    torch.testing.assert_close(found, dict(values), rtol=0, atol=1e-5)
        assert rank["sgd"] == ("SGD", "")
        assert rank["kept"] == ("AdamW", "")


@pytest.mark.process
@pytest.mark.slow
def test_its_state_moves_to_and_from_torchs() -> None:
    """Without the compiled part, in the place of which torch computes."""
    names, case = OFFLOAD[1:], MOVED[0]
    check(launch(trained, names, case, False, devices=2, timeout=200), names, case)


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_compiled_it_trains_like_torchs(cache: Path) -> None:
    """Both ranks begin at once, with an empty cache, and a lock file of torch's that a dead process has left."""
    stale = cache.parent / "cpu_adam" / "lock"
    stale.parent.mkdir()
    stale.touch()
    (case,) = longer(MOVED[:1])
    ranks = launch(trained, OFFLOAD, case, True, devices=2, timeout=600)
    check(ranks, OFFLOAD, case)
    assert len(list(cache.glob("*.so"))) == 1
    single = train("single", FEW[1], parts=2)
    for rank in ranks:
        for name in OFFLOAD:
            same_run(rank[name], single, 1e-5)
        for name in ADAMS:
            torchs, deepspeeds = rank["numbers"][name]
            torch.testing.assert_close(deepspeeds, torchs, rtol=0, atol=1e-6)
