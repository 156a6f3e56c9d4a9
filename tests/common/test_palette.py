"""The colors of our pictures can be told apart by people with each kind of color blindness."""

from itertools import combinations

import numpy as np
import pytest
from drivetrain.common.pictures import INK, PALE, PALETTE
from drivetrain.pipeline.ledger.picture import CEILING, PARTS, PLACES
from drivetrain.pipeline.measuring.tuning.result import OUTCOMES
from numpy.typing import NDArray

# Of linear RGB, for the whole lack of a cone: Machado, Oliveira and Fernandes, "A Physiologically-based Model for
# Simulation of Color Vision Deficiency", 2009, table 1 (severity 1.0).
SEEN = {
    "by most": np.eye(3),
    "protanopia": np.array([
        [0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998],
    ]),
    "deuteranopia": np.array([
        [0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881],
    ]),
    "tritanopia": np.array([
        [1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900],
    ]),
}  # fmt: skip
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = TO_XYZ.sum(1)
APART = 11.0  # of CIELAB's units, of which one is hardly noticed


def lab(color: str, seen: NDArray[np.float64]) -> NDArray[np.float64]:
    values = np.array([int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    x, y, z = np.cbrt((TO_XYZ @ np.clip(seen @ linear, 0, 1)) / WHITE)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("who", SEEN)
@pytest.mark.parametrize(
    "colors",
    [
        (*PALETTE, INK, PALE),
        (*PARTS.values(),),
        (*CEILING.values(),),
        (*PLACES.values(),),
        (*OUTCOMES.values(),),
    ],
    ids=["palette", "parts of a step", "ceilings", "places", "outcomes"],
)
def test_colors_of_one_picture_differ(colors: tuple[str, ...], who: str) -> None:
    for one, other in combinations(colors, 2):
        assert np.linalg.norm(lab(one, SEEN[who]) - lab(other, SEEN[who])) > APART, (one, other)
