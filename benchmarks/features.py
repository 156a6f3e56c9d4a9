"""Measure the features that `cifar10-simclr` learns without labels: what a linear classifier makes of them, and what
`cifar10-quickstart` gains by starting from them.

    python benchmarks/features.py [--epochs 10] [--label-epochs 1 5] [--seeds 3] [--out benchmarks/results]

The linear classifier is a logistic regression on what the network's head takes, for the training images without
augmentation (Chen et al., arXiv:2002.05709, section 2.2); for comparison, also with random weights. The training on
labels runs from the features and from random weights, with the same seeds.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from drivetrain import Pipeline
from drivetrain.common.table import Table
from drivetrain.loaders import FFCVLoader
from drivetrain.loaders.datasets.names import resolve
from measuring import save, summarize
from torch import nn

FEATURES, LABELS = "cifar10-simclr", "cifar10-quickstart"
PREPROCESSING = ("eval_ratio", "mean", "std")
DECAY = 1e-4
"""Of the linear classifier's weights; little, because there are many more images than features."""


def features(pipeline: Pipeline, model: nn.Module, data: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the model's first linear layer takes, `(N, D)`, and the labels, `(N,)`."""
    assert pipeline.data is not None
    options: Any = {name: pipeline.data.settings[name] for name in PREPROCESSING}
    options["image_size"] = pipeline.data.image_size
    first = next(module for module in model.modules() if isinstance(module, nn.Linear))
    inputs, labels = [], []
    hook = first.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    model.eval()
    with FFCVLoader(resolve(data), train=False, batch_size=500, **options) as loader, torch.no_grad():
        for images, classes in loader:
            model(images)
            labels.append(classes.clone())
    hook.remove()
    return torch.cat(inputs), torch.cat(labels)


def linear_accuracy(pipeline: Pipeline, model: nn.Module, train: str, val: str) -> float:
    """Return the accuracy on the test images of a linear classifier of the training images' features."""
    inputs, labels = features(pipeline, model, train)
    mean, deviation = inputs.mean(0), inputs.std(0) + 1e-6
    inputs = (inputs - mean) / deviation
    torch.manual_seed(0)
    classifier = nn.Linear(inputs.shape[1], int(labels.max()) + 1)
    optimizer = torch.optim.LBFGS(classifier.parameters(), max_iter=300, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(classifier(inputs), labels) + DECAY * classifier.weight.square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    inputs, labels = features(pipeline, model, val)
    with torch.no_grad():
        guesses = classifier((inputs - mean) / deviation).argmax(1)
    return float((guesses == labels).double().mean())


def on_labels(epochs: int, seed: int, weights: Path | None, data: dict[str, Any]) -> float:
    """Return the accuracy of a training on labels that begins from the `weights` of a run."""
    pipeline = Pipeline.from_recipe(LABELS, seed=seed, precision="fp32", **data)
    return pipeline.fit(epochs=epochs, init_from=weights, progress=False).accuracy or 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, help="without labels; default: the recipe's")
    parser.add_argument("--label-epochs", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--train", default="cifar10:train")
    parser.add_argument("--val", default="cifar10:test")
    options = parser.parse_args()
    data = {"train": options.train, "val": options.val}
    pipeline = Pipeline.from_recipe(FEATURES, train=options.train)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "features")
        torch.manual_seed(pipeline.seed)
        untrained: Any = pipeline.model(**pipeline.model_options)
        result = pipeline.fit(epochs=options.epochs, out=run, progress=False)
        print([epoch.loss for epoch in result.history.epochs], flush=True)
        linear = {
            "random weights": linear_accuracy(pipeline, untrained, **data),
            FEATURES: linear_accuracy(pipeline, result.model, **data),
        }
        print(linear, flush=True)
        trained: dict[str, dict[str, list[float]]] = {}
        for epochs in options.label_epochs:
            runs: dict[str, list[float]] = {name: [] for name in linear}
            for seed in range(options.seeds):
                for name, weights in zip(runs, (None, run), strict=True):
                    runs[name].append(on_labels(epochs, seed, weights, data))
                    print(f"{epochs} epochs, {name}, seed {seed}: {runs[name][-1]:.2%}", flush=True)
            trained[str(epochs)] = runs
    heads = ("from", "linear classifier", *(f"{LABELS}, {epochs} epochs" for epochs in trained))
    rows = [
        (
            name,
            f"{linear[name]:.1%}",
            *(f"{summarize(runs[name])['median']:.1%}" for runs in trained.values()),
        )
        for name in linear
    ]
    figures = {
        "epochs": len(result.history.epochs),
        "losses": [epoch.loss for epoch in result.history.epochs],
        "seconds": sum(epoch.seconds for epoch in result.history.epochs),
        "linear": linear,
        "on_labels": {
            epochs: {name: summarize(values) for name, values in runs.items()} for epochs, runs in trained.items()
        },
    }
    save([Table(heads, rows, figures=True)], figures, options.out / "features.json")


if __name__ == "__main__":
    main()
