"""Tiny random models for tests: a Mamba-2, its original layout, a Transformer."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from inference.model import TraceMambaConfig, TraceMambaForCausalLM

MAMBA = {
    "hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 16, "num_hidden_layers": 2, "n_groups": 2,
    "chunk_size": 16, "tie_word_embeddings": True, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


def tiny_mamba(vocab_size: int = 128, seed: int = 0, **settings) -> TraceMambaForCausalLM:
    torch.manual_seed(seed)
    return TraceMambaForCausalLM(TraceMambaConfig(vocab_size=vocab_size, **{**MAMBA, **settings})).eval()


def tiny_transformer_directory(path: Path, vocab_size: int, tied: bool = True) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=tied, bos_token_id=0, eos_token_id=0,
        pad_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def original_layout_directory(path: Path, model: TraceMambaForCausalLM, vocab_size: int) -> Path:
    """Writes the model as state-spaces/mamba2-* publishes its own: config.json without a type, pytorch_model.bin."""
    path.mkdir(parents=True)
    c = model.config
    config = {
        "d_model": c.hidden_size, "d_intermediate": 0, "n_layer": c.num_hidden_layers, "vocab_size": vocab_size,
        "ssm_cfg": {"layer": "Mamba2", "d_state": c.state_size, "headdim": c.head_dim,
                    "ngroups": c.n_groups, "chunk_size": 16},
        "attn_layer_idx": [], "attn_cfg": {}, "rms_norm": True, "residual_in_fp32": True, "fused_add_norm": True,
        "pad_vocab_size_multiple": 16, "tie_embeddings": True,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    weights = {k.replace("embeddings.", "embedding."): v.clone() for k, v in model.state_dict().items()}
    torch.save(weights, path / "pytorch_model.bin")
    return path


def logits(model, ids: torch.Tensor, **kwargs) -> torch.Tensor:
    return model.logits(model.hidden(ids, **kwargs)[0])
