"""Pictures of errors: the worst samples, the confusion of classes, calibration, curves of labels, residuals."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....common.errors import require
from ....common.pictures import BLUE, GRID, INK, gallery, literal
from ....loaders.beton.targets import NOT_COUNTED, palette

CLASSES = 30
"""Classes in the picture of a confusion: of more, those with the most mistakes."""
COLUMNS = 6


def figure_of(errors: Any, samples: bool = True) -> Any:
    """Return a matplotlib figure of the `Errors` of a data set, whose class imports this file: the overview of its
    kind, then, with `samples`, the worst. Raise MissingExtra without matplotlib."""
    figure_class = require("matplotlib.figure", "plot", "draw the errors").Figure
    worst = worst_of(errors) if samples else []
    rows = -(-len(worst) // COLUMNS)
    overview = 4.6 if errors.kind else 0.0
    figure = figure_class(figsize=(10, 0.6 + overview + 2.0 * rows), layout="constrained")
    figure.suptitle(_title(errors), x=0.01, ha="left", fontsize=11, color=INK)
    top, bottom = figure.subfigures(2, 1, height_ratios=(max(overview, 0.1), max(2.0 * rows, 0.1)))
    if errors.kind:
        _OVERVIEWS[errors.kind](top, errors)
    if worst:
        sheet(bottom, errors, worst, "highest loss")
    return figure


def sheet(figure: Any, errors: Any, places: list[int], title: str) -> None:
    """Draw samples with truth, prediction and loss; masks over their images."""
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, color=INK)
    rows = -(-len(places) // COLUMNS)
    panels = figure.subplots(rows, COLUMNS, squeeze=False).ravel()
    for axes in panels:
        axes.axis("off")
    for axes, place in zip(panels, places, strict=False):
        axes.imshow(overlaid(errors.pictures[int(errors.samples[place])], errors.colors))
        lines = [textwrap.shorten(line, 28, placeholder="…") for line in about(errors, place)]
        axes.set_title(literal("\n".join(lines)), fontsize=7, loc="left", color=INK, pad=2)


def worst_of(errors: Any) -> list[int]:
    return [int(at) for at in errors.worst() if int(errors.samples[at]) in errors.pictures]


def about(errors: Any, place: int) -> list[str]:
    known = errors.of(place)
    said = [f"{mark} {known[name]}" for name, mark in (("truth", "is"), ("prediction", "→")) if name in known]
    return [f"#{known['sample']} loss {known['loss']:.3g}", *said]


def thumbnails(errors: Any) -> str:
    """Return the worst samples as HTML; "" without pictures."""
    pictures = ((overlaid(errors.pictures[int(errors.samples[at])], errors.colors), at) for at in worst_of(errors))
    tiles = [((picture,), "\n".join(about(errors, at))) for picture, at in pictures]
    sides = ": the truth, then the prediction" if errors.kind == "pixels" else ""
    return f"<p>Highest loss{sides}</p>{gallery(tiles)}" if tiles else ""


def overlaid(pictures: Any, colors: Sequence[str] = ()) -> NDArray[np.uint8]:
    """Return an image; with masks, half transparent, beside each other: the truth, and the prediction with what is
    wrong in full color."""
    image: NDArray[np.uint8] = pictures["image"]
    if "truth" not in pictures:
        return image
    truth, prediction = pictures["truth"], pictures["prediction"]
    counts = truth != NOT_COUNTED
    left = masked(image, truth, colors)
    right = colored(image, prediction, np.where(counts & (truth != prediction), 1.0, 0.4), colors)
    return np.concatenate([left, right], axis=1)


def masked(image: NDArray[np.uint8], mask: NDArray[Any], colors: Sequence[str] = ()) -> NDArray[np.uint8]:
    """Return an image `(H, W, 3)` under its mask `(H, W)`: half transparent in the colors of the classes, and hatched
    in gray where pixels do not count."""
    counts = mask != NOT_COUNTED
    rows, columns = np.indices(mask.shape)
    stripes = (rows + columns) // max(min(mask.shape) // 40, 1) % 2
    gray = np.where(stripes, 225, 120)[..., None].astype(np.uint8)
    return np.where(counts[..., None], colored(image, np.where(counts, mask, 0), 0.5, colors), gray)


def colored(
    image: NDArray[np.uint8], classes: NDArray[Any], strength: Any, colors: Sequence[str] = ()
) -> NDArray[np.uint8]:
    """Return an image `(H, W, 3)` under the `colors` of the classes `(H, W)`, as strong as `strength`, 0 to 1."""
    weight = np.asarray(strength, np.float32)[..., None] * np.ones((*classes.shape, 1), np.float32)
    over = palette(colors)[classes.astype(np.int64) % 256]
    return (image * (1 - weight) + over * weight).round().astype(np.uint8)


def _title(errors: Any) -> str:
    figures = ", ".join(f"{name} {value:.4g}" for name, value in errors.metrics.items())
    return literal(textwrap.fill(f"{errors.source}  ·  {len(errors):,} samples  ·  {figures}", 110))


def _classes(figure: Any, errors: Any) -> None:
    matrix, curve = figure.subplots(1, 2, width_ratios=(1.5, 1))
    chosen = np.arange(len(errors.classes))
    if len(chosen) > CLASSES:
        wrong = errors.targets != errors.predictions
        mistakes = sum(np.bincount(each[wrong], minlength=len(chosen)) for each in (errors.targets, errors.predictions))
        chosen = np.sort(np.argsort(-mistakes, kind="stable")[:CLASSES])
    samples = np.bincount(errors.targets, minlength=len(errors.classes))[chosen]
    _matrix(matrix, errors.confusion_of(chosen), samples, [errors.classes[at] for at in chosen])
    matrix.set_title(f"truth × prediction, share of the truth{_of(chosen, errors)}", loc="left", fontsize=9)
    calibration = errors.calibration
    curve.plot([0, 1], [0, 1], color=GRID, zorder=0)
    there = calibration.samples > 0
    curve.plot(calibration.probability[there], calibration.right[there], color=BLUE, marker="o", markersize=4)
    curve.set(xlim=(0, 1), ylim=(0, 1), xlabel="probability of the prediction", ylabel="share that is right")
    curve.set_title(f"calibration, expected error {calibration.error:.3f}", loc="left", fontsize=9)
    _plain(curve)


def _of(chosen: NDArray[Any], errors: Any) -> str:
    classes = len(errors.classes)
    return f"; {len(chosen)} of {classes:,} classes" if len(chosen) < classes else ""


def _matrix(axes: Any, counts: NDArray[np.int64], there: NDArray[np.int64], names: list[str]) -> None:
    """Draw a confusion `(k, k)`: colors are shares of the samples `(k,)` of each row's class, also of those taken for
    classes that are left out; numbers stand in it if there is room."""
    shares = counts / np.maximum(there, 1)[:, None]
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    size = 8 if len(names) <= 12 else 6
    if len(names) <= 12:
        for row, column in np.ndindex(counts.shape):
            if counts[row, column]:
                light = shares[row, column] > 0.5
                axes.text(
                    column, row, f"{counts[row, column]:,}", ha="center", va="center", fontsize=size,
                    color="white" if light else INK,
                )  # fmt: skip
    short = [literal(name if len(name) <= 16 else f"{name[:9]}…{name[-6:]}") for name in names]
    axes.set_xticks(range(len(names)), short, rotation=60, ha="right", fontsize=size)
    axes.set_yticks(range(len(names)), short, fontsize=size)
    axes.set(xlabel="prediction", ylabel="truth")


def _labels(figure: Any, errors: Any) -> None:
    axes = figure.subplots()
    order = np.argsort(errors.scores(), kind="stable")[:8]
    lines, labels = list[Any](), list[str]()  # for the legend, which leaves out a line's label that begins with "_"
    for at in order:
        if errors.targets[:, at].any():
            precision, recall, _ = errors.curve(int(at))
            labels.append(literal(f"{errors.classes[at]} {errors.average_precision(int(at)):.2f}"))
            # As average precision sums it: up to each recall, the precision there.
            lines += axes.step(np.append(0, recall), np.append(precision[:1], precision), where="pre")
    axes.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="recall", ylabel="precision")
    axes.set_title("precision and recall of the labels with the lowest average precision", loc="left", fontsize=9)
    axes.legend(lines, labels, frameon=False, fontsize=8)
    _plain(axes)


def _values(figure: Any, errors: Any) -> None:
    panels = figure.subplots(1, min(len(errors.classes), 4), squeeze=False)[0]
    if (values := len(errors.classes)) > len(panels):
        title = f"the first {len(panels)} of {values:,} values"
        figure.suptitle(title, x=0.01, ha="left", fontsize=10, color=INK)
    for k, axes in enumerate(panels):
        target, off = errors.targets[:, k], errors.residuals[:, k]
        axes.axhline(0, color=GRID, zorder=0)
        axes.scatter(target, off, s=6, alpha=0.4, color=BLUE, linewidths=0)
        axes.set(xlabel="target", ylabel="prediction − target" if k == 0 else "")
        axes.set_title(literal(errors.classes[k]), loc="left", fontsize=9)
        _plain(axes)


def _pixels(figure: Any, errors: Any) -> None:
    matrix, bars = figure.subplots(1, 2, width_ratios=(1.5, 1))
    lowest = np.argsort(np.nan_to_num(errors.scores(), nan=1.0), kind="stable")
    chosen = np.sort(lowest[:CLASSES])
    names = [errors.classes[at] for at in chosen]
    confusion = errors.confusion
    _matrix(matrix, confusion[np.ix_(chosen, chosen)], confusion.sum(1)[chosen], names)
    for text in [*matrix.texts]:
        text.remove()  # numbers of pixels are too long
    title = f"truth × prediction, share of the truth's pixels{_of(chosen, errors)}"
    matrix.set_title(title, loc="left", fontsize=9)
    scores = errors.scores()[chosen]
    bars.barh(range(len(names)), np.nan_to_num(scores), color=BLUE, height=0.7)
    bars.set_yticks(range(len(names)), [*map(literal, names)], fontsize=8 if len(names) <= 12 else 6)
    bars.set(xlim=(0, 1), xlabel="intersection over union")
    bars.invert_yaxis()
    _plain(bars)


def _plain(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


_OVERVIEWS: dict[str, Any] = {"classes": _classes, "labels": _labels, "values": _values, "pixels": _pixels}
