"""Executor ``sweep/choose-best``: ``choose_best.py JOB_FILE`` writes the name of the best variant to ``best``."""

import json
import sys
from pathlib import Path


def choose_best(folder: Path) -> str:
    """Return the name of the variant with the smallest loss; the folder has a JSON file for each."""
    results = [json.loads(path.read_text()) for path in folder.iterdir()]
    return str(min(results, key=lambda result: float(result["loss"]))["name"])


if __name__ == "__main__":
    task = json.loads(Path(sys.argv[1]).read_text())
    Path("best").write_text(choose_best(Path(task["settings"]["variants"])))
