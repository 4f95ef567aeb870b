"""Vocabulary extension and LoRA: what trains, what stays, and that merging changes nothing."""

from __future__ import annotations

import copy
import json
import logging

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from inference.model import (
    TraceMambaConfig,
    TraceMambaForCausalLM,
    attach_adapter,
    export_merged,
    extend_vocabulary,
    load_adapter,
    load_model,
    merge_adapter,
    save_adapter,
    trainable_parameters,
)
from inference.model.vocabulary import padded_size
from inference.tokens import PlanTokenizer
from tests.plan_tokenizers import trained
from tests.tiny_models import logits, tiny_mamba, tiny_transformer_directory


@pytest.fixture
def tokens() -> PlanTokenizer:
    return trained()


def padded(tokens: PlanTokenizer) -> int:
    return padded_size(tokens.n_tokens)


def stream(tokens: PlanTokenizer, length: int = 40) -> torch.Tensor:
    ids = torch.randint(0, tokens.n_tokens, (2, length), generator=torch.Generator().manual_seed(0))
    ids[0, 3:10] = torch.tensor(list(tokens.structural.values()))
    return ids


def adapted(
    tokens: PlanTokenizer, rank: int = 4, dropout: float = 0.0, dtype=torch.float32
) -> TraceMambaForCausalLM:
    model = tiny_mamba(padded(tokens)).to(dtype)
    extend_vocabulary(model, tokens)
    return attach_adapter(model, rank, 2 * rank, dropout)


def train(model, tokens, steps: int = 3) -> None:
    ids = stream(tokens)
    optimizer = torch.optim.AdamW([p for _, p in trainable_parameters(model)], lr=1e-2)
    for _ in range(steps):
        loss = F.cross_entropy(logits(model, ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_extension_starts_from_the_mean_without_resizing(tokens):
    model = tiny_mamba(padded(tokens))
    ids = list(tokens.structural.values())
    plain = [i for i in range(tokens.n_tokens) if i not in ids]
    mean = model.backbone.embeddings.weight[plain].mean(0)
    extend_vocabulary(model, tokens)
    assert model.config.vocab_size == padded(tokens)
    assert model.lm_head.weight is model.backbone.embeddings.weight
    torch.testing.assert_close(model.structural_rows, mean.expand(7, -1), atol=1e-6, rtol=1e-5)
    hidden = torch.randn(3, model.config.hidden_size)
    out = model.logits(hidden)
    torch.testing.assert_close(out[:, ids], (hidden @ mean)[:, None].expand(-1, 7))
    torch.testing.assert_close(out[:, plain], hidden @ model.backbone.embeddings.weight[plain].t())


def test_full_vocabulary_grows_to_the_next_multiple_of_16(tokens, caplog):
    full = tokens.n_tokens - 7
    model = tiny_mamba(full)
    with caplog.at_level(logging.WARNING):
        extend_vocabulary(model, tokens)
    assert model.config.vocab_size == padded(tokens) and f"grown to {padded(tokens)}" in caplog.text
    assert model.lm_head.weight is model.backbone.embeddings.weight
    assert logits(model, stream(tokens)).shape[-1] == padded(tokens)


def test_a_tokenizer_of_another_model_is_refused(tokens):
    with pytest.raises(ValueError, match="mismatched tokenizer"):
        extend_vocabulary(tiny_mamba(16), tokens)
    model = tiny_mamba(padded(tokens))
    model.config.structural_token_ids = [1, 2, 3, 4, 5, 6, 7]
    with pytest.raises(ValueError, match="trained with structural tokens at ids"):
        extend_vocabulary(model, tokens)


def test_an_exported_model_refuses_another_tokenizer(tokens, tmp_path):
    """Also one of the same size: the fingerprint is noted beside the weights."""
    export_merged(tiny_mamba(padded(tokens)), tokens, tmp_path / "m")
    extend_vocabulary(load_model(tmp_path / "m"), PlanTokenizer.from_pretrained(tmp_path / "m").extend())
    file = tmp_path / "m" / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    vocab["!"], vocab["?"] = vocab["?"], vocab["!"]
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="mismatched tokenizer"):
        extend_vocabulary(load_model(tmp_path / "m"), PlanTokenizer.from_pretrained(tmp_path / "m").extend())


def test_only_adapters_and_new_rows_train_and_each_gets_a_gradient(tokens):
    model = adapted(tokens)
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    names = [n for n, _ in trainable_parameters(model)]
    assert len(names) == 2 * 2 * 2 + 1 and "structural_rows" in names  # layers x projections x (A, B), rows
    train(model, tokens, steps=2)  # after one step B is no longer zero, so A's gradient is not either
    for name, parameter in trainable_parameters(model):
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
    for name, parameter in model.named_parameters():
        if name in frozen:
            assert parameter.grad is None and torch.equal(parameter, frozen[name]), name


def test_a_new_row_learns_as_input_and_as_output(tokens):
    """Each side alone: an ordinary token's logit sees a row only as input, a structural one's only as output."""
    first, second = list(tokens.structural.values())[:2]
    model = adapted(tokens)
    logits(model, torch.tensor([[5, first, 6]]))[0, -1, 7].backward()
    gradient = model.structural_rows.grad.abs().amax(1)
    assert gradient[0] > 0 and (gradient[1:] == 0).all()
    model = adapted(tokens)
    logits(model, torch.tensor([[5, 6]]))[0, -1, second].backward()
    gradient = model.structural_rows.grad.abs().amax(1)
    assert gradient[1] > 0 and gradient[0] == 0 and (gradient[2:] == 0).all()


def test_training_mode_changes_nothing_without_dropout(tokens):
    model = adapted(tokens)
    train(model, tokens)
    ids = stream(tokens)
    model.train()
    training = logits(model, ids)
    assert (training - logits(model.eval(), ids)).abs().max() <= 1e-4
    model.backbone.gradient_checkpointing = True
    assert (training - logits(model.train(), ids)).abs().max() <= 1e-4


def test_merged_and_exported_logits_are_the_adapters(tokens, tmp_path):
    model = adapted(tokens)
    train(model, tokens)
    ids = stream(tokens)
    with torch.no_grad():
        want = logits(model, ids)
        save_adapter(model, tmp_path / "adapter")
        merged = merge_adapter(copy.deepcopy(model))
        assert not any("lora" in n for n, _ in merged.named_parameters()) and merged.structural_rows is None
        assert (logits(merged, ids) - want).abs().max() <= 1e-4
        export_merged(merged, tokens, tmp_path / "merged")
        stock = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        assert (
            type(stock).__name__ == "Mamba2ForCausalLM"
            and stock.lm_head.weight is stock.backbone.embeddings.weight
        )
        assert (stock(ids).logits - want).abs().max() <= 1e-4
        assert PlanTokenizer.from_pretrained(tmp_path / "merged").structural == tokens.structural
        again = tiny_mamba(padded(tokens))
        extend_vocabulary(again, tokens)
        load_adapter(again, tmp_path / "adapter")
        assert torch.equal(logits(again, ids), want) and not trainable_parameters(again)


def test_stages_stack_and_continue(tokens, tmp_path):
    """Stage 2 starts on merged stage 1 with equal logits, trained rows kept; stage 3 continues its adapter."""
    stage1 = adapted(tokens, rank=16)
    train(stage1, tokens)
    ids, want = stream(tokens), None
    with torch.no_grad():
        want = logits(stage1, ids)
    export_merged(merge_adapter(stage1), tokens, tmp_path / "stage1")
    stage2 = load_model(tmp_path / "stage1")
    extend_vocabulary(stage2, tokens)
    attach_adapter(stage2, 8, 16, 0.1)
    with torch.no_grad():
        assert (logits(stage2.eval(), ids) - want).abs().max() <= 1e-4
    train(stage2.eval(), tokens)
    save_adapter(stage2, tmp_path / "adapter2")
    stage3 = load_model(tmp_path / "stage1")
    extend_vocabulary(stage3, tokens)
    load_adapter(stage3, tmp_path / "adapter2", trainable=True, dropout=0.0)
    with torch.no_grad():
        assert torch.equal(logits(stage3, ids), logits(stage2, ids))
    assert [n for n, _ in trainable_parameters(stage3)] == [n for n, _ in trainable_parameters(stage2)]


def test_adapters_and_rows_are_fp32_beside_a_bf16_base(tokens):
    model = adapted(tokens, dtype=torch.bfloat16)
    assert {p.dtype for _, p in trainable_parameters(model)} == {torch.float32}
    assert model.backbone.embeddings.weight.dtype == torch.bfloat16
    train(model, tokens, steps=2)
    assert all(p.grad.dtype == torch.float32 for _, p in trainable_parameters(model))


def test_adapter_files_of_another_model_or_damaged_ones_are_named(tokens, tmp_path):
    save_adapter(adapted(tokens), tmp_path / "a")
    fresh = lambda **kw: tiny_mamba(padded(tokens), **kw)  # noqa: E731
    wider = fresh(hidden_size=64, num_heads=8)
    extend_vocabulary(wider, tokens)
    with pytest.raises(ValueError, match=r"adapter_model.safetensors.*this model needs"):
        load_adapter(wider, tmp_path / "a")
    deeper = fresh(num_hidden_layers=3)
    extend_vocabulary(deeper, tokens)
    with pytest.raises(ValueError, match=r"adapter_model.safetensors.*lack.*of another model"):
        load_adapter(deeper, tmp_path / "a")
    with pytest.raises(ValueError, match="extend it first"):
        load_adapter(fresh(), tmp_path / "a")
    with pytest.raises(ValueError, match="merge it first"):
        attach_adapter(adapted(tokens), 4, 8)
    weights = tmp_path / "a" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    plain = fresh()
    extend_vocabulary(plain, tokens)
    with pytest.raises(ValueError, match="damaged or half-written"):
        load_adapter(plain, tmp_path / "a")
    config = (tmp_path / "a" / "adapter_config.json").read_text()
    (tmp_path / "a" / "adapter_config.json").write_text(config[:20])
    with pytest.raises(ValueError, match=r"adapter_config.json.*half-written"):
        load_adapter(plain, tmp_path / "a")
    (tmp_path / "a" / "adapter_config.json").write_text(config)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match=r"adapter_model.safetensors"):
        load_adapter(fresh(), tmp_path / "a")


def test_paper_scale_adapter_is_the_papers_size(tokens):
    """in_proj 2560 -> 10576 and out_proj 5120 -> 2560, rank 8, 64 layers: 10,657,792; the paper says 10.7M."""
    config = TraceMambaConfig(
        hidden_size=2560, num_hidden_layers=64, num_heads=80, head_dim=64, state_size=128, n_groups=1,
        vocab_size=50288, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = TraceMambaForCausalLM(config)
        extend_vocabulary(model, tokens)
        attach_adapter(model, 8, 16)
    lora = sum(p.numel() for n, p in trainable_parameters(model) if "lora_" in n)
    assert lora == 64 * 8 * (2560 + 10576 + 5120 + 2560) == 10_657_792
    assert sum(p.numel() for _, p in trainable_parameters(model)) == lora + 7 * 2560


@pytest.mark.parametrize("tied", [True, False])
def test_transformer_variant_trains_merges_and_packs(tokens, tmp_path, tied):
    model = load_model(tiny_transformer_directory(tmp_path / "llama", tokens.n_tokens - 7, tied))
    extend_vocabulary(model, tokens)
    attach_adapter(model, 4, 8)
    assert any("q_proj" in n for n, _ in trainable_parameters(model))
    train(model, tokens)
    ids = stream(tokens)
    with torch.no_grad():
        want = logits(model, ids)
        lengths = [25, 1, 14]
        seq_idx = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).expand(2, -1)
        alone = torch.cat([logits(model, part) for part in ids.split(lengths, dim=1)], 1)
        torch.testing.assert_close(logits(model, ids, seq_idx_BL=seq_idx), alone, atol=1e-4, rtol=1e-4)
        save_adapter(model, tmp_path / "adapter")
        export_merged(merge_adapter(model), tokens, tmp_path / "merged")
        stock = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        torch.testing.assert_close(stock(ids).logits, want, atol=1e-4, rtol=1e-4)
        again = load_model(tmp_path / "merged")
        extend_vocabulary(again, tokens)
        torch.testing.assert_close(logits(again, ids), want, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="no recurrent state"):
        model.hidden(ids, return_states=True)
