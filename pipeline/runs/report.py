"""`report.html`: a run as one file, for people who do not have its folder."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...common.errors import CheckpointError, DrivetrainError, RecipeError, require_suffix
from ...common.pictures import drawn, image_tag
from ...common.storage.files import write_file
from ...common.table import Table
from ..describe.pipeline_spec import PipelineSpec
from ..describe.plan import Plan
from ..ledger.ledger import Ledger
from ..models.weights import weights_omitted
from ..recipes.convert import build_pipeline
from ..recipes.core_yaml import dump, parse
from ..recipes.files import RECIPE
from ..recipes.script import recipe_and_files
from ..telemetry.history import HISTORY, History, read_history, shown
from .analysis.batch import ShownBatch, batch_of, may_use_the_model
from .analysis.errors import Errors
from .analysis.picture import figure_of
from .checkpoints.directory import CheckpointDir
from .checkpoints.remote import CHECKPOINTS, opened, run_name
from .folder import MODEL, PLAN, UNLISTED, provide_code, with_trained

LEDGER = "ledger.json"
SAMPLES = 24  # of the batch: as many as there are worst samples
STYLE = """
:root { color-scheme: light dark; --ink: #222; --paper: #fff; --line: #d5dadd; --mark: #b5452c }
body { margin: 0 auto; max-width: 64rem; padding: 1rem; color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
.wide { overflow-x: auto } pre { overflow-x: auto; font-size: 12px } .wrapped { white-space: pre-wrap }
.plot img { max-width: 100%; border-radius: 4px }
table { border-collapse: collapse; font-size: 13px; overflow-wrap: normal }
th, td { padding: 3px 9px; border-bottom: 1px solid var(--line) } .facts td { overflow-wrap: anywhere }
.unfinished { border-left: 4px solid var(--mark); padding-left: .7rem; font-weight: 600 }
@media (max-width: 42rem) { .plot img { max-width: none; width: 40rem } }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ddd; --paper: #171717; --line: #3a4145; --mark: #e8886f }
  .plot img { filter: invert(.91) hue-rotate(180deg) } }
"""
"""Plots keep their size on a telephone and scroll; in the dark, their white becomes the page's color."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a report shows.

    Attributes:
        title: its heading.
        history: the finished epochs and the facts.
        plan, recipe: as text; "" if there is none.
        batch, errors: compute these; what they raise is the reason why they cannot be shown.
        ledger: its file; None without.
    """

    title: str
    history: History
    plan: str
    recipe: str
    batch: Callable[[], ShownBatch]
    errors: Callable[[], Errors]
    ledger: Path | None = None

    @classmethod
    def of(cls, run: str | Path, errors: Callable[[], Errors], *, trust_code: bool = False) -> Report:
        """Return that of the run in a folder or at an address; raise CheckpointError if there is none."""
        folder = opened(run, RECIPE, HISTORY, MODEL, UNLISTED, PLAN, LEDGER)
        texts = {name: _text_of(folder / name) for name in (PLAN, RECIPE)}
        history = read_history(folder)
        if history is None and ((folder / HISTORY).exists() or not any(texts.values())):
            raise CheckpointError(
                f"{run} has no results of a run: its {HISTORY} is missing or damaged. Pass the folder of a run "
                "(fit(out=…), --out)."
            )
        if history is None:  # it has not finished an epoch, but may have a checkpoint
            store = CheckpointDir(folder / CHECKPOINTS)
            saved = next(store.of_run(store.run), None)  # those of an earlier run stay until it has its first
            history = History() if saved is None else saved.content.history
        ledger = folder / LEDGER

        def batch() -> ShownBatch:
            provide_code(run, folder, trust=trust_code)
            return first_batch(build_pipeline(folder / RECIPE, {}, PipelineSpec))

        return cls(
            title=str(history.facts.get("recipe") or run_name(run)), history=history, plan=texts[PLAN],
            recipe=texts[RECIPE], batch=batch, errors=errors, ledger=ledger if ledger.exists() else None,
        )  # fmt: skip

    @classmethod
    def unsaved(cls, history: History, plan: Plan, spec: PipelineSpec | None, errors: Callable[[], Errors]) -> Report:
        recipe = ""
        if spec is not None:
            with suppress(RecipeError):  # e.g. of a custom model
                own, _ = recipe_and_files(spec)
                recipe = with_trained({RECIPE: dump(own)}, history.facts)[RECIPE]
        return cls(
            title=str(history.facts.get("recipe") or "A run"), history=history, plan=f"{plan!r}" if plan.steps else "",
            recipe=recipe, batch=lambda: first_batch(spec), errors=errors,
        )  # fmt: skip

    def write(self, out: str | Path) -> Path:
        """Write the file, and return its path; raise DrivetrainError unless it ends in `.html`."""
        out = check_report(out)
        title = html.escape(self.title)
        page = (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{title}</title><style>{STYLE}</style></head><body><h1>{title}</h1>{self._body()}</body></html>\n"
        )
        write_file(out, page)
        return out

    def _body(self) -> str:
        history, ledger = self.history, self.ledger
        curves = "loss, metric, learning rate and throughput by epoch"
        return "".join([
            _state(history, self.recipe),
            _section("Curves", lambda: _plot(history.show(), curves)),
            _section("Epochs", history._repr_html_),
            _section("A batch", lambda: self.batch()._repr_html_()),
            _section("Errors", lambda: _errors(self.errors())),
            "" if ledger is None else _section("Ledger", lambda: _ledger(ledger)),
            _text("Plan", self.plan),
            _section("Machine and versions", lambda: _facts(history.facts.get("provenance", {}))),
            _text("Recipe", self.recipe, "wrapped"),
        ])  # fmt: skip


def check_report(out: str | Path) -> Path:
    """Return the path of a report; DrivetrainError unless it ends in `.html`."""
    require_suffix(Path(out), ".html", DrivetrainError)
    return Path(out)


def _text_of(file: Path) -> str:
    """Return the text of a file, also of a damaged one; "" without it."""
    return file.read_text("utf-8", errors="replace") if file.exists() else ""


def first_batch(spec: PipelineSpec | None) -> ShownBatch:
    if spec is None:
        raise CheckpointError("The result has no pipeline.")
    # The files of weights with which the run began may be gone, and published ones would be downloaded.
    needed = any(map(may_use_the_model, spec.transforms))
    with nullcontext() if needed else weights_omitted():
        return batch_of(spec, 0, SAMPLES, None)


def _state(history: History, recipe: str) -> str:
    """Return the final metrics, and whether the run reached its last epoch."""
    last, done = history.last, len(history.epochs)
    figures = [] if last is None else [f"val_loss {last.val_loss:.4f}", *shown(last.metrics, history.units)]
    found = f"<p>{html.escape(', '.join(figures) or 'no validation data')}</p>"
    if history.stopped is not None:
        finished = f"{done} epoch{'s' * (done != 1)} finished"
        reason = html.escape(history.stopped)
        return f'<p class="unfinished">Stopped, {finished}: {reason}</p>{found}'
    values: Any = None
    with suppress(RecipeError):
        values, _ = parse(recipe, RECIPE)
    if left := history.unfinished(values if isinstance(values, dict) else {}):
        return f'<p class="unfinished">Unfinished: {left}.</p>{found}'
    if not done:
        return f'<p class="unfinished">No epoch has finished.</p>{found}'
    return f"<p>{done} epoch{'s' * (done != 1)}, finished.</p>{found}"


def _section(title: str, content: Callable[[], str]) -> str:
    """Return a section, or the reason why it cannot be shown."""
    try:
        inner = content()
    except Exception as error:  # what the user's model, task and metrics raise may be anything
        what = "" if isinstance(error, DrivetrainError) else f"{type(error).__name__}: "
        inner = f"<p>Not available: {html.escape(f'{what}{error}')}</p>"
    return f'<h2>{title}</h2><div class="wide">{inner}</div>'


def _text(title: str, text: str, kind: str = "") -> str:
    inner = f'<pre class="{kind}">{html.escape(text)}</pre>' if text else "<p>There is none.</p>"
    return f"<h2>{title}</h2>{inner}"


def _plot(figure: Any, about: str) -> str:
    return f'<div class="wide plot">{image_tag(drawn(figure, dpi=120), about)}</div>'


def _errors(errors: Errors) -> str:
    overview = _plot(figure_of(errors, samples=False), "what is mistaken for what") if errors.kind else ""
    return overview + errors._repr_html_()


def _ledger(file: Path) -> str:
    ledger = Ledger.load(file)
    return ledger._repr_html_() + _plot(ledger.show(), "throughput of each stage")


def _facts(facts: Mapping[str, Any]) -> str:
    rows = [(key, value) for key, value in _flat(facts) if value]
    if not rows:
        return "<p>Not recorded: the run ended before its first checkpoint.</p>"
    return f'<div class="facts">{Table(("fact", "value"), rows).html()}</div>'


def _flat(facts: Mapping[str, Any], before: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for key, value in facts.items():
        name = f"{before}{key}"
        found += _flat(value, f"{name} ") if isinstance(value, Mapping) else [(name, _said(value))]
    return found


def _said(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)
