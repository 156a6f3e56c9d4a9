"""Each command of the page on clusters runs as it is printed: on machines with networks of their own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from drivetrain import Pipeline
from machines import Cluster
from pipeline_data import Toy
from places import ROOT, SUPPORT

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(500)]

PAGE = (ROOT / "docs/guide/cluster.md").read_text()
BLOCKS = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
SUBSTITUTIONS = {"--nproc-per-node=8": "--nproc-per-node=2"}
"""What is not run as printed, because sixteen ranks on two cores would only wait for each other."""
LIMIT = 400.0  # seconds that a block may take

RECIPE = """\
model: pipeline_data:plain_model
train: {train}
val: {val}
batch_size: 96
image_size: 16
workers: 1
optimizer: {{name: sgd, lr: 0.1}}
epochs: 2
"""


def blocks(word: str, without: str = "\0") -> list[str]:
    """The blocks of the page with a word, and without another."""
    return [block for block in BLOCKS if word in block and without not in block]


def run(block: str, cluster: Cluster, machines: int) -> list[str]:
    """Run a block on the first machines at the same time, and return what each prints."""
    for printed, instead in SUBSTITUTIONS.items():
        block = block.replace(printed, instead)
    environment = {
        **os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]),
        "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "COLUMNS": "200",
    }  # fmt: skip
    processes = [
        machine.start("bash", "-e", "-c", block, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for machine in cluster.machines[:machines]
    ]
    outputs = [process.communicate(timeout=LIMIT)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * machines, "\n\n".join(outputs)
    return outputs


@pytest.fixture
def mine(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The page's recipe, in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(RECIPE.format(train=toy.train, val=toy.val))
    return "mine.yaml"


def check_losses(out: Path, recipe: str) -> None:
    """They are those of one process."""
    expected = Pipeline.from_recipe(recipe, devices=1).fit(progress=False).history.epochs
    found = json.loads((out / "history.json").read_text())["epochs"]
    assert [epoch["loss"] for epoch in found] == pytest.approx([epoch.loss for epoch in expected], abs=1e-5)


def test_on_one_machine(cluster: Cluster, mine: str) -> None:
    """In one process, and then on the devices of the machine, which find a finished run."""
    (block,) = blocks("torchrun", without="--rdzv-endpoint")
    (output,) = run(block, cluster, 1)
    assert "the training was finished" in output
    check_losses(Path("runs/mine"), mine)


@pytest.mark.parametrize("block", blocks("--rdzv-endpoint", without="doctor"), ids=["fixed", "elastic"])
def test_on_two_machines(cluster: Cluster, mine: str, block: str) -> None:
    outputs = run(block, cluster, 2)
    assert sum("after 2 epochs" in output for output in outputs) == 1, "only rank 0 prints"
    assert not any("Warning" in output for output in outputs)
    check_losses(cluster.folder / "shared/runs/mine", mine)


def test_doctor(cluster: Cluster) -> None:
    (block,) = blocks("doctor --ranks")
    output = "".join(run(block, cluster, 2))
    for machine in cluster.machines:
        assert output.count(machine.address) >= 2


def test_job_files(cluster: Cluster, mine: str) -> None:
    """They are what submits `mine.yaml`; `tests/pipeline/apps/jobs` runs such files."""
    (block,) = blocks("drivetrain job")
    run(block, cluster, 1)
    script, pods, ray, sky = (
        Path(f"mine{end}").read_text() for end in (".sbatch", ".k8s.yaml", "_ray.py", ".sky.yaml")
    )
    subprocess.run(["bash", "-n", "mine.sbatch"], check=True)
    compile(ray, "mine_ray.py", "exec")
    for text in (script, yaml.safe_load(sky)["run"], f"{[*yaml.safe_load_all(pods)]}", ray):
        assert "/shared/runs/mine" in text
        assert "fsdp" in text
    assert mine in script


def test_every_block_is_run() -> None:
    assert len(BLOCKS) == 5
