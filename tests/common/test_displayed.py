"""What `show()` returns is a picture in IPython, also without `%matplotlib inline`."""

import pytest
from drivetrain.common.pictures import displayed
from IPython.core.formatters import DisplayFormatter
from matplotlib.figure import Figure


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_figure_is_shown_as_png() -> None:
    figure = displayed(Figure(figsize=(2, 1)))
    figure.subplots().plot([0, 1])
    data, _ = DisplayFormatter().format(figure)
    assert data["image/png"][:8] == b"\x89PNG\r\n\x1a\n"
