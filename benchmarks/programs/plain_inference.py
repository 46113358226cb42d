"""Classify slices with transformers alone, as a script that somebody writes for one machine; imports nothing of ours.

Arguments: model directory, batch size, output folder, slices. Writes ``part-<n>.jsonl`` and, for each part, a line
``<seconds since the epoch> <rows>`` to standard output; for the first batch ``<seconds> 0``.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageClassification


def main(model_dir: str, batch_size: str, out: str, *slices: str) -> None:
    """Classify every row of the slices."""
    torch.set_num_threads(1)
    model = AutoModelForImageClassification.from_pretrained(model_dir).eval()
    size, told = int(batch_size), False
    for path in map(Path, slices):
        rows = load_file(path)["pixel_values"]
        lines = []
        for begin in range(0, len(rows), size):
            with torch.inference_mode():
                logits = model(pixel_values=rows[begin : begin + size]).logits
            scores, labels = torch.softmax(logits, -1).max(-1)
            found = zip(labels.tolist(), scores.tolist(), strict=True)
            for row, (label, score) in enumerate(found, begin):
                lines.append(json.dumps({"slice": path.stem, "row": row, "label": label, "score": score}) + "\n")
            if not told:
                told = True
                print(time.time(), 0, flush=True)
        (Path(out) / f"part-{path.stem}.jsonl").write_text("".join(lines))
        print(time.time(), len(rows), flush=True)


main(*sys.argv[1:])
