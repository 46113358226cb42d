"""Train with torch and transformers alone, as a script that somebody writes for one machine; imports nothing of ours.

Arguments: model directory, batch size, learning rate, steps, slices. Prints ``ready`` after `WARM_UP` steps, waits for
a line on standard input, takes the steps and prints ``<seconds> <samples>``. The samples of a slice are shuffled and
slices follow each other in turn, so that batches are those of a job that is given these slices in this order.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification

WARM_UP = 20
Rows = dict[str, torch.Tensor]


def main(model_dir: str, batch_size: str, learning_rate: str, steps: str, *slices: str) -> None:
    """Train on the slices, as often as needed."""
    torch.set_num_threads(1)
    is_text = AutoConfig.from_pretrained(model_dir).model_type == "llama"
    kind = AutoModelForCausalLM if is_text else AutoModelForImageClassification
    model = kind.from_pretrained(model_dir).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=float(learning_rate))
    batches = _batches([_load(path) for path in map(Path, slices)], int(batch_size))
    _train(model, optimizer, batches, WARM_UP)
    print("ready", flush=True)
    sys.stdin.readline()
    began = time.perf_counter()
    samples = _train(model, optimizer, batches, int(steps))
    print(time.perf_counter() - began, samples, flush=True)


def _load(path: Path) -> Rows:
    return {name: values if values.is_floating_point() else values.long() for name, values in load_file(path).items()}


def _train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[Rows], steps: int) -> int:
    """Take steps; return the number of samples."""
    samples, losses = 0, 0.0
    for _ in range(steps):
        batch = next(batches)
        loss = model(**batch).loss
        losses += loss.item()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        samples += len(batch["labels"])
    print(f"loss {losses / steps:.4f}", file=sys.stderr)
    return samples


def _batches(slices: list[Rows], batch_size: int) -> Iterator[Rows]:
    """Batches of shuffled slices without end; they may span two slices."""
    left: list[Rows] = []
    epoch = 0
    while True:
        for index, rows in enumerate(slices):
            order = torch.from_numpy(numpy.random.default_rng([0, epoch, index]).permutation(len(rows["labels"])))
            left.append({name: values[order] for name, values in rows.items()})
            rest = {name: torch.cat([part[name] for part in left]) for name in rows}
            whole = len(rest["labels"]) // batch_size * batch_size
            for begin in range(0, whole, batch_size):
                yield {name: values[begin : begin + batch_size] for name, values in rest.items()}
            left = [{name: values[whole:] for name, values in rest.items()}]
        epoch += 1


main(*sys.argv[1:])
