"""Compute test accuracy with transformers alone: ``python baseline_accuracy.py MODEL_DIR TEST_SET``."""

import sys

import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageClassification

model = AutoModelForImageClassification.from_pretrained(sys.argv[1]).eval()
data = load_file(sys.argv[2])
with torch.no_grad():
    logits = model(pixel_values=data["pixel_values"]).logits
print((logits.argmax(-1) == data["labels"]).sum().item() / len(data["labels"]))
