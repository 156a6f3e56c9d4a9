"""The command line as a module: `python -m drivetrain …`, or `torchrun … -m drivetrain train …` on several ranks."""

from __future__ import annotations

import sys

from drivetrain.pipeline.apps.cli import main

if __name__ == "__main__":
    sys.argv[0] = "drivetrain"  # its name in help and in provenance
    main()
