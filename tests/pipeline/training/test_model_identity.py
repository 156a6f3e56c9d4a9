"""What a model is, as text: what makes a difference, and what does not."""

import importlib
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from drivetrain import CheckpointError, PlanError
from drivetrain.pipeline import CheckpointWarning
from drivetrain.pipeline.training import model_identity as model_identity_module
from drivetrain.pipeline.training.build import identity_of
from drivetrain.pipeline.training.model_identity import difference, model_identity
from pipeline_data import VAL, Toy, batch_norm_model, write_toy
from torch import nn

NET = """
from torch import nn
SCALE, OPTIONS = 1.0, {"a": 1, "b": 2}

def act(x):
    return x.relu() * SCALE

class Net(nn.Module):
    def __init__(self, p=0.1):
        super().__init__()
        self.conv, self.drop, self.head = nn.Conv2d(3, 8, 4, 4), nn.Dropout(p), nn.Linear(8, 4)
        self.norm = nn.GroupNorm(4, 8)
        self.options = OPTIONS
        self.call = lambda x: x

    def forward(self, x):
        return self.head(self.drop(act(self.norm(self.conv(x)))).mean((2, 3)))
"""
SAME = {
    "a comment": NET.replace("    return x.relu()", "    # why\n\n    return x.relu()"),
    "the order of a dict": NET.replace('{"a": 1, "b": 2}', '{"b": 2, "a": 1}'),
}
OTHER = {
    "dropout": (NET.replace("p=0.1", "p=0.2"), r"model\.drop is Dropout\(p=0\.1"),
    "a setting": (NET.replace('"b": 2', '"b": 3'), "options="),
    "groups": (NET.replace("GroupNorm(4", "GroupNorm(8"), r"model\.norm is GroupNorm\(4"),
    "a helper": (NET.replace("x.relu()", "x.sigmoid()"), r"code of net_\w+\.act is not the same"),
    "a constant": (NET.replace("OPTIONS = 1.0", "OPTIONS = 2.0"), r"code of net_\w+\.act is not the same"),
    "forward": (NET.replace(".mean((2, 3))", ".amax((2, 3))"), r"code of net_\w+\.Net is not the same"),
}


def net(folder: Path, text: str, name: str = "net_of_test") -> Any:
    """The class in a file of this text, imported from it once more."""
    (folder / f"{name}.py").write_text(text)
    sys.modules.pop(name, None)
    importlib.invalidate_caches()
    importlib.import_module("linecache").clearcache()
    return importlib.import_module(name).Net


def differing(one: nn.Module, other: nn.Module) -> str:
    return difference(model_identity(one), model_identity(other))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


def test_what_makes_a_difference(folder: Path) -> None:
    kind = net(folder, NET)
    first = model_identity(kind(), kind)
    assert not difference(first, model_identity(kind(), kind))
    for name, text in SAME.items():
        assert text != NET, name
        kind = net(folder, text)
        assert not difference(first, model_identity(kind(), kind)), name
    for name, (text, words) in OTHER.items():
        kind = net(folder, text)
        said = difference(first, model_identity(kind(), kind))
        assert said, name
        assert re.search(words, said), (name, said)
    # Of a lambda, not the statement around it, which may have other arguments.
    given = [(lambda: kind(0.1), 1), (lambda: kind(0.1), 2)]
    assert not difference(*(model_identity(made(), made) for made, _ in given))
    torch_only = model_identity(batch_norm_model(), partial(batch_norm_model, 4))
    assert "version of torch" in torch_only


CONFIGURED = """
import enum
from dataclasses import dataclass

from torch import nn

CONFIG, KINDS = {"p": 0.1}, ["relu"]
CACHE = {}

class Mode(enum.Enum):
    FAST = 1
    EXACT = 2

@dataclass(slots=True)
class Options:
    width: int = 8

class Scale:
    def __init__(self, factor):
        self._factor, self._self = factor, self

def hook(factor):
    return lambda module, inputs, output: output * factor

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.mode, self.options, self.head = Mode.FAST, Options(), nn.Linear(8, 4)
        self.head.register_forward_hook(hook(2.0))
        self.scale, self.deep = Scale(2.0), [{"a": [{"b": [{"c": [[0.5]]}]}]}]
        self.deep.append(self.deep)

    def forward(self, x):
        CACHE.setdefault(x.shape, x)
        return nn.functional.dropout(self.head(x), CONFIG["p"], self.training) if KINDS else x
"""


def test_configuration_makes_a_difference(folder: Path) -> None:
    kind = net(folder, CONFIGURED)
    first = model_identity(kind(), kind)
    kind()(torch.zeros(2, 8))  # fills the cache
    assert not difference(first, model_identity(kind(), kind))
    for old, new in (('"p": 0.1', '"p": 0.3'), ('["relu"]', '["gelu"]'), ("= Mode.FAST", "= Mode['EXACT']"),
                     ("hook(2.0)", "hook(3.0)"), ("Options()", "Options(16)")):  # fmt: skip
        assert old in CONFIGURED
        kind = net(folder, CONFIGURED.replace(old, new))
        assert difference(first, model_identity(kind(), kind)), new


def test_the_same_settings_in_a_member_or_slots_are_the_same(folder: Path) -> None:
    kind = net(folder, CONFIGURED)
    first, mode, options, scale, deep = (kind() for _ in range(5))
    assert not differing(first, mode)
    mode.mode = type(mode.mode).EXACT
    options.options.width = 9
    scale.scale._factor = 3.0
    deep.deep[0]["a"][0]["b"][0]["c"][0][0] = 0.6
    for name, other in {"mode": mode, "options": options, "scale": scale, "deep": deep}.items():
        assert f"{name}=" in differing(first, other)


def test_compiled_layers_have_no_numbers_of_their_wrappers() -> None:
    first, other = (nn.Sequential(torch.compile(nn.Linear(4, 4)), nn.Dropout(0.1)) for _ in range(2))
    assert not differing(first, other)
    unbiased = nn.Sequential(torch.compile(nn.Linear(4, 4, bias=False)), nn.Dropout(0.1))
    assert "_orig_mod is Linear(in_features=4" in differing(first, unbiased)


def test_each_of_several_lambdas_in_a_line_counts() -> None:
    class Calls(nn.Module):
        def __init__(self, *calls: Any) -> None:
            super().__init__()
            self.calls = nn.ModuleList()
            for number, call in enumerate(calls):
                setattr(self, f"call{number}", call)

    plus, minus, times = (lambda x: x + 2), (lambda x: x - 2), (lambda x: 1 + (lambda z: z * 2)(x))
    (other,) = [lambda x: 1 + (lambda z: z - 2)(x)]
    first = Calls(plus, minus)
    assert not differing(first, Calls(plus, minus))
    for calls in ((plus, times), (times, minus), (plus, plus)):
        assert differing(first, Calls(*calls))
    assert differing(Calls(times), Calls(other))


def test_what_an_installer_put_into_a_folder_is_a_package_and_edited_code_is_not(folder: Path) -> None:
    """As `pip install --target` does, and as a folder that is lent to an environment has it: with a record of files."""
    model = net(folder, NET)()
    assert "code of net_of_test.Net" in model_identity(model)
    record = folder / "net_of_test-1.0.dist-info" / "RECORD"
    record.parent.mkdir()
    identities = []
    for listed in ("net_of_test_too.py,sha256=x,1\n", "a.py,,\nnet_of_test.py,sha256=x,1\n"):
        record.write_text(listed)
        model_identity_module._is_recorded.cache_clear()
        identities.append(model_identity(model))
    model_identity_module._is_recorded.cache_clear()
    assert "code of net_of_test.Net" in identities[0]
    assert [key for key in identities[1] if key.startswith("code of")] == []
    assert "version of net_of_test" in identities[1]


def test_torch_is_a_package_wherever_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise all of its source code would be read, in minutes."""
    model = net(folder, NET)()
    expected = model_identity(model)
    for name in ["torch", *(name for name in sys.modules if name.startswith("torch.nn.modules."))]:
        monkeypatch.setattr(sys.modules[name], "__file__", f"/src/{name}.py")
    monkeypatch.setattr(model_identity_module, "_is_recorded", lambda _: False)
    assert model_identity(model) == expected


def test_a_scripted_model_is_the_code_of_it() -> None:
    def scripted(p: float) -> nn.Module:
        made: nn.Module = torch.jit.script(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(p)))  # type: ignore[no-untyped-call]
        return made

    with pytest.warns(FutureWarning, match="torch.jit.script"):
        first, again, other = scripted(0.1), scripted(0.1), scripted(0.2)
    assert not differing(first, again)
    assert "code of model" in differing(first, other)


def test_a_run_resumes_only_with_its_own_model(folder: Path, toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "run"
    toy.pipeline(net(folder, NET)).fit(epochs=1, out=out, progress=False)
    for text, words in OTHER.values():
        other = toy.pipeline(net(folder, text))
        with pytest.raises(CheckpointError, match=f"another model: .*{words}") as caught:
            other.fit(epochs=2, out=out, resume="auto", progress=False)
        assert "changed_model=True" in str(caught.value)
    other.fit(epochs=2, out=out, resume="auto", changed_model=True)
    assert "The model has changed since" in capsys.readouterr().out
    with pytest.raises(PlanError, match="changed_model=True lets a run resume"):
        other.fit(epochs=2, changed_model=True)


def test_a_run_that_resumes_with_other_validation_data_warns(toy: Toy, tmp_path: Path) -> None:
    def resumed(epochs: int, val: str) -> None:
        pipeline = toy.pipeline().load(toy.train, val, batch_size=32, image_size=16, workers=1)
        pipeline.fit(epochs=epochs, out=tmp_path / "run", resume="auto", progress=False)

    resumed(1, toy.val)
    for file in Path(toy.val).parent.glob("val.*"):  # the same data under another name, with its manifest
        shutil.copy(file, tmp_path / file.name.replace("val", "same", 1))
    resumed(2, str(tmp_path / "same.beton"))
    words = rf"was .*same.beton \({VAL} samples\), and is now .*other.beton \({VAL} samples\): the best"
    with pytest.warns(CheckpointWarning, match=words):
        resumed(3, str(write_toy(tmp_path / "other.beton", VAL, seed=3)))


def test_the_plan_warns_of_validation_data_that_is_trained_on(toy: Toy, tmp_path: Path) -> None:
    link, copy = tmp_path / "link.beton", tmp_path / "copy.beton"
    link.symlink_to(toy.train)
    copy.write_bytes(Path(toy.train).read_bytes())
    for train, val in ((toy.train, toy.train), (toy.train, str(link)), (toy.train, str(copy)),
                       ({toy.train: 0.5, toy.val: 0.5}, str(link))):  # fmt: skip
        plan = toy.pipeline().load(train, val, batch_size=32, image_size=16).plan()
        assert plan.steps[0].caution.startswith("the validation data has")
        first, _, table = str(plan).partition("Plan\n")
        assert first.startswith("Caution, step 1: the validation data has")
        assert "see the caution above" in " ".join(table.split())
    assert toy.pipeline().plan().cautions == []


def test_the_plan_warns_of_options_of_remote_files_without_any(toy: Toy) -> None:
    local = toy.pipeline(cache="copies", cache_limit=1, stream=True)
    words = "without effect: cache=, cache_limit=, stream=, because none of the files is at an address"
    assert local.plan().cautions == [f"Caution, step 1: {words}."]
    again: dict[str, Any] = {"batch_size": 32, "image_size": 16, "stream": True}
    both = toy.pipeline().load(toy.train, toy.train, **again).plan().steps[0].caution
    assert both.endswith("on new images; without effect: stream=, because none of the files is at an address")
    for train, val in (("s3://bucket/a.beton", toy.val), (toy.train, "s3://bucket/a.beton")):
        assert toy.pipeline().load(train, val, **again).plan().cautions == []


def test_ranks_compare_the_model_that_they_build(folder: Path, toy: Toy) -> None:
    one = identity_of(toy.pipeline(net(folder, NET)))
    other = identity_of(toy.pipeline(net(folder, OTHER["groups"][0])))
    said = difference(one, other, libraries=True, names=("rank 0 (a)", "rank 1 (b)"))
    assert said.startswith("model.norm is GroupNorm(4, 8")
    assert "in rank 1 (b)" in said


def test_weights_of_torch_save_are_read_alike(toy: Toy, tmp_path: Path) -> None:
    result = toy.pipeline().fit(epochs=1, progress=False)
    torch.save(result.model.state_dict(), tmp_path / "w.pth")
    assert toy.pipeline().evaluate(tmp_path / "w.pth") == result.metrics
