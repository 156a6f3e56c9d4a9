"""The commands of the page on clusters are commands of torchrun's and Drivetrain's."""

import re
import shlex

import pytest
from command_line import parsed
from drivetrain.pipeline.recipes.presets import KEYS, parse_overrides
from places import ROOT
from torch.distributed.run import parse_args

PAGE = (ROOT / "docs/guide/cluster.md").read_text()
LINES = "\n".join(re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)).replace("\\\n", " ").splitlines()


@pytest.mark.parametrize("line", [line for line in LINES if line and not line.startswith("export ")])
def test_each_command_parses(line: str) -> None:
    program, *words = shlex.split(line.partition(" > ")[0])
    if program == "torchrun":
        given = parse_args(words)
        assert (given.module, given.training_script) == (True, "drivetrain")
        if given.nnodes.partition(":")[1]:
            assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in LINES
        words = given.training_script_args
    else:
        assert program == "drivetrain"
    assert set(parse_overrides(parsed(*words).get("overrides", ()))) <= set(KEYS)


def test_there_are_commands() -> None:
    assert sum(line.startswith("torchrun") for line in LINES) >= 4
