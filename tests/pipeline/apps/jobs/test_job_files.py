"""Job files: what the schedulers read in them, and what is refused."""

import ast
import inspect
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import call
from drivetrain import PlanError, RecipeError
from drivetrain.pipeline.apps.cli import job as command
from drivetrain.pipeline.apps.jobs.job import stoppable
from drivetrain.pipeline.apps.jobs.schedulers import SCHEDULERS, job_file
from job_scripts import SCONTROL, SRUN, TORCHRUN, programs, surroundings
from pipeline_data import Toy
from process_state import run
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

RECIPE = """\
model: cifar_resnet
train: train.beton
batch_size: 512
image_size: 16
optimizer: {name: sgd, lr: 0.1}
strategy: ddp
epochs: 2
"""
AWKWARD = "a \"b\"\n'c' $(touch oops) `touch oops`; # ${HOME} $$ \\ é\u2028\U0001f600 x: y"
"""A text in which shells, YAML and Python see something else if it is not quoted."""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(RECIPE)
    return "mine.yaml"


PODS = ("kubernetes", "jobset")  # of Kubernetes


def written(scheduler: str, recipe: str, *overrides: str, **options: Any) -> str:
    """A job file with the options that its scheduler needs."""
    needed: dict[str, Any] = {"out": "/shared/run", "nodes": "1", "gpus": 8, "cpus": 4}
    image = {"image": "team/image:1"}
    needed |= {"kubernetes": image, "jobset": image, "skypilot": {"gpu_type": "H100"}}.get(scheduler, {})
    return job_file(scheduler, recipe, overrides, **needed | options)[0]


def manifests(text: str) -> dict[str, Any]:
    """Those of a file, by kind."""
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def container(text: str) -> dict[str, Any]:
    (only,) = job_of(manifests(text))["spec"]["template"]["spec"]["containers"]
    return dict(only)


def job_of(found: dict[str, Any]) -> Any:
    """The Job, or that of the JobSet's pods, which has no name."""
    if "Job" in found:
        return found["Job"]
    (pods,) = found["JobSet"]["spec"]["replicatedJobs"]
    return {"apiVersion": "batch/v1", "kind": "Job", **pods["template"]}


def bash_reads(text: str) -> None:
    done = run("bash", "-n", input=text)
    assert (done.returncode, done.stderr) == (0, "")


def arguments(scheduler: str, text: str, folder: Path) -> list[str]:
    """What `torchrun` receives when the scheduler's machine runs the file; of Kubernetes, what the container does."""
    path = programs(folder / f"bin-{scheduler}", srun=SRUN, scontrol=SCONTROL, torchrun=TORCHRUN)
    requests = folder / f"arguments-{scheduler}"
    shell = ["bash", "-c", text]
    if scheduler in PODS:
        pod = container(text)
        shell = [*pod["command"], *(word.replace("$$", "$") for word in pod["args"])]
    elif scheduler == "skypilot":
        shell = ["bash", "-c", yaml.safe_load(text)["run"]]
    done = run(*shell, env=surroundings(path, requests), cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    return requests.read_text().split("\0")[:-1]


def test_all_are_offered() -> None:
    assert set(command.SCHEDULERS) == set(SCHEDULERS)


def test_slurm(recipe: str) -> None:
    text = written("slurm", recipe, nodes="2", time="1-12:00:00", gpu_type="h100")
    bash_reads(text)
    options = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2] for line in text.splitlines() if line.startswith("#SBATCH")
    )
    assert options == {
        "job-name": "mine", "output": "%x-%j.log", "nodes": "2", "ntasks-per-node": "1", "cpus-per-task": "32",
        "gpus-per-node": "h100:8", "time": "1-12:00:00", "signal": "B:USR1@180", "requeue": "", "open-mode": "append",
        "mem": "0",
    }  # fmt: skip
    first_command = min(n for n, line in enumerate(text.splitlines()) if line and not line.startswith("#"))
    assert all(not line.startswith("#SBATCH") for line in text.splitlines()[first_command:])


@pytest.mark.parametrize("out", ["/shared/run", '/a "b"$(c)/d', "s3://bucket/run", "runs/mine", "mine"])
def test_slurm_in_a_container(recipe: str, tmp_path: Path, out: str) -> None:
    """Both steps run in it, with the folder of submission and the shared one."""
    stand_in = '#!/bin/bash\nprintf "%s\\n" "$@" >> "$REQUESTS"\n'
    path = programs(tmp_path / "bin", srun=stand_in, scontrol=SCONTROL)
    environment = surroundings(path, tmp_path / "requests") | {"SLURM_SUBMIT_DIR": "/home/a b"}
    text = written("slurm", recipe, image="registry#team/image:1", out=out)
    done = run("bash", "-c", text, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    given = (tmp_path / "requests").read_text().splitlines()
    shared = "/".join(out.split("/")[:2])
    mounts = "/home/a b:/home/a b" + f",{shared}:{shared}" * (out[0] == "/")
    for option in ("image=registry#team/image:1", f"mounts={mounts}", "workdir=/home/a b"):
        assert given.count(f"--container-{option}") == 2


TORCHRUN_AFTER = """\
#!/bin/bash
if [[ "$*" == *"doctor --ranks"* ]]; then printf 'a table\\n%s' "$FOUND"; exit 0; fi
echo trained >> "$REQUESTS"
exit "$STATUS"
"""


EXCLUDED = ["show job", "requeuehold", "ExcNodeList=node07,node09", "release"]


@pytest.mark.parametrize(
    ("found", "status", "seconds", "before", "expected"),
    [
        ("", 0, 9000, "", []),
        ("", 1, 500, "", []),  # a mistake, which would fail again
        ("", 1, 700, "", ["requeue"]),
        ("", 1, 700, "failed: 1\n" * 19 + "slow: node01\n", ["requeue"]),
        ("", 1, 700, "failed: 1\n" * 20, []),
        ("Leave out: node07,node09\n", 1, 0, "", EXCLUDED),
        ("Leave out: node07.example.org,node09.example.org\n", 1, 0, "slow: node01\n" * 2, EXCLUDED),
        ("Leave out: node07\n", 0, 0, "slow: node01\n" * 3, []),
        ("Leave out: gone.example.org\n", 0, 0, "", []),  # SLURM has another name for it
    ],
)
def test_slurm_starts_again(
    recipe: str, tmp_path: Path, found: str, status: int, seconds: int, before: str, expected: list[str]
) -> None:
    """After a failure that came late, and without a node that the check has named, before it trains: so many times,
    however often the time limit has ended it."""
    path = programs(tmp_path / "bin", srun=SRUN, scontrol=SCONTROL, torchrun=TORCHRUN_AFTER)
    requests = tmp_path / "requests"
    environment = surroundings(path, requests) | {
        "FOUND": found, "STATUS": f"{status}", "SECONDS": f"{seconds}", "SLURM_RESTART_COUNT": "99",
    }  # fmt: skip
    again = tmp_path / f"mine-{environment['SLURM_JOB_ID']}.again"
    again.write_text(before)
    text = written("slurm", recipe)
    done = run("bash", "-c", text, env=environment, cwd=tmp_path)
    assert done.returncode == status, done.stderr
    trains = expected is not EXCLUDED
    asked = requests.read_text().splitlines()
    assert asked[:trains] == ["trained"] * trains
    assert len(asked) == len(expected) + trains
    for line, part in zip(asked[trains:], expected, strict=True):
        assert part in line
    assert len(again.read_text().splitlines()) == len(before.splitlines()) + bool(expected)


def test_slurm_keeps_the_log_of_earlier_starts(recipe: str, tmp_path: Path) -> None:
    """SLURM's log is a file that is opened to append, not a pipe."""
    path = programs(tmp_path / "bin", srun=SRUN, scontrol=SCONTROL, torchrun=TORCHRUN_AFTER)
    environment = surroundings(path, tmp_path / "requests") | {"FOUND": "", "STATUS": "0"}
    log = tmp_path / "mine.log"
    log.write_text("the start before\n")
    command = ["bash", "-c", written("slurm", recipe)]
    with log.open("a") as output:
        subprocess.run(command, env=environment, cwd=tmp_path, stdout=output, stderr=output, check=True)
    assert log.read_text() == "the start before\na table\n"


@pytest.mark.parametrize("moment", ["sleep 5 &", "step=$!"])
def test_a_signal_while_a_script_starts_its_process_is_passed_on(moment: str) -> None:
    script = stoppable("sleep 5", "step", "USR1").replace(moment, f"kill -USR1 $$\n{moment}")
    done = run("bash", "-c", f'{script}\nexit "$status"')
    assert done.returncode == 75, done.stderr


def test_torchrun_gives_workers_30_seconds_when_a_machine_joins() -> None:
    """As docs/guide/cluster.md states: `--shutdown-timeout` is for signals to torchrun itself."""
    assert "timeout" not in inspect.getsource(LocalElasticAgent._stop_workers)
    assert inspect.signature(LocalElasticAgent._shutdown).parameters["timeout"].default == 30


def test_numbers_of_nodes(recipe: str) -> None:
    """512 images are divided among 8, 16 and 32 GPUs, and not among 24."""
    assert "#SBATCH --nodes=1,2,4\n" in written("slurm", recipe, nodes="1:4")
    assert "#SBATCH --nodes=1-4\n" in written("slurm", recipe, "batch_size=480", nodes="1:4")
    groups = ("batch_size=480", "strategy=hsdp", 'strategy_options={"shard_size": 16}')
    assert "#SBATCH --nodes=2,4\n" in written("slurm", recipe, *groups, nodes="2:4")
    job = manifests(written("kubernetes", recipe, nodes="1:4"))["Job"]["spec"]
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (4, 4, "Indexed")
    assert job["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    assert "--nnodes=1:4 " in written("kubernetes", recipe, nodes="1:4")
    assert "successPolicy" not in written("kubernetes", recipe, nodes="4")
    assert "num_workers=(8, 32)" in written("ray", recipe, nodes="1:4")
    assert "among 8, 16 or 32 of them" in written("ray", recipe, nodes="1:4")
    assert "num_workers=32," in written("ray", recipe, nodes="4")
    task = yaml.safe_load(written("skypilot", recipe, nodes="1:4"))
    assert task["num_nodes"] == 4


def test_kubernetes(recipe: str) -> None:
    """Against the published schema, in which no key is free."""
    text = written("kubernetes", recipe, nodes="1:2", gpu_type="NVIDIA-H100-80GB-HBM3")
    found = manifests(text)
    assert set(found) == {"ConfigMap", "PersistentVolumeClaim", "Service", "Job"}
    assert found["ConfigMap"]["data"] == {"mine.yaml": RECIPE}
    pod = container(text)
    bash_reads(pod["command"][2])
    assert "$(" not in pod["command"][2]
    assert pod["args"][0] == "/recipe/mine.yaml"
    assert pod["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert pod["resources"]["requests"] == {"cpu": 32, "memory": "128Gi", "ephemeral-storage": "20Gi"}
    assert "activeDeadlineSeconds" not in found["Job"]["spec"]
    assert found["Job"]["spec"]["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"] == [75]
    assert "ConfigMap" not in manifests(written("kubernetes", "cifar10-fast", "strategy=ddp"))
    schema = pytest.importorskip("kubernetes_validate", reason="the published schemas are not installed")
    for manifest in found.values():
        schema.validate(manifest, "1.37", strict=True)
    found["Job"]["spec"]["completion"] = 2
    with pytest.raises(schema.ValidationError, match="completion"):
        schema.validate(found["Job"], "1.37", strict=True)


def test_jobset(recipe: str) -> None:
    """The Job's pods, and around them keys from JobSet's documentation; no package publishes its schema."""
    text, plain = (written(scheduler, recipe, nodes="1:2", time="90") for scheduler in ("jobset", "kubernetes"))
    found = manifests(text)
    assert set(found) == {"ConfigMap", "PersistentVolumeClaim", "JobSet"}
    spec = found["JobSet"]["spec"]
    assert set(spec) == {"network", "failurePolicy", "replicatedJobs"}
    assert spec["network"] == {
        "enableDNSHostnames": True,
        "publishNotReadyAddresses": True,
        "subdomain": "mine",
    }
    assert spec["failurePolicy"] == {
        "maxRestarts": 10, "rules": [{"action": "FailJobSet", "onJobFailureReasons": ["DeadlineExceeded"]}],
    }  # fmt: skip
    job, alone = job_of(found), manifests(plain)["Job"]
    assert "--rdzv-endpoint=mine-pods-0-0.mine:29400 " in container(text)["command"][2]
    assert alone["spec"]["template"]["spec"].pop("subdomain") == "mine", "JobSet adds its own"
    (pod,), (other,) = (each["spec"]["template"]["spec"]["containers"] for each in (job, alone))
    pod["command"][2] = pod["command"][2].replace("mine-pods-0-0.mine", "mine-0.mine")
    assert pod == other
    assert job["spec"] == alone["spec"]
    schema = pytest.importorskip("kubernetes_validate", reason="the published schemas are not installed")
    schema.validate(job, "1.37", strict=True)


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("90", 5400),
        ("10:30", 630),
        ("2:00:05", 7205),
        ("1-6", 108000),
        ("1-06:30", 109800),
        ("0-00:00:09", 9),
    ],
)
def test_a_time_limit_of_kubernetes_is_written_as_for_slurm(recipe: str, time: str, seconds: int) -> None:
    job = manifests(written("kubernetes", recipe, time=time))["Job"]["spec"]
    assert job["activeDeadlineSeconds"] == seconds


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_results_at_an_address_need_no_shared_folder(recipe: str, tmp_path: Path, scheduler: str) -> None:
    text = written(scheduler, recipe, out="s3://bucket/run")
    if scheduler == "ray":
        assert "OUT = 's3://bucket/run'" in text
        return
    given = arguments(scheduler, text, tmp_path)
    assert given[given.index("--out") + 1] == "s3://bucket/run"
    if scheduler in PODS:
        found = manifests(text)
        assert "PersistentVolumeClaim" not in found
        assert [one["name"] for one in container(text)["volumeMounts"]] == ["memory", "recipe"]
        schema = pytest.importorskip("kubernetes_validate", reason="the published schemas are not installed")
        schema.validate(job_of(found), "1.37", strict=True)
    elif scheduler == "skypilot":
        assert "volumes" not in yaml.safe_load(text)


def test_skypilot(recipe: str) -> None:
    """By the keys of its documentation: the package itself is too large for a test."""
    task = yaml.safe_load(written("skypilot", recipe, nodes="2", image="team/image:1"))
    assert set(task) == {"name", "num_nodes", "resources", "volumes", "workdir", "setup", "run"}
    assert task["resources"] == {
        "accelerators": {"H100": 8}, "cpus": "32+", "image_id": "docker:team/image:1",
        "job_recovery": {"max_restarts_on_errors": 3, "recover_on_exit_codes": [75]},
    }  # fmt: skip
    bash_reads(task["run"])


PYTHON = '#!/bin/bash\n[ "$1" = -m ] || exec "$REAL" -S "$@"\n'
"""Without installed packages; of `-m drivetrain doctor`, nothing."""


def test_skypilot_installs_the_folder_drivetrain(recipe: str, tmp_path: Path) -> None:
    """Though Python finds that folder where it starts, as if it were the package."""
    (tmp_path / "drivetrain").mkdir()
    (tmp_path / "drivetrain/__init__.py").write_text("")
    path = programs(tmp_path / "bin", python=PYTHON, pip='#!/bin/bash\necho "$*" >> "$REQUESTS"\n')
    environment = surroundings(path, tmp_path / "requests") | {"REAL": sys.executable, "PYTHONPATH": ""}
    command = ["bash", "-c", yaml.safe_load(written("skypilot", recipe))["setup"]]
    subprocess.run(command, env=environment, cwd=tmp_path, check=True)
    assert (tmp_path / "requests").read_text() == "install -e ./drivetrain\n"


def test_ray(recipe: str) -> None:
    text = written("ray", recipe, "optimizer.lr=0.5", "seed=3", gpu_type="H100")
    constants = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    overrides = {"optimizer.lr": 0.5, "seed": 3}
    assert constants == {"RECIPE": "mine.yaml", "OVERRIDES": overrides, "OUT": "/shared/run"}
    assert "accelerator_type='H100'" in text
    assert 'TorchConfig(backend="cpu:gloo,cuda:nccl", timeout_s=600)' in text
    assert '{"CPU": 4, "GPU": 1}' in text
    assert '{"CPU": 4}' in written("ray", recipe, 'strategy_options={"device": "cpu"}')


def test_ray_keeps_the_callbacks_of_the_recipe_and_reports_only_what_was_measured(
    recipe: str, toy: Toy, tmp_path: Path
) -> None:
    """The function that Ray's workers call, in this process."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'drivetrain[ray]'")
    Path(recipe).write_text(
        f"model: pipeline_data:plain_model\ntrain: {toy.train}\nval: {toy.val}\nbatch_size: 32\nimage_size: 16\n"
        "optimizer: {name: sgd, lr: 0.1}\nepochs: 9\neval_every: 2\nstrategy_options: {device: cpu}\n"
        "callbacks: [{name: EarlyStopping, monitor: loss, patience: 1, min_delta: 9}]\n"
    )
    reported: list[dict[str, Any]] = []
    job: dict[str, Any] = {"__name__": "job"}
    exec(written("ray", recipe, out=f"{tmp_path / 'run'}", gpus=1), job)
    job["report"] = reported.append
    job["train"]({"folder": str(tmp_path)})
    assert [each["epoch"] for each in reported] == [1, 2]
    assert ["top1" in each for each in reported] == [False, True]


def test_on_the_cpu_no_gpus_are_requested(recipe: str) -> None:
    cpu = 'strategy_options={"device": "cpu"}'
    assert "gpu" not in written("slurm", recipe, cpu).partition("srun")[0].replace("partition=gpu", "")
    assert "limits" not in container(written("kubernetes", recipe, cpu))["resources"]
    assert "use_gpu=False" in written("ray", recipe, cpu)
    assert "accelerators" not in yaml.safe_load(written("skypilot", recipe, cpu, gpu_type=None))["resources"]


@pytest.mark.parametrize("scheduler", ["slurm", *PODS, "skypilot"])
def test_awkward_texts_arrive_as_they_are(recipe: str, tmp_path: Path, scheduler: str) -> None:
    file, out = f"{AWKWARD[:20]}.yaml", f"/shared/{AWKWARD}"
    shutil.copy(recipe, file)
    text = written(scheduler, file, f"description={AWKWARD}", out=out)
    words = arguments(scheduler, text, tmp_path)
    given = words[words.index("train") + 1 :]
    name = given[0] if scheduler not in PODS else file
    assert [name, *given[1:]] == [
        file, f"description={AWKWARD}", "devices=auto", "--out", out, "--resume", "--every-minutes", "10",
    ]  # fmt: skip
    assert not list(tmp_path.rglob("oops"))


@pytest.mark.parametrize("scheduler", ["slurm", *PODS, "skypilot"])
def test_devices_are_given_once(recipe: str, tmp_path: Path, scheduler: str) -> None:
    words = arguments(scheduler, written(scheduler, recipe, "devices=auto", "seed=3"), tmp_path)
    assert (words.count("devices=auto"), words.count("seed=3")) == (1, 1)


def test_awkward_texts_in_python_and_in_a_recipe(recipe: str) -> None:
    tree = ast.parse(written("ray", recipe, f"description={AWKWARD}", out=f"/shared/{AWKWARD}"))
    values = [ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign)]
    assert values == ["mine.yaml", {"description": AWKWARD}, f"/shared/{AWKWARD}"]
    for more in ("description: 'a \u2028 b'\n", "#  \n\n", "notes: {}   \n", "# \ttab", "# é 😀\n"):
        Path(recipe).write_text(f"{RECIPE}{more}", newline="")
        text = written("kubernetes", recipe)
        assert manifests(text)["ConfigMap"]["data"]["mine.yaml"] == f"{RECIPE}{more}"


WRONG: dict[str, tuple[str, list[str], dict[str, Any], str]] = {
    "groups": (
        "slurm", ["strategy=hsdp", 'strategy_options={"shard_size": 6}'], {},
        "--nodes 1: shard_size=6 must be a positive integer that divides the 8 devices",
    ),
    "another scheduler": ("slrum", [], {}, "'slrum'. Did you mean 'slurm'?"),
    "no folder": ("slurm", [], {"out": None}, "Pass --out"),
    "a relative folder": ("ray", [], {"out": "runs/mine"}, "Pass an absolute path"),
    "a folder that the container lacks": ("slurm", [], {"image": "a", "out": "../run"}, "Pass an absolute path"),
    "a web server": ("slurm", [], {"out": "https://host/run"}, "a web server cannot be written"),
    "a folder above": ("skypilot", [], {"out": "/shared/../mine"}, "Pass an absolute path"),
    "a folder of the system": ("kubernetes", [], {"out": "/usr/run"}, "in /usr, which the image needs itself"),
    "the folder of the recipe": ("kubernetes", [], {"out": "/recipe/run"}, "where the pods have the recipe"),
    "no image for jobset": ("jobset", [], {"image": None}, "Pass --image"),
    "no image": ("kubernetes", [], {"image": None}, "Pass --image"),
    "an image for ray": ("ray", [], {"image": "a"}, "for ray has no --image"),
    "a time for ray": ("ray", [], {"time": "10"}, "for ray has no --time"),
    "a name for ray": ("ray", [], {"name": "mine"}, "for ray has no --name"),
    "a bad time": ("slurm", [], {"time": "10h"}, "--time '10h' must be minutes, HH:MM:SS"),
    "no time": ("kubernetes", [], {"time": "00:00:00"}, "--time 00:00:00 would end the job at once"),
    "too short a time": ("slurm", [], {"time": "3"}, "--time 3 is too short: SLURM signals the job 3 minutes before"),
    "a time with a line": ("slurm", [], {"time": "10\n#SBATCH --x"}, "--time '10"),
    "no nodes": ("slurm", [], {"nodes": "0"}, "--nodes '0' must be a positive integer, or MIN:MAX"),
    "a range of nodes": ("slurm", [], {"nodes": "4:1"}, "--nodes '4:1' must be"),
    "no GPUs": ("slurm", [], {"gpus": 0}, "gpus_per_node=0 must be a positive integer"),
    "no cores": ("slurm", [], {"cpus": 0}, "cpus_per_gpu=0 must be a positive integer"),
    "a name": ("slurm", [], {"name": "My job"}, "--name 'My job' must be"),
    "no GPU type": ("skypilot", [], {"gpu_type": None}, "Pass --gpu-type"),
    "a GPU type on the CPU": (
        "slurm", ['strategy_options={"device": "cpu"}'], {"gpu_type": "a"}, "trains on the CPU"
    ),
    "devices": ("slurm", ["devices=8"], {}, "devices= of a job is the number of its GPUs"),
    "one process": ("slurm", ["strategy=single"], {}, "strategy=single trains in one process"),
    "a batch": ("slurm", [], {"nodes": "3"}, "--nodes 3: batch_size=512 is global and must"),
    "microbatches": ("slurm", ["accumulate=100"], {}, "accumulate=100"),
    "no epochs": ("slurm", ["epochs=null"], {}, "Number of epochs not set by mine.yaml. Pass epochs=…"),
    "an unknown key": ("slurm", ["epoch=3"], {}, "Did you mean 'epochs'?"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_run_is_refused(recipe: str, name: str) -> None:
    scheduler, overrides, options, message = WRONG[name]
    with pytest.raises((PlanError, RecipeError)) as raised:
        written(scheduler, recipe, *overrides, **options)
    assert message in str(raised.value)


def test_recipes_that_cannot_be_read_or_copied(recipe: str, tmp_path: Path) -> None:
    wrong = [
        ("none.yaml", "does not exist"),
        ("cifar10-fats", "Did you mean 'cifar10-fast'"),
        ("-a.yaml", "Write ./-a"),
    ]
    for file, message in wrong:
        with pytest.raises((PlanError, RecipeError), match=message):
            written("slurm", file)
    with pytest.raises(PlanError, match="pass the relative path"):
        written("skypilot", str(tmp_path / recipe))
    Path(recipe).write_text(f"{RECIPE}# {'x' * 2_000_000}\n")
    with pytest.raises(PlanError, match="too many for a ConfigMap"):
        written("kubernetes", recipe)


NAMES = {"a/B c_d.YAML": "b-c-d", "50.yaml": "train-50", "é.yaml": "train", f"{'x' * 80}.yaml": "x" * 44}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_jobs_are_those_of_recipes(recipe: str, name: str) -> None:
    Path(name).parent.mkdir(exist_ok=True)
    shutil.copy(recipe, name)
    assert f"#SBATCH --job-name={NAMES[name]}\n" in written("slurm", name)


@pytest.mark.parametrize("scheduler", [*PODS, "skypilot"])
def test_names_of_jobs_are_texts_in_yaml(recipe: str, scheduler: str) -> None:
    """YAML reads words such as no and null as other values."""
    shutil.copy(recipe, "no.yaml")
    for document in yaml.safe_load_all(written(scheduler, "no.yaml")):
        assert document.get("name", document.get("metadata", {}).get("name")) == "train-no"
    with pytest.raises(PlanError, match="--name 'null' must be"):
        written(scheduler, recipe, name="null")


@pytest.mark.parametrize(("nodes", "most"), [(1, 48), (10, 48), (11, 47), (101, 46)])
def test_names_of_jobset_leave_room_for_those_of_pods(recipe: str, nodes: int, most: int) -> None:
    """At most 63 characters: NAME-pods-0-INDEX-xxxxx."""
    options: dict[str, Any] = {"nodes": f"{nodes}", "gpus": 1}
    sized = f"batch_size={nodes * 8}"
    found = manifests(written("jobset", recipe, sized, name="x" * most, **options))["JobSet"]
    pods, job = found["spec"]["replicatedJobs"][0], job_of({"JobSet": found})
    last = f"{found['metadata']['name']}-{pods['name']}-0-{job['spec']['completions'] - 1}-abcde"
    assert len(last) == 63
    with pytest.raises(PlanError, match=f"for jobset, {most} are the most"):
        written("jobset", recipe, sized, name="x" * (most + 1), **options)


def test_the_command_prints_the_file_and_warns_of_numbers_that_fail(recipe: str) -> None:
    options = ["--nodes", "1:4", "--gpus-per-node", "8", "--cpus-per-gpu", "4", "--out", "/shared/run"]
    end = call("job", "slurm", recipe, "seed=3", *options)
    assert (end.code, end.out, end.err) == (0, written("slurm", recipe, "seed=3", nodes="1:4"), "")
    end = call("job", "ray", recipe, *options)
    assert (end.code, end.out) == (0, written("ray", recipe, nodes="1:4"))
    note = "The batch cannot be divided among the GPUs of 3 nodes: a job that gets so many fails."
    assert end.err == f"Note: {note}\n"
    assert "Pass --out" in call("job", "slurm", recipe).line


@pytest.mark.parametrize(
    ("scheduler", "out", "train", "lacks"),
    [
        ("kubernetes", "s3://bucket/run", "/data/train.beton", "nothing, because --out is an address"),
        ("kubernetes", "s3://bucket/run", "train.beton", "nothing, because --out is an address"),
        ("kubernetes", "/shared/run", "/data/{0..3}.beton", "only /shared"),
        ("kubernetes", "/shared/run", "/shared/train.beton", ""),
        ("kubernetes", "s3://bucket/run", "s3://bucket/train.beton", ""),
        ("kubernetes", "s3://bucket/run", "cifar10:train", ""),
        ("skypilot", "s3://bucket/run", "/data/train.beton", "nothing, because --out is an address"),
        ("skypilot", "s3://bucket/run", "data/train.beton", ""),
        ("slurm", "s3://bucket/run", "/data/train.beton", ""),
    ],
)
def test_data_that_nothing_mounts_is_named(
    recipe: str, monkeypatch: pytest.MonkeyPatch, scheduler: str, out: str, train: str, lacks: str
) -> None:
    monkeypatch.chdir(Path(recipe).parent)
    options = {"kubernetes": ["--image", "x"], "skypilot": ["--gpu-type", "H100"]}.get(scheduler, [])
    end = call("job", scheduler, Path(recipe).name, f"train={train}", "val=null", "--out", out, *options)
    assert end.code == 0, end.err
    assert (f"Note: The machines do not have the data {train[:6]}" in end.err) == bool(lacks)
    assert lacks in end.err


@pytest.mark.parametrize(
    ("out", "train", "lacks"),
    [
        ("/shared/run", "/data/train.beton", "only the folder where it is submitted and /shared."),
        ("runs/mine", "../train.beton", "only the folder where it is submitted."),
        ("runs/mine", "HERE/train.beton", ""),
        ("runs/mine", "train.beton", ""),
        ("/shared/run", "/shared/train.beton", ""),
        ("s3://bucket/run", "s3://bucket/train.beton", ""),
    ],
)
def test_data_that_a_container_of_slurm_lacks_is_named(recipe: str, out: str, train: str, lacks: str) -> None:
    data = train.replace("HERE", str(Path.cwd()))
    end = call("job", "slurm", recipe, f"train={data}", "val=null", "--out", out, "--image", "team/image:1")
    assert end.code == 0, end.err
    assert (f"Note: The containers do not have the data {data}: the file mounts " in end.err) == bool(lacks)
    assert lacks in end.err


def test_the_command_takes_data(recipe: str, tmp_path: Path) -> None:
    """As `drivetrain train` does; also a name that JSON would read as a number."""
    data = ["--train", "https://data.example.org/train.beton", "--val", "2026"]
    end = call("job", "slurm", recipe, "seed=3", *data, "--out", "/shared/run")
    assert (end.code, end.err) == (0, "")
    words = arguments("slurm", end.out, tmp_path)
    assert "train=https://data.example.org/train.beton" in words
    assert 'val="2026"' in words
    twice = call("job", "slurm", recipe, "train=a.beton", *data, "--out", "/shared/run")
    assert (twice.code, "--train and train= are both given" in twice.line) == (1, True)


def test_the_command_takes_a_folder_that_begins_with_a_dash(recipe: str, tmp_path: Path) -> None:
    end = call("job", "slurm", recipe, "--out", "./-run")
    assert (end.code, end.err) == (0, "")
    words = arguments("slurm", end.out, tmp_path)
    assert words[words.index("--out") + 1] == "./-run"
