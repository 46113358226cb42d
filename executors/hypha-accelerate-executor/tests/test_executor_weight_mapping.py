"""Names and shapes of a model's files and of the loaded module: tied, renamed, split and fused tensors."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from click.testing import CliRunner

from hypha.accelerate_executor.cli import main as command
from hypha.accelerate_executor.diloco.replica import Replica
from hypha.accelerate_executor.errors import DeliveryError, ModelError
from hypha.accelerate_executor.modeling.create import create_model
from hypha.accelerate_executor.modeling.delivery import check_delivery
from hypha.accelerate_executor.modeling.hf import load_model
from hypha.accelerate_executor.modeling.round_trip import check_round_trip

pytestmark = pytest.mark.timeout(120)

TEXT = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("causal-lm", TEXT | {"tie_word_embeddings": True}),
    "mixtral": ("causal-lm", TEXT | {"num_local_experts": 3}),
    "qwen3_moe": (
        "causal-lm",
        TEXT | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8},
    ),
    "bert": ("masked-lm", TEXT),
    "t5": ("seq2-seq-lm", {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}),
    "marian": (
        "seq2-seq-lm",
        {"vocab_size": 64, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 32,
         "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
         "pad_token_id": 0, "decoder_start_token_id": 1, "eos_token_id": 2},
    ),
    "vit": (
        "image-classification",
        {"image_size": 16, "patch_size": 8, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
         "num_attention_heads": 2},
    ),
    "wav2vec2": (
        "audio-classification",
        {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24,
         "conv_dim": [16, 16], "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_conv_pos_embeddings": 8,
         "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 16},
    ),
}  # fmt: skip


def make(kind: str, out: Path) -> str:
    """Write a small model with random weights; return its task."""
    task, config = MODELS[kind]
    create_model(task, {"model_type": kind} | config, 0, out)
    return task


def rewrite(model: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Change the tensors of a model's file."""
    path = model / "model.safetensors"
    safetensors.torch.save_file(change(safetensors.torch.load_file(path)), path, {"format": "pt"})


@pytest.mark.parametrize("kind", MODELS)
def test_model_is_delivered_as_it_was_trained(kind: str, tmp_path: Path) -> None:
    task = make(kind, tmp_path / "model")
    found = check_round_trip(task, tmp_path / "model")
    assert found.difference is not None
    assert found.difference < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_name_of_a_tied_tensor_gets_the_trained_values(dtype: torch.dtype, tmp_path: Path) -> None:
    task = make("llama", tmp_path / "model")
    rewrite(
        tmp_path / "model",
        lambda tensors: {
            name: value.to(dtype)
            for name, value in (tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}).items()
        },
    )
    found = check_round_trip(task, tmp_path / "model")
    assert (found.aliases, found.difference) == (1, 0.0)


def test_tensors_that_differ_are_two_although_the_configuration_ties_them(tmp_path: Path) -> None:
    task = make("llama", tmp_path / "model")
    rewrite(tmp_path / "model", lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"] + 1})
    found = check_round_trip(task, tmp_path / "model")
    assert (found.aliases, found.difference) == (0, 0.0)
    assert "lm_head.weight" in Replica(load_model(task, tmp_path / "model"), tmp_path / "model").names


def test_experts_are_sent_as_the_files_have_them(tmp_path: Path) -> None:
    task = make("mixtral", tmp_path / "model")
    stored = safetensors.torch.load_file(tmp_path / "model" / "model.safetensors")
    replica = Replica(load_model(task, tmp_path / "model"), tmp_path / "model")
    assert replica.names == stored.keys()
    assert replica.names - replica.members.keys(), "the library fuses experts"
    for name, values in replica.mapping.to_files(replica.members):
        assert torch.equal(values, stored[name]), name
    back = replica.mapping.to_module(stored)
    assert all(torch.equal(value, replica.members[name]) for name, value in back.items())


@pytest.mark.parametrize("prefix", ["", "another."])
def test_files_without_the_prefix_of_the_head_are_mapped_and_unknown_ones_refused(prefix: str, tmp_path: Path) -> None:
    task = make("bert", tmp_path / "model")
    rewrite(tmp_path / "model", lambda t: {n.replace("bert.", prefix, 1): v for n, v in t.items()})
    if prefix:
        with pytest.raises(ModelError, match="lack"):
            load_model(task, tmp_path / "model")
        return
    assert check_round_trip(task, tmp_path / "model").converted > 10


def test_tensor_of_another_shape_is_named_before_the_first_round(tmp_path: Path) -> None:
    task = make("vit", tmp_path / "model")
    rewrite(tmp_path / "model", lambda t: t | {"classifier.weight": torch.ones(7, 16)})
    with pytest.raises(
        ModelError, match=r"'classifier.weight' with the shape \[7, 16\], and config.json says \[2, 16\]"
    ):
        load_model(task, tmp_path / "model")


def test_running_statistics_that_the_files_lack_are_not_exchanged(digit_model: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for path in digit_model.iterdir():
        (tmp_path / "model" / path.name).write_bytes(path.read_bytes())
    rewrite(tmp_path / "model", lambda t: {n: v for n, v in t.items() if not n.endswith("num_batches_tracked")})
    module = load_model("image-classification", tmp_path / "model")
    names = Replica(module, tmp_path / "model").names
    assert not any(name.endswith("num_batches_tracked") for name in names)
    assert any(name.endswith("running_mean") for name in names)


def test_model_that_loads_with_other_weights_is_not_delivered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "doubling_net.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Linear):\n"
        "    def __init__(self):\n"
        "        super().__init__(3, 2)\n"
        "        self.register_load_state_dict_post_hook(Net.double)\n"
        "    def double(self, _):\n"
        "        if self.bias.sum() > 5:\n"
        "            raise RuntimeError('the bias is too large')\n"
        "        self.bias.data *= 2\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"torch_class": "doubling_net:Net"}))
    tensors = {"weight": torch.ones(2, 3), "bias": torch.ones(2)}
    safetensors.torch.save_file(tensors, model / "model.safetensors")
    replica = Replica(load_model("torch", model, allowed={"doubling_net"}), model)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(DeliveryError, match="1 of 2 tensors differ, first 'bias'"):
        check_delivery("torch", model, replica, {"doubling_net"})
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    safetensors.torch.save_file({"weight": torch.ones(2, 3), "bias": torch.full((2,), 3.0)}, tmp_path / "weights")
    replica.replace(tmp_path / "weights")
    with pytest.raises(DeliveryError, match=r"the delivered model cannot be loaded: .*the bias is too large"):
        check_delivery("torch", model, replica, {"doubling_net"})
    sys.modules.pop("doubling_net")


def test_check_model_prints_what_was_compared(tmp_path: Path) -> None:
    make("vit", tmp_path / "model")
    done = CliRunner().invoke(command, ["check-model", "--model", str(tmp_path / "model")])
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert (found["model"], found["aliases"], found["difference"]) == ("ViTForImageClassification", 0, 0.0)
    missing = CliRunner().invoke(command, ["check-model", "--model", str(tmp_path / "none")])
    assert missing.exit_code == 1
    assert "config.json" in missing.output


def test_names_are_those_that_save_pretrained_writes(tmp_path: Path) -> None:
    task = make("vit", tmp_path / "model")
    replica = Replica(load_model(task, tmp_path / "model"), tmp_path / "model")
    module = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "model")
    module.save_pretrained(tmp_path / "again")
    assert replica.names == safetensors.torch.load_file(tmp_path / "again" / "model.safetensors").keys()
