"""Print a table of the architectures of transformers that Hypha trains and delivers, made small with random weights.

    uv run python tools/architectures.py [TASK[:TYPE]…]

For each model type that the library has for a task, a model is created from its default configuration with small sizes,
saved, and checked as `hypha-accelerate-executor check-model` does: all weights are changed, the change takes the way of
a job, and the delivered model is compared with the changed one. Types of which no small model could be created (their
sizes depend on each other in ways of their own) are listed at the end.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from hypha.accelerate_executor.errors import ExecutorError
from hypha.accelerate_executor.modeling.hf import auto_class, quieten_transformers
from hypha.accelerate_executor.modeling.round_trip import RoundTrip, check_round_trip

TASKS = (
    "causal-lm", "masked-lm", "seq2-seq-lm", "sequence-classification", "token-classification", "image-classification",
    "audio-classification", "semantic-segmentation", "speech-seq2-seq", "ctc",
)  # fmt: skip
LARGEST = 30_000_000
"""Parameters of a model that is still small."""
ROUNDING = 1e-5
"""Outputs of equal weights differ at most by this, relative to the largest."""
SMALL: dict[str, Any] = {
    key: value
    for value, keys in {
        32: "hidden_size d_model n_embd dim emb_dim embed_dim embedding_size output_hidden_size codevector_dim "
            "classifier_proj_size",
        64: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff d_inner n_inner hidden_dim ffn_hidden_size "
            "dense_intermediate_size shared_expert_intermediate_size max_source_positions max_target_positions",
        160: "vocab_size max_position_embeddings n_positions",
        16: "kv_lora_rank q_lora_rank moe_intermediate_size num_mel_bins num_conv_pos_embeddings",
        8: "head_dim d_kv d_head qk_nope_head_dim qk_rope_head_dim v_head_dim patch_size",
        4: "num_attention_heads encoder_attention_heads decoder_attention_heads n_head n_heads num_heads rotary_dim "
           "num_experts num_local_experts n_routed_experts moe_num_experts",
        3: "num_labels",
        2: "num_hidden_layers encoder_layers decoder_layers n_layer n_layers num_layers num_decoder_layers "
           "num_encoder_layers num_key_value_heads num_kv_heads num_experts_per_tok n_group topk_group moe_topk "
           "num_conv_pos_embedding_groups eos_token_id",
        1: "first_k_dense_replace bos_token_id decoder_start_token_id",
        0: "pad_token_id",
    }.items()
    for key in keys.split()
} | {"image_size": 32, "conv_dim": [32, 32], "conv_stride": [5, 2], "conv_kernel": [10, 3]}  # fmt: skip
"""Sizes by key of a configuration."""


def main(arguments: list[str]) -> int:
    """Print the table; return 1 if a model is not delivered as it was trained."""
    quieten_transformers()
    delivered: dict[str, list[str]] = {}
    failures, skipped = [], []
    for task, kind in chosen(arguments):
        print(task, kind, file=sys.stderr)
        with tempfile.TemporaryDirectory() as folder:
            if (reason := create(task, kind, Path(folder))) is not None:
                skipped.append(f"{task} {kind}: {reason}")
                continue
            try:
                delivered.setdefault(task, []).append(cell(kind, check_round_trip(task, Path(folder))))
            except ExecutorError as error:
                failures.append(f"{task} {kind}: {error}")
    print(f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}\n")
    print("| task | types | delivered as trained |\n| --- | --- | --- |")
    for task, cells in delivered.items():
        print(f"| {task} | {len(cells)} | {', '.join(cells)} |")
    for title, lines in (("Not delivered", failures), ("Not created", skipped)):
        print(f"\n{title}: {len(lines)}\n", *(f"- {line}" for line in lines), sep="\n")
    return 1 if failures else 0


def chosen(arguments: list[str]) -> Iterator[tuple[str, str]]:
    """Yield tasks and model types."""
    for argument in arguments or TASKS:
        task, _, kind = argument.partition(":")
        types = {config.model_type for config in auto_class(task)._model_mapping}
        yield from ((task, each) for each in sorted(types) if kind in ("", each))


def create(task: str, kind: str, folder: Path) -> str | None:
    """Save a small model; return why there is none."""
    try:
        settings = shrunk(transformers.AutoConfig.for_model(kind).to_dict())
        config = transformers.AutoConfig.for_model(kind, **settings)
        with torch.device("meta"):
            size = sum(each.numel() for each in auto_class(task).from_config(config).parameters())
        if size > LARGEST:
            return f"{size:,} parameters"
        torch.manual_seed(0)
        auto_class(task).from_config(config).save_pretrained(folder)
    except Exception as error:  # noqa: BLE001 – whatever sizes that do not fit each other raise
        return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return None


def shrunk(settings: dict[str, Any]) -> dict[str, Any]:
    """Return small sizes for the keys that a configuration has."""
    small = {
        key: value
        for key, value in SMALL.items()
        if key in settings and type(settings[key]) in (type(value), type(None))
    }
    return small | {key: shrunk(value) for key, value in settings.items() if key.endswith("_config") and value}


def cell(kind: str, found: RoundTrip) -> str:
    """Return a type with marks: `c` for converted tensors, `o` where only weights are compared; or how they differ."""
    marks = ["c"] * bool(found.converted) + ["o"] * (found.difference is None)
    if found.difference is not None and found.difference > ROUNDING:
        marks.append(f"{found.difference:.1g}")
    return f"{kind} ({', '.join(marks)})" if marks else kind


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
