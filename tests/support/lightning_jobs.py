"""A script that trains through Lightning's Trainer, as users write it: `ddp` runs it again for each further rank.

`python lightning_jobs.py JOB.json`, the job being `{"trainings", "ranks", "train", "val", "out"}`, a training
`[strategy, case]`. Rank 0 of each writes `OUT/STRATEGY.CASE.json`: of each epoch loss, validation loss and accuracy.
"""

import json
import logging
import os
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from drivetrain import Pipeline, PlanError
from drivetrain.transforms import ChannelsLast, LabelSmoothing, MixUp, NoWeightDecay, SqueezeExcite
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy
from own_transforms import WithoutTheFirstClass
from pipeline_data import plain_model
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

EPOCHS = 2


class FSDPOnCPU(FSDPStrategy):
    """Lightning's own, which refuses the CPU only as that very class; the device is its number there, None here."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(
            model, cpu_offload=self.cpu_offload, mixed_precision=self.mixed_precision_config,
            sharding_strategy=self.sharding_strategy, device_id=torch.device("cpu"), **self.kwargs,
        )  # fmt: skip


class DeepSpeedOnCPU(DeepSpeedStrategy):
    """Lightning's own without its refusal of the CPU: FSDP1 and ZeRO themselves compute there."""

    def setup_environment(self) -> None:
        super(DDPStrategy, self).setup_environment()
        self.setup_distributed()

    def setup_distributed(self) -> None:
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, for minutes
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    def _setup_model_and_optimizer(self, model: Any, optimizer: Any, lr_scheduler: Any = None) -> Any:
        import deepspeed

        engine, wrapped, _, _ = deepspeed.initialize(
            config=self.config, model=model, model_parameters=list(model.parameters()), optimizer=optimizer,
            lr_scheduler=lr_scheduler, dist_init_required=False,
        )  # fmt: skip
        return engine, wrapped


def deepspeed(**options: Any) -> DeepSpeedOnCPU:
    return DeepSpeedOnCPU(process_group_backend="gloo", overlap_comm=False, **options)


ON_CPU: dict[str, Any] = {
    "FSDP": FSDPOnCPU,
    "FSDP, gradients": lambda: FSDPOnCPU(sharding_strategy="SHARD_GRAD_OP"),
    "FSDP of units": lambda: FSDPOnCPU(auto_wrap_policy={nn.Conv2d, nn.Linear}),
    **{f"ZeRO {stage}": partial(deepspeed, stage=stage) for stage in (1, 2, 3)},
}
"""What Lightning has for CUDA only, made to run here."""


def pipeline_of(case: str, train: str, val: str, ranks: int) -> Pipeline:
    """A pipeline whose training is the same for 1 and 2 ranks, if one rank has twice the microbatches of two."""
    batch = 24 if case == "indivisible" else 32
    start = Pipeline(plain_model).load(train, val, batch_size=batch, image_size=16, flip=True, workers=1)
    start = start.optimize("sgd", lr=0.1, momentum=0.9, weight_decay=0.2, schedule="cosine", warmup=0.3)
    if case == "plain":
        return start
    if case == "kept":  # of each rank, another number of samples
        return start.transform(WithoutTheFirstClass())
    if case == "indivisible":  # 24 divides into 8 parts, and 12, of one of two ranks, does not
        return start.distribute("single", device="cpu", accumulate=8)
    excite = SqueezeExcite(latent_channels=4, min_channels=3)
    start = start.transform(ChannelsLast(), LabelSmoothing(0.1), MixUp(0.2), NoWeightDecay(), excite)
    return start.distribute("single", device="cpu", accumulate=4 // ranks, clip_norm=0.2)


class Writes(pl.Callback):
    """Notes each epoch's figures, and rank 0 writes them at the end, wherever it runs."""

    def __init__(self, path: str) -> None:
        self.path, self.found = path, []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        values = trainer.callback_metrics
        self.found.append([float(values[name]) for name in ("loss", "val_loss", "top1")])

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        if trainer.is_global_zero:
            facts = {"ranks": trainer.world_size, "kind": type(trainer.strategy).__name__}
            Path(self.path).write_text(json.dumps(facts | {"found": self.found}))


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for name, case in job["trainings"]:
        train(name, case, job)


def train(name: str, case: str, job: dict[str, Any]) -> None:
    """One training, or why there was none: an error of ours on all ranks, or of Lightning's on one."""
    path = Path(job["out"]) / f"{name}.{case}.json"
    module, data, arguments, _ = pipeline_of(case, job["train"], job["val"], job["ranks"]).to_lightning(
        epochs=EPOCHS, strategy=ON_CPU[name]() if name in ON_CPU else name, devices=job["ranks"], accelerator="cpu",
        callbacks=[Writes(str(path))], enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    try:
        pl.Trainer(**arguments).fit(module, data)
    except Exception as error:
        if job["ranks"] > 1 and not isinstance(error, PlanError):
            raise
        path.write_text(json.dumps({"refused": f"{type(error).__name__}: {error}"}))


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    main()
