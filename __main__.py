"""`python -m drivetrain …` is the command line; `torchrun … -m drivetrain train …` is it on several ranks."""

from __future__ import annotations

import sys

from drivetrain.pipeline.cli import main

if __name__ == "__main__":
    sys.argv[0] = "drivetrain"  # its name in help, and in the provenance of what it measures
    main()
