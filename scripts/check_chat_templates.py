"""Checks chat templates against recorded renders: prints a table, exits with 1 on a mismatch.

FOLDER holds the templates and `jinja2_goldens.json`: {"contexts": {name: variables}, "renders":
{file or file#key: {context: {"out": text} or {"error": message}}}}. The clock stands at 2024-07-26.

    python scripts/check_chat_templates.py FOLDER
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from jaxinfer.text import ChatTemplate, ChatTemplateError

NOW = datetime(2024, 7, 26, 12)


def main() -> int:
    """0 if every render is equal, and every recorded error an error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    data = json.loads((folder / "jinja2_goldens.json").read_text(encoding="utf-8"))
    failures = 0
    for name, renders in data["renders"].items():
        template = ChatTemplate(_source(folder, name))
        wrong = [
            context
            for context, expected in renders.items()
            if _render(template, data["contexts"][context]) != expected.get("out")
        ]
        failures += len(wrong)
        state = f"FAIL {', '.join(wrong)}" if wrong else "ok"
        print(f"{len(renders) - len(wrong)} / {len(renders)}  {name}  {state}")
    return int(failures > 0 or not data["renders"])


def _render(template: ChatTemplate, variables: dict[str, Any]) -> str | None:
    """The text, or None where the template refuses the messages."""
    try:
        return template.render(**variables, strftime_now=NOW.strftime)
    except ChatTemplateError:
        return None


def _source(folder: Path, name: str) -> str:
    """The template in a file, or under a key of a JSON file (NAME#KEY)."""
    file, _, key = name.partition("#")
    text = (folder / file).read_text(encoding="utf-8")
    value = json.loads(text)[key] if key else text
    if isinstance(value, list):
        value = next(entry["template"] for entry in value if entry["name"] == "default")
    return value


if __name__ == "__main__":
    sys.exit(main())
