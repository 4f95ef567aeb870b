"""Model directories: stock, original layout, half-written; and the policies that drive the models."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Mamba2Config, Mamba2ForCausalLM

from inference.model import MambaPolicy, TransformerPolicy, export_merged, load_model, make_policy
from tests.tiny_models import MAMBA, logits, original_layout_directory, tiny_mamba, tiny_transformer_directory

IDS = torch.randint(0, 128, (2, 50), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_a_stock_directory_loads_with_equal_logits(tmp_path):
    torch.manual_seed(3)
    stock = Mamba2ForCausalLM(Mamba2Config(vocab_size=128, **MAMBA)).eval()
    stock.save_pretrained(tmp_path)
    model = load_model(tmp_path)
    assert (
        model.config.model_type == "trace_mamba2" and model.lm_head.weight is model.backbone.embeddings.weight
    )
    assert (logits(model, IDS) - stock(IDS).logits).abs().max() <= 1e-4


def test_loss_and_every_gradient_are_the_stock_models(tmp_path):
    torch.manual_seed(3)
    stock = Mamba2ForCausalLM(Mamba2Config(vocab_size=128, **MAMBA)).train()
    stock.save_pretrained(tmp_path)
    model = load_model(tmp_path).train()
    ours, theirs = model(IDS, labels=IDS).loss, stock(IDS, labels=IDS).loss
    assert abs(ours - theirs) <= 1e-5
    ours.backward()
    theirs.backward()
    for (name, parameter), (stock_name, expected) in zip(
        model.named_parameters(), stock.named_parameters(), strict=True
    ):
        assert name == stock_name
        assert (parameter.grad - expected.grad).abs().max() <= 1e-4 * expected.grad.abs().max(), name


@torch.no_grad()
def test_an_untied_stock_directory_keeps_its_head(tmp_path):
    torch.manual_seed(3)
    stock = Mamba2ForCausalLM(Mamba2Config(vocab_size=128, **{**MAMBA, "tie_word_embeddings": False})).eval()
    stock.save_pretrained(tmp_path / "in")
    model = load_model(tmp_path / "in")
    export_merged(model, None, tmp_path / "out")
    again = Mamba2ForCausalLM.from_pretrained(tmp_path / "out")
    assert (again(IDS).logits - stock(IDS).logits).abs().max() <= 1e-4
    assert (logits(model, IDS) - stock(IDS).logits).abs().max() <= 1e-4


@torch.no_grad()
def test_the_original_layout_loads(tmp_path):
    source = tiny_mamba(128)
    path = original_layout_directory(tmp_path / "mamba2-tiny", source, vocab_size=117)  # padded to 128
    model = load_model(path)
    assert model.config.vocab_size == 128 and model.config.n_groups == 2
    assert model.lm_head.weight is model.backbone.embeddings.weight
    assert torch.equal(logits(model, IDS), logits(source, IDS))
    meta = load_model(path, dtype=torch.bfloat16, meta=True)
    assert {p.device.type for p in meta.parameters()} == {"meta"}


def test_an_original_layout_of_another_architecture_is_refused(tmp_path):
    path = original_layout_directory(tmp_path / "m", tiny_mamba(128), 128)
    config = json.loads((path / "config.json").read_text())
    for change, key in (
        ({"attn_layer_idx": [1]}, "attn_layer_idx"),
        ({"ssm_cfg": {"layer": "Mamba1"}}, "ssm_cfg.layer"),
    ):
        (path / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(ValueError, match=key):
            load_model(path)


def test_no_pickled_code_is_run(tmp_path):
    path = original_layout_directory(tmp_path / "m", tiny_mamba(128), 128)

    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "touched"), "w"))

    torch.save({"x": Evil()}, path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model.bin"):
        load_model(path)
    assert not (tmp_path / "touched").exists()


@torch.no_grad()
def test_bf16_and_half_precision_exports_keep_decay_rates_fp32(tmp_path):
    model = tiny_mamba(128)
    export_merged(model, None, tmp_path / "bf16", dtype=torch.bfloat16)
    loaded = load_model(tmp_path / "bf16", dtype=torch.bfloat16)
    assert loaded.backbone.embeddings.weight.dtype == torch.bfloat16
    assert loaded.backbone.layers[0].mixer.A_log.dtype == torch.float32


@pytest.mark.parametrize(
    "damage, error, text",
    [
        ("no directory", FileNotFoundError, "no such model directory"),
        ("no config", FileNotFoundError, "config.json"),
        ("cut config", ValueError, "config.json.*not valid JSON"),
        ("no weights", FileNotFoundError, "model.safetensors"),
        ("cut weights", ValueError, "model.safetensors.*half-written"),
        ("missing tensor", ValueError, "lack 'backbone.layers.1.mixer.D'"),
        ("unknown tensor", ValueError, "unknown tensor 'extra'"),
        ("other shape", ValueError, "this model needs"),
        ("missing shard", FileNotFoundError, "model-00002.*named by"),
        ("cut index", ValueError, "model.safetensors.index.json.*half-written"),
    ],
)
def test_half_written_directories_are_named(tmp_path, damage, error, text):
    path = export_merged(tiny_mamba(128), None, tmp_path / "m")
    weights = path / "model.safetensors"
    if damage == "no directory":
        shutil.rmtree(path)
    elif damage == "no config":
        (path / "config.json").unlink()
    elif damage == "cut config":
        (path / "config.json").write_text('{"model_type": "mam')
    elif damage == "no weights":
        weights.unlink()
    elif damage == "cut weights":
        weights.write_bytes(weights.read_bytes()[:-64])
    elif damage == "cut index":
        (path / "model.safetensors.index.json").write_text('{"weight_map": {"a"')
    elif damage == "missing shard":
        index = {"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        tensors = load_file(weights)
        if damage == "missing tensor":
            tensors.pop("backbone.layers.1.mixer.D")
        elif damage == "unknown tensor":
            tensors["extra"] = torch.zeros(1)
        else:
            tensors["backbone.norm_f.weight"] = torch.zeros(5)
        save_file(tensors, weights)
    with pytest.raises(error, match=text):
        load_model(path)


def test_a_half_written_transformer_is_named(tmp_path):
    path = tiny_transformer_directory(tmp_path / "llama", 128)
    tensors = load_file(path / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="half-written"):
        load_model(path)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["mamba", "transformer"])
def test_a_policy_reads_ragged_turns_and_single_steps_alike(tmp_path, kind):
    model = (
        tiny_mamba(128) if kind == "mamba" else load_model(tiny_transformer_directory(tmp_path / "t", 128))
    )
    policy = make_policy(model)
    assert isinstance(policy, MambaPolicy if kind == "mamba" else TransformerPolicy)
    feeds = [[[1, 2, 3], [4]], [[5], [6]], [[7], [8]], [[9, 10], [11, 12, 13]], [[14], [15]]]
    states, histories = policy.new_states(2), [[], []]
    for feed in feeds:
        out, states = policy.feed(states, feed)
        for i in range(2):
            histories[i] += feed[i]
            want = logits(model, torch.tensor([histories[i]]))[0, -1]
            torch.testing.assert_close(out[i], want, atol=1e-4, rtol=1e-4)
    swapped, _ = policy.feed(states.select([1, 0]), [[3], [3]])
    straight, _ = policy.feed(states, [[3], [3]])
    torch.testing.assert_close(swapped, straight[[1, 0]], atol=1e-4, rtol=1e-4)
    both = type(states).cat([states.select([0]), states.select([1])])
    torch.testing.assert_close(policy.feed(both, [[3], [3]])[0], straight, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="at least one"):
        policy.feed(states, [[1], []])
