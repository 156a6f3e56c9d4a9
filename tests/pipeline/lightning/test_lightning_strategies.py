"""Every strategy name of Lightning's registry with a handed-over pipeline: trained to our own losses on two ranks,
or, where Lightning itself refuses the CPU, refused by it in so many words and trained without that refusal."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pipeline_data import Toy, numbers
from places import SUPPORT

FORKS = [
    f"{start}{end}"
    for start in ("ddp_fork", "ddp_notebook")
    for end in ("", "_find_unused_parameters_false", "_find_unused_parameters_true")
]
SPAWNS = ["ddp_spawn", "ddp_spawn_find_unused_parameters_false", "ddp_spawn_find_unused_parameters_true"]
SCRIPTS = ["ddp", "ddp_find_unused_parameters_false", "ddp_find_unused_parameters_true"]
DEEPSPEED = [
    "deepspeed", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_2_offload", "deepspeed_stage_3",
    "deepspeed_stage_3_offload", "deepspeed_stage_3_offload_nvme",
]  # fmt: skip
REFUSALS = {
    **dict.fromkeys(["fsdp", "fsdp_cpu_offload"], "strategy `fsdp` requires a GPU accelerator"),
    **dict.fromkeys(DEEPSPEED, "DeepSpeed strategy is only supported on CUDA GPUs"),
    **dict.fromkeys(["xla", "xla_debug"], "torch_xla"),
    # By these names it makes no strategy anywhere; on a TPU, "auto" does.
    **dict.fromkeys(["single_xla", "single_tpu"], "missing 1 required positional argument: 'device'"),
}
"""What Lightning says where it cannot train on a CPU, by the strategy's name."""
CASES = ["plain", "everything"]


class Script:
    """`lightning_jobs.py`, run to its end in a process group of its own, of which nothing may be left."""

    def __init__(self, toy: Toy, folder: Path) -> None:
        self.toy, self.folder = toy, folder

    def run(self, trainings: list[tuple[str, str]], seconds: float, ranks: int = 2, threads: int = 1) -> None:
        job = {"trainings": trainings, "ranks": ranks, "out": str(self.folder)}
        order = self.folder / "job.json"
        order.write_text(json.dumps({**job, "train": self.toy.train, "val": self.toy.val}))
        # No pipe: a rank that was left would hold it open.
        with (self.folder / "output.txt").open("w") as output:
            process = subprocess.Popen(
                [sys.executable, str(SUPPORT / "lightning_jobs.py"), str(order)],
                stdout=output, stderr=output, start_new_session=True, cwd=self.folder,
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            )  # fmt: skip
            try:
                code = process.wait(seconds)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        assert code == 0, (self.folder / "output.txt").read_text()[-3000:]

    def found(self, name: str, case: str) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads((self.folder / f"{name}.{case}.json").read_text())
        return facts


@pytest.fixture(scope="module")
def script(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Script:
    return Script(toy, tmp_path_factory.mktemp("lightning"))


@pytest.fixture(scope="module")
def alone(toy: Toy, one_thread: None) -> Callable[[str], list[tuple[float, float, float]]]:  # noqa: ARG001
    """The figures of a case in our own loop, in one process."""
    from lightning_jobs import EPOCHS, pipeline_of

    @cache
    def figures(case: str) -> list[tuple[float, float, float]]:
        pipeline = pipeline_of(case, toy.train, toy.val, ranks=1)
        return numbers(pipeline.fit(epochs=EPOCHS, progress=False))

    return figures


def every(names: list[str]) -> list[tuple[str, str]]:
    return [(name, case) for name in names for case in CASES]


def check(script: Script, trainings: list[tuple[str, str]], alone: Any, kind: str, ranks: int = 2) -> None:
    """Each came to the figures of our own loop."""
    for name, case in trainings:
        found = script.found(name, case)
        assert (found["ranks"], found["kind"]) == (ranks, kind), (name, case)
        for one, other in zip(found["found"], alone(case), strict=True):
            assert one == pytest.approx(other, abs=1e-5), (name, case)


def test_the_names_below_are_all_of_them() -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    trained = {"single_device", *SCRIPTS, *FORKS, *SPAWNS}
    assert trained.isdisjoint(REFUSALS)
    assert sorted(trained | set(REFUSALS)) == sorted(StrategyRegistry.available_strategies())


@pytest.mark.slow  # nine trainings on two ranks; test_lightning.py trains on one
@pytest.mark.process
@pytest.mark.timeout(200)
def test_ranks_that_run_the_script_again(script: Script, alone: Any) -> None:
    """Lightning's DDP, and its FSDP made to run on the CPU, in one start."""
    sharded = every(["FSDP", "FSDP, gradients", "FSDP of units"])
    script.run([*every(SCRIPTS), *sharded, ("ddp", "indivisible")], seconds=180)
    check(script, every(SCRIPTS), alone, "DDPStrategy")
    check(script, sharded, alone, "FSDPOnCPU")
    refused = script.found("ddp", "indivisible")["refused"]
    assert "PlanError: batch_size=24 is global and must be divisible by 2 Lightning ranks" in refused


@pytest.mark.timeout(200)
@pytest.mark.slow
@pytest.mark.parametrize("names", [FORKS[:1], FORKS[1:]])
def test_ranks_that_are_forked(script: Script, alone: Any, names: list[str]) -> None:
    """With two threads: had the hand-over started some, the ranks would hang."""
    trainings = [(name, "everything") for name in names]
    script.run(trainings, seconds=180, threads=2)
    check(script, trainings, alone, "DDPStrategy")


@pytest.mark.timeout(200)
@pytest.mark.slow
@pytest.mark.parametrize("name", SPAWNS)
def test_ranks_that_are_spawned(script: Script, alone: Any, name: str) -> None:
    script.run([(name, "everything")], seconds=180)
    check(script, [(name, "everything")], alone, "DDPStrategy")


# Once, after other tests in the same process, "everything" in our own loop differed by 5e-4; alone it never did.
@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(200)
def test_one_device_and_what_lightning_has_for_other_devices_only(script: Script, alone: Any) -> None:
    """Its own words, for the names themselves; `single_device` is the one name that means one process."""
    names = [name for name in REFUSALS if name not in DEEPSPEED]
    script.run([*every(["single_device"]), *((name, "plain") for name in names)], seconds=180, ranks=1)
    check(script, every(["single_device"]), alone, "SingleDeviceStrategy", ranks=1)
    for name in names:
        assert REFUSALS[name] in script.found(name, "plain")["refused"], name


@pytest.mark.slow  # importing DeepSpeed takes long
@pytest.mark.timeout(400)
def test_deepspeed_made_to_run_on_the_cpu(script: Script, alone: Any) -> None:
    pytest.importorskip("deepspeed")
    trainings = every(["ZeRO 1", "ZeRO 2", "ZeRO 3"])
    script.run(trainings, seconds=380)
    check(script, trainings, alone, "DeepSpeedOnCPU")


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_what_lightning_has_of_deepspeed_for_gpus_only(script: Script) -> None:
    pytest.importorskip("deepspeed")
    script.run([(name, "plain") for name in DEEPSPEED], seconds=180, ranks=1)
    for name in DEEPSPEED:
        assert REFUSALS[name] in script.found(name, "plain")["refused"], name
