"""The command line: what a run leaves and prints, run directories, YAML lookup, what wins over what."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml  # type: ignore[import-untyped]
from safetensors.torch import load_file
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from callbacks.run_record import read_metrics
from lightning_modules import cli
from lightning_modules.runs import claim
from tests.cli_tools import FAST, fails, yaml_file
from tests.tiny_training import REPOSITORY, fit_arguments, run_forked, scalars, tiny

pytestmark = pytest.mark.usefixtures("in_tmp")


# -- a whole run ----------------------------------------------------------------------------------------------------


def test_what_a_run_leaves(finished_run: Path) -> None:
    run = finished_run / "runs/stage2"
    for name in ("config.yaml", "metrics.json", "checkpoints/last.ckpt", "checkpoints/best.ckpt", "export/base.json",
                 "export/adapter/adapter_model.safetensors", "export/merged/config.json"):  # fmt: skip
        assert (run / name).is_file(), name
    tags = scalars(run)
    for tag in ("train/loss", "train/grad_norm", "val/loss", "lr-AdamW", "speed/plan_tokens_per_second",
                "speed/tokens_per_second", "train/real_token_share"):  # fmt: skip
        assert any(name.startswith(tag) for name in tags), (tag, sorted(tags))
    assert all(share >= 0.95 for _, share in tags["train/real_token_share"])
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert events.Tags()["images"] and events.Tags()["tensors"], "a DAG picture and the plans as text"


def test_what_a_run_prints(finished_run: Path) -> None:
    """The table, where things are, what to type next; no library chatter, nothing on stderr."""
    out = (finished_run / "stdout").read_text()
    for piece in ("starting from", "plan_exact_match", "before", "after", "runs/stage2/", "next:",
                  "tensorboard --logdir", "fit --config stage3.yaml", "train/loss", "val/loss"):  # fmt: skip
        assert piece in out, piece
    assert len(out.splitlines()) < 60
    assert (finished_run / "stderr").read_text() == ""


def test_config_yaml_repeats_the_run(finished_run: Path, tmp_path: Path) -> None:
    """The resolved YAML alone makes the same run again."""
    config = finished_run / "runs/stage2/config.yaml"
    assert yaml.safe_load(config.read_text())["model"]["init_args"]["rank"] == 8
    assert run_forked(["fit", "--config", str(config)], tmp_path) == 0
    again = tmp_path / "runs/stage2"
    assert (again / "metrics.json").read_bytes() == (finished_run / "runs/stage2/metrics.json").read_bytes()


def test_validate_measures_a_checkpoint(finished_run: Path, tmp_path: Path) -> None:
    arguments = fit_arguments(**FAST)
    arguments[0] = "validate"
    arguments += ["--ckpt_path", str(finished_run / "runs/stage2/checkpoints/best.ckpt")]
    assert run_forked(arguments, tmp_path) == 0
    metrics = read_metrics(tmp_path / "runs/validate-stage2")
    best = torch.load(finished_run / "runs/stage2/checkpoints/best.ckpt", weights_only=True)
    score = next(v["best_score"] for k, v in best["callbacks"].items() if k.startswith("RunCheckpoints"))
    assert metrics["val_loss"]["value"] == pytest.approx(score, rel=1e-6)


def test_last_is_the_last_and_export_the_best(tmp_path: Path) -> None:
    """With the largest loss called best, `best` stays at the first validation; `last` is where training ended."""
    options: dict[str, Any] = {
        **FAST,
        "trainer.max_epochs": 2,
        "trainer.val_check_interval": 1.0,
        "checkpoint.mode": "max",
    }
    assert run_forked(fit_arguments(**options), tmp_path) == 0
    last, best = (
        torch.load(f"runs/stage2/checkpoints/{name}.ckpt", weights_only=True) for name in ("last", "best")
    )
    assert (best["global_step"], last["global_step"]) == (2, 4)
    rows = "model.structural_rows"
    assert not torch.equal(last["state_dict"][rows], best["state_dict"][rows])
    exported = load_file("runs/stage2/export/adapter/structural_rows.safetensors")["structural_rows"]
    assert torch.equal(exported, best["state_dict"][rows])


def test_a_transformer_goes_the_same_way(tmp_path: Path) -> None:
    """Overlay transformer.yaml on a tiny GPT-NeoX: stage 1, then stage 2 from its run."""
    config = GPTNeoXConfig(vocab_size=512, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                           intermediate_size=64, tie_word_embeddings=False)  # fmt: skip
    GPTNeoXForCausalLM(config).save_pretrained("neox")
    tiny().tokens().save("neox")
    options: dict[str, Any] = {
        **FAST,
        "data.max_length": 600,
        "model.plan_metrics_dialogues": 1,
        "model.max_new_tokens": 20,
    }
    for stage, start in (("stage1", "neox"), ("stage2", None)):
        arguments = fit_arguments(f"{stage}.yaml", **{**options, "model.init_from": start})
        # Not forked: transformers loads weights in threads, which a forked child has lost.
        command = [sys.executable, "-m", "lightning_modules.cli", *arguments, "--config", "transformer.yaml"]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
    assert json.loads(Path("runs/stage2/export/base.json").read_text())["base"]["name"] == "stage1"
    metrics = read_metrics(tmp_path / "runs/stage2")
    assert metrics["after/val_loss"]["value"] < metrics["before/val_loss"]["value"]
    GPTNeoXForCausalLM.from_pretrained("runs/stage2/export/merged")


# -- run directories ------------------------------------------------------------------------------------------------


def test_a_used_directory_is_refused(
    finished_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(finished_run)
    before = (finished_run / "runs/stage2/config.yaml").read_bytes()
    line = fails(capsys, *fit_arguments(**FAST))
    assert (
        line.startswith("runs/stage2 already holds a run") and "--ckpt_path" in line and "--overwrite" in line
    )
    assert (finished_run / "runs/stage2/config.yaml").read_bytes() == before


def test_overwrite_removes_what_a_run_wrote_and_no_more(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for name in ("checkpoints/last.ckpt", "export/base.json", "metrics.json", "config.yaml", "notes.txt"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("x")
    with pytest.raises(FileExistsError, match="already holds a run"):
        claim(run, resuming=False, overwrite=False)
    claim(run, resuming=True, overwrite=False)
    assert (run / "checkpoints/last.ckpt").exists()
    claim(run, resuming=False, overwrite=True)
    assert [path.name for path in run.iterdir()] == ["notes.txt"]
    with pytest.raises(FileExistsError, match=r"holds notes\.txt, which no run wrote"):
        claim(run, resuming=False, overwrite=True)


def test_a_failed_start_leaves_the_name_free(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text("x")
    claim(tmp_path / "run", resuming=False, overwrite=False)
    with pytest.raises(FileExistsError, match="is a file"):
        (tmp_path / "file").write_text("")
        claim(tmp_path / "file", resuming=False, overwrite=True)


# -- what wins ------------------------------------------------------------------------------------------------------


def test_working_directory_before_shipped(tmp_path: Path) -> None:
    assert cli.find_config("stage2.yaml") == str(cli.CONFIGS / "stage2.yaml")
    yaml_file("stage2.yaml", "seed_everything: 1\n")
    assert cli.find_config("stage2.yaml") == "stage2.yaml"
    arguments, files = cli.find_configs(
        ["fit", "--config=h100x4/stage2.yaml", "-c", "stage2.yaml", "--name", "x"]
    )
    assert files == [str(cli.CONFIGS / "h100x4/stage2.yaml"), "stage2.yaml"]
    assert arguments == ["fit", f"--config={files[0]}", "-c", files[1], "--name", "x"]


def test_command_line_and_yaml_win_over_a_checkpoint(tmp_path: Path) -> None:
    """Resumed with another rate, a run trains with that rate (Lightning would take the checkpoint's)."""
    options: dict[str, Any] = {**FAST, "trainer.max_epochs": 2, "model.lr": 0.01, "name": "a"}
    assert run_forked(fit_arguments(**options, trainer__max_steps=2), tmp_path) == 0
    resumed = fit_arguments(**{**options, "model.lr": 0.5, "model.warmup_fraction": 0.0})
    assert run_forked([*resumed, "--ckpt_path", "last"], tmp_path) == 0
    saved = yaml.safe_load(Path("runs/a/config.yaml").read_text())
    assert saved["model"]["init_args"]["lr"] == 0.5
    state = torch.load("runs/a/checkpoints/last.ckpt", weights_only=True)
    assert state["global_step"] == 4
    rates = [
        value
        for _, value in next(v for k, v in scalars(tmp_path / "runs/a").items() if k.startswith("lr-AdamW"))
    ]
    assert rates[-2:] == pytest.approx([0.5 * 2 / 4, 0.5 * 1 / 4])  # steps 2 and 3 of 4


def test_before_metrics_survive_a_resume(tmp_path: Path) -> None:
    options: dict[str, Any] = {**FAST, "trainer.max_epochs": 2, "name": "a"}
    assert run_forked(fit_arguments(**options, trainer__max_steps=2), tmp_path) == 0
    before = read_metrics(tmp_path / "runs/a")["before/val_loss"]
    assert run_forked([*fit_arguments(**options), "--ckpt_path", "last"], tmp_path) == 0
    after = read_metrics(tmp_path / "runs/a")
    assert after["before/val_loss"] == before and after["after/val_loss"]["value"] < before["value"]
