"""The JSON files of a run's folder, read with an error that names the file.

Place in the flow: config.json, report.json and the like of a run -> this -> checkpoints/hub.py, eval/served_run.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_run_json(path: Path) -> dict[str, Any]:
    """The object that a file holds.

    Raises:
        ValueError: if it is missing, damaged or no object, with what to do.
    """
    if not path.is_file():
        raise ValueError(f"{path} is missing: run the recipe to its end first")
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): run the recipe again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged, expected a JSON object: run the recipe again")
    return found
