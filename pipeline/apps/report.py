"""`report.html`: a run as one file, for people who do not have its folder."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from ...common.errors import CheckpointError, DrivetrainError, require_suffix
from ...common.pictures import drawn, image_tag
from ...common.storage.files import atomic_file
from ...common.table import Table
from ..checkpoints.remote import opened
from ..ledger.ledger import Ledger
from ..recipes.files import RECIPE
from ..runs.folder import MODEL, PLAN, UNLISTED
from ..runs.result import load_run
from ..telemetry.curves import draw
from ..telemetry.history import HISTORY, History, read_history, shown

LEDGER = "ledger.json"
STILL: dict[str, Any] = {"dpi": 110, "bbox_inches": "tight"}
STYLE = """
:root { color-scheme: light dark; --ink: #222; --paper: #fff; --line: #d5dadd; --mark: #b5452c }
@media (prefers-color-scheme: dark) { :root { --ink: #ddd; --paper: #16191b; --line: #3a4145; --mark: #e8886f } }
body { margin: 0 auto; max-width: 64rem; padding: 1rem; color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem; overflow-wrap: anywhere } h2 { font-size: 1.15rem; margin-top: 2rem }
img { max-width: 100%; background: #fff; border-radius: 4px }
.wide { overflow-x: auto } pre { overflow-x: auto }
table { border-collapse: collapse; font-size: 13px } th, td { padding: 3px 9px; border-bottom: 1px solid var(--line) }
.unfinished { border-left: 4px solid var(--mark); padding-left: .7rem; font-weight: 600 }
"""


def write_report(
    run: str | Path, out: str | Path, data: str | Path | None = None, *, trust_code: bool = False
) -> Path:
    """Write a run as one HTML file without scripts that needs no network, and return its path.

    It has the final metrics, the curves, every epoch, the errors on the validation data with the worst samples, the
    ledger if `ledger.json` is in the folder, the plan with its cautions, machine and versions, and the recipe. What
    cannot be shown is named, with the reason. A run that did not reach its last epoch is reported as unfinished.

    Args:
        run: the run's folder, or its address.
        out: the file, `.html`.
        data: data whose errors are shown. Default None: the run's validation data.
        trust_code: as `load_run` takes it.

    Raises:
        DrivetrainError: unless `out` ends in `.html`; for `data` that cannot be judged.
        CheckpointError: if the folder has no history of a run.

    Example::

        >>> from drivetrain.pipeline.apps.report import write_report
        >>> write_report("runs/photos", "report.html").name
        'report.html'
    """
    out = Path(out)
    require_suffix(out, ".html", DrivetrainError)
    folder = opened(run, RECIPE, HISTORY, MODEL, UNLISTED, PLAN, LEDGER)
    history = read_history(folder)
    if history is None:
        raise CheckpointError(
            f"{run} has no results of a run: its {HISTORY} is missing or damaged. Pass the folder of a run "
            "(fit(out=…), --out) whose first epoch has finished."
        )
    recipe = folder / RECIPE
    described = recipe.read_text() if recipe.exists() else ""
    errors = partial(_errors, run, data, trust_code)
    title = str(history.facts.get("recipe") or Path(str(run)).name)
    parts = [
        f"<h1>{html.escape(title)}</h1>", _state(history, described),
        _section("Curves", lambda: image_tag(draw(history), "loss, metric, learning rate and throughput by epoch")),
        _section("Epochs", history._repr_html_),
        _section("Errors", errors) if data is None else f"<h2>Errors</h2>{errors()}",
        *([_section("Ledger", lambda: _ledger(folder))] if (folder / LEDGER).exists() else []),
        _text("Plan", folder / PLAN),
        _section("Machine and versions", lambda: _facts(history.facts.get("provenance", {}))),
        _text("Recipe", recipe),
    ]  # fmt: skip
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )
    with atomic_file(out) as file:
        file.write(page.encode())
    return out


def _state(history: History, recipe: str) -> str:
    """Return the final metrics, and whether the run reached its last epoch."""
    last, done = history.last, len(history.epochs)
    planned = (yaml.safe_load(recipe) or {}).get("epochs") if recipe else None
    figures = [] if last is None else [f"val_loss {last.val_loss:.4f}", *shown(last.metrics, history.units)]
    found = f"<p>{html.escape(', '.join(figures) or 'no validation data')}</p>"
    if history.stopped is not None:
        finished = f"{done} epoch{'s' * (done != 1)} finished"
        reason = html.escape(history.stopped)
        return f'<p class="unfinished">Stopped, {finished}: {reason}</p>{found}'
    if left := history.unfinished(planned):
        return f'<p class="unfinished">Unfinished: {left}.</p>{found}'
    return f"<p>{done} epoch{'s' * (done != 1)}, finished.</p>{found}"


def _section(title: str, content: Callable[[], str]) -> str:
    """Return a section, or the reason why it cannot be shown."""
    try:
        inner = content()
    except DrivetrainError as error:
        inner = f"<p>Not available: {html.escape(str(error))}</p>"
    return f'<h2>{title}</h2><div class="wide">{inner}</div>'


def _text(title: str, file: Path) -> str:
    inner = html.escape(file.read_text()) if file.exists() else f"There is no {file.name}."
    return f"<h2>{title}</h2><pre>{inner}</pre>"


def _errors(run: str | Path, data: str | Path | None, trust_code: bool) -> str:
    errors = load_run(run, trust_code=trust_code).errors(data)
    picture = image_tag(drawn(errors.show(), **STILL), "errors and worst samples")
    return f'<div class="wide">{errors._repr_html_()}</div>{picture}'


def _ledger(folder: Path) -> str:
    ledger = Ledger.load(folder / LEDGER)
    return ledger._repr_html_() + image_tag(drawn(ledger.show(), **STILL), "throughput of each stage")


def _facts(facts: Mapping[str, Any]) -> str:
    rows = [(key, value) for key, value in _flat(facts) if value]
    return Table(("fact", "value"), rows).html() if rows else "<p>Not recorded.</p>"


def _flat(facts: Mapping[str, Any], before: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for key, value in facts.items():
        name = f"{before}{key}"
        found += _flat(value, f"{name} ") if isinstance(value, Mapping) else [(name, _said(value))]
    return found


def _said(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)
