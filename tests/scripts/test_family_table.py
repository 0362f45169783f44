"""The README's table of families is the code's own, and its numbers are small."""

import re
from pathlib import Path

from jaxinfer.models import FAMILIES
from scripts.family_table import BEGIN, END, largest_difference, table

ROOT = Path(__file__).parents[2]


def test_the_readme_has_the_table_of_the_code():
    text = (ROOT / "README.md").read_text("utf-8")
    shown = text.partition(BEGIN)[2].partition(END)[0].strip()
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in shown.splitlines()[2:]]
    measured = {row[0].strip(): float(row[-1]) for row in cells}
    assert measured.keys() == {family.name for family in FAMILIES}
    assert all(0 < difference <= 1e-4 for difference in measured.values())
    assert shown == table(measured)


def test_a_difference_is_measured():
    family, difference = largest_difference(ROOT / "tests" / "data" / "tiny" / "qwen3")
    assert family == "qwen3"
    assert 0 < difference <= 1e-4
