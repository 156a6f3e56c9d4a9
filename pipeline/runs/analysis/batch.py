"""A batch as the step gets it: after cropping, colors, policies, MixUp and CutMix, at the epoch's size."""

from __future__ import annotations

import dataclasses
import html
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ....common.errors import PlanError, require
from ....common.pictures import INK, check_picture, displayed, gallery, literal, save_picture
from ....loaders.beton.targets import palette
from ....transforms import Transform
from ....transforms.base import is_own
from ...describe.pipeline_spec import PipelineSpec
from ...describe.resolve import resolve
from ...tasks.nests import join_samples, labels_of, pair
from ...tasks.standard import IGNORED, Segmentation
from ...tasks.task import names_of
from ...training.build import build, fork_rng, resolve_data
from ..initial import initial_weights
from .judge import shown
from .marks import Mark, color_of, marked, marks_of, masks_of
from .picture import masked

COLUMNS = 8
WIDTH, LARGEST = 10.8, 4.0  # of the figure, and of a picture in it, in inches
LIKELY = 0.01  # shares below are not named


@dataclass(frozen=True, eq=False)
class ShownBatch:
    """Images of a training batch, as the first step of an epoch gets them.

    Attributes:
        title: what it is.
        pictures: for each sample its views, each `(H, W, 3)` uint8, normalization undone.
        texts: the target of each sample: class names with their shares, numbers; "" for masks.
        masks: of each sample, `(H, W)`, 255 where pixels do not count; empty without masks.
        classes: names of the classes; their numbers if the data has none.
        colors: of the classes of masks, `"#rrggbb"`, as their source had them, or "".
        marks: of each sample its boxes and keypoints, as the step gets them; empty without such fields.

    Example::

        >>> batch = pipeline.show_batch(samples=8)
        >>> len(batch.pictures)
        8
    """

    title: str
    pictures: tuple[tuple[NDArray[np.uint8], ...], ...]
    texts: tuple[str, ...]
    masks: tuple[NDArray[Any], ...] = ()
    classes: tuple[str, ...] = ()
    colors: tuple[str, ...] = ()
    marks: tuple[tuple[Mark, ...], ...] = ()

    def show(self) -> Any:
        """Return the picture, which a notebook displays: a matplotlib figure.

        Raises:
            MissingExtra: without matplotlib.
        """
        figure_class = require("matplotlib.figure", "plot", "draw a batch").Figure
        views, (height, width, _) = len(self.pictures[0]), self.pictures[0][0].shape
        columns = min(max(COLUMNS // views, 1), len(self.pictures)) * views
        rows = -(-len(self.pictures) * views // columns)
        side = min(WIDTH / columns, LARGEST)
        size = side * columns, 0.5 + (side * height / width + 0.15) * rows
        figure = figure_class(figsize=size, layout="constrained")
        figure.suptitle(self.title, x=0.01, ha="left", fontsize=10, color=INK)
        panels = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes in panels:
            axes.axis("off")
        for sample, (pictures, text) in enumerate(self._drawn()):
            for view, picture in enumerate(pictures):
                axes = panels[sample * views + view]
                axes.imshow(picture)
                title = textwrap.fill(text, 24, max_lines=3, placeholder="…") if view == 0 else f"view {view + 1}"
                axes.set_title(literal(title), fontsize=7, loc="left", color=INK, pad=2)
        if legend := self._legend():
            patch = require("matplotlib.patches", "plot", "draw a batch").Patch
            handles = [
                patch(label=literal(name), facecolor=color, edgecolor="#888888", hatch=None if counts else "////")
                for name, color, counts in legend
            ]
            figure.legend(handles=handles, loc="outside lower left", ncols=8, fontsize=8, frameon=False)
        return displayed(figure)

    def _drawn(self) -> list[tuple[tuple[NDArray[np.uint8], ...], str]]:
        """Return of each sample its views, under their masks, boxes and keypoints, and the text."""
        pictures = self.pictures
        if self.masks:
            pictures = tuple(
                (masked(views[0], mask, self.colors),) for views, mask in zip(pictures, self.masks, strict=True)
            )
        if self.marks:
            pictures = tuple((marked(views[0], own),) for views, own in zip(pictures, self.marks, strict=True))
        return list(zip(pictures, self.texts, strict=True))

    def _legend(self) -> list[tuple[str, str, bool]]:
        """Return of each class in the masks its name, its color, and whether it counts; then what boxes and keypoints
        are."""
        there = sorted({index for mask in self.masks for index in np.unique(mask).tolist()})
        names, colors = self.classes, palette(self.colors)
        found = []
        for at in there:
            counts = at != IGNORED
            name = "not counted" if not counts else names[at] if at < len(names) else str(at)
            color = "#{:02x}{:02x}{:02x}".format(*colors[at % 256]) if counts else "#dddddd"
            found.append((name, color, counts))
        drawn = {(mark.number, mark.name) for own in self.marks for mark in own}
        return found + [(name, color_of(number), True) for number, name in sorted(drawn)]

    def save(self, path: str | Path) -> Path:
        """Write the picture.

        Raises:
            DataError: unless it ends in `.png`, `.svg` or `.pdf`.
            MissingExtra: without matplotlib.
        """
        path = check_picture(path)
        return save_picture(self.show(), path)

    def __repr__(self) -> str:
        return f"ShownBatch({self.title!r}, {len(self.pictures)} samples)"

    def _repr_html_(self) -> str:
        legend = "".join(
            f'<span style="display:inline-block;margin-right:1em"><span style="display:inline-block;width:.8em;height:'
            f'.8em;border:1px solid;background:{color}"></span> {html.escape(name)}</span>'
            for name, color, _ in self._legend()
        )
        return f"<p>{html.escape(self.title)}</p>{gallery(self._drawn())}<p>{legend}</p>"


def batch_of(spec: PipelineSpec, epoch: int, count: int, epochs: int | None) -> ShownBatch:
    """Return the first batch of an epoch; see `Pipeline.show_batch`. It is computed in this process: the microbatches
    of all ranks are those of one process with as many."""
    how, planned = spec.distributed, epochs or spec.epochs
    epochs = planned or epoch + 1
    if epoch >= epochs:
        raise PlanError(f"epoch={epoch} is not one of the pipeline's {epochs} epochs, counted from 0.")
    # Views are compared with those of the whole batch, and no transform changes a part of it by itself.
    ranks = 1 if spec.target.kind == "views" else how.ranks
    alone = dataclasses.replace(
        how, strategy="single", devices=1, accumulate=how.accumulate * ranks, compile=False,
        activation_checkpointing=False, sync_batchnorm=False,
        options={} if how.device is None else {"device": how.device},
    )  # fmt: skip
    # Without a number of epochs, none can be too few for a transform.
    plan = resolve_data(resolve(spec.replace(distribution=alone, epochs=planned)), progress=False)
    begins = initial_weights(plan) if any(map(may_use_the_model, plan.transforms)) else None
    with fork_rng(plan.seed), build(plan, begins) as built:
        built.begin(epochs)
        state = built.hooks.state
        state.epoch, state.step = epoch, epoch * len(built.train)
        built.begin_epoch()
        built.train.set_epoch(epoch)
        marks: tuple[tuple[Mark, ...], ...] = ()
        images, targets = pair(next(iter(built.train)))
        parts = built.hooks.microbatches(built.engine, images, targets, built.loss)
        own = built.train.settings
        views = [join_samples([part for part, _ in parts])] if isinstance(images, torch.Tensor) else [*images]
        given = join_samples([part for _, part in parts])
        further = dict(zip(own.fields, given[1:], strict=True)) if own.fields else {}
        targets = labels_of(given)[:count].cpu()
        if isinstance(views[0], torch.Tensor) and views[0].dim() == 5:
            views = [*views[0].unbind(1)]
        pictures = tuple(
            tuple(shown(image, own.mean, own.std) for image in sample)
            for sample in zip(*(view[:count] for view in views), strict=True)
        )
        classes, colors = built.train.classes, built.train.colors
        masks: tuple[NDArray[Any], ...] = ()
        if built.train.has_masks:
            counted = (
                not further and type(plan.task).metric_targets is Segmentation.metric_targets
            )  # as it ignores some
            masks = tuple((plan.task.metric_targets(targets) if counted else targets).numpy())
        texts = tuple("" if masks else _text(target, classes, plan.task.kind) for target in targets)
        if further:
            marks = marks_of(built.train, further, len(pictures))
            if not masks and (found := masks_of(built.train, further, len(pictures))):
                (masks, colors), classes = found, []  # which are those of the labels
        size = "×".join(map(str, views[0].shape[-2:]))
        title = f"epoch {epoch} of {epochs}, step {state.step}: {len(pictures)} of {len(images)} images, {size} pixels"
    return ShownBatch(title, pictures, texts, masks, tuple(classes), colors, marks)


def may_use_the_model(transform: Transform) -> bool:
    """Whether a batch may depend on what the model computes: by Drivetrain's own transforms, if they select samples."""
    return transform.selects_samples or transform.unknown or not is_own(type(transform))


def _text(target: torch.Tensor, classes: list[str], kind: str) -> str:
    if not target.dim() and not target.is_floating_point():
        return names_of(len(classes), classes)[int(target)] if classes else str(int(target))
    if not target.dim() or kind not in ("class indices", "labels"):
        values = target.reshape(-1)
        return ", ".join(f"{value:.3g}" for value in values[:4].tolist()) + ", …" * (len(values) > 4)
    names = names_of(len(target), classes)
    chosen = [(float(share), names[at]) for at, share in enumerate(target) if share >= LIKELY]
    chosen.sort(key=lambda pair: -pair[0])
    whole = all(share == 1 for share, _ in chosen)
    more = ", …" * (whole and len(chosen) > 3)  # of a mixture, the shares do not add up to 100 %
    return ", ".join(name if whole else f"{name} {share:.0%}" for share, name in chosen[:3]) + more or "none"
