"""Every Python block of docs/ runs as it stands."""

import re
from pathlib import Path

import pytest

DOCS = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
BLOCKS = [
    pytest.param(block, id=f"{path.stem}-{i}")
    for path in DOCS
    for i, block in enumerate(
        re.findall(r"^```python\n(.*?)^```", path.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    )
]


@pytest.mark.parametrize("block", BLOCKS)
def test_the_block_runs(block):
    exec(compile(block, "docs", "exec"), {})
