"""The command line, in processes: help, results, files, and one-line errors."""

import inspect
import json
import re
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from command_line import COMMANDS, ENVIRONMENT, call, call_several, parsed, run, toy_values
from drivetrain import RECIPES, Pipeline, loaders
from drivetrain.common.machine import KEEPS_MEMORY
from drivetrain.common.options.config import options_of
from drivetrain.pipeline.apps.cli.doctor import EXTRAS, memory_kept, reachable_host
from drivetrain.pipeline.apps.cli.options import say
from drivetrain.pipeline.models import cifar_resnet
from drivetrain.pipeline.recipes.presets import KEYS
from drivetrain.pipeline.recipes.table import PROSE
from drivetrain.pipeline.runs.config import FitConfig
from loader_pictures import jpeg_folder
from PIL import Image
from pipeline_data import CLASSES, RUN_FILES, Toy, left_in, toy_arrays
from places import ROOT
from safetensors.torch import load_file

PAGES = ("convert", "inspect", "verify", "advise", "train", "export", "ledger", "job", "recipes", "doctor")


def test_help_describes_every_command_and_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    page, *pages = call("--help"), *(call(command, "--help") for command in PAGES)
    for command, own in zip(PAGES, pages, strict=True):
        assert re.search(rf"^. {command} +[A-Z].*\w", page.out, re.MULTILINE), page.out
        options = re.findall(r"^  (?:-h, )?(--[a-z-]+)(.*)", own.out, re.MULTILINE)
        assert options, own
        for option, rest in options:
            assert re.search(r"  \S.* \w+", rest), f"{command} {option} is not described:\n{own.out}"
        assert max(map(len, own.out.splitlines())) < 110
    assert "[default: 0.5]" in pages[0].out
    assert "\n\n  torchrun --nproc-per-node=8 -m drivetrain train RECIPE strategy=ddp devices=auto\n" in pages[4].out
    empty = call()
    assert (empty.code, empty.out) == (2, page.out)
    assert call("--version").out.startswith("drivetrain 0.")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_printed_as_written(command: str) -> None:
    printed = "".join(call(command, "--help").out.split())
    for param in COMMANDS[command].params:
        assert "".join(f"{vars(param)['help']}".split()) in printed


WRONG = {
    "a command": (["tran"], "No such command 'tran'. Did you mean 'train'?"),
    "an option": (["train", "baseline", "--ot", "x"], "No such option '--ot'. (Did you mean one of: '--out',"),
    "an option with its value": (["ledger", "--second=3"], "No such option '--second'. Did you mean '--seconds'?"),
    "a value as an option": (
        ["train", "baseline", "--batch-size", "8"],
        "No such option '--batch-size'. Values of the recipe are passed as batch_size=….",
    ),
    "a value within another": (
        ["race", "baseline", "--lr=0.1"], "No such option '--lr'. Values of the recipe are passed as optimizer.lr=….",
    ),
    "an option of no command": (["--versio"], "Did you mean '--version'?"),
    "too few": (["export", "a"], "Missing argument 'OUT'."),
    "too many": (["recipes", "a", "b"], "unexpected extra argument (b)."),
    "no value": (["train", "baseline", "--out"], "'--out' requires an argument."),
    "a value too many": (["train", "baseline", "--resume=yes"], "'--resume' does not take a value."),
    "one file to compare": (["ledger", "--compare", "a.json"], "'--compare' requires 2 arguments."),
    "no number": (["train", "x", "--ledger-seconds", "many"], "'--ledger-seconds': 'many' is not a valid float."),
    "an empty folder": (["train", "baseline", "--out="], "'--out': it is empty."),
    "an empty source": (["convert", "", "a.beton"], "'SOURCE': it is empty."),
    "no data": (["train", "baseline", "--train="], "'--train': it is empty."),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_arguments_that_cannot_be_read_are_one_line(name: str) -> None:
    command, message = WRONG[name]
    end = call(*command)
    assert (end.code, end.out, end.err.count("\n")) == (2, "", 1)
    assert end.err.startswith("UsageError: ")
    assert message in end.err
    assert re.search(r" See: drivetrain( [a-z]+)? --help\n$", end.err)


def test_what_follows_two_dashes_is_no_option() -> None:
    assert "-odd.beton does not exist" in call("inspect", "--", "-odd.beton").line


def test_an_error_is_red_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    say("DataError", "gone")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    say("DataError", "gone")
    monkeypatch.setenv("NO_COLOR", "1")
    say("DataError", "gone")
    plain, red = "DataError: gone", "\033[1;31mDataError:\033[0m gone"
    assert capsys.readouterr().err.splitlines() == [plain, red, plain]


@pytest.mark.process
def test_output_that_nobody_reads_is_no_error() -> None:
    program = [sys.executable, "-m", "drivetrain", "recipes"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_a_path_that_the_system_refuses_is_one_line(tmp_path: Path) -> None:
    assert ". is not a file" in call("inspect", ".").line
    name = "x" * 300
    assert call("convert", name, str(tmp_path / "a.beton")).line == f"OSError: {name}: File name too long.\n"


@pytest.mark.process
@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        ("recipes >/dev/full", 1, "OSError: the output cannot be written: No space left on device.\n"),
        ("recipes >&-", 0, ""),
        ("recipes no-such-recipe 2>&-", 1, ""),
        ("recipes --keys", 0, ""),
    ],
)
def test_output_that_cannot_be_written(words: str, code: int, error: str) -> None:
    """The disk is full, the output is closed, or its encoding has no lines of tables."""
    shell = ["bash", "-c", f'exec "$0" -m drivetrain {words}', sys.executable]
    environment = ENVIRONMENT | {"PYTHONIOENCODING": "ascii"}
    end = subprocess.run(shell, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert (end.returncode, end.stderr) == (code, error)
    assert bool(end.stdout) == (words == "recipes --keys")


def test_the_defaults_of_convert_are_its_owners() -> None:
    owner = inspect.signature(loaders.convert).parameters
    for name, value in parsed("convert", "photos", "out.beton").items():
        # Called fields=, mask_map=, on_error= and progress=; the last is of the report's text.
        if name not in ("source", "out", "field", "ignore", "map", "skip_bad", "quiet", "verbose"):
            assert owner[name].default == value, name


def test_recipes_are_listed_shown_and_explained() -> None:
    every, one, keys = call_several(["recipes"], ["recipes", "baseline"], ["recipes", "--keys"])
    for name in RECIPES:
        assert name in every.out
    for key in {*KEYS} - {"notes", *PROSE}:  # which are in the last column, and above the table
        assert re.search(rf"^. {key} ", one.out, re.MULTILINE), key
    assert "the baseline to compare with" in " ".join(one.out.split())
    assert "(required)" in keys.out
    assert re.search(r"precision +. fp32 ", keys.out)
    assert (every.code, one.code, keys.code) == (0, 0, 0)


def test_a_recipe_and_the_keys_of_all_exclude_each_other() -> None:
    assert "Leave out 'baselin', or --keys to see its values." in call("recipes", "baselin", "--keys").line


def test_a_file_is_a_recipe(toy: Toy, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(toy.named().replace(epochs=1).to_recipe()))
    shown, trained, wrong, folder = call_several(
        ["recipes", str(file)],
        ["train", str(file), "--out", str(tmp_path / "out"), "seed=3", "--val", toy.val],
        ["train", str(file), "optimizer.lr=fast"],
        ["train", str(tmp_path / "out")],
    )
    assert re.search(r"optimizer .*name: sgd", shown.out)
    assert trained.code == 0, trained.err
    assert "after 1 epoch\n" in trained.out
    assert f"Did you mean '{tmp_path / 'out' / 'recipe.yaml'}'?" in folder.line
    assert json.loads((tmp_path / "out" / "history.json").read_text())["recipe"] == "mine.yaml"
    assert "mine.yaml" in wrong.line


def test_what_is_unknown_is_one_line(toy: Toy, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    files = [*toy_values(toy), "--out", str(tmp_path / "file")]
    recipe, key, pair, data, train, ledger, option, seconds = call_several(
        ["recipes", "baselin"], ["train", "baseline", "epoch=3"], ["ledger", "baseline", "epochs"],
        ["train", "baseline", "--train", "no.beton", "--val", "no.beton"],
        ["train", "cifar10-quickstart", *files], ["ledger", "cifar10-quickstart", *files],
        ["train", "baseline", "model_options.num_clases=4", *toy_values(toy)],
        ["train", "cifar10-quickstart", *toy_values(toy), "--ledger", "--ledger-seconds", "0"],
    )  # fmt: skip
    assert "No recipe is named 'baselin'. Did you mean 'baseline'?" in recipe.line
    assert "Did you mean 'epochs'?" in key.line
    assert "'epochs' is not KEY=VALUE" in pair.line
    for end, message in ((data, "no.beton does not exist"), (train, "is a file"), (option, "num_clases")):
        assert end.code == 1
        assert message in end.err.splitlines()[-1]
        assert "Traceback" not in end.err
    assert "is a file" in ledger.line  # before it measures
    assert "seconds=0 (--seconds, --ledger-seconds, --tune) must be positive" in seconds.line  # before it trains
    refused = call_several(
        ["train", "baseline", "epochs=1", "epochs=2"],
        ["train", "baseline", "train=a.beton", "--train", "b.beton"],
        ["train", "baseline", "--train", "a.beton", "--train=b.beton"],
        ["ledger", "baseline", "--out", "a", "--seconds", "3", "--out", "b"],
        ["ledger", "baseline", "--epochs", "3"],
        ["ledger", "baseline", "--seconds", "9", "--compare", "a.json", "b.json"],
        ["train", "cifar10-quickstart", *toy_values(toy), "--tune", "nan", "--out", str(tmp_path / "none")],
        ["train", "cifar10-quickstart", *toy_values(toy), "--tune", "600", "--resume"],
        ["train", "cifar10-quickstart", *toy_values(toy), "--callback", '{"name": []}'],
    )
    messages = (
        "epochs= is given twice", "--train and train= are both", "--train is given 2 times", "--out is given 2 times",
        "--epochs sets", ": recipe, --seconds.", "seconds=nan", "resume='auto' searches out", "No callback is named []",
    )  # fmt: skip
    for end, message in zip(refused, messages, strict=True):
        assert message in end.line
    logger, empty = call_several(
        ["train", "cifar10-quickstart", *toy_values(toy), "--logger", "csv", "--tune", "9999"],  # not after tuning
        ["train", "cifar10-quickstart", *toy_values(toy), "--out", ""],
    )
    assert "Pass fit(out=…) (--out)" in logger.err
    assert (empty.code, "it is empty" in empty.err) == (2, True)


def test_convert(tmp_path: Path) -> None:
    good, bad, out = tmp_path / "good", tmp_path / "bad", tmp_path / "out.beton"
    for number, image in enumerate(toy_arrays(6, 0)[0]):
        for root in (good, bad):
            (root / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(root / "ab"[number % 2] / f"{number}.jpg")
    (bad / "a" / "bad.jpg").write_bytes(b"no image")
    converted, refused, skipped, quality = call_several(
        ["convert", str(good), str(out)],
        ["convert", str(bad), str(tmp_path / "refused.beton")],
        ["convert", str(bad), str(tmp_path / "skipped.beton"), "--skip-bad", "--quality", "80"],
        ["convert", str(good), str(tmp_path / "refused.beton"), "--quality", "0"],
    )
    assert (converted.code, refused.code, skipped.code) == (0, 1, 0)
    assert "6 images" in converted.out
    assert json.loads((tmp_path / "out.beton.json").read_text())["classes"] == ["a", "b"]
    assert "bad.jpg: it is not an image" in refused.err.splitlines()[-1]
    assert "(--skip-bad)" in refused.err.splitlines()[-1]
    assert "  skipped " in skipped.out
    assert "bad.jpg" in skipped.out
    assert "quality=0 must" in quality.line
    assert sorted(path.name for path in tmp_path.glob("*.beton")) == ["out.beton", "skipped.beton"]


def test_a_file_of_another_kind_is_refused_before_any_work(tmp_path: Path) -> None:
    """Not even the run is looked for."""
    none = str(tmp_path / "none")
    assert "worst.txt must end in .json, .png, .svg or .pdf." in call("errors", none, "--out", "worst.txt").line
    assert "curves.json must end in .png, .svg or .pdf." in call("compare", none, "--out", "curves.json").line


@pytest.mark.process
def test_train_writes_its_results(toy: Toy, tmp_path: Path) -> None:
    """Without the seconds of torchmetrics, of what that imports, and of FFCV."""
    out, values = tmp_path / "runs" / "one", [*toy_values(toy), "--logger", "csv"]
    end = run("train", "cifar10-quickstart", *values, "--out", str(out), PYTHONPROFILEIMPORTTIME="1")
    assert end.code == 0, end.err
    imported = {name.partition(".")[0] for name in re.findall(r"^import time:.*\| +(\S+)$", end.err, re.MULTILINE)}
    assert "torch" in imported
    assert not imported & {"torchmetrics", "torchvision", "transformers", "ffcv", "numba"}
    for text in ("BlurPool", "epoch 2  loss", "top1", "after 2 epochs"):
        assert text in end.out, text
    assert left_in(out) == sorted([*RUN_FILES, "metrics.csv"])
    again = Pipeline.from_recipe(str(out / "recipe.yaml"))
    assert again.plan().text(120) == (out / "plan.txt").read_text().strip()
    assert again.epochs == 2
    files = sorted(path.name for path in out.iterdir() if path.is_file())
    *_, listed, following, errors, report, predict = end.out.splitlines()
    assert listed == f"{out}: {', '.join(files)}"
    assert following == "Next:"
    for line, name in ((errors, "errors"), (report, "report"), (predict, "predict")):
        assert line.startswith(f"  drivetrain {name} {out}")
    with Image.open(out / "curves.png") as curves:
        assert curves.size == (1080, 672)
    assert again.plan().text(110) in end.out  # as wide as the terminal
    assert (out / "metrics.csv").read_text().startswith("step,epoch,loss,val_loss,")
    history = json.loads((out / "history.json").read_text())
    assert history["recipe"] == "cifar10-quickstart"
    assert history["provenance"]["command"].startswith("drivetrain train cifar10-quickstart batch_size=32")
    assert history["epochs"][1]["metrics"]["top1"] is not None
    trained = cifar_resnet(CLASSES, width=4)
    trained.load_state_dict(load_file(out / "model.safetensors"))


@pytest.mark.slow  # it measures for half a minute
def test_train_measures_a_ledger(toy: Toy, tmp_path: Path) -> None:
    end = run(
        "train", "cifar10-quickstart", *toy_values(toy), "--out", str(tmp_path), "--ledger", "--ledger-seconds", "30"
    )  # fmt: skip
    assert end.code == 0, end.err
    assert "plain PyTorch" in end.out
    assert "bottleneck" in end.out
    assert {"ledger.json", "ledger.png"} <= set(left_in(tmp_path))
    measured = json.loads((tmp_path / "ledger.json").read_text())
    assert [row["name"] for row in measured["rows"]][:2] == ["plain PyTorch", "+ FFCV loader"]


@pytest.mark.slow  # torchrun, and two interpreters of its ranks
@pytest.mark.timeout(200)
def test_torchrun_runs_the_command_on_its_ranks(toy: Toy, tmp_path: Path) -> None:
    """They train together, only rank 0 prints, and the folder is as after any run."""
    out = tmp_path / "run"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", "-m", "drivetrain", "train", "cifar10-quickstart",
        *toy_values(toy), "strategy=ddp", "devices=2", "transforms=[]", "--out", str(out),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-3000:]
    for text in ("why here", "epoch 1  loss", "epoch 2  loss", "after 2 epochs"):
        assert done.stdout.count(text) == 1, (text, done.stdout)
    assert {path.name for path in out.iterdir()} == {*RUN_FILES, "recipe.yaml"}
    assert done.stdout.splitlines()[-5] == (
        f"{out}: curves.png, history.json, model.safetensors, plan.txt, recipe.yaml"
    )
    history = json.loads((out / "history.json").read_text())
    assert history["provenance"]["command"].startswith("drivetrain train cifar10-quickstart ")
    assert Pipeline.from_recipe(out / "recipe.yaml").distribution.devices == 2


def test_doctor_knows_every_extra_that_users_install() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert set(EXTRAS) == set(extras) - {"all", "dev", "docs"}
    for extra, (packages, _) in EXTRAS.items():
        assert set(packages) <= {re.split(r"[^\w.-]", asked)[0] for asked in extras[extra]}


def test_doctor_says_how_glibc_keeps_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KEEPS_MEMORY:
        monkeypatch.delenv(name, raising=False)
    finding = memory_kept()
    assert not finding.good
    for setting in finding.remedy.removeprefix("export ").split():
        monkeypatch.setenv(*setting.split("="))
    assert memory_kept().good
    assert memory_kept().remedy == ""


@pytest.mark.parametrize(
    ("address", "remedy"),
    [
        ("10.0.0.7", ""),
        ("127.0.1.1", "other machines cannot reach 127.0.1.1. For several machines, set GLOO_SOCKET_IFNAME"),
        (OSError("unknown"), "for several machines, set GLOO_SOCKET_IFNAME"),
        (UnicodeError("label too long"), "for several machines, set GLOO_SOCKET_IFNAME"),
    ],
)
def test_doctor_warns_of_a_name_that_leads_to_this_machine_only(
    address: str | Exception, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look_up(_: str) -> str:
        if isinstance(address, Exception):
            raise address
        return address

    monkeypatch.setattr(socket, "gethostbyname", look_up)
    finding = reachable_host()
    assert finding.good == (not remedy)
    assert finding.remedy.startswith(remedy)


@pytest.mark.process
@pytest.mark.slow
def test_doctor_with_all_extras() -> None:
    whole = run("doctor")
    assert whole.code == 0
    for extra in EXTRAS:
        assert re.search(rf"^  extra {extra}  +\d?", whole.out.partition("Here:")[2], re.MULTILINE), extra
    assert re.search(r"^  torch  +\d", whole.out, re.MULTILINE)
    assert re.search(r"^  strategies  +single, dp, ddp", whole.out, re.MULTILINE)
    assert "…" not in whole.out  # nothing is cut off


def test_doctor_without_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ffcv", "numba"):
        monkeypatch.setitem(sys.modules, name, None)
    (doctor,) = call_several(["doctor"])
    assert doctor.code == 0  # the core is whole
    assert "extra ffcv" not in doctor.out.partition("Here:")[2]
    assert re.search(r"^  torch  +\d", doctor.out, re.MULTILINE)
    assert re.search(r"^  strategies  +single, dp, ddp", doctor.out, re.MULTILINE)
    (remedy,) = (line for line in doctor.out.splitlines() if line.startswith("  extra ffcv: "))
    assert "drivetrain[ffcv]" in remedy


@pytest.mark.long
def test_the_options_of_fit_are_flags(toy: Toy, tmp_path: Path) -> None:
    """They replace those of the recipe; what is not given is the recipe's."""
    stopping = '{"name": "EarlyStopping", "monitor": "top1", "patience": 1, "min_delta": 1}'
    values = [each for each in toy_values(toy) if each != "epochs=2"] + ["epochs=4", "on_nonfinite=skip"]
    command = ["train", "cifar10-quickstart", *values, "--out", str(tmp_path)]
    norms = '{"name": "GradientNorms", "every": 1}'
    options = ["--eval-every-steps", "3", "--callback", stopping, "--callback", norms, "--logger", "csv"]
    wrong, zero, done = call_several(
        [*command, "--on-nonfinite", "skp"], [*command, "--eval-every", "0"], [*command, *options]
    )
    assert "on_nonfinite='skp' is not known. Did you mean 'skip'?" in wrong.line
    assert "eval_every=0 must be a positive integer" in zero.line
    assert done.code == 0, done.err
    history = json.loads((tmp_path / "history.json").read_text())
    assert len(history["epochs"]) == 1, "EarlyStopping has stopped it"
    assert [one["step"] for one in history["evaluations"]] == [3]
    assert "gradient" in (tmp_path / "metrics.csv").read_text().partition("\n")[0]


def test_every_option_of_fit_can_be_set() -> None:
    flags = {*parsed("train", "baseline")} | {"epochs", "progress", "checkpoints", "stop_on"}
    assert set(options_of(FitConfig)) <= flags


def test_a_budget_without_a_ledger_is_refused(toy: Toy) -> None:
    refused = call("train", "cifar10-quickstart", *toy_values(toy), "--ledger-seconds", "60")
    assert "--ledger-seconds is the time budget of --ledger. Pass both or neither." in refused.line


def test_null_and_false_replace_the_recipes_options_of_fit_or_are_refused(toy: Toy, tmp_path: Path) -> None:
    none = str(tmp_path / "none.safetensors")
    command = ["train", "cifar10-quickstart", *toy_values(toy)[:-2], "val=null", "eval_every_steps=3"]
    assert "log_every=False must be a positive integer" in call(*command, "--log-every", "false").line
    assert "(eval_every_steps=3) needs validation data" in call(*command, "--init-from", none).line
    assert none in call(*command, "--eval-every-steps", "null", "--init-from", none).line  # which is looked for later


ADVISE = ["--image-size", "32", "--seconds", "0.8", "--workers", "1", "--quiet"]


def test_advise_prints_a_table_or_json(tmp_path: Path) -> None:
    folder = str(jpeg_folder(tmp_path / "photos"))
    shown = call("advise", folder, *ADVISE, "--wanted", "1", "--scratch", str(tmp_path))
    assert (shown.code, shown.err) == (0, "")
    assert "18 images, loaded as random crops of 32 × 32 pixels" in " ".join(shown.out.split())
    assert "'as stored' loses the least quality of the formats that reach 1.0 images/s" in shown.out
    found = json.loads(call("advise", folder, *ADVISE, "--samples", "5", "--json").out)
    assert (found["images"], found["sampled"], found["image_size"]) == (18, 5, [32, 32])
    assert [name for name in found["rows"][0] if name.endswith("workers")] == ["all_workers"]
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]


def test_advise_reports_errors_as_one_line(tmp_path: Path) -> None:
    assert "contains no images" in call("advise", str(tmp_path)).line
    jpeg_folder(tmp_path / "photos")
    assert "seconds=-1" in call("advise", str(tmp_path), "--seconds", "-1").line
    assert "--scratch" in call("advise", str(tmp_path), "--scratch", str(tmp_path / "none")).line
