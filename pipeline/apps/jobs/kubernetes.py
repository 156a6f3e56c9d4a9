"""Manifests for Kubernetes: an Indexed Job, its Service, its volume, and the recipe."""

from __future__ import annotations

import textwrap

from ....common.errors import PlanError
from .job import WARNING_SECONDS, Job
from .text import SIGNALS, TORCHRUN_PORT, literal, scalar, stoppable

_RESTARTS = 10
_MAX_CONFIG = 1_000_000  # bytes; a ConfigMap may have 1 MiB
_SYSTEM = (
    "bin", "boot", "dev", "etc", "lib", "lib64", "opt", "proc", "root", "run", "sbin", "sys", "usr", "var",
)  # fmt: skip
"""Folders that an image needs itself."""


def kubernetes(job: Job) -> str:
    """Return manifests for `kubectl apply`.

    Raises:
        PlanError: without an image, or if the run's folder cannot be in a volume.
    """
    if job.image is None:
        raise PlanError(
            "Kubernetes runs containers. Pass --image, one that has Drivetrain and its requirements."
        )
    if job.top_folder is not None and job.top_folder[1:] in _SYSTEM:
        raise PlanError(
            f"--out {job.out!r} is in {job.top_folder}, which the image needs itself. Pass a folder in a shared "
            "volume, e.g. --out /shared/runs/mine."
        )
    words = job.arguments("/recipe/" + _recipe_name(job) if job.recipe_file else None)
    arguments = "\n".join(f"        - {scalar(word.replace('$(', '$$('))}" for word in words)
    return f"""\
# Trains with Drivetrain; written by `drivetrain job kubernetes`. Submit it with: kubectl apply -f FILE
# To submit it again, first run: kubectl delete job {job.name}
{_recipe(job)}{_claim(job)}# Gives the pods names, so that they find the first of them: {job.name}-0.{job.name}
apiVersion: v1
kind: Service
metadata:
  name: {job.name}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    batch.kubernetes.io/job-name: {job.name}
---
apiVersion: batch/v1
kind: Job
metadata:
  name: {job.name}
spec:
  completionMode: Indexed
  completions: {job.most}
  parallelism: {job.most}
{_success(job)}  # Pods that were evicted, or stopped and saved (75), are replaced without limit.
  backoffLimit: {_RESTARTS * job.most}
  podFailurePolicy:
    rules:
    - action: Ignore
      onPodConditions:
      - type: DisruptionTarget
    - action: Ignore
      onExitCodes:
        containerName: train
        operator: In
        values: [75]
  template:
    spec:
      subdomain: {job.name}
      restartPolicy: Never
      terminationGracePeriodSeconds: {WARNING_SECONDS}
{_selector(job)}      containers:
      - name: train
        image: {scalar(job.image)}
{_working_folder(job)}        command:
        - /bin/bash
        - -c
        - |
{textwrap.indent(_script(job), "          ").rstrip()}
        - drivetrain
        args:  # of drivetrain train
{arguments}
        resources:
          requests:
            cpu: {job.cpus * job.processes}
{_gpus(job)}        volumeMounts:
{_shared_mount(job)}        - name: memory
          mountPath: /dev/shm{_recipe_mount(job)}
      volumes:
{_shared_volume(job)}\
      - name: memory  # of NCCL and of loaders with processes, for which the usual 64 MiB are too small
        emptyDir:
          medium: Memory{_recipe_volume(job)}
"""


def _script(job: Job) -> str:
    """Return the shell commands of a pod, which take the arguments of `drivetrain train`. They must not contain `$(`,
    which Kubernetes would replace."""
    command = f"""\
torchrun --nnodes={job.nnodes} --nproc-per-node={job.processes} --max-restarts={_RESTARTS} \\
    --rdzv-backend=c10d --rdzv-endpoint={job.name}-0.{job.name}:{TORCHRUN_PORT} --rdzv-id={job.name} \\
    --rdzv-conf="is_host=$first,join_timeout=3600" \\
    {SIGNALS} \\
    -m drivetrain train "$@"
"""
    return f"""\
{_elastic(job)}# The first pod is where the pods meet. Kubernetes may need some time to start all of them.
if [ "$JOB_COMPLETION_INDEX" = 0 ]; then first=true; else first=false; fi
{stoppable(command, "agent", "TERM")}
exit "$status"
"""


def _claim(job: Job) -> str:
    """Return the manifest of the volume; nothing if the run is at an address."""
    if job.top_folder is None:
        return ""
    return f"""\
# What all pods share, with the data and the run's folder. Remove this part if the claim exists.
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: {job.name}
spec:
  accessModes: [ReadWriteMany]
  resources:
    requests:
      storage: 500Gi
---
"""


def _working_folder(job: Job) -> str:
    """Return where the pods work; if the run is at an address, where they have its credentials from."""
    if job.top_folder is not None:
        return f"        workingDir: {scalar(job.top_folder)}\n"
    return f"""\
        # The results are at an address, and so should the data be. The store's credentials, as variables:
        # kubectl create secret generic {job.name} --from-literal=AWS_ACCESS_KEY_ID=…
        envFrom:
        - secretRef:
            name: {job.name}
            optional: true  # if the pods have them otherwise, e.g. by their service account
"""


def _shared_mount(job: Job) -> str:
    folder = job.top_folder
    return "" if folder is None else f"        - name: shared\n          mountPath: {scalar(folder)}\n"


def _shared_volume(job: Job) -> str:
    if job.top_folder is None:
        return ""
    return f"      - name: shared\n        persistentVolumeClaim:\n          claimName: {job.name}\n"


def _elastic(job: Job) -> str:
    if job.fewest == job.most:
        return ""
    return "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # so that pods can join later\n"


def _success(job: Job) -> str:
    """Return the rule by which a job ends that never had all of its pods."""
    if job.fewest == job.most:
        return ""
    missing = ", ".join(map(str, job.left_out))
    note = f"  # {missing} pods do not divide the batch: the ranks end there, which uses up restarts.\n"
    return f"""\
  # torchrun begins with {job.fewest} pod(s) or more, and all end together.
{note if job.left_out else ""}  successPolicy:
    rules:
    - succeededIndexes: "0"
"""


def _gpus(job: Job) -> str:
    return f"          limits:\n            nvidia.com/gpu: {job.processes}\n" if job.on_gpus else ""


def _selector(job: Job) -> str:
    if job.gpu_type is None:
        return ""
    return f"      nodeSelector:\n        nvidia.com/gpu.product: {scalar(job.gpu_type)}\n"


def _recipe_name(job: Job) -> str:
    """Return the recipe's file name in the ConfigMap."""
    assert job.recipe_file is not None
    return f"{job.name}{job.recipe_file.suffix.lower()}"


def _recipe(job: Job) -> str:
    """Return the manifest with the recipe's file."""
    if job.recipe_file is None:
        return ""
    text = job.recipe_file.read_text(encoding="utf-8-sig")
    if len(text.encode()) > _MAX_CONFIG:
        raise PlanError(
            f"{job.recipe} has {len(text.encode()):,} bytes, too many for a ConfigMap. Shorten it."
        )
    return f"""\
# The recipe. Modules of your own that it names must be in the image.
apiVersion: v1
kind: ConfigMap
metadata:
  name: {job.name}
data:
  {literal(_recipe_name(job), text, "  ")}
---
"""


def _recipe_mount(job: Job) -> str:
    return "" if job.recipe_file is None else "\n        - name: recipe\n          mountPath: /recipe"


def _recipe_volume(job: Job) -> str:
    if job.recipe_file is None:
        return ""
    return f"\n      - name: recipe\n        configMap:\n          name: {job.name}"
