"""Write the report of a run in a folder: `drivetrain report`."""

from __future__ import annotations

from pathlib import Path

from ..runs.report import Report, check_report
from ..runs.result import load_run


def write_report(run: str | Path, out: str | Path, data: str | Path | None = None, *, trust_code: bool = False) -> Path:
    """Write a run as one HTML file without scripts that needs no network, and return its path.

    It has the final metrics, the curves, every epoch, a training batch, the errors on the validation data with the
    worst samples, the ledger if `ledger.json` is in the folder, the plan with its cautions, machine and versions, and
    the recipe. What cannot be shown is named, with the reason. A run that did not reach its last epoch is reported as
    unfinished, also one that ended before its first.

    Args:
        run: the run's folder, or its address.
        out: the file, `.html`.
        data: data whose errors are shown. Default None: the run's validation data.
        trust_code: as `load_run` takes it.

    Raises:
        DrivetrainError: unless `out` ends in `.html`; for `data` that cannot be judged.
        CheckpointError: if the folder is not that of a run, or its history is damaged.

    Example::

        >>> from drivetrain.pipeline.apps.report import write_report
        >>> write_report("runs/photos", "report.html").name
        'report.html'
    """
    check_report(out)
    if data is None:
        return Report.of(run, lambda: load_run(run, trust_code=trust_code).errors(), trust_code=trust_code).write(out)
    errors = load_run(run, trust_code=trust_code).errors(data)  # refused here, and not in the report
    return Report.of(run, lambda: errors, trust_code=trust_code).write(out)
