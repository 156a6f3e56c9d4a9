"""Job files run on this machine: by stand-ins for SLURM's programs, as a pod's and a machine's commands, and by Ray."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from drivetrain import Pipeline
from drivetrain.pipeline.apps.jobs.schedulers import job_file
from drivetrain.pipeline.recipes.files import modules_of
from job_scripts import SCONTROL, SRUN, programs, surroundings
from pipeline_data import Toy
from process_state import wait_until

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(600)]

PROCESSES = 2
LIMIT = 400  # seconds that a job may take; Ray takes most of a minute to start on two cores


def recipe_for(toy: Toy, folder: Path, model: str, epochs: int) -> str:
    """A recipe that trains on the CPU, for which a job requests processes instead of GPUs."""
    file = folder / "mine.yaml"
    file.write_text(
        f"model: {model}\ntrain: {toy.train}\nval: {toy.val}\nbatch_size: 32\nimage_size: 16\n"
        f"optimizer: {{name: sgd, lr: 0.1}}\nepochs: {epochs}\nstrategy: ddp\n"
        "strategy_options: {device: cpu}\n"
    )
    return file.name


def job_of(scheduler: str, recipe: str, out: Path, **options: Any) -> str:
    return job_file(scheduler, recipe, (), f"{out}", nodes="1", gpus=PROCESSES, cpus=1, **options)[0]


def losses(out: Path) -> list[float]:
    return [epoch["loss"] for epoch in json.loads((out / "history.json").read_text())["epochs"]]


def undisturbed(recipe: str, **overrides: Any) -> list[float]:
    """The losses of a run of one process, without interruptions."""
    with modules_of(recipe):
        pipeline = Pipeline.from_recipe(recipe, strategy="single", **overrides)
        return [epoch.loss for epoch in pipeline.fit(progress=False).history.epochs]


def run_until(command: list[str], environment: dict[str, str], number: int = 0, after: Path | None = None) -> int:
    """Run a command, send it a signal once the folder `after` has a checkpoint, and return its status."""
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            if after is not None:
                wait_until(lambda: list(after.glob("step-*")), process, LIMIT)
                process.send_signal(number)
            output, _ = process.communicate(timeout=LIMIT)
        finally:
            if process.poll() is None:
                process.terminate()  # Ray's own processes end with it, and not with a killed one
                with suppress(subprocess.TimeoutExpired):
                    process.wait(20)
            process.kill()
    print(output)
    return process.returncode


def test_slurm_saves_requeues_and_resumes(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the batch script is signalled, as by SLURM before the time limit."""
    monkeypatch.chdir(tmp_path)
    recipe = recipe_for(toy, tmp_path, "pipeline_data:Sleepy\nmodel_options: {seconds: 0.3}", epochs=4)
    script, out, requests = tmp_path / "job.sh", tmp_path / "out", tmp_path / "requests"
    script.write_text(job_of("slurm", recipe, out))
    environment = surroundings(programs(tmp_path / "bin", srun=SRUN, scontrol=SCONTROL), requests)
    assert run_until(["bash", str(script)], environment, signal.SIGUSR1, out / "checkpoints") == 75
    assert requests.read_text() == f"requeue {environment['SLURM_JOB_ID']}\n"
    assert len(losses(out)) < 4
    requests.unlink()
    assert run_until(["bash", str(script)], environment) == 0
    assert not requests.exists()
    expected = undisturbed(recipe, model_options={"seconds": 0})
    assert losses(out) == pytest.approx(expected, abs=1e-5)


def test_an_error_is_no_reason_to_requeue(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = recipe_for(toy, tmp_path, "cifar_resnet\nmodel_options: {num_classes: 2}", epochs=1)
    script, requests = tmp_path / "job.sh", tmp_path / "requests"
    script.write_text(job_of("slurm", recipe, tmp_path / "out"))
    environment = surroundings(programs(tmp_path / "bin", srun=SRUN, scontrol=SCONTROL), requests)
    assert run_until(["bash", str(script)], environment) == 1
    assert not requests.exists()


@pytest.mark.parametrize("scheduler", ["kubernetes", "skypilot"])
def test_pods_and_machines_save_and_leave_with_75(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheduler: str
) -> None:
    """Their schedulers send SIGTERM."""
    monkeypatch.chdir(tmp_path)
    recipe = recipe_for(toy, tmp_path, "pipeline_data:Sleepy\nmodel_options: {seconds: 0.3}", epochs=40)
    out = tmp_path / "out"
    if scheduler == "kubernetes":
        *_, job = yaml.safe_load_all(job_of(scheduler, recipe, out, image="any"))
        (pod,) = job["spec"]["template"]["spec"]["containers"]
        script = pod["command"][2].replace("mine-0.mine", "localhost")
        command = ["bash", "-c", script, "drivetrain", recipe, *pod["args"][1:]]
    else:
        command = ["bash", "-c", yaml.safe_load(job_of(scheduler, recipe, out))["run"]]
    environment = surroundings(programs(tmp_path / "bin"), tmp_path / "requests")
    assert run_until(command, environment, signal.SIGTERM, out / "checkpoints") == 75
    assert len(losses(out)) < 40


ONCE = """\
import os
from pathlib import Path

from pipeline_data import BATCH, plain_model


def lost_once():
    \"\"\"A model; rank 1's process ends in its sixth step, the first time.\"\"\"
    model, steps = plain_model(), []

    def count(module, images):
        if module.training and len(images[0]) < BATCH and os.environ.get("RANK") == "1":
            steps.append(1)
            if len(steps) == 6 and not Path("lost").exists():
                Path("lost").touch()
                os._exit(1)

    model.register_forward_pre_hook(count)
    return model
"""


def test_ray_trains_in_its_own_group_and_replaces_a_lost_worker(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers on a local Ray; the model is a module next to the recipe."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'drivetrain[ray]'")
    monkeypatch.chdir(tmp_path)
    Path("once.py").write_text(ONCE)
    recipe = recipe_for(toy, tmp_path, "once:lost_once", epochs=3)
    Path("job.py").write_text(job_of("ray", recipe, tmp_path / "out"))
    environment = surroundings(os.environ["PATH"], tmp_path / "requests") | {"RAY_DEDUP_LOGS": "0"}
    assert run_until([sys.executable, "job.py"], environment) == 0
    assert Path("lost").exists()
    assert losses(tmp_path / "out") == pytest.approx(undisturbed(recipe), abs=1e-5)
