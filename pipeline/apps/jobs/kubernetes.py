"""Manifests for Kubernetes: an Indexed Job and its Service, or a JobSet; their volume, and the recipe."""

from ....common.errors import PlanError
from .job import SIGNALS, TORCHRUN_PORT, WARNING_SECONDS, Job, fill, literal, scalar, seconds_of, stoppable

_RESTARTS = 10
_LABEL = 63  # characters of a name of a pod
_MEMORY = 16  # GiB for each process
_MAX_CONFIG = 1_000_000  # bytes; a ConfigMap may have 1 MiB
# Folders that an image needs itself.
_SYSTEM = [
    "bin", "boot", "dev", "etc", "lib", "lib64", "opt", "proc", "root", "run", "sbin", "sys", "usr", "var",
]  # fmt: skip
_TOP = """\
# Trains with Drivetrain; written by `drivetrain job @scheduler@`. Submit it with: kubectl apply -f FILE
# To submit it again, first run: kubectl delete @kind@ @name@
@recipe@
@claim@
"""
_JOB = """\
# Gives the pods names, so that they find the first of them: @first@
apiVersion: v1
kind: Service
metadata:
  name: @name@
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    batch.kubernetes.io/job-name: @name@
---
apiVersion: batch/v1
kind: Job
metadata:
  name: @name@
  # With Kueue, which starts all pods or none (its waitForPodsReady), name a queue, and add under spec: suspend: true
  # labels: {kueue.x-k8s.io/queue-name: team}
spec:
  @spec@
"""
_JOBSET = """\
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: @name@
  # With Kueue, which starts all pods or none (its waitForPodsReady), name a queue, and add under spec: suspend: true
  # labels: {kueue.x-k8s.io/queue-name: team}
  # To have all pods in one domain of the network, which no other JobSet shares:
  # annotations: {alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.provider.com/rack}
spec:
  network:  # JobSet makes the Service; the first pod is @first@
    enableDNSHostnames: true
    publishNotReadyAddresses: true
    subdomain: @name@
  failurePolicy:
    maxRestarts: @restarts@  # of all pods, when one has failed too often; the run resumes
    rules:
    - action: FailJobSet
      onJobFailureReasons: [DeadlineExceeded]
  replicatedJobs:
  - name: pods
    replicas: 1
    template:
      spec:
        @spec@
"""
_SPEC = """\
@deadline@
completionMode: Indexed
completions: @most@
parallelism: @most@
@success@
# Pods that were evicted, or stopped and saved (75), are replaced without limit.
backoffLimit: @restarts@
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
    @subdomain@
    restartPolicy: Never
    terminationGracePeriodSeconds: @warning@
    # Which jobs are evicted first when machines are short (kubectl get priorityclass):
    # priorityClassName: training
    @selector@
    containers:
    - name: train
      image: @image@
      @folder@
      command:
      - /bin/bash
      - -c
      - |
        @script@
      - drivetrain
      args:  # of drivetrain train
      @arguments@
      # If the pods find each other only through one of several network interfaces:
      # env: [{name: GLOO_SOCKET_IFNAME, value: eth0}, {name: NCCL_SOCKET_IFNAME, value: eth0}]
      resources:
        requests:
          cpu: @cores@
          memory: @memory@Gi  # of its processes, /dev/shm and the data in the system's cache; fewer is slower
          ephemeral-storage: 20Gi  # of the cache of data at an address and of checkpoints on their way
        @limits@
      volumeMounts:
      @shared_mount@
      - name: memory
        mountPath: /dev/shm
      @recipe_mount@
    volumes:
    @shared_volume@
    - name: memory  # of NCCL and of loaders with processes, for which the usual 64 MiB are too small
      emptyDir:
        medium: Memory
    @recipe_volume@
"""
_SCRIPT = """\
@elastic@
# The first pod is where the pods meet. Kubernetes may need some time to start all of them.
if [ "$JOB_COMPLETION_INDEX" = 0 ]; then first=true; else first=false; fi
@run@
exit "$status"
"""
"""The shell commands of a pod, which take the arguments of `drivetrain train`. They must not contain `$(`, which
Kubernetes would replace."""
_COMMAND = """\
torchrun --nnodes=@nnodes@ --nproc-per-node=@processes@ --max-restarts=@restarts@ \\
    --rdzv-backend=c10d --rdzv-endpoint=@first@:@port@ --rdzv-id=@name@ \\
    --rdzv-conf="is_host=$first,join_timeout=3600" \\
    @signals@ \\
    -m drivetrain train "$@\""""
_CLAIM = """\
# What all pods share, with the data and the run's folder. Remove this part if the claim exists.
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: @name@
spec:
  accessModes: [ReadWriteMany]
  resources:
    requests:
      storage: 500Gi
---
"""
_CREDENTIALS = """\
# The results are at an address, and so should the data be. The store's credentials, as variables:
# kubectl create secret generic @name@ --from-literal=AWS_ACCESS_KEY_ID=…
envFrom:
- secretRef:
    name: @name@
    optional: true  # if the pods have them otherwise, e.g. by their service account
"""
_RECIPE = """\
# The recipe. Modules of your own that it names must be in the image.
apiVersion: v1
kind: ConfigMap
metadata:
  name: @name@
data:
  @text@
---
"""
_SUCCESS = """\
# torchrun begins with @fewest@ pod(s) or more, and all end together.
@note@
successPolicy:
  rules:
  - succeededIndexes: "0"
"""


def kubernetes(job: Job) -> str:
    """A Job; its pods have the Service's name as their subdomain."""
    first = f"{job.name}-0.{job.name}"
    return _manifests(job, _JOB, first, scheduler="kubernetes", kind="job", subdomain=f"subdomain: {job.name}")


def jobset(job: Job) -> str:
    """The same pods in a JobSet (https://jobset.sigs.k8s.io), which makes the Service."""
    most = _LABEL - len(f"-pods-0-{job.most - 1}-xxxxx")  # JobSet refuses longer names of pods
    if len(job.name) > most:
        raise PlanError(
            f"--name {job.name!r} has {len(job.name)} characters; for jobset, {most} are the most, because pods are "
            "named after it. Pass a shorter --name."
        )
    return _manifests(job, _JOBSET, f"{job.name}-pods-0-0.{job.name}", scheduler="jobset", kind="jobset", subdomain="")


def _manifests(job: Job, template: str, first: str, *, scheduler: str, kind: str, subdomain: str) -> str:
    """Fill `template`, whose pods meet at the one with the address `first`."""
    folder, file, name = job.top_folder, job.recipe_file, job.name
    if job.image is None:
        raise PlanError("Kubernetes runs containers. Pass --image, one that has Drivetrain and its requirements.")
    if job.time is not None and not seconds_of(job.time):
        raise PlanError(f"--time {job.time} would end the job at once. Pass a positive time limit, or none.")
    if folder is not None and folder[1:] in _SYSTEM:
        raise PlanError(
            f"--out {job.out!r} is in {folder}, which the image needs itself. Pass a folder in a shared volume, e.g. "
            "--out /shared/runs/mine."
        )
    if folder == "/recipe" and file is not None:
        raise PlanError(
            f"--out {job.out!r} is in /recipe, where the pods have the recipe. Pass another folder, e.g. --out "
            "/shared/runs/mine."
        )
    recipe = None if file is None else f"{name}{file.suffix.lower()}"
    words = job.arguments(recipe and f"/recipe/{recipe}")
    spec = fill(
        _SPEC, name=name, most=job.most, restarts=_RESTARTS * job.most, warning=WARNING_SECONDS,
        subdomain=subdomain,
        image=scalar(job.image), cores=job.cpus * job.processes, memory=_MEMORY * job.processes,
        script=_script(job, first), success=_success(job),
        deadline="" if job.time is None else f"activeDeadlineSeconds: {seconds_of(job.time)}",
        # Kubernetes replaces "$(…)", and "$$" by "$".
        arguments="\n".join(f"- {scalar(word.replace('$', '$$'))}" for word in words),
        selector="" if job.gpu_type is None else f"nodeSelector:\n  nvidia.com/gpu.product: {scalar(job.gpu_type)}",
        limits=f"limits:\n  nvidia.com/gpu: {job.processes}" if job.on_gpus else "",
        folder=f"workingDir: {scalar(folder)}" if folder else fill(_CREDENTIALS, name=name),
        shared_mount=f"- name: shared\n  mountPath: {scalar(folder)}" if folder else "",
        shared_volume=f"- name: shared\n  persistentVolumeClaim:\n    claimName: {name}" if folder else "",
        recipe_mount="- name: recipe\n  mountPath: /recipe" if recipe else "",
        recipe_volume=f"- name: recipe\n  configMap:\n    name: {name}" if recipe else "",
    )  # fmt: skip
    return fill(
        _TOP + template, name=name, first=first, spec=spec, restarts=_RESTARTS, scheduler=scheduler, kind=kind,
        claim=fill(_CLAIM, name=name) if folder else "",
        recipe=fill(_RECIPE, name=name, text=literal(recipe, _recipe_text(job))) if recipe else "",
    )  # fmt: skip


def _script(job: Job, first: str) -> str:
    command = fill(
        _COMMAND, nnodes=job.nnodes, processes=job.processes, restarts=_RESTARTS, name=job.name, first=first,
        port=TORCHRUN_PORT, signals=SIGNALS,
    )  # fmt: skip
    later = "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # so that pods can join later"
    elastic = later if job.fewest < job.most else ""
    return fill(_SCRIPT, elastic=elastic, run=stoppable(command, "agent", "TERM"))


def _success(job: Job) -> str:
    """Return the rule by which a job ends that never had all of its pods."""
    missing = ", ".join(map(str, job.left_out))
    note = f"# {missing} pods do not divide the batch: the ranks end there, which uses up restarts."
    return fill(_SUCCESS, fewest=job.fewest, note=note if missing else "") if job.fewest < job.most else ""


def _recipe_text(job: Job) -> str:
    assert job.recipe_file is not None
    text = job.recipe_file.read_text(encoding="utf-8-sig")
    if (size := len(text.encode())) > _MAX_CONFIG:
        raise PlanError(f"{job.recipe} has {size:,} bytes, too many for a ConfigMap. Shorten it.")
    return text
