"""`Pipeline.to_lightning`: Lightning's Trainer reaches the losses of our own loop."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from drivetrain import PlanError
from drivetrain.transforms import EMA, SAM, BlurPool, ChannelsLast, LabelSmoothing, MixUp, NoWeightDecay
from pipeline_data import Toy, batch_norm_model, plain_model

# Lightning's own: too few workers (our loaders have threads of their own), and its use of torch.
pytestmark = pytest.mark.filterwarnings(
    "ignore:::lightning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)


def trained(pipeline: Any, epochs: int) -> tuple[Any, list[dict[str, float]]]:
    """The module after Lightning's training, and what it logged of each epoch."""
    import lightning.pytorch as pl

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    found: list[dict[str, float]] = []

    class Keeps(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
            found.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    module, data, arguments, _ = pipeline.to_lightning(epochs=epochs)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    pl.Trainer(**arguments, **quiet, callbacks=[Keeps()]).fit(module, data)
    return module, found


@pytest.mark.parametrize("case", ["plain", "everything"])
def test_the_losses_of_our_own_loop(toy: Toy, case: str) -> None:
    pipeline = toy.pipeline(batch_norm_model, flip=True).optimize(
        "sgd", lr=0.1, momentum=0.9, weight_decay=1e-3, schedule="cosine", warmup=0.3
    )
    if case == "everything":
        pipeline = pipeline.transform(ChannelsLast(), LabelSmoothing(0.1), MixUp(0.2), NoWeightDecay())
        pipeline = pipeline.distribute("single", accumulate=2, clip_norm=0.5)
    module, found = trained(pipeline, 2)
    result = pipeline.fit(epochs=2, progress=False)
    for name in ("loss", "val_loss", "accuracy"):
        own = [getattr(epoch, name) for epoch in result.history.epochs]
        assert [values[name] for values in found] == pytest.approx(own, abs=1e-5), name
    torch.testing.assert_close(module.model.state_dict(), result.model.state_dict(), rtol=1e-5, atol=1e-5)


def test_what_needs_our_own_loop_is_refused(toy: Toy) -> None:
    pipeline = toy.pipeline(plain_model)
    with pytest.raises(PlanError, match="EMA, SAM works in Drivetrain's own loop only"):
        pipeline.transform(EMA(), SAM(), BlurPool()).to_lightning(epochs=1)
    with pytest.raises(PlanError, match=r"give to_lightning\(epochs=…\)"):
        pipeline.to_lightning()
    with pytest.raises(PlanError, match="compile= and activation_checkpointing="):
        pipeline.distribute("single", compile=True).to_lightning(epochs=1)
