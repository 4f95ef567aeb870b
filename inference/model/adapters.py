"""LoRA on a frozen backbone: attach, save, load, merge (CMT-RAG B.1, B.3; arithmetic by PEFT).

In:  a model from ``load_model`` (vocabulary extended or not).
Out: the same model with fp32 adapters on ``in_proj`` and ``out_proj`` and fp32 structural rows, everything else frozen.

Files of an adapter directory: ``adapter_config.json`` and ``adapter_model.safetensors`` as PEFT names them, and
``structural_rows.safetensors`` (rows, and their token ids) where the vocabulary was extended.
"""

import json
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import nn

from inference.model.tensors import check_tensors, read_tensors
from inference.model.vocabulary import fold_structural_rows

# Where LoRA goes, by model type; every other Transformer gets its attention and MLP projections.
TARGETS = {
    "trace_mamba2": ("in_proj", "out_proj"),
    "gpt_neox": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
}
_TRANSFORMER_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_ROWS = ("structural_rows", "structural_head_rows")


def attach_adapter(
    model: nn.Module, rank: int, alpha: float, dropout: float = 0.0, targets: tuple[str, ...] | None = None
) -> nn.Module:
    """Freezes the model and adds fresh LoRA (B = 0, so outputs do not change), in place; returns the model.

    Raises:
        ValueError: an adapter is there already, or no module of the model has a target's name.
    """
    if any(isinstance(m, LoraLayer) for m in model.modules()):
        raise ValueError("the model already carries an adapter; merge it first")
    if targets is None:
        targets = TARGETS.get(model.config.model_type, _TRANSFORMER_TARGETS)
    config = LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=list(targets), bias="none"
    )
    model.requires_grad_(False)
    try:
        inject_adapter_in_model(config, model)
    except ValueError as error:
        raise ValueError(
            f"no LoRA target {list(targets)} in a {model.config.model_type} model: {error}"
        ) from error
    for name, parameter in model.named_parameters():
        # fp32 whatever the base's dtype: bf16 AdamW without master weights loses small updates.
        if "lora_" in name or name in _ROWS:
            parameter.data = parameter.data.float()
            parameter.requires_grad_(True)
    model.adapter_settings = {"rank": rank, "alpha": alpha, "dropout": dropout, "targets": sorted(targets)}
    return model


def save_adapter(model: nn.Module, directory: str | Path) -> None:
    """Writes the adapter directory described above. ValueError when the model has no adapter."""
    settings = getattr(model, "adapter_settings", None)
    if settings is None:
        raise ValueError("the model carries no adapter to save")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    lora = {
        f"base_model.model.{k}": v.detach().cpu().contiguous()
        for k, v in get_peft_model_state_dict(model).items()
    }
    save_file(lora, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    rows = {
        name: getattr(model, name).detach().cpu().contiguous()
        for name in _ROWS
        if getattr(model, name) is not None
    }
    if rows:
        rows["structural_ids"] = model.structural_ids.cpu()
        save_file(rows, directory / "structural_rows.safetensors")
    config = {
        "peft_type": "LORA", "task_type": None, "r": settings["rank"], "lora_alpha": settings["alpha"],
        "lora_dropout": settings["dropout"], "target_modules": settings["targets"], "bias": "none",
        "base_model_name_or_path": None, "inference_mode": True,
    }  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def load_adapter(
    model: nn.Module, directory: str | Path, trainable: bool = False, dropout: float | None = None
) -> nn.Module:
    """Attaches a saved adapter, in place; returns the model.

    Args:
        trainable: keep training it (stage 3 continues stage 2's), else everything is frozen.
        dropout: overrides the saved dropout.

    Raises:
        FileNotFoundError: a file of the directory is missing.
        ValueError: a damaged file, or an adapter of another model (names or shapes differ).
    """
    directory = Path(directory)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (directory / name).is_file():
            raise FileNotFoundError(
                f"{directory / name}: missing, so this is not a (complete) adapter directory"
            )
    try:
        config = json.loads((directory / "adapter_config.json").read_text())
    except ValueError as error:
        raise ValueError(
            f"{directory / 'adapter_config.json'}: not valid JSON ({error}); the adapter is half-written"
        ) from error
    missing = [key for key in ("r", "lora_alpha", "lora_dropout", "target_modules") if key not in config]
    if missing:
        raise ValueError(f"{directory / 'adapter_config.json'}: key {missing[0]!r} is missing")
    tensors = read_tensors(directory / "adapter_model.safetensors")
    tensors = {k.removeprefix("base_model.model."): v for k, v in tensors.items()}
    attach_adapter(
        model, config["r"], config["lora_alpha"], config["lora_dropout"] if dropout is None else dropout,
        tuple(config["target_modules"]),
    )  # fmt: skip
    expected = get_peft_model_state_dict(model)
    check_tensors(tensors, expected, directory / "adapter_model.safetensors")
    set_peft_model_state_dict(model, tensors)
    _load_rows(model, directory / "structural_rows.safetensors")
    if not trainable:
        model.requires_grad_(False)
    return model


def _load_rows(model: nn.Module, path: Path) -> None:
    if not path.is_file():
        if model.structural_rows is not None:
            raise FileNotFoundError(f"{path}: missing, but the model's vocabulary is extended")
        return
    rows = read_tensors(path)
    if model.structural_rows is None:
        raise ValueError(
            f"{path}: has structural rows, the model's vocabulary is not extended; extend it first"
        )
    if rows["structural_ids"].tolist() != model.structural_ids.tolist():
        raise ValueError(
            f"{path}: structural tokens at ids {rows['structural_ids'].tolist()}, the tokenizer has others"
        )
    for name in _ROWS:
        if getattr(model, name) is not None:
            with torch.no_grad():
                getattr(model, name).copy_(rows[name])


def merge_adapter(model: nn.Module) -> nn.Module:
    """Adds the adapter into the weights and the structural rows into the matrix, in place; returns the model."""
    for name, module in list(model.named_modules()):
        if isinstance(module, LoraLayer):
            module.merge(safe_merge=True)
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, module.base_layer)
    fold_structural_rows(model)
    for attribute in ("adapter_settings", "peft_config"):
        if hasattr(model, attribute):
            delattr(model, attribute)
    return model


def trainable_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Names and parameters that train, in order."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]
