"""Trains on ranks that it forks, so that tests can kill them at any moment without paying for imports.

One line of stdin, JSON `{"out", "strategy", "ranks", "train", "val", "every_steps", "callbacks", "task"}`, starts a
training that resumes from `out`. Answers: that it is ready; the ranks' process ids at once, their exit statuses when
all have ended.

This process only imports; it computes nothing before it forks. stdout is for answers: the ranks have none.
"""

import json
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import drivetrain.loaders.decode.decoder  # a training imports this, torch._dynamo and matplotlib late  # noqa: F401
import matplotlib.backends.backend_agg
import matplotlib.figure  # noqa: F401
import torch
import torch._dynamo
import torch.distributed as dist
from drivetrain import Callback, Classification, EarlyStopping, MultiLabel, Regression, RunView, Task
from drivetrain.pipeline import Checkpoints, Pipeline
from drivetrain.pipeline.runs.config import FitConfig
from drivetrain.pipeline.runs.fit import fit
from drivetrain.transforms import EMA
from pipeline_data import BATCH, CLASSES, SIDE
from torch import nn

EPOCHS = 4
STOPS_AT = 9
"""The step after which early stopping ends a run with `callbacks`: the fourth evaluation after the first."""


class Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[float | None] = []

    def on_step_end(self, view: RunView) -> None:
        self.losses.append(view.loss)

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.losses = list(state["losses"])


def callbacks() -> dict[str, Any]:
    """Options of `fit`: evaluations at steps 3, 4, 6, 8 and 9, none of which improves enough."""
    return {"callbacks": [Losses(), EarlyStopping(patience=4, min_delta=100.0)], "eval_every_steps": 3}


class Large(nn.Sequential):
    """Enough weights that saving takes a good part of the time; draws random numbers."""

    def __init__(self, outputs: int = CLASSES) -> None:
        super().__init__(
            nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
            nn.Flatten(), nn.Linear(256, 512), nn.Dropout(0.2), nn.Linear(512, outputs),
        )  # fmt: skip


TASKS: dict[str, tuple[Task, int]] = {
    "Classification": (Classification(), CLASSES),
    "MultiLabel": (MultiLabel(metrics=("map", "f1", "auroc")), 3),
    "Regression": (Regression(), 1),
}
"""By name, with the model's outputs per image."""


def pipeline_of(train: str, val: str, task: str = "Classification") -> Pipeline:
    goal, outputs = TASKS[task]
    pipeline = Pipeline(Large, outputs=outputs).task(goal)
    pipeline = pipeline.load(train, val, batch_size=BATCH, image_size=SIDE, flip=True, workers=1)
    return pipeline.optimize("adamw", lr=0.01, warmup=0.2).transform(EMA(half_life=3))


def train(order: dict[str, Any], rank: int) -> None:
    os.dup2(os.open(f"{order['out']}.stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    os.dup2(2, 1)
    torch.set_num_threads(1)
    ranks, pipeline = order["ranks"], pipeline_of(order["train"], order["val"], order["task"])
    if ranks > 1:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", init_method=f"file://{order['rendezvous']}", rank=rank, world_size=ranks)
        pipeline = pipeline.distribute(order["strategy"], devices=ranks)
    config = FitConfig(
        epochs=EPOCHS, out=Path(order["out"]), progress=False, resume="auto",
        checkpoints=Checkpoints(every_steps=order["every_steps"]), **(callbacks() if order["callbacks"] else {}),
    )  # fmt: skip
    fit(pipeline, config)
    if ranks > 1:
        dist.destroy_process_group()


def main() -> None:
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        pids = []
        for rank in range(order["ranks"]):
            pid = os.fork()
            if pid == 0:
                try:
                    train(order, rank)
                    os._exit(0)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
            pids.append(pid)
        print(json.dumps(pids), flush=True)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)


if __name__ == "__main__":
    main()
