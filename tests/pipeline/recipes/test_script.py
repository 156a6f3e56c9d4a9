"""What a script defines itself is saved with its run, and executed on request only."""

import os
import re
import runpy
import shutil
import sys
import time
from pathlib import Path

import process_state
import pytest
from command_line import ENVIRONMENT, call_several, done
from drivetrain import CheckpointError, RecipeError
from drivetrain.pipeline import load_run
from drivetrain.pipeline.recipes.files import read_recipe
from pipeline_data import Toy

NET = """from torch import nn
{before}
class Net(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.layer = nn.Linear(3, classes)

    def forward(self, images):
        result = self.layer(images.mean((2, 3))){after}
        return result
"""
FIRST = """
import sys
from drivetrain import Pipeline
from drivetrain.common.errors import CheckpointError
from drivetrain.pipeline import Classification, load_run

def smooth(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, label_smoothing=0.1)

pipeline = Pipeline(Net, classes=4).load({train!r}, {val!r}, batch_size=32, image_size=16, workers=1)
result = pipeline.task(Classification(loss=smooth)).optimize("sgd", lr=0.1).fit(epochs=1, out="run")
assert load_run("run").metrics == result.metrics
for name in [name for name in sys.modules if name.startswith("script_")]:
    del sys.modules[name]
SCALES["all"] = 3.0
try:
    load_run("run")
except CheckpointError as error:
    assert "trust_code=True" in str(error)
else:
    raise AssertionError("what the script defines now is not what was trained")
"""
SCALES = '\n# A scale.\nSCALES = {}\nSCALES["all"] = 2.0\n\n'


@pytest.mark.process
@pytest.mark.long
def test_the_first_script(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It trains at its top level, and this process opens its run and predicts; a changed copy is refused."""
    net = NET.format(before=SCALES, after=' * SCALES["all"]')
    (tmp_path / "first.py").write_text(net + FIRST.format(train=toy.train, val=toy.val))
    process_state.output_of(sys.executable, "first.py", cwd=tmp_path, env=ENVIRONMENT)
    monkeypatch.chdir(tmp_path)
    (file,) = Path("run").glob("script_*.py")
    assert read_recipe("run/recipe.yaml")[0]["model"] == f"{file.stem}:Net"
    assert "fit" not in file.read_text().split('"""', 2)[2]
    (refused,) = call_several(["predict", "run", toy.val])
    assert re.search(rf"run needs Net, smooth of its {file.name}.*--trust-code", refused.line)
    shutil.copytree("run", "other")
    Path("other", file.name).write_text(file.read_text() + "raise SystemExit\n")
    with pytest.raises(CheckpointError, match="its name has the digest of another text"):
        load_run("other", trust_code=True)
    Path("other", file.name).unlink()
    with pytest.raises(CheckpointError, match=r"cannot be read.*Copy the whole folder"):
        load_run("other", trust_code=True)
    predicted = done("predict", "run", toy.val, "--trust-code", "--json")
    result = load_run("run", trust_code=True)
    assert result.evaluate() == result.metrics
    rows = [row["class"] for row in result.predict(toy.val)]
    assert rows == [re.search(r'"class": "(\w)"', line)[1] for line in predicted.splitlines()]  # type: ignore[index]
    assert load_run("run").metrics == result.metrics  # its code runs already


def defined(folder: Path, script: str, saved: float = 0) -> str:
    """What would be saved of a script's Net."""
    file = folder / "train.py"
    file.write_text(
        f"{script}\nfrom drivetrain.pipeline.recipes.script import definitions\nfound = definitions(['Net'])\n"
    )
    os.utime(file, (saved, saved))  # by default, before this process started
    return str(runpy.run_path(str(file), run_name="__main__")["found"])


def test_a_script_is_refused_if_it_changed_and_not_for_a_clock_that_is_ahead(tmp_path: Path) -> None:
    ahead = time.time() + 3600  # that of the file server
    assert "Net" in defined(tmp_path, NET.format(before="", after=""), ahead)
    change = 'from pathlib import Path\nwith Path(__file__).open("a") as file:\n    file.write("LATER = 1")\n'
    with pytest.raises(RecipeError, match="was saved after this process had started"):
        defined(tmp_path, change + NET.format(before="", after=""), ahead)


def test_what_is_saved(tmp_path: Path) -> None:
    """Comments and order are kept; what has the name of a local variable only, and what is changed later, is not."""
    script = NET.format(before=SCALES, after=' * SCALES["all"]')
    text = defined(tmp_path, f"import json, torch\ntorch.manual_seed(1); result = open\n{script}")
    head = '"""What recipe.yaml names of train.py, and what that uses: saved by fit(out=…)."""'
    assert re.sub(r"\n+", "\n", text) == re.sub(r"\n+", "\n", f"{head}\n{script}")
    later = 'if __name__ == "__main__":\n    other = 3\n'
    assert defined(tmp_path, f"from torch.nn import *\n{script}{later}") == text.replace(
        "from torch import", "from torch.nn import *\nfrom torch import"
    )


REGISTERED = """PARTS = {}
SIZES = []
def part(kind):
    PARTS[kind.__name__] = kind
    return kind
def sized(number):
    def add(kind):
        SIZES.append(number)
        return kind
    return add
@part
class One: ...
@sized(3)
class Two: ...
class Parts(dict):
    def add(self, kind):
        self[kind.__name__] = kind
OTHERS = Parts()
@OTHERS.add
class Three: ...
"""


def test_what_decorators_register_and_setattr_changes_is_saved(tmp_path: Path) -> None:
    script = NET.format(before=REGISTERED, after=" * len(PARTS) * sum(SIZES) * len(OTHERS)")
    text = defined(tmp_path, f"{script}setattr(Net, 'size', 5)\n")
    assert [f"class {name}: ..." in text for name in ("One", "Two", "Three")] == [True] * 3
    assert text.endswith("setattr(Net, 'size', 5)\n")
    assert "class One" not in defined(tmp_path, NET.format(before=REGISTERED, after=" * sum(SIZES)"))


@pytest.mark.parametrize(
    ("before", "after", "later", "words"),
    [
        ("import sys\nn = int(sys.argv[1:] == 0)", " * n", "", "line 3 defines, which reads the command"),
        ("teacher = open\nif 0:\n    teacher = teacher.fit()", " * teacher", "", "which trains"),
        ("", " * n", "if __name__ == '__main__':\n    n = 3", "uses n, which is set under if __name__"),
        ("n = 1\ndef main():\n    global n\n    n = 2", " * n", "main()", r"uses n, which main\(\) sets"),
        ("exec('n = 3')", " * n", "", "uses n, which its top level does not define"),
        ("", " * len(__file__)", "", "uses __file__"),
    ],
)
def test_what_cannot_be_saved(before: str, after: str, later: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=f"Net of train.py cannot be saved with the run, because.*{words}"):
        defined(tmp_path, f"{NET.format(before=before, after=after)}{later}")
