"""What a training run leaves behind, and how a later stage or the runtime opens it.

An export directory holds
    adapter/    only what was trained (LoRA and structural rows); absent where the whole model was trained
    base.json   what the adapter sits on: {"schema", "base": {"name", "path", "hash"} or null, "tokenizer", "template"}
    merged/     a stock Hugging Face directory with the adapter merged in; shipped assets leave it out
CMT-RAG B.3: stage 1 is merged before stage 2, stage 3 continues the adapter of stage 2.

A source is named by a path: a run directory (its `export/` is meant), an export directory, or a model directory; the
name `smollm2` is the embedded Transformer (inference/smollm2.py).
The hash of a source is taken from the files that define it (the base's hash and the adapter, or the weights), so it is
the same on every machine; merged weights are not, because matrix products differ in the last bit.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from inference import smollm2
from inference.model import extend_vocabulary, load_adapter, load_model, merge_adapter
from inference.tokens import TEMPLATE_VERSION, PlanTokenizer

ASSETS = Path(__file__).parent / "assets"
SCHEMA = "export/1"
# The embedded base is shipped under its model's name, not under the run that made it.
ASSET_OF_RUN = {"pretrain": "mamba2-tiny"}


@dataclass(frozen=True)
class BaseReference:
    """What an adapter sits on.

    Attributes:
        name: how the user knows it (a run's name, an asset's name, a directory's name).
        path: where it was, relative to the export directory that names it.
        hash: `source_hash` of it.
    """

    name: str
    path: str
    hash: str


def open_source(path: str | Path) -> Path:
    """The export or model directory a path means.

    Raises:
        FileNotFoundError: nothing is there, or a run that has not written its export yet.
        ValueError: a directory of something else.
    """
    if str(path) == smollm2.NAME and not Path(path).exists():
        return smollm2.smollm2_directory()
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such directory")
    for candidate in (path, path / "export"):
        if (candidate / "base.json").is_file() or (candidate / "config.json").is_file():
            return candidate
    if (path / "config.yaml").is_file():
        raise FileNotFoundError(
            f"{path} is a run that has not ended: it has no export/. "
            f"Resume it with --ckpt_path {path}/checkpoints/last.ckpt"
        )
    raise ValueError(
        f"{path} is neither a run, nor an export (base.json), nor a model directory (config.json)"
    )


def read_base(source: Path) -> BaseReference | None:
    """The base reference of an export directory; None where the whole model was trained or it is a model directory."""
    file = source / "base.json"
    if not file.is_file():
        return None
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON ({error}): the export may be half written") from error
    if not isinstance(record, dict):
        raise ValueError(f"{file}: holds {type(record).__name__}, not an object: no export wrote it")
    if record.get("schema") != SCHEMA:
        raise ValueError(f"{file}: schema is {record.get('schema')!r}, this version reads {SCHEMA!r}")
    if record.get("template") != TEMPLATE_VERSION:
        raise ValueError(
            f"{file}: template is {record.get('template')!r}, this version writes turns as {TEMPLATE_VERSION!r}"
        )
    base = record.get("base")
    if base is None:
        return None
    for key in ("name", "path", "hash"):
        if not isinstance(base, dict) or not isinstance(base.get(key), str):
            raise ValueError(f"{file}: key base.{key} is missing or no string: no export wrote it")
    return BaseReference(base["name"], base["path"], base["hash"])


def find_base(source: Path) -> Path:
    """The directory an export's adapter sits on: where it was, else the shipped asset of that name.

    Raises:
        FileNotFoundError: neither place has it.  ValueError: what is there has another hash.
    """
    base = read_base(source)
    if base is None:
        raise ValueError(f"{source} names no base: its whole model was trained")
    shipped = ASSETS / ASSET_OF_RUN.get(base.name, base.name)
    found = [path for path in ((source / base.path).resolve(), shipped) if path.is_dir()]
    for path in found:
        if source_hash(open_source(path)) == base.hash:
            return open_source(path)
    if found:
        raise ValueError(
            f"{source}: its adapter was trained on another {base.name} than {found[0]} (hashes differ)"
        )
    raise FileNotFoundError(
        f"{source}: its adapter sits on {base.name}, which is neither at {source / base.path} nor at {shipped}"
    )


def source_hash(source: Path) -> str:
    """sha256 that names an export or model directory by the files that define it."""
    digest = hashlib.sha256()
    base = read_base(source)
    if base is not None:
        digest.update(base.hash.encode())
        files = sorted((source / "adapter").glob("*.safetensors"))
    else:
        directory = source / "merged" if (source / "base.json").is_file() else source
        files = sorted([*directory.glob("*.safetensors"), *directory.glob("pytorch_model*.bin")])
    if not files:
        raise FileNotFoundError(f"{source}: no weights (*.safetensors) here; the directory is half written")
    for file in files:
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def load_tokens(source: Path) -> PlanTokenizer:
    """The tokenizer of a source: beside its weights, else its base's. Structural tokens may still be missing.

    Raises ValueError where base.json names another tokenizer.
    """
    read_base(source)  # a damaged base.json is refused before anything else
    for directory in (source / "merged", source):
        if (directory / "tokenizer.json").is_file():
            tokens = PlanTokenizer.from_pretrained(directory)
            break
    else:
        if not (source / "adapter").is_dir():
            raise FileNotFoundError(
                f"{source / 'tokenizer.json'} does not exist: put the model's tokenizer there "
                "(for state-spaces/mamba2-* that of EleutherAI/gpt-neox-20b), or name it with --model.tokenizer"
            )
        tokens = load_tokens(find_base(source))
    if (source / "adapter").is_dir():
        named = json.loads((source / "base.json").read_text(encoding="utf-8")).get("tokenizer")
        if named is not None and named != tokens.extend().fingerprint():
            raise ValueError(f"{source}: mismatched tokenizer, base.json names {named[:12]}…, found another")
    return tokens


def load_merged(source: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model of a source with every adapter merged in."""
    if (source / "merged").is_dir():
        return load_model(source / "merged", dtype)
    if not (source / "base.json").is_file():
        return load_model(source, dtype)
    model, adapter = load_base(source, dtype)
    load_adapter(model, adapter)
    return merge_adapter(model)


def load_base(source: Path, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Path]:
    """What an export's adapter sits on, vocabulary extended, and the adapter's directory."""
    if not (source / "adapter").is_dir():
        raise ValueError(
            f"{source} holds no adapter/, only a whole model: it cannot be continued, start a new adapter on it"
        )
    model = load_merged(find_base(source), dtype)
    extend_vocabulary(model, load_tokens(source).extend())
    return model, source / "adapter"


def write_base(
    directory: Path,
    name: str | None,
    path: Path | None,
    hash_: str | None,
    tokens: PlanTokenizer,
    **more: Any,
) -> None:
    """Write base.json; `name`, `path` and `hash_` are None where the whole model was trained."""
    base = None
    if name is not None and path is not None:
        base = {"name": name, "path": os.path.relpath(path.resolve(), directory.resolve()), "hash": hash_}
    record = {
        "schema": SCHEMA,
        "base": base,
        "tokenizer": tokens.fingerprint(),
        "template": TEMPLATE_VERSION,
        **more,
    }
    directory.mkdir(parents=True, exist_ok=True)
    partial = directory / "base.json.partial"
    partial.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    partial.replace(directory / "base.json")


def clear_export(directory: Path) -> None:
    """Remove what an earlier export wrote, base.json first: a directory without it is no export."""
    (directory / "base.json").unlink(missing_ok=True)
    for name in ("adapter", "merged"):
        shutil.rmtree(directory / name, ignore_errors=True)
