"""Figures in the README and in `docs/` are those of `benchmarks/results/`, or say why not."""

import copy
import json
import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from drivetrain import DataError
from drivetrain.pipeline import Ledger
from drivetrain.transforms import TRANSFORMS
from PIL import Image
from places import ROOT, load_script
from torch import nn

figures = load_script("figures", ROOT / "benchmarks")
charts = load_script("charts", ROOT / "benchmarks")
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in figures.pages()}

NUMBER = r"(?<![\w.,:-])\d[\d,]*(?:\.\d+)?"
LOOKS_MEASURED = re.compile(
    rf"{NUMBER} ?%"
    rf"|{NUMBER}-? times (?:as |that |less|more|plain|longer)"
    rf"|{NUMBER} ×(?! \d)(?! `)"
    rf"|{NUMBER} (?:images|views|samples|steps|MB|GB)/s"
    rf"|{NUMBER} (?:µs|ms|s|seconds|minutes|min)\b"
    rf"|\({NUMBER} to {NUMBER}\)"
    rf"|\bn = \d+"
)
"""A ratio, a share, a speed, a time, an interval or a count of rounds."""

BY_HAND = "measured once, by hand; the text states what was measured"
NOTEBOOK = "of the notebook that the entry links, once; its outputs are committed"
ADVISE = "printed by `drivetrain advise`; the text states photographs, machine and rounds"
SETTING = "a setting or a limit"
CONDITION = "a condition of a measurement"
TESTED = "a bound that a test checks"
NOT_OF_RESULTS: dict[str, dict[str, str]] = {
    "docs/transforms.md": {"intervals are of 95 %": CONDITION},
    "docs/guide/after-the-run.md": {"take 30 seconds to arrive": CONDITION},
    "README.md": {
        "5 to 10 minutes on two CPU cores": "5:08, 5:57 and 10:10, once each, by hand: how long to wait",
        "n = 1": BY_HAND,
    },
    "docs/data.md": {
        "loading is then 2.7 times as fast": BY_HAND,
        "the file 4 % larger": BY_HAND,
        "4 % smaller (all of 392, by 1 to 9 %), load no faster, and take 2.7 times as long": BY_HAND,
        "2.7 ms for 64 float32 images of 224 pixels on a CPU, about 4 % of FFCV's time": BY_HAND,
        "for 4 to 9 s": BY_HAND,
        "a virtual disk of about 1 GB/s": CONDITION,
        "begin after 20 ms and share 125 MB/s": CONDITION,
        "a virtual disk of 0.57 GB/s": CONDITION,
        "1,213 ± 0 % | 2,413 ± 1 % | 7,723 ± 11 %": ADVISE,
        "2,357 ± 1 % | 4,515 ± 2 % | 13,189 ± 4 %": ADVISE,
        "9,925 ± 4 % | 18,362 ± 2 % | 3,886 ± 7 %": ADVISE,
        "3,199 ± 1 % | 6,094 ± 2 % | 16,018 ± 9 %": ADVISE,
        "less than 2,400 images/s": ADVISE,
        "3,886 images/s, which is": ADVISE,
        "by less than 5 %": ADVISE,
        "crops of 8 to 100 %": CONDITION,
    },
    "docs/gallery.md": {
        "(n = 1)": BY_HAND,
        "62 s for the full notebook": NOTEBOOK,
        "mean IoU of 92.7 %": NOTEBOOK,
        "reach 41.1 %, and 85.7 % of the pixels": BY_HAND,
        "98 s for the notebook": NOTEBOOK,
        "6 min 43 s of processor time, and 28 min behind": BY_HAND,
        "mean average precision of 82.9 %": NOTEBOOK,
        "86 s": NOTEBOOK,
        "with five labels per class, 86 % of the validation pictures are right instead of 57 %": NOTEBOOK,
        "131 s for": NOTEBOOK,
        "80 s, the server": NOTEBOOK,
        "a request takes 37 ms": NOTEBOOK,
        "102 s": NOTEBOOK,
    },
    "docs/guide/callbacks.md": {"after 10 seconds": SETTING},
    "docs/guide/cluster.md": {
        "600 seconds by default": SETTING,
        "(5 s × 3)": SETTING,
        "(30 s)": SETTING,
        "save within 30 s (see": "torch's",
        "the others 30 seconds, whatever": "torch's",
        "50 ms a step": CONDITION,
    },
    "docs/ledger.md": {
        "95 % interval is within ± 2 %": SETTING,
        "85.31 % top-1": BY_HAND,
        "4 min 3 s": BY_HAND,
    },
    "docs/measuring.md": {
        "95 % intervals": SETTING,
        "within ± 2 %": SETTING,
        "marked n = 1": "how a figure of a single run is marked",
    },
    "docs/recipes.md": {
        "94.10 %": BY_HAND,
        "best of 5 epochs is 85.77 %, the mean of five runs": "the board's",
        "best of 20 epochs is 91.57 %": "the board's",
    },
    "docs/releasing.md": {"about 20 minutes on two cores": BY_HAND},
    "docs/security.md": {"for 63 minutes in all, 11.4 million executions": BY_HAND},
    "docs/strategies.md": {"in 80 s instead of 178 s": BY_HAND},
    "docs/tuning.md": {
        "a gain of 1 %": SETTING,
        "at most 0.25 %": SETTING,
        "the same network, to 75 %": SETTING,
        "from two seeds, 2026-11-26)": CONDITION,
        "in ten runs with 5 %": TESTED,
        "in ten with 2 %": TESTED,
        "95 % over all looks": SETTING,
        "each 1 % of the budget": SETTING,
        "less than 95 % of the model's speed alone": SETTING,
        "at least by 1 %": SETTING,
        "600 s each": CONDITION,
        "wider than a 95 % interval": SETTING,
        "a plain 95 % interval": SETTING,
        "95 % interval only if all do": SETTING,
    },
}
"""By page: pieces of text with figures that are not from `benchmarks/results/`, and why."""


def prose(text: str) -> str:
    """Return a page without its code, its generated tables and its marked figures."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!-- table: .*?<!-- end of table -->", "", text, flags=re.DOTALL)
    text = figures.MARKED.sub("", text)
    return " ".join(re.sub(r"`[^`]*`", "``", text).split())


def test_every_figure_is_that_of_the_results() -> None:
    """If this fails, run `python benchmarks/figures.py`."""
    for page, text in PAGES.items():
        now = figures.written(text)
        pairs = zip(text.splitlines(), now.splitlines(), strict=False)
        assert text == now, (page, [(line, other) for line, other in pairs if line != other][:3])


def test_a_figure_has_a_source_or_a_reason() -> None:
    for page, text in PAGES.items():
        rest = prose(text)
        for piece in NOT_OF_RESULTS.get(page, {}):
            assert " ".join(piece.split()) in rest, (page, piece)
            rest = rest.replace(" ".join(piece.split()), "")
        found = [rest[max(0, one.start() - 40) : one.end() + 30] for one in LOOKS_MEASURED.finditer(rest)]
        assert found == [], (page, found)


def test_each_comment_after_a_figure_is_read() -> None:
    """A comment of a wrong form would otherwise be ignored, and its figure go stale."""
    for page, text in PAGES.items():
        comments = re.findall(r"<!-- (?!not run: |table: |end of table -->).*?-->", text)
        assert len(comments) == len(list(figures.MARKED.finditer(text))), page
        tables = len(figures.TABLE.findall(text))
        assert text.count("<!-- table: ") == text.count("<!-- end of table -->") == tables


def test_a_figure_keeps_its_shape() -> None:
    text = "8.5 %<!-- cifar10-fast: epochs / -1 / accuracy -->, 1<!-- peers: scale 0.25 / FFCVLoader / images/s -->."
    now = figures.written(text)
    accuracy = figures.entry("cifar10-fast", "epochs / -1 / accuracy")
    speed = figures.entry("peers", "scale 0.25 / FFCVLoader / images/s / median")
    assert now == re.sub("^8.5", f"{100 * accuracy:.1f}", text).replace(", 1<", f", {speed:,.0f}<")
    assert figures.written(now) == now
    assert figures.written("2000-01-01<!-- peers: provenance / date -->")[:10] > "2026"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("1.0<!-- nothing: a -->", "No figure is at <!-- nothing: a -->"),
        ("1.0<!-- peers: scale 0.25 / FFCV -->", "No figure is at"),
        ("1.0<!-- computed: nothing -->", "No figure is at"),
        ("1.0<!-- peers: scale 0.25 / stock FFCV -->", "is not one figure; continue with a key of"),
        ("<!-- table: nothing -->\n<!-- end of table -->", "No table is named 'nothing'"),
    ],
)
def test_what_has_no_source_is_an_error(text: str, told: str) -> None:
    with pytest.raises(DataError, match=re.escape(told)):
        figures.written(text)


def test_everything_that_is_computed_has_a_place() -> None:
    everything = "".join(PAGES.values())
    marks = [f"computed: {name}" for name in figures.COMPUTED] + [f"table: {name}" for name in figures.TABLES]
    assert [mark for mark in marks if f"<!-- {mark} -->" not in everything] == []


def test_a_method_that_failed_from_every_seed_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `benchmarks/methods.py` writes it."""
    methods = {"EMA": {"reached": 0, "ratio": None, "accuracy": None}}
    monkeypatch.setattr(figures, "result", lambda _: {"target": 0.8, "epochs": 5, "methods": methods})
    assert figures.effects_table("methods").splitlines()[-1] == "| EMA | not from every seed | failed |"


def outputs(model: nn.Module, training: bool) -> torch.Tensor:
    torch.manual_seed(1)
    with torch.no_grad():
        return model.train(training)(torch.linspace(-1, 1, 4 * 3 * 32 * 32).reshape(4, 3, 32, 32).sin())


def dropping() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 64), nn.ReLU(), nn.Dropout(), nn.Linear(64, 10))


def vit() -> nn.Module:
    model = torchvision.models.VisionTransformer(32, 8, 2, 2, 64, 128, num_classes=10)
    nn.init.normal_(model.heads.head.weight)
    return model


def resnet(norm_layer: Any = nn.BatchNorm2d) -> nn.Module:
    return torchvision.models.resnet18(num_classes=10, norm_layer=norm_layer)


def wide() -> nn.Module:
    """As many channels as Factorize looks for, in one layer: it decomposes each for a third of a second."""
    layers = nn.Conv2d(3, 256, 3, 2), nn.ReLU(), nn.Conv2d(256, 256, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 10))


CHANGED = {
    "GyroDropout": dropping, "Factorize": wide, "LowPrecisionGroupNorm": partial(resnet, partial(nn.GroupNorm, 32)),
    **dict.fromkeys(("ALiBi", "GatedLinearUnits", "LowPrecisionLayerNorm", "PatchDropout"), vit),
}  # fmt: skip
"""Small models that methods change; all others change the residual network."""


@cache  # drawing eleven million weights takes longer than all that is computed with them
def made(model: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return model()


def built(name: str) -> nn.Module:
    """Return a model that the method changes, the same each time."""
    return copy.deepcopy(made(CHANGED.get(name, resnet)))


OPTIONS = {"GyroDropout": {"total_steps": 10}, "GhostBatchNorm": {"ghost_batch_size": 2}}


@pytest.mark.parametrize("name", figures.OUTPUTS)
def test_what_a_method_changes_is_what_the_catalogue_states(name: str) -> None:
    changed = built(name)
    TRANSFORMS[name](**OPTIONS.get(name, {})).apply(changed)
    stated = figures.OUTPUTS[name]
    unchanged = built(name)
    for training, differs in (
        (False, stated == "outputs"),
        (True, stated in ("outputs", "outputs in training")),
    ):
        ours, plain = outputs(changed, training), outputs(unchanged, training)
        assert torch.allclose(plain, ours, rtol=1e-3, atol=1e-4) != differs, (stated, training)


def test_the_catalogue_has_every_method() -> None:
    table = figures.methods_table()
    for name, method in TRANSFORMS.items():
        assert f"\n| `{name}` |" in table
        assert (name in figures.OUTPUTS) == (method.kind in ("surgery", "memory_format")), name


@pytest.mark.parametrize("name", charts.CHARTS)
def test_a_picture_is_what_the_results_say(name: str) -> None:
    """And it has one style for dark pages, and says in words what it shows."""
    drawn = (charts.PICTURES / name).read_text()
    assert drawn == charts.CHARTS[name](), "run benchmarks/charts.py"
    assert "prefers-color-scheme: dark" in drawn
    assert len(drawn.partition("<title>")[2].partition("</title>")[0]) > 40


@pytest.mark.parametrize("notebook", charts.GALLERY)
def test_the_gallery_shows_what_the_notebook_shows(notebook: str) -> None:
    """But for the losses of its compression; if it differs, run benchmarks/charts.py."""
    path = charts.PICTURES / f"{notebook}.webp"
    with Image.open(path) as committed:
        pixels = np.asarray(committed.convert("RGB"), np.float32)
    shown = np.asarray(charts.last_picture(notebook), np.float32)
    assert pixels.shape == shown.shape
    assert np.abs(pixels - shown).mean() < 8
    assert path.stat().st_size < 60_000
    page = PAGES["docs/gallery.md"]
    assert f"(pictures/{path.name})" in page
    assert f"(../notebooks/{notebook}.ipynb)" in page


def test_every_picture_of_a_page_is_there_and_described() -> None:
    for page, text in PAGES.items():
        for about, path in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", text):
            assert (ROOT / page).parent.joinpath(path).is_file(), (page, path)
            assert len(about.split()) > 4, (page, path)


def test_results_load_with_todays_code() -> None:
    ledger = Ledger.load(figures.RESULTS / "quickstart-ledger.json")
    saved = json.loads((figures.RESULTS / "quickstart-ledger.json").read_text())
    for row, written in zip(ledger.rows, saved["rows"], strict=True):
        assert (row.name, row.images_per_s.value) == (
            written["name"],
            pytest.approx(written["images_per_s"]["value"]),
        )
