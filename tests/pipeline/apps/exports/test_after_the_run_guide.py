"""The lines of `docs/guide/after-the-run.md` run as printed."""

import dataclasses
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import call
from drivetrain import Pipeline
from drivetrain.loaders import convert
from loader_pictures import jpeg_bytes, picture
from PIL import Image
from places import ROOT

GUIDE = (ROOT / "docs/guide/after-the-run.md").read_text()


@pytest.mark.slow
@pytest.mark.long
def test_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(16):
        folder = Path("pets", ("cat", "dog")[number % 2])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:02}.jpg").write_bytes(jpeg_bytes(picture(number, 40, 50)))
    shutil.copy("pets/cat/00.jpg", "cat.jpg")
    shutil.copy("pets/dog/01.jpg", "dog.jpg")
    convert("pets", "val.beton", progress=False)
    Path("net.py").write_text("from pipeline_data import batch_norm_model\nNet = lambda: batch_norm_model(2)\n")
    load: dict[str, Any] = {"batch_size": 8, "image_size": 24, "workers": 1}
    named = Pipeline("cifar_resnet", num_classes=2, width=4).load("val.beton", "val.beton", **load)
    named.fit(epochs=2, out="runs/pets", progress=False)
    from pipeline_data import batch_norm_model

    built = Pipeline(batch_norm_model(2)).load("val.beton", "val.beton", **load)
    built.fit(epochs=1, out="runs/own", progress=False)
    with Image.open("cat.jpg") as image:
        names: dict[str, Any] = {"picture": image.convert("RGB"), "pipeline": named}
    printed = []
    for kind, block in re.findall(r"```(python|console)\n(.*?)```", GUIDE, re.DOTALL):
        if kind == "python":
            exec(compile(block, "guide", "exec"), names)
            continue
        for line in block.splitlines():
            end = call(*shlex.split(line)[1:])
            assert end.code == 0, (line, end.err)
            printed.append(end.out)
    assert names["classes"] == ["cat", "dog"]
    assert names["row"]["class"] in names["classes"]
    assert "largest difference" in str(names["exported"].difference)
    assert len(printed) == 11
    inputs = names["result"].inputs
    for size in ((50, 40), (41, 64), (24, 24), (300, 201), (17, 90)):
        for ratio in (inputs.eval_ratio, 1.0, 0.65):
            wanted = dataclasses.replace(inputs, eval_ratio=ratio)
            image = Image.fromarray(picture(sum(size), *size))
            alone = names["preprocess"](image, wanted.image_size, ratio, wanted.mean, wanted.std)
            assert (alone - wanted.transform()(image)).abs().max() < 1e-6, (size, ratio)
    for name in ("pets.safetensors", "pets.pt2", "pets.onnx", "own.pt2", "MODEL_CARD.md"):
        assert Path(name).stat().st_size


@pytest.mark.slow
def test_the_card_of_each_format_says_how_to_use_it(tmp_path: Path, toy: Any) -> None:
    """The code in the card runs on its file."""
    from drivetrain.pipeline import export

    result = toy.named().fit(epochs=1, out=tmp_path / "run", progress=False)
    with torch.no_grad():
        expected = result.model(torch.zeros(1, 3, 16, 16))
    for name in ("own.safetensors", "own.pt2", "own.onnx"):
        card = export(tmp_path / "run", tmp_path / name).card.read_text()
        (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
        names: dict[str, Any] = {"model": result.model}
        with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path)
            exec(compile(code, name, "exec"), names)
        outputs = names["outputs"]
        found = torch.from_numpy(outputs[0]) if isinstance(outputs, list) else outputs
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
