"""Compute results with transformers alone, as JSON lines.

``python plain_inference.py classify MODEL SLICE.safetensors...`` prints label and score of each row in this order;
``python plain_inference.py generate MODEL ROWS.jsonl TOKENS`` prints what follows each ``question``, greedily.
"""

import json
import sys

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, AutoTokenizer


def classify(model_dir: str, paths: list[str]) -> None:
    """Classify the images of some files."""
    model = AutoModelForImageClassification.from_pretrained(model_dir).eval()
    for path in paths:
        data = load_file(path)
        with torch.no_grad():
            scores = model(pixel_values=data["pixel_values"]).logits.softmax(-1)
        best, labels = scores.max(-1)
        for label, score, true in zip(labels.tolist(), best.tolist(), data["labels"].tolist(), strict=True):
            print(json.dumps({"label": label, "score": score, "correct": label == true}))


def generate(model_dir: str, path: str, tokens: int) -> None:
    """Continue the questions of a file, one at a time."""
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    with open(path) as file:
        rows = [json.loads(line) for line in file]
    for row in rows:
        inputs = tokenizer(row["question"], return_tensors="pt")
        with torch.no_grad():
            made = model.generate(**inputs, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
        text = tokenizer.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        print(json.dumps({"id": row["id"], "text": text}))


if sys.argv[1] == "classify":
    classify(sys.argv[2], sys.argv[3:])
else:
    generate(sys.argv[2], sys.argv[3], int(sys.argv[4]))
