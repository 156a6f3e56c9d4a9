"""Tables: within their maximum width, with all of their content."""

import pytest
from drivetrain.common.table import Table

WORDS = "in the loader, on each training image; evaluation sees the images as they are"


def test_a_table_is_drawn() -> None:
    table = Table(("", "step"), [("1", "load"), ("2", "two\nlines"), ("3", "")], "Plan", "below", line_after=1)
    assert (
        table.text(80)
        == """\
Plan
┏━━━┳━━━━━━━┓
┃   ┃ step  ┃
┡━━━╇━━━━━━━┩
│ 1 │ load  │
├───┼───────┤
│ 2 │ two   │
│   │ lines │
│ 3 │       │
└───┴───────┘
below"""
    )


def test_figures_stand_on_the_right_and_are_never_wrapped() -> None:
    table = Table(("", "images/s"), [("plain PyTorch", "1"), ("+ bf16", "1,418  (1,412 to 1,426)")], figures=True)
    assert table.text(50).splitlines()[3:5] == [
        "│ plain PyTorch │                       1 │",
        "│ + bf16        │ 1,418  (1,412 to 1,426) │",
    ]
    assert table.text(40).splitlines()[3:-1] == [  # the interval below its figure
        "│ plain PyTorch │                1 │",
        "│ + bf16        │            1,418 │",
        "│               │ (1,412 to 1,426) │",
    ]
    assert table.text(20).splitlines()[1:-1] == [  # each row as a list
        "│ plain PyTorch                       │",
        "│   images/s  1                       │",
        "├─────────────────────────────────────┤",
        "│ + bf16                              │",
        "│   images/s  1,418  (1,412 to 1,426) │",
    ]


def test_without_heads_and_without_rows() -> None:
    assert Table((), [("a", "b")]).text(80) == "┌───┬───┐\n│ a │ b │\n└───┴───┘"
    assert Table(("", "b"), []).text(80) == "┏━━━┳━━━┓\n┃   ┃ b ┃\n┡━━━╇━━━┩\n└───┴───┘"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_long_texts_are_wrapped_and_lose_nothing(width: int) -> None:
    address = "https://example.org/" + "x" * 100
    rows = [("a-name-that-stays-whole", WORDS, f"{WORDS} {address}"), ("b", "short", "[bold]no markup[/]")]
    table = Table(("name", "one", "two"), rows, "\n".join([WORDS * 2, "source"]), spaced=True)
    lines = table.text(width).splitlines()
    assert max(map(len, lines)) <= width
    assert sum(line.startswith("├") for line in lines) == 1
    cells = [[cell.strip() for cell in line.split("│")] for line in lines if line.startswith("│")]
    assert "".join(cell[3] for cell in cells).replace(" ", "") == "".join(f"{WORDS}{address}[bold]nomarkup[/]".split())
    assert cells[0][1] == "a-name-that-stays-whole"


def test_a_table_is_printed_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    assert max(map(len, str(Table(("a", "b"), [("x", WORDS)])).splitlines())) == 50
