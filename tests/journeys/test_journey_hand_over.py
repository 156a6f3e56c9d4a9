"""Job 16: hand a pipeline over to Lightning, ask which format loads fastest, and use the loader in a plain loop."""

import json

import pytest
import torch
from command_line import done
from drivetrain.loaders import FFCVLoader
from journey_models import Net, photos


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:::lightning", "ignore:.*LeafSpec:FutureWarning")
def test_lightning_trains_to_the_same_losses() -> None:
    from lightning.pytorch import Trainer

    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    module, data, arguments, _ = photos().to_lightning(epochs=2, **quiet)
    trainer = Trainer(**arguments)
    trainer.fit(module, data)
    last = photos().fit(epochs=2, progress=False).history.epochs[-1]
    assert float(trainer.callback_metrics["val_loss"]) == pytest.approx(last.val_loss, rel=1e-4)


@pytest.mark.slow
@pytest.mark.long
def test_advice_on_the_format() -> None:
    found = json.loads(done("advise", "photos/train", "--seconds", "5", "--image-size", "96", "--json"))
    assert found["images"] == 24
    assert found["chosen"] in [row["name"] for row in found["rows"]]


def test_the_loader_in_a_plain_loop() -> None:
    torch.manual_seed(0)
    model, losses = Net(3), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    with FFCVLoader("train.beton", batch_size=8, image_size=32) as loader:
        for _ in range(12):
            for images, labels in loader:
                loss = torch.nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    assert len(losses) == 12 * len(loader) == 36
    assert sum(losses[-3:]) < sum(losses[:3])
