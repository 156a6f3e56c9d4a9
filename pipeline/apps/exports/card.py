"""The model card of an exported file, in Markdown: only facts that the checkpoint and its run's folder have."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from ....common.errors import CheckpointError, DrivetrainError
from ....common.storage.files import write_file
from ....common.table import Table
from ....loaders.image_size import height_width
from ....loaders.options import fill_color
from ....transforms import TRANSFORMS
from ...describe.inputs import Inputs
from ...recipes.core_yaml import dump
from ...runs.checkpoints.format import Checkpoint
from ...tasks.metrics import format_metric
from ...telemetry.history import Epoch, History
from .programs import INPUT, OUTPUT, Difference

CARD = "MODEL_CARD.md"
LEDGER = "ledger.json"
MARK = "<!-- Written by `drivetrain export`, which replaces this file. -->"
_MANY = 50  # classes beyond this number are only in the file's metadata
_LOGITS = ("Classification(", "MultiLabel(")  # tasks whose outputs are logits
_CHANNELS = {1: "one channel", 3: "RGB", 4: "RGBA"}
_USE = {
    "safetensors": """\
import torch
from safetensors.torch import load_file

model.load_state_dict(load_file("{name}"))  # of the model {names}
model.eval()
images = torch.zeros({shape})  # yours, as below
outputs = model(images)""",
    "scaled safetensors": """\
import torch
from safetensors.torch import load_file

state = load_file("{name}")  # of the model {names}
mean, std = state.pop("target_mean"), state.pop("target_std")  # of the targets: it was trained on scaled ones
model.load_state_dict(state)
model.eval()
images = torch.zeros({shape})  # yours, as below
outputs = model(images) * std + mean""",
    "torch-export": """\
import torch

model = torch.export.load("{name}").module()
images = torch.zeros({shape})  # yours, as below
outputs = model(images)""",
    "onnx": f"""\
import numpy as np
import onnxruntime

images = np.zeros({{shape}}, np.float32)  # yours, as below
session = onnxruntime.InferenceSession("{{name}}")
outputs = session.run(None, {{{{"{INPUT}": images}}}})""",
}
"""How to run a file of each format."""
_SURGERY = {"plain": "before surgery", "trained": "after surgery"}


def check_card(path: Path) -> None:
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointError(f"{path} is in the way of the model card: {error.strerror}. Move it.") from None
    if MARK not in text:
        raise CheckpointError(
            f"{path} was not written by Drivetrain, and would be replaced by the model card. Move it, or export to "
            "another folder."
        )


def write_card(
    path: Path, exported: Path, kind: str, names: str, checkpoint: Checkpoint, folder: Path | None,
    recipe: Mapping[str, Any], difference: Difference | None, *, scaled: bool,
) -> None:  # fmt: skip
    """Write the card of `exported`, whose weights have `names`, and the scale of the targets if it is `scaled`. Without
    the run's folder, its ledger is unknown."""
    facts = checkpoint.content.history.facts
    recipe = {key: value for key, value in recipe.items() if key != "trained"}  # the card has it elsewhere
    parts = [
        _front_matter(facts, kind), MARK, f"# {exported.name}", _origin(checkpoint, recipe),
        *_use(exported, kind, names, facts, difference, scaled), _training(checkpoint, recipe),
        *_results(checkpoint, recipe), _ledger(folder), _environment(checkpoint),
    ]  # fmt: skip
    if recipe:
        text = dump(recipe, default_flow_style=None, width=110)
        parts.append(f"## Recipe\n\n```yaml\n{text}```")
    write_file(path, "\n\n".join(filter(None, parts)) + "\n")


def _front_matter(facts: Mapping[str, Any], kind: str) -> str:
    about: dict[str, Any] = {"tags": ["drivetrain", "onnx" if kind == "onnx" else "pytorch"]}
    if str(facts.get("task", "")).startswith(_LOGITS):
        about = {"pipeline_tag": "image-classification", **about}
    return f"---\n{yaml.safe_dump(about, sort_keys=False)}---"


def _origin(checkpoint: Checkpoint, recipe: Mapping[str, Any]) -> str:
    content = checkpoint.content
    model = recipe.get("model") or (content.description or {}).get("model")
    named = f"`{model}`" if model else "A custom model"
    recipe_name = content.history.facts.get("recipe")
    by = f", recipe `{recipe_name}`" if recipe_name else ""
    within = f" and {content.step_in_epoch} steps" if content.step_in_epoch else ""
    return (
        f"{named}, trained with Drivetrain {content.drivetrain}{by}: the evaluated weights after {content.epoch} of "
        f"{content.facts['epochs']} epochs{within} ({content.step:,} optimizer steps)."
    )


def _use(
    exported: Path, kind: str, names: str, facts: Mapping[str, Any], difference: Difference | None, scaled: bool
) -> Iterator[str]:
    inputs = Inputs.from_dict(facts["inputs"]) if "inputs" in facts else None
    shape = "(1, 3, 224, 224)"  # of what the run does not say
    if inputs is not None:
        shape = str((1, len(inputs.mean), *height_width(inputs.image_size)))
    code = _USE[f"scaled {kind}" if scaled else kind].format(name=exported.name, names=_SURGERY[names], shape=shape)
    yield f"## Use\n\n```python\n{code}\n```"
    if inputs is not None:
        yield _input_text(inputs, kind, facts.get("task"))
    if difference is not None:
        yield f"Compared with the trained model in PyTorch, in fp32: {difference}."


def _input_text(inputs: Inputs, kind: str, task_name: object) -> str:
    height, width = height_width(inputs.image_size)
    name, result = (f"`{INPUT}`", f"`{OUTPUT}`") if kind == "onnx" else ("`images`", "`outputs`")
    channels = _CHANNELS[inputs.channels] + (", from 16 bits" if inputs.depth == 16 else "")
    text = (
        f"{name}: float32 `(N, {len(inputs.mean)}, {height}, {width})`, {channels}. {_crop_text(inputs)}, scaled to "
        f"0–1, minus the mean {_list(inputs.mean)}, divided by the standard deviation {_list(inputs.std)}."
    )
    if not inputs.classes:
        return text
    count = len(inputs.classes)
    listed = ", ".join(inputs.classes) if count <= _MANY else "their names are in the file's metadata, `inputs`"
    values = "logits, one" if str(task_name).startswith(_LOGITS) else "a value"
    return f"{text}\n\n{result}: {values} for each of {count} classes: {listed}."


def _crop_text(inputs: Inputs) -> str:
    height, width = height_width(inputs.image_size)
    antialiased = ", antialiased" if inputs.interpolation in ("bilinear", "bicubic") else ""
    resized = f"{height} × {width} pixels ({inputs.interpolation}{antialiased})"
    if inputs.eval_crop == "whole":
        return f"Each full picture, resized to {resized}"
    if inputs.eval_crop == "fit":
        fill = ", ".join(map(str, fill_color(inputs.mean, inputs.depth)))
        return (
            f"Each full picture, scaled to fit into {resized}, with its aspect ratio, and centered on the color "
            f"({fill})"
        )
    shape = "square" if height == width else f"crop of the shape {height} × {width} (height × width)"
    if inputs.eval_ratio == 1:
        return f"Of each picture, the largest central {shape}, resized to {resized}"
    size = f"{inputs.eval_ratio:g} × the largest size, rounded down to whole pixels"
    return f"Of each picture, the central {shape} of {size}, resized to {resized}"


def _list(values: tuple[float, ...]) -> str:
    return f"({', '.join(f'{value:g}' for value in values)})"


def _section(title: str, rows: Sequence[tuple[str, object]]) -> str:
    known = [(name, _text(value)) for name, value in rows if value is not None]
    return f"## {title}\n\n{Table(('', ''), known).markdown()}" if known else ""


def _training(checkpoint: Checkpoint, recipe: Mapping[str, Any]) -> str:
    content, facts = checkpoint.content, checkpoint.content.facts
    run = content.history.facts
    first, *_ = facts.get("parameter groups") or ({},)
    pairs = [f"{name}={value}" for name, value in first.items() if value is not None]
    return _section("Training", [
        ("training data", recipe.get("train")),
        ("training samples", facts.get("training samples")),
        ("validation data", recipe.get("val")),
        ("task", run.get("task")),
        ("transforms", ", ".join(map(str, facts.get("transforms") or ())) or "none"),
        ("optimizer", facts.get("optimizer")),
        ("its first parameter group", ", ".join(pairs) if pairs else None),
        ("schedule", facts.get("schedule")),
        ("warmup", facts.get("warmup")),
        ("batch size, over all devices", facts.get("batch_size")),
        ("image size in training", facts.get("image_size")),
        ("precision", facts.get("precision")),
        ("strategy", f"{content.strategy}, {len(content.ranks)} process(es)"),
        ("seed", facts.get("seed")),
        ("began with", (run.get("init_from") or {}).get("source")),
        ("stopped", (run.get("stopped") or {}).get("reason")),
    ])  # fmt: skip


def _text(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _results(checkpoint: Checkpoint, recipe: Mapping[str, Any]) -> Iterator[str]:
    history = checkpoint.content.history
    rated = [epoch for epoch in history.epochs if history.monitor.score(epoch) is not None]
    best = history.best
    if best is None:
        return
    named = {f"last, epoch {rated[-1].epoch}": rated[-1]}
    if best is not rated[-1]:
        named[f"best {history.monitor}, epoch {best.epoch}"] = best
    metrics = dict.fromkeys(name for epoch in named.values() for name in epoch.metrics)
    rows = [_row(name, epoch, metrics) for name, epoch in named.items()]
    trained = recipe.get("val") is not None and recipe.get("val") == recipe.get("train")
    yield f"## Results on the {'training' if trained else 'validation'} data"
    if trained:
        yield "The model was evaluated on the data that it was trained on: how it does on new images is not known."
    yield Table(("", "loss", "validation loss", *metrics), rows, figures=True).markdown()
    if note := _not_of_the_weights(checkpoint, history):
        yield note


def _row(name: str, epoch: Epoch, metrics: Iterable[str]) -> tuple[str, ...]:
    known = epoch.metrics  # without those that are undefined
    cells = (format_metric(known[each], epoch.units.get(each)) if each in known else "" for each in metrics)
    return name, f"{epoch.loss:.4f}", f"{epoch.val_loss:.4f}", *cells


def _not_of_the_weights(checkpoint: Checkpoint, history: History) -> str:
    content, last = checkpoint.content, history.last
    if content.step_in_epoch or last is None or last.epoch != content.epoch:
        return "The exported weights are of a later moment than these epochs."
    names = (str(one).partition("(")[0] for one in content.facts.get("transforms") or ())
    known = [f"`{name}`" for name in names if name in TRANSFORMS and TRANSFORMS[name].kind == "evaluation"]
    note = f"They were evaluated with {', '.join(known)}, which the exported file does not have."
    return note if known else ""


def _ledger(folder: Path | None) -> str:
    path = None if folder is None else folder / LEDGER
    if path is None or not path.exists():
        return ""
    from ...ledger.ledger import Ledger
    from ...ledger.table import tables

    try:
        ledger = Ledger.load(path)
    except DrivetrainError:
        return ""
    table = tables(ledger)[0]
    measured = [row for row in table.rows if row[1] not in ("left out", "failed")]
    return "\n\n".join(["## Speed of training", replace(table, rows=measured).markdown(), ledger.bound])


def _environment(checkpoint: Checkpoint) -> str:
    source = checkpoint.content.history.facts.get("provenance") or {}
    hardware, versions = source.get("hardware") or {}, source.get("versions") or {}
    rows = [
        ("date", source.get("date")),
        ("command", f"`{source['command']}`" if source.get("command") else None),
        ("hardware", ", ".join(hardware.get("gpus") or ()) or hardware.get("processor")),
        ("cores", hardware.get("cores")),
        ("revision of Drivetrain", source.get("git_revision")),
        ("versions", ", ".join(f"{name} {each}" for name, each in versions.items() if each)),
    ]
    return _section("Environment", [(name, value or None) for name, value in rows])
