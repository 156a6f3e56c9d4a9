"""Results at an address: those of a folder, complete or absent, and taken up by a machine that has nothing."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from time import monotonic, sleep
from typing import Any

import numpy as np
import psutil
import pytest
import s3fs
import torch
import yaml
from cluster_jobs import Signals, apart
from command_line import call, call_several, toy_values
from drivetrain import Callback, CheckpointError, Checkpoints, DataError, PlanError, Profile, RunView, strategies
from drivetrain.common.storage import addresses as sources
from drivetrain.pipeline import TrainingInterrupted, TrainingPreempted, export, load_run
from drivetrain.pipeline.apps.cli.training import _end_reported, _what_is_measured
from drivetrain.pipeline.runs.checkpoints.remote import RemoteRun, opened
from drivetrain.pipeline.runs.folder import PublishResults, published, uploading_from
from ledgers import made_up
from object_store import SECRET, Store, object_store
from PIL import Image
from pipeline_data import Toy, left_in, numbers
from places import SUPPORT
from process_state import wait_until_ended
from safetensors.torch import load_file

pytestmark = pytest.mark.usefixtures("own_cache")
OUT = "s3://bucket/team/run"
EVERY_2 = Checkpoints(every_steps=2, background=False)


@pytest.fixture
def store() -> Iterator[Store]:
    with object_store() as one:
        yield one


def test_copies_that_are_no_longer_read_are_removed(tmp_path: Path, own_cache: Path) -> None:
    def read(name: str) -> Path:
        return opened(f"file://{tmp_path}/{name}/model.safetensors")

    for name in "abc":
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text(name)
    for path in (read("a"), read("b")):
        os.utime(path.parent / ".address", (0, 0))
    assert (read("b").read_text(), read("c").read_text()) == ("b", "c")
    assert sorted(path.name[:2] for path in (own_cache / "copies").iterdir()) == ["b-", "c-"]


def test_an_address_is_like_a_folder(toy: Toy, tmp_path: Path, own_cache: Path) -> None:
    pipeline, out, local = toy.named(flip=False), f"file://{tmp_path}/store/run", tmp_path / "local"
    expected = numbers(pipeline.fit(epochs=3, out=local, progress=False))
    first = pipeline.fit(epochs=2, out=out, progress=False, logger="csv", checkpoints=Checkpoints(every_steps=3))
    assert numbers(first) == expected[:2]
    there = tmp_path / "store/run"
    assert left_in(there) == sorted([*left_in(local), "metrics.csv"])
    assert sorted(path.name for path in (there / "checkpoints").iterdir() if path.is_file()) == ["run.json"]
    assert list((own_cache / "runs").iterdir()) == []  # nothing is kept of a run that is finished
    resumed = pipeline.fit(epochs=3, out=out, progress=False, logger="csv", resume="auto")
    assert numbers(resumed) == expected
    assert len((there / "metrics.csv").read_text().splitlines()) == 1 + 3  # the header, and both runs' epochs
    assert numbers(load_run(out)) == expected
    assert pipeline.evaluate(out) == pytest.approx(pipeline.evaluate(local))
    weights = tmp_path / "model.safetensors"
    assert export(out, weights).checkpoint.path.name == "step-00000012"
    for name, value in load_file(weights).items():
        torch.testing.assert_close(value, resumed.plain_state()[name])
    for source in (out, f"{out}/checkpoints/step-00000012", f"{out}/model.safetensors"):
        begun = pipeline.fit(epochs=1, progress=False, init_from=source)
        assert begun.history.facts["init_from"]["source"] == source
    branch = pipeline.fit(epochs=3, out=tmp_path / "branch", progress=False, resume=f"{out}/checkpoints/step-00000008")
    assert numbers(branch) == expected
    with pytest.raises(PlanError, match="which the new run would overwrite"):
        pipeline.fit(epochs=1, out=out, init_from=f"{out}/model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{out}/checkpoints/step-00000008 is not the newest"):
        pipeline.fit(epochs=3, out=out, progress=False, resume=f"{out}/checkpoints/step-00000008")


def test_a_new_run_replaces_the_old_one(toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = f"file://{tmp_path}/store"
    toy.pipeline().fit(epochs=2, out=out, progress=False)
    capsys.readouterr()
    toy.pipeline().fit(epochs=1, out=out, checkpoints=None)
    assert f"{out} held a run of 2 epochs; it is replaced" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "store/history.json").read_text())["epochs"]) == 1
    assert not list((tmp_path / "store").rglob("state.json"))


GOES = """
import shutil
from pathlib import Path
from drivetrain import Callback, DataError

class Goes(Callback):
    def on_step_end(self, view):
        store = Path("store")
        shutil.rmtree(store)
        store.touch()  # so that nothing can be written there
        raise DataError("The data is damaged.")
"""


def test_the_command_line_has_where_results_are_that_could_not_be_uploaded(
    toy: Toy, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("goes.py").write_text(GOES)
    out, goes = f"file://{tmp_path}/store", '{"name": "goes:Goes"}'
    command = ["train", "cifar10-quickstart", *toy_values(toy), "--out", out, "--callback", goes, "--quiet"]
    (end,) = call_several(command)
    (kept,) = (own_cache / "runs").iterdir()
    assert end.line.startswith("DataError: The data is damaged. Not all results could be uploaded; they are in ")
    assert f"{kept}. {out} cannot be written: " in end.line
    preempted = TrainingPreempted("SIGTERM")
    preempted.add_note(f"They are in {kept}.")
    with pytest.raises(TrainingPreempted), _end_reported(out, quiet=False):
        raise preempted
    assert f"They are in {kept}." in capsys.readouterr().err


def test_a_ledger_that_cannot_be_uploaded_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PATIENCE", 0.1)
    store = tmp_path / "store"
    for fails in (False, True):
        kept = pytest.raises(CheckpointError, match=r"store cannot be written: .* The results are kept in /")
        with kept if fails else nullcontext(), uploading_from(f"file://{store}") as folder:
            made_up().save(folder / "ledger.json")
            if fails:
                shutil.rmtree(store)
                store.touch()
            note = _what_is_measured(made_up(), None, f"file://{store}/")
        assert note == f"The ledger of 3 rounds is in file://{store}/ledger.json."
        assert ((store / "ledger.json").exists(), (folder / "ledger.json").exists()) == (not fails, fails)
    shutil.rmtree(folder)


def test_what_comes_during_an_upload_is_uploaded_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the log until a checkpoint: who resumes from it on another machine has no other."""
    folder, begun, continues, upload = tmp_path / "run", Event(), Event(), sources.RemoteFolder.upload

    def slow(self: sources.RemoteFolder, path: Path, name: str) -> None:
        begun.set()
        continues.wait(10)
        upload(self, path, name)

    monkeypatch.setattr(sources.RemoteFolder, "upload", slow)
    results = PublishResults(RemoteRun.create(folder, f"file://{tmp_path}/store"))
    (folder / "model.safetensors").write_text("weights")
    results.begin()
    assert begun.wait(10)
    (folder / "metrics.csv").write_text("step")
    results.begin()
    continues.set()
    results.on_end(failed=False)
    assert (tmp_path / "store/metrics.csv").read_text() == "step"


def test_an_error_is_not_replaced_by_one_of_the_upload(tmp_path: Path) -> None:
    """Also if the list of what was uploaded cannot be written, as on a full disk."""
    folder = tmp_path / "run"
    RemoteRun.create(folder, f"file://{tmp_path}/store")
    (folder / "history.json").write_text("{}")
    (folder / ".uploaded.json").mkdir()
    with pytest.raises(ZeroDivisionError) as failed, published(folder):
        raise ZeroDivisionError
    assert failed.value.__notes__[0].startswith(f"Not all results could be uploaded; they are in {folder}.")
    with pytest.raises(CheckpointError, match=f"The results are kept in {folder}"), published(folder):
        pass
    assert (folder / "history.json").exists()


@pytest.mark.process
@pytest.mark.long
@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_machines_that_share_nothing(strategy: str, toy: Toy, tmp_path: Path) -> None:
    """A machine keeps one checkpoint of those that it has resumed from."""
    trained, restarted = (toy.pipeline().distribute(name, devices=2, device="cpu") for name in (strategy, "ddp"))
    main, other = strategies.launch(apart, trained, restarted, tmp_path, devices=2)
    for (expected, resumed, left), _ in (main, other):
        assert resumed == expected
        assert not [name for name in left if name.startswith("note-")]
    assert (main[1], other[1]) == ([], ["step-00000008"])
    newest = {path.name for path in (tmp_path / "store/trained/checkpoints/step-00000012").iterdir()}
    assert "rank-00002-of-00002.safetensors" in newest
    assert ("model-00002-of-00002.safetensors" in newest) == (strategy == "fsdp")
    assert not [name for name in newest if name.startswith("note-")]


class Does(Callback):
    """Calls a function after a step."""

    def __init__(self, step: int, function: Any) -> None:
        self.step, self.function = step, function

    def on_step_end(self, view: RunView) -> None:
        if view.step == self.step:
            self.function()


@pytest.mark.long
def test_an_object_store(toy: Toy, store: Store, own_cache: Path) -> None:
    pipeline = toy.pipeline()
    expected = numbers(pipeline.fit(epochs=2, progress=False))
    with pytest.raises(TrainingPreempted) as preempted:
        pipeline.fit(epochs=2, out=OUT, progress=False, stop_on=["SIGUSR1"], callbacks=[Signals(5)])
    assert preempted.value.checkpoint == f"{OUT}/checkpoints/step-00000006"
    assert f"saved {OUT}/checkpoints/step-00000006" in preempted.value.message
    for step in (4, 6):  # state.json is the last file, and the first that is removed
        written = [line for line in store.requests if re.match(rf"PUT .*/step-{step:08d}/", line)]
        assert [line.split("/")[-2].split()[0] for line in written].index("state.json") == 4
    store.remove("team/run/checkpoints/step-00000006/state.json")  # as after a kill before the last file
    shutil.rmtree(own_cache)  # another machine continues; this one would upload what only it has
    resumed = pipeline.fit(
        epochs=2, out=OUT, progress=False, resume="auto", checkpoints=Checkpoints(keep=1, keep_best=False)
    )
    assert numbers(resumed) == expected
    assert resumed.history.facts["resumed"][0]["step"] == 4
    removed = [line for line in store.requests if re.match(r"DELETE .*/step-00000004/", line)]
    assert "/state.json" in removed[0]
    steps = {name.split("/")[0] for name in store.names("team/run/checkpoints/")}
    assert steps == {"run.json", "step-00000008"}


@pytest.mark.slow
def test_a_store_that_dies_midway(
    toy: Toy, store: Store, own_cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def die() -> None:
        store.gone = True
        monkeypatch.setattr(sources, "SECONDS", 0.5)

    pipeline, given_up = toy.pipeline(), sources.SECONDS
    expected = numbers(pipeline.fit(epochs=2, progress=False))
    monkeypatch.setattr(sources, "PATIENCE", 1.0)
    with pytest.raises(CheckpointError) as failed:
        pipeline.fit(epochs=2, out=OUT, progress=False, checkpoints=EVERY_2, callbacks=[Does(5, die)])
    message = "\n".join([str(failed.value), *failed.value.__notes__])
    assert f"{OUT} cannot be written: " in message
    assert f"The last complete checkpoint is {OUT}/checkpoints/step-00000004." in message
    (kept,) = own_cache.glob("runs/*/checkpoints/step-00000006")
    assert f"kept in {kept}" in message
    assert f"Not all results could be uploaded; they are in {kept.parent.parent}." in message
    assert SECRET not in message
    store.gone = False
    monkeypatch.setattr(sources, "SECONDS", given_up)
    s3fs.S3FileSystem.clear_instance_cache()
    capsys.readouterr()
    assert numbers(pipeline.fit(epochs=2, out=OUT, resume="auto", callbacks=[Does(0, die)])) == expected
    printed = capsys.readouterr().out
    assert f"Uploaded {OUT}/checkpoints/step-00000006, which was only on this machine." in printed
    assert f"Resumed from {OUT}/checkpoints/step-00000006: step 2 of epoch 2." in printed


@pytest.mark.slow
def test_ctrl_c_waits_for_the_upload(toy: Toy, store: Store) -> None:
    def interrupt() -> None:
        assert not [name for name in store.names("team/run/checkpoints/") if "step-00000004/state" in name]
        raise KeyboardInterrupt

    callbacks = [Does(4, lambda: setattr(store, "delay", 0.2)), Stops(interrupt)]
    every_4 = Checkpoints(every_steps=4)
    with pytest.raises(TrainingInterrupted):
        toy.pipeline().fit(epochs=2, out=OUT, progress=False, checkpoints=every_4, callbacks=callbacks)
    assert "state.json" in store.names("team/run/checkpoints/step-00000004/")


class Stops(Does):
    """Calls a function after step 5."""

    def __init__(self, function: Any) -> None:
        super().__init__(5, function)


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ("https://host/run", "a web server cannot be written"),
        ("s3://", "is not the address of a folder"),
        ("ftp://me:secret@host/run", "is an address with credentials"),
        (Path("s3://bucket/run"), "Pass the address as text"),
        ("nothing://bucket/run", "Protocol not known: nothing"),
        ("gs://bucket/run", "gcsfs"),
    ],
)
def test_addresses_that_cannot_be_used(toy: Toy, out: Any, words: str) -> None:
    with pytest.raises((PlanError, CheckpointError, ImportError), match=words) as failed:
        toy.pipeline().fit(epochs=1, out=out, progress=False)
    assert "secret" not in str(failed.value)
    if not isinstance(out, Path):
        said = call("ledger", "baseline", "--train", toy.train, "batch_size=8", "--out", out).err
        assert words in said
        assert "secret" not in said


def test_what_stays_on_this_machine_is_not_written_to_a_folder_named_s3(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for write in (
        lambda: toy.pipeline().race(target=0.5, epochs=1, out="s3://bucket/race.json"),
        lambda: toy.pipeline().tune(seconds=1, out="s3://bucket/tuned.json"),
        lambda: Profile(Path("s3://bucket/trace.json")),
        lambda: Profile("simplecache::s3://bucket/trace.json"),
    ):
        with pytest.raises(PlanError, match=r"out='[\w:]*s3:.*\.json' is an address. Pass a path of this machine\."):
            write()
    assert not (tmp_path / "s3:").exists()


def test_the_command_line(toy: Toy, tmp_path: Path) -> None:
    recipe, out, image = tmp_path / "mine.yaml", f"file://{tmp_path}/store/run", tmp_path / "image.png"
    recipe.write_text(yaml.safe_dump(toy.named().replace(epochs=1).to_recipe()))
    trained = call("train", str(recipe), "--out", out)
    assert trained.code == 0, trained.err
    assert f"{out}: curves.png, history.json, model.safetensors, plan.txt, recipe.yaml" in trained.out
    again = call("train", str(recipe), "--out", out, "--resume")
    assert f"Resumed from {out}/checkpoints/step-00000004: the training was finished." in again.out
    Image.fromarray(np.zeros((20, 20, 3), dtype=np.uint8)).save(image)
    predicted = call("predict", out, str(image), "--json")
    assert (predicted.code, "probabilities" in predicted.out) == (0, True), predicted
    exported = call("export", out, str(tmp_path / "model.safetensors"))
    assert exported.code == 0, exported.err
    begun = call("train", str(recipe), "--init-from", out)
    assert f"Weights from {out}: loaded" in begun.out


class Refuses(BaseHTTPRequestHandler):
    """Answers as S3 does to a key that may not write."""

    def do_PUT(self) -> None:
        self._answer(403, b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>")

    def do_GET(self) -> None:
        keys = b"<KeyCount>0</KeyCount><IsTruncated>false</IsTruncated>"
        self._answer(200, b"<ListBucketResult>%b</ListBucketResult>" % keys)

    def do_HEAD(self) -> None:
        self._answer(404, b"")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_a_store_that_refuses_is_found_before_training(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as server:
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a-key-id")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        s3fs.S3FileSystem.clear_instance_cache()
        trained = Does(1, lambda: pytest.fail("it trains"))
        with pytest.raises(CheckpointError, match=f"{OUT} cannot be written: .*Access Denied.*credentials") as failed:
            toy.pipeline().fit(epochs=1, out=OUT, progress=False, callbacks=[trained])
        assert SECRET not in str(failed.value)
        server.shutdown()
    s3fs.S3FileSystem.clear_instance_cache()


def test_a_bucket_that_does_not_exist(toy: Toy, store: Store) -> None:  # noqa: ARG001
    with pytest.raises(CheckpointError, match=r"s3://nowhere/run cannot be written: .*Create the bucket"):
        toy.pipeline().fit(epochs=1, out="s3://nowhere/run", progress=False)


SCRIPT = """
import sys
from drivetrain import Checkpoints
from pipeline_data import Toy, numbers
from pathlib import Path

folder, strategy, out = sys.argv[1:]
toy = Toy.__new__(Toy)
toy.train, toy.val = f"{folder}/train.beton", f"{folder}/val.beton"
pipeline = toy.pipeline().distribute(strategy, devices=2, device="cpu")
result = pipeline.fit(
    epochs=3, out=out, progress=False, resume="auto", checkpoints=Checkpoints(every_steps=2)
)
print(result.history.facts.get("resumed", [{}])[0].get("step"), numbers(result))
"""


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(500)
@pytest.mark.parametrize(("strategy", "held"), [("fsdp", "model-00002-of-00002"), ("ddp", "state.json")])
def test_killed_within_an_upload(strategy: str, held: str, toy: Toy, store: Store, tmp_path: Path) -> None:
    """Two ranks are killed while a file of the checkpoint of step 6 does not arrive; another machine continues."""

    path = os.pathsep.join(filter(None, [str(SUPPORT), os.environ.get("PYTHONPATH")]))

    def start(out: str, machine: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": path, "DRIVETRAIN_DATA": str(tmp_path / machine)}
        command = [sys.executable, "-c", SCRIPT, str(Path(toy.train).parent), strategy, out]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def ended(process: subprocess.Popen[str]) -> tuple[str, str]:
        out, err = process.communicate(timeout=200)
        assert process.returncode == 0, err
        assert SECRET not in out + err
        step, _, result = out.strip().splitlines()[-1].partition(" ")
        return step, result

    expected = numbers(toy.pipeline().distribute(strategy, devices=2, device="cpu").fit(epochs=3, progress=False))
    store.hold = rf"PUT .*/step-00000006/{held}"
    first = start(OUT, "one")
    try:
        deadline = monotonic() + 200
        while not store.held.wait(0.1) and first.poll() is None and monotonic() < deadline:
            pass
        family = [psutil.Process(first.pid), *psutil.Process(first.pid).children(recursive=True)]
    finally:
        first.kill()
    for process in family:
        process.kill()
    printed = first.communicate()
    assert store.held.is_set(), printed
    assert wait_until_ended(family, 10) == []
    store.hold = None
    assert "step-00000006/state.json" not in store.names("team/run/checkpoints/")
    assert ended(start(OUT, "two")) == ("4", f"{expected}")


def test_what_is_kept_of_a_new_run_is_uploaded_although_the_one_before_was_longer(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = f"file://{tmp_path}/store"
    expected = numbers(toy.pipeline().fit(epochs=2, out=out, progress=False))  # until step 8

    def gone(*_: Any) -> None:
        raise CheckpointError("The store is gone.")

    with monkeypatch.context() as patch:
        patch.setattr(RemoteRun, "send", gone)
        with pytest.raises(CheckpointError, match=r"The store is gone.*kept in"):
            toy.pipeline().fit(epochs=2, out=out, progress=False, checkpoints=EVERY_2)
    capsys.readouterr()
    resumed = toy.pipeline().fit(epochs=2, out=out, resume="auto")
    assert f"Uploaded {out}/checkpoints/step-00000002" in capsys.readouterr().out
    assert (resumed.history.facts["resumed"][0]["step"], numbers(resumed)) == (2, expected)


def test_lines_of_a_run_whose_upload_failed_are_kept(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine that has them continues the run."""

    def gone(*_: Any) -> None:
        raise CheckpointError("The store is gone.")

    out, logged = f"file://{tmp_path}/store", dict[str, Any](logger="csv", log_every=1, progress=False)
    with monkeypatch.context() as patch:
        leaves = Does(5, lambda: patch.setattr(sources.RemoteFolder, "upload", gone))
        with pytest.raises(CheckpointError, match=r"The store is gone.*kept in"):
            toy.pipeline().fit(epochs=2, out=out, checkpoints=EVERY_2, callbacks=[leaves], **logged)
    resumed = toy.pipeline().fit(epochs=2, out=out, resume="auto", **logged)
    assert resumed.history.facts["resumed"][0]["step"] == 6
    with (tmp_path / "store/metrics.csv").open() as file:
        steps = [line["step"] for line in csv.DictReader(file)]
    assert steps == ["1", "2", "3", "4", "4", "5", "6", "7", "8", "8"]


def test_results_whose_last_upload_failed_are_uploaded_by_resume(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the address has the last checkpoint, so that there is nothing left to train."""

    def gone(_: RemoteRun) -> None:
        raise CheckpointError("The store is gone.")

    out, logged = f"file://{tmp_path}/store", dict[str, Any](logger="csv", log_every=1, progress=False)
    kept = r"The store is gone\. The results are kept in .*\. The same command with --resume .* uploads them\."
    with monkeypatch.context() as patch:
        patch.setattr(RemoteRun, "push", gone)
        with pytest.raises(CheckpointError, match=kept):
            toy.pipeline().fit(epochs=1, out=out, **logged)
    assert (tmp_path / "store/checkpoints/step-00000004/state.json").exists()
    assert not (tmp_path / "store/metrics.csv").exists()
    resumed = toy.pipeline().fit(epochs=1, out=out, resume="auto", **logged)
    assert resumed.history.facts["resumed"][0]["step"] == 4
    with (tmp_path / "store/metrics.csv").open() as file:
        assert [line["step"] for line in csv.DictReader(file)] == ["1", "2", "3", "4", "4"]


def test_a_checkpoint_that_cannot_be_fetched_is_not_passed_over(
    toy: Toy, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else training would begin from scratch, and remove the checkpoints that it could not read."""

    def fail() -> None:
        raise ZeroDivisionError

    out, read = f"file://{tmp_path}/store", sources.RemoteFile.read
    expected = numbers(toy.pipeline().fit(epochs=2, progress=False))
    with pytest.raises(ZeroDivisionError):
        toy.pipeline().fit(epochs=2, out=out, progress=False, checkpoints=EVERY_2, callbacks=[Does(5, fail)])
    shutil.rmtree(own_cache)  # another machine

    def away(self: sources.RemoteFile, start: int, size: int) -> bytes:
        if self.address.endswith("optimizer.safetensors"):
            raise DataError(f"{self.address} cannot be read: no answer.")
        return read(self, start, size)

    before = sorted((tmp_path / "store/checkpoints").rglob("*"))
    with monkeypatch.context() as patch:
        patch.setattr(sources.RemoteFile, "read", away)
        with pytest.raises(CheckpointError, match=r"step-00000004/optimizer.safetensors cannot be read: no answer"):
            toy.pipeline().fit(epochs=2, out=out, progress=False, resume="auto")
    assert sorted((tmp_path / "store/checkpoints").rglob("*")) == before
    resumed = toy.pipeline().fit(epochs=2, out=out, progress=False, resume="auto")
    assert (resumed.history.facts["resumed"][0]["step"], numbers(resumed)) == (4, expected)


def test_a_checkpoint_that_only_this_machine_has_is_not_removed_for_a_file_that_cannot_be_fetched(
    toy: Toy, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several machines, each has uploaded its own files, and this one could not upload its `state.json`."""

    def gone(*_: Any) -> None:
        raise CheckpointError("The store is gone.")

    def away(self: sources.RemoteFile, start: int, size: int) -> bytes:
        if self.address.endswith("step-00000006/optimizer.safetensors"):
            raise DataError(f"{self.address} cannot be read: no answer.")
        return read(self, start, size)

    out, read = f"file://{tmp_path}/store", sources.RemoteFile.read
    expected = numbers(toy.pipeline().fit(epochs=2, progress=False))
    with monkeypatch.context() as patch:
        leaves = Does(5, lambda: patch.setattr(sources.RemoteFolder, "upload", gone))
        with pytest.raises(CheckpointError, match=r"The store is gone.*kept in"):
            toy.pipeline().fit(epochs=2, out=out, checkpoints=EVERY_2, callbacks=[leaves], progress=False)
    (kept,) = own_cache.glob("runs/*/checkpoints/step-00000006")
    there = tmp_path / "store/checkpoints/step-00000006"
    there.mkdir(exist_ok=True)
    (kept / "optimizer.safetensors").rename(there / "optimizer.safetensors")  # as one that another machine has written
    with monkeypatch.context() as patch:
        patch.setattr(sources.RemoteFile, "read", away)
        with pytest.raises(CheckpointError, match=r"step-00000006/optimizer.safetensors cannot be read: no answer"):
            toy.pipeline().fit(epochs=2, out=out, progress=False, resume="auto")
    assert (kept / "state.json").exists()
    resumed = toy.pipeline().fit(epochs=2, out=out, progress=False, resume="auto")
    assert (resumed.history.facts["resumed"][0]["step"], numbers(resumed)) == (6, expected)


def test_the_log_is_uploaded_with_each_checkpoint(toy: Toy, tmp_path: Path) -> None:
    """Another machine may resume from it, within the epoch."""
    log, found = tmp_path / "store/metrics.csv", list[str]()

    def wait() -> None:
        deadline = monotonic() + 5
        while not (log.exists() and "\n1," in log.read_text()) and monotonic() < deadline:
            sleep(0.01)
        found.append(log.read_text() if log.exists() else "")

    toy.pipeline().fit(
        epochs=1, out=f"file://{tmp_path}/store", progress=False, logger="csv", log_every=1,
        checkpoints=Checkpoints(every_steps=1), callbacks=[Does(3, wait)],
    )  # fmt: skip
    assert "\n1," in found[0]
