"""Model directories: what can be loaded as a trace generator's base, and what is written.

In:  our own or a stock Hugging Face ``mamba2`` directory, the original ``state-spaces/mamba2-*`` layout, or any other
     Hugging Face causal LM directory (then wrapped by ``TransformerGenerator``).
Out: models; and stock ``Mamba2ForCausalLM`` directories that plain ``transformers`` loads with the same logits.

Weights are read from safetensors; only the original layout has a ``.bin``, read with ``weights_only``.
Paper: CMT-RAG B.3 (Mamba-2 2.7B, GPT-NeoX tokenizer).
"""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, Mamba2Config

from inference.model.mamba import TraceMambaConfig, TraceMambaForCausalLM
from inference.model.tensors import check_tensors, read_tensors
from inference.model.transformer import TransformerGenerator
from inference.model.vocabulary import VOCABULARY_MULTIPLE, padded_size


def load_model(
    path: str | Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    meta: bool = False,
) -> nn.Module:
    """Loads a base model directory.

    Args:
        meta: build the model on the ``meta`` device from ``config.json`` alone (no weights are read).

    Raises:
        FileNotFoundError: no such directory, or a file of it is missing.
        ValueError: a half-written or damaged directory, or an architecture that is not supported; names the file.
    """
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(
            f"{path}: no such model directory; models are local directories, download it first"
        )
    config = read_config(path)
    if isinstance(config, TraceMambaConfig):
        with torch.device("meta"):
            model: nn.Module = TraceMambaForCausalLM(config)
        if meta:
            return model.to(dtype)
        _assign(model, _convert_names(_read_weights(path)), path, dtype, config.tie_word_embeddings)
        return model.to(device).eval()
    if meta:
        with torch.device("meta"):
            return TransformerGenerator(AutoModelForCausalLM.from_config(config, dtype=dtype))
    _require_weights(path)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ValueError(f"{path}: cannot be loaded as a causal language model: {error}") from error
    if info["missing_keys"]:
        raise ValueError(f"{path}: half-written, the weights lack {sorted(info['missing_keys'])[:3]}")
    return TransformerGenerator(model).to(device).eval()


def read_config(path: str | Path) -> Any:
    """The directory's ``config.json`` as a TraceMambaConfig (Mamba-2 of any layout) or the Transformer's own config."""
    file = Path(path) / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file}: missing, so this is not a (complete) model directory")
    try:
        raw = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: not valid JSON ({error}); the directory is half-written") from error
    if "model_type" not in raw:
        return _config_of_original_layout(raw, file)
    if raw["model_type"] in ("mamba2", "trace_mamba2"):
        raw.pop("model_type")
        return TraceMambaConfig(**{key: _plain_floats(value) for key, value in raw.items()})
    return AutoConfig.from_pretrained(Path(path), local_files_only=True)


def _plain_floats(value: Any) -> Any:
    """Hugging Face writes an infinite float as {"__float__": "Infinity"}."""
    if isinstance(value, list):
        return [_plain_floats(item) for item in value]
    if isinstance(value, dict) and set(value) == {"__float__"}:
        return float(value["__float__"])
    return value


def _config_of_original_layout(raw: dict, file: Path) -> TraceMambaConfig:
    """``state-spaces/mamba2-*``: MambaConfig of mamba_ssm (d_model, n_layer, ssm_cfg, pad_vocab_size_multiple)."""
    for key in ("d_model", "n_layer", "vocab_size"):
        if key not in raw:
            raise ValueError(
                f"{file}: neither a Hugging Face config (model_type) nor an original one (key {key!r} missing)"
            )
    ssm = raw.get("ssm_cfg", {})
    unsupported = {
        "ssm_cfg.layer": ssm.get("layer") != "Mamba2", "attn_layer_idx": bool(raw.get("attn_layer_idx")),
        "d_intermediate": bool(raw.get("d_intermediate")), "rms_norm": not raw.get("rms_norm", True),
    }  # fmt: skip
    for key, is_bad in unsupported.items():
        if is_bad:
            raise ValueError(
                f"{file}: key {key!r} asks for an architecture other than plain Mamba-2, which is not supported"
            )
    multiple = raw.get("pad_vocab_size_multiple", VOCABULARY_MULTIPLE)
    expand, head_dim = ssm.get("expand", 2), ssm.get("headdim", 64)
    return TraceMambaConfig(
        vocab_size=padded_size(raw["vocab_size"], multiple), hidden_size=raw["d_model"],
        num_hidden_layers=raw["n_layer"], state_size=ssm.get("d_state", 128), expand=expand, head_dim=head_dim,
        num_heads=raw["d_model"] * expand // head_dim, n_groups=ssm.get("ngroups", 1),
        conv_kernel=ssm.get("d_conv", 4), chunk_size=ssm.get("chunk_size", 256),
        residual_in_fp32=raw.get("residual_in_fp32", True), tie_word_embeddings=raw.get("tie_embeddings", True),
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip


def _require_weights(path: Path) -> list[Path]:
    """The safetensors files of a directory, all shards checked to be there."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(
                f"{index}: no index of shards ({error!r}); the directory is half-written"
            ) from error
        missing = [shard for shard in shards if not (path / shard).is_file()]
        if missing:
            raise FileNotFoundError(
                f"{path / missing[0]}: missing, named by {index.name}; the directory is half-written"
            )
        return [path / shard for shard in shards]
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    raise FileNotFoundError(
        f"{path / 'model.safetensors'}: missing; the directory is half-written or holds other formats"
    )


def _read_weights(path: Path) -> dict[str, Tensor]:
    original = path / "pytorch_model.bin"
    if original.is_file() and not (path / "model.safetensors").is_file():
        try:
            return torch.load(original, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # torch raises several kinds for a truncated or unsafe file
            raise ValueError(f"{original}: damaged, half-written or not plain tensors ({error})") from error
    return {key: value for file in _require_weights(path) for key, value in read_tensors(file).items()}


def _convert_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Original names to Hugging Face's: only the embedding is called differently."""
    return {k.replace("backbone.embedding.", "backbone.embeddings."): v for k, v in weights.items()}


def _assign(model: nn.Module, weights: dict[str, Tensor], path: Path, dtype: torch.dtype, tied: bool) -> None:
    expected = model.state_dict()
    if tied:
        weights.pop("lm_head.weight", None)
        expected.pop("lm_head.weight", None)
    check_tensors(weights, expected, path)
    # A_log, D and dt_bias decide decay rates: they stay fp32, as the original implementation keeps them.
    fp32 = ("A_log", ".D", "dt_bias")
    weights = {k: v.to(torch.float32 if k.endswith(fp32) else dtype, copy=True) for k, v in weights.items()}
    model.load_state_dict(weights, strict=False, assign=True)
    if tied:
        model.lm_head.weight = model.backbone.embeddings.weight


def _note_tokenizer(directory: Path) -> None:
    """Writes the tokenizer's fingerprint, structural tokens included, into config.json, so another is refused."""
    from inference.tokens import PlanTokenizer

    config = json.loads((directory / "config.json").read_text())
    config["tokenizer_fingerprint"] = PlanTokenizer.from_pretrained(directory).extend().fingerprint()
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def export_merged(
    model: nn.Module, tokens: Any, directory: str | Path, dtype: torch.dtype | None = None
) -> Path:
    """Writes a stock Hugging Face directory (weights in ``dtype``, tokenizer beside them) atomically.

    The model must carry no adapter (``merge_adapter`` first; work on a copy to keep training).
    """
    directory = Path(directory)
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    if isinstance(model, TransformerGenerator):
        (model.model if dtype is None else copy.deepcopy(model.model).to(dtype)).save_pretrained(partial)
    else:
        raw = {
            k: v
            for k, v in model.config.to_dict().items()
            if k not in ("model_type", "architectures", "dtype")
        }
        tied = model.lm_head.weight is model.backbone.embeddings.weight
        config = Mamba2Config(**raw, architectures=["Mamba2ForCausalLM"])
        config.tie_word_embeddings = tied
        weights = {
            k: v.detach().cpu().to(v.dtype if dtype is None else dtype).contiguous().clone()
            for k, v in model.state_dict().items()
            if not (tied and k == "lm_head.weight")
        }
        config.dtype = dtype or model.backbone.embeddings.weight.dtype
        save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(partial)
    if tokens is not None:
        tokens.save(partial)
        _note_tokenizer(partial)
    shutil.rmtree(directory, ignore_errors=True)
    partial.rename(directory)
    return directory
