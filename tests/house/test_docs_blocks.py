"""Every Python block of the README and of `docs/` runs, page by page on small data, and every command line parses.

A block that cannot run follows a comment `<!-- not run: REASON -->`. `NOT_RUN` counts them.
"""

import ast
import importlib.util
import re
import shlex
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import COMMANDS, parsed
from drivetrain import Classification
from drivetrain.loaders import FFCVLoader, convert
from drivetrain.pipeline.recipes.presets import KEYS, parse_overrides
from drivetrain.transforms import SWA
from loader_pictures import jpeg_bytes, picture, tar_file
from PIL import Image
from pipeline_data import Loud, Toy
from places import ROOT
from process_state import output_of
from torch import nn
from torch.distributed.run import parse_args

PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
}
ELSEWHERE = {
    "README.md": "tests/house/test_readme.py",
    "docs/guide/after-the-run.md": "tests/pipeline/apps/exports/test_after_the_run_guide.py",
    "docs/guide/callbacks.md": "tests/pipeline/callbacks/test_callbacks.py",
    "docs/guide/composer.md": "tests/transforms/test_from_composer.py",
    "docs/guide/project.md": "tests/pipeline/apps/cli/test_new.py",
    "docs/guide/how-to.md": "tests/house/test_readme.py",
    "docs/guide/search.md": "tests/pipeline/callbacks/test_search.py",
    "docs/guide/tasks.md": "tests/pipeline/tasks/test_training.py",
}
"""The pages whose Python blocks other tests run."""
NOT_RUN = {"docs/checkpoints.md": 1, "docs/coming-from.md": 3, "docs/data.md": 1}
"""How many Python blocks of a page cannot run here: downloads, an object store, other libraries' code."""
BLOCK = re.compile(r"(?:<!-- not run: (.+?) -->\n)?^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(page: str) -> list[tuple[str, str]]:
    """For each Python block, why it is not run, "" if it is, and its text."""
    return BLOCK.findall(PAGES[page])


def numbered_images(count: int, side: int = 16) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, (count, side, side, 3), dtype=np.uint8)


def write(name: str, count: int, classes: int = 10, side: int = 16) -> None:
    convert((numbered_images(count, side), np.arange(count) % classes), name, progress=False)


def convolutions(num_classes: int = 10) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2), nn.BatchNorm2d(16), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(64, num_classes),
    )  # fmt: skip


def data_sources(_: Toy) -> dict[str, Any]:
    """The folder, the table, the shards and the VOC data set of `docs/data.md`."""
    rows = []
    for number in range(4):
        path = Path("photos", "train", ("cat", "dog")[number % 2], f"{number}.jpg")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg_bytes(picture(number, 40, 50)))
        rows.append(f"{path.relative_to('photos')},{number % 2}\n")
    Path("labels.csv").write_text("".join(["file,label\n", *rows]))
    Path("shards").mkdir()
    for number in range(128):
        content = {"jpg": jpeg_bytes(picture(number, 20, 20)), "cls": b"1", "txt": b"a text"}
        members = {f"{number:04}.{suffix}": value for suffix, value in content.items()}
        tar_file(Path(f"shards/train-{number:03}.tar"), members)
    voc = Path("voc/VOCdevkit/VOC2012")
    for folder in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (voc / folder).mkdir(parents=True)
    (voc / "ImageSets/Segmentation/train.txt").write_text("1\n2\n")
    for number in (1, 2):
        (voc / f"JPEGImages/{number}.jpg").write_bytes(jpeg_bytes(picture(number, 20, 30)))
        Image.new("P", (30, 20), number).save(voc / f"SegmentationClass/{number}.png")
    for number in range(32):
        write(f"photos-{number:02}.beton", 2)
    write("scans.beton", 2)
    return {"images": numbered_images(4, 32), "labels": np.array([0, 1, 0, 1])}


def toy_pipeline(toy: Toy) -> dict[str, Any]:
    """A pipeline, and what `docs/checkpoints.md` calls other.beton."""
    Path("other.beton").symlink_to(toy.val)
    return {"pipeline": toy.pipeline()}


def two_files(_: Toy, classes: int = 10) -> dict[str, Any]:
    write("train.beton", 64, classes, side=32)
    write("val.beton", 64, classes, side=32)
    return {"model": convolutions()}


def with_loader(toy: Toy) -> dict[str, Any]:
    """The blocks of other libraries have a loader, too."""
    return two_files(toy) | {"train": FFCVLoader("train.beton", batch_size=32, image_size=32, workers=1)}


PREPARE: dict[str, Callable[[Toy], dict[str, Any]]] = {
    "docs/checkpoints.md": toy_pipeline,
    "docs/coming-from.md": with_loader,
    "docs/data.md": data_sources,
    "docs/extending.md": toy_pipeline,
    "docs/optimization.md": lambda _: {},
    "docs/recipes.md": toy_pipeline,
    "docs/stages.md": two_files,
    "docs/strategies.md": toy_pipeline,
    "docs/transforms.md": lambda _: {"model": convolutions()},
    "docs/tuning.md": partial(two_files, classes=3),
}
"""The pages that are run here: what makes their files in the current folder, and returns the names that they use."""
REPLACED = {
    "docs/checkpoints.md": {"epochs=16": "epochs=4", "epochs=32": "epochs=6"},
    "docs/data.md": {"batch_size=256": "batch_size=4", '"batch_size": 256': '"batch_size": 4'},
    "docs/tuning.md": {
        "batch_size=256, image_size=176": "batch_size=8, image_size=32", "=600": "=5", "=16)": "=1)",
        "epochs=16, seconds=8 * 3600": "epochs=1, seconds=5",
        "seconds=3600": "seconds=5", "seeds=5": "seeds=1", "epochs=16,": "epochs=1,",
        "batch_size=64, image_size=176": "batch_size=16, image_size=32",
    },
    "docs/recipes.md": {'strategy="ddp", devices=2': 'accelerator="cpu", enable_checkpointing=False'},
}  # fmt: skip
"""What would only take long, in memory or in processes."""


pytestmark = pytest.mark.usefixtures("nothing_registered")


LONGER = {"docs/coming-from.md", "docs/tuning.md"}
"""Pages that import another trainer, and that measure for seconds: for `make test-all`."""


@pytest.mark.long
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.slow if page in LONGER else ()) for page in PREPARE]
)
@pytest.mark.filterwarnings(
    "ignore:.*VOC2012:pytest.PytestUnraisableExceptionWarning",  # torchvision leaves masks open
    "ignore:::lightning",
    "ignore:.*LeafSpec:FutureWarning",
)
@pytest.mark.usefixtures("own_cache")
def test_the_blocks_of_a_page_run_one_after_another(
    page: str, toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = {"__name__": "page", **PREPARE[page](toy)}
    for text in (text for excuse, text in blocks(page) if not excuse):
        for printed, instead in REPLACED.get(page, {}).items():
            text = text.replace(printed, instead)
        exec(compile(text, page, "exec", dont_inherit=True), names)


def test_loops_of_ones_own_are_that_of_fit(toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    """Also with averages, other metrics, and steps that fp16's loss scale skips."""
    pipeline = toy.pipeline(Loud, batch_size=8).transform(SWA(0.0, 1.0)).task(Classification(metrics=("f1",)))
    pipeline = pipeline.optimize("sgd", lr=1e-3).distribute("single", precision="fp16")
    loops = [text for page in ("docs/guide/how-to.md", "docs/coming-from.md") for _, text in blocks(page)]
    with_train_epoch, *written_out = [text for text in loops if "pipeline.build() as built" in text]
    history = pipeline.fit(epochs=2, progress=False).history
    assert history.epochs[0].skipped
    capsys.readouterr()
    exec(compile(with_train_epoch, "loop", "exec", dont_inherit=True), {"pipeline": pipeline})
    for line, epoch in zip(capsys.readouterr().out.splitlines(), history.epochs, strict=True):
        assert line == f"{epoch.loss} { {'val_loss': epoch.val_loss, **epoch.metrics} }"
    model = pipeline.fit(epochs=1, progress=False).model
    assert len(written_out) == 2
    for text in written_out:
        names: dict[str, Any] = {"pipeline": pipeline}
        exec(compile(text, "loop", "exec", dont_inherit=True), names)
        names["hooks"].finish()
        torch.testing.assert_close(names["engine"].plain_model.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_every_page_with_python_is_run() -> None:
    assert {page for page in PAGES if blocks(page)} == {*PREPARE, *ELSEWHERE, "docs/index.md"}
    for page, test in ELSEWHERE.items():
        assert page in (ROOT / test).read_text().replace('"docs" / "guide"', "docs/guide"), (page, test)
    (example,) = blocks("docs/index.md")
    assert example == blocks("README.md")[0]


def test_what_is_not_run_is_counted() -> None:
    found = {page: sum(bool(excuse) for excuse, _ in blocks(page)) for page in PAGES}
    assert {page: count for page, count in found.items() if count} == NOT_RUN
    assert sum(len(re.findall("<!-- not run", text)) for text in PAGES.values()) == sum(NOT_RUN.values())


HEAVY = {"composer", "ffcv"}
"""Libraries whose import takes half a minute of a core, mostly of compilers."""


@pytest.mark.long
@pytest.mark.parametrize("heavy", [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.process])])
def test_what_is_not_run_imports_names_that_exist(heavy: bool) -> None:
    """Those of libraries that are installed; Composer, whose import has side effects, in a process of its own."""
    imports = [
        ast.unparse(node)
        for page in NOT_RUN
        for excuse, text in blocks(page)
        for node in ast.walk(ast.parse(text))
        if excuse and isinstance(node, ast.Import | ast.ImportFrom)
    ]
    roots = [line.split()[1].partition(".")[0] for line in imports]
    there = [
        line
        for line, root in zip(imports, roots, strict=True)
        if (root in HEAVY) == heavy and importlib.util.find_spec(root)
    ]
    assert len(there) > 2
    program = "\n".join(there)
    if heavy:
        output_of(sys.executable, "-W", "ignore", "-c", program)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(program, "imports", "exec", dont_inherit=True), {})


@pytest.mark.parametrize("page", PAGES)
def test_code_fits_the_page(page: str) -> None:
    blocks = re.findall(r"```(?:python|console|yaml)\n(.*?)```", PAGES[page], re.DOTALL)
    assert [line for block in blocks for line in block.splitlines() if len(line) > 88] == []


def commands(page: str) -> list[list[str]]:
    """The command lines of a page, without comments, redirections and dots."""
    text = "\n".join(re.findall(r"```console\n(.*?)```", PAGES[page], re.DOTALL)).replace("\\\n", " ")
    lines = [shlex.split(line.partition(" > ")[0], comments=True) for line in text.splitlines()]
    return [[word for word in line if word != "…"] for line in lines if line]


def parses(words: list[str]) -> None:
    """Fail unless our parser and the recipes' keys know all that follows `drivetrain`."""
    keys = {key.partition(".")[0] for key in parse_overrides(parsed(*words).get("overrides", ()))}
    assert keys <= set(KEYS), words


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_each_command_parses(page: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    monkeypatch.chdir(tmp_path)
    for name, *words in commands(page):
        if name == "drivetrain":
            parses(words)
        elif name == "torchrun":
            given = parse_args(words)
            assert (given.module, given.training_script) == (True, "drivetrain")
            if re.search(r"--nnodes=\d+:", " ".join(words)):
                assert ["export", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"] in commands(page)
            parses(given.training_script_args)
        elif name == "make":
            assert words[0] in targets, words
        else:
            assert name in ("cd", "export", "pip"), name


def test_options_within_sentences_are_options_of_the_command() -> None:
    """`drivetrain train … --resume`, and options alone, such as `--scratch`, of any command."""
    known = {
        name: {word for param in command.params for word in param.opts} | {"--help"}
        for name, command in COMMANDS.items()
    }
    seen = 0
    for page, text in PAGES.items():
        prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
        for command, rest in re.findall(r"`drivetrain ([a-z]+)([^`]*)`", prose):
            assert command in known, (page, command)
            for option in re.findall(r"--[a-z-]+", rest):
                assert option in known[command], (page, command, option)
                seen += 1
    assert seen
