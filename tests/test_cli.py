"""The command line: run directories, YAML lookup, what wins over what, and errors a user can act on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml  # type: ignore[import-untyped]
from safetensors.torch import load_file
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from callbacks.run_record import read_metrics
from lightning_modules import cli, ship
from lightning_modules.runs import claim, run_directory
from tests.tiny_training import REPOSITORY, fit_arguments, run_forked, scalars, tiny

FAST: dict[str, Any] = {"data.limit_train": 8, "data.batch_size": 4}


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cli"])


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, by the real command in a process of its own; the output lies beside it."""
    folder = tmp_path_factory.mktemp("done")
    options = {
        **FAST,
        "model.plan_metrics_dialogues": 2,
        "model.max_new_tokens": 40,
        "trainer.callbacks": None,
    }
    arguments = fit_arguments(**options)
    result = subprocess.run(
        [sys.executable, "-m", "lightning_modules.cli", *arguments],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    (folder / "stdout").write_text(result.stdout)
    (folder / "stderr").write_text(result.stderr)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def fails(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that a failing command prints."""
    assert cli.main([str(a) for a in arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1, err
    return err.removeprefix("error: ").strip()


def yaml_file(name: str, text: str) -> str:
    Path(name).write_text(text)
    return name


# -- a whole run ----------------------------------------------------------------------------------------------------


def test_what_a_run_leaves(done: Path) -> None:
    run = done / "runs/stage2"
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


def test_what_a_run_prints(done: Path) -> None:
    """The table, where things are, what to type next; no library chatter, nothing on stderr."""
    out = (done / "stdout").read_text()
    for piece in ("starting from", "plan_exact_match", "before", "after", "runs/stage2/", "next:",
                  "tensorboard --logdir", "fit --config stage3.yaml", "train/loss", "val/loss"):  # fmt: skip
        assert piece in out, piece
    assert len(out.splitlines()) < 60
    assert (done / "stderr").read_text() == ""


def test_config_yaml_repeats_the_run(done: Path, tmp_path: Path) -> None:
    """The resolved YAML alone makes the same run again."""
    config = done / "runs/stage2/config.yaml"
    assert yaml.safe_load(config.read_text())["model"]["init_args"]["rank"] == 8
    assert run_forked(["fit", "--config", str(config)], tmp_path) == 0
    again = tmp_path / "runs/stage2"
    assert (again / "metrics.json").read_bytes() == (done / "runs/stage2/metrics.json").read_bytes()


def test_validate_measures_a_checkpoint(done: Path, tmp_path: Path) -> None:
    arguments = fit_arguments(**FAST)
    arguments[0] = "validate"
    arguments += ["--ckpt_path", str(done / "runs/stage2/checkpoints/best.ckpt")]
    assert run_forked(arguments, tmp_path) == 0
    metrics = read_metrics(tmp_path / "runs/validate-stage2")
    best = torch.load(done / "runs/stage2/checkpoints/best.ckpt", weights_only=True)
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
        assert run_forked([*arguments, "--config", "transformer.yaml"], tmp_path) == 0
    assert json.loads(Path("runs/stage2/export/base.json").read_text())["base"]["name"] == "stage1"
    metrics = read_metrics(tmp_path / "runs/stage2")
    assert metrics["after/val_loss"]["value"] < metrics["before/val_loss"]["value"]
    GPTNeoXForCausalLM.from_pretrained("runs/stage2/export/merged")


# -- run directories ------------------------------------------------------------------------------------------------


def test_a_used_directory_is_refused(
    done: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(done)
    before = (done / "runs/stage2/config.yaml").read_bytes()
    line = fails(capsys, *fit_arguments(**FAST))
    assert (
        line.startswith("runs/stage2 already holds a run") and "--ckpt_path" in line and "--overwrite" in line
    )
    assert (done / "runs/stage2/config.yaml").read_bytes() == before


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


# -- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model:\n  init_args:\n    lrr: 3\n", "bad.yaml, line 3: unknown key model.init_args.lrr (did you mean lr?)"),
        ("data:\n  init_args:\n    stages: 3\n",
         "bad.yaml, line 3: unknown key data.init_args.stages (did you mean stage?)"),
        ("modell:\n  init_args:\n    lr: 3\n", "bad.yaml, line 1: unknown key modell (did you mean model?)"),
        ("trainer:\n  max_epoch: 3\n", "bad.yaml, line 2: unknown key trainer.max_epoch (did you mean max_epochs?)"),
        ("checkpoint:\n  every: 3\n", "bad.yaml, line 2: unknown key checkpoint.every"),
        ("model:\n  init_args:\n    lr: fast\n", "bad.yaml, line 3: model.init_args.lr is 'fast', expected float"),
        ("a: b\n c: [\n", "bad.yaml, line 2: not valid YAML"),
        ("- a\n", "bad.yaml, line 1: the file must hold `key: value` lines"),
        (
            "trainer:\n  callbacks:\n    - class_path: callbacks.plan_samples.PlanSamples\n"
            "      init_args:\n        many: 1\n",
            "bad.yaml, line 5: unknown key trainer.callbacks.init_args.many",
        ),
        ("model:\n  class_path: lightning_modules.trace_sft.Nope\n", "bad.yaml, line 2: class_path lightning_modules"),
        ("model:\n  class_path: torch.nn.Linear\n", "bad.yaml, line 1: model: class_path torch.nn.Linear is no Lightn"),
        ("data:\n  init_args:\n    limit_dev: few\n", "bad.yaml, line 3: data.init_args.limit_dev has a value of the "
         "wrong type, expected one of int, null"),
        ("", "bad.yaml: holds no settings"),
        ("trainer:\n", "bad.yaml, line 1: trainer must hold `key: value` lines"),
        ("model: 3\n", "bad.yaml, line 1: model must hold `key: value` lines"),
        ("data:\n  init_args:\n    stage: 2\n    stage: 3\n", "bad.yaml, line 4: key stage stands here a second time"),
        ("1: 2\n", "bad.yaml, line 1: a key must be a name"),
        ("a: &a [*a]\n", "bad.yaml, line 1: the alias of this node stands inside it"),
        ("a: !!python/name:os.system\n", "bad.yaml, line 1: not valid YAML (could not determine a constructor"),
        ("seed_everything: -1\n", "seed_everything is -1: it must be from 0"),
    ],
)  # fmt: skip
def test_yaml_errors_name_file_line_and_key(
    text: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = fails(capsys, "fit", "--config", "stage2.yaml", "--config", yaml_file("bad.yaml", text))
    assert line.startswith(expected)
    assert not Path("runs").exists()


def test_command_line_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert fails(capsys, "fit", "--config", "none.yaml").startswith(
        "--config none.yaml: no such file here or in"
    )
    assert (
        fails(capsys, "fit", "--config", "stage2.yaml", "--lrr", "3")
        == "the command line: unknown option --lrr"
    )
    assert fails(capsys, "fit", "--config", "stage2.yaml", "--model.lrr=3").startswith(
        "the command line: unknown key --model.lrr"
    )
    assert "'fitt'" in fails(capsys, "fitt", "--config", "stage2.yaml")
    assert "gone.ckpt does not exist" in fails(capsys, *fit_arguments(), "--ckpt_path", "gone.ckpt")
    assert fails(capsys, "--config", "stage2.yaml", "fit").startswith("the command stands first: {fit,")
    assert fails(capsys, "fit").endswith("name a recipe, such as --config stage2.yaml")
    assert fails(capsys, "fit", "--config", "stage2.yaml", "x") == "the command line: unknown argument x"
    Path("bad.yaml").write_bytes(b"\xff\xfe")
    assert "bad.yaml: not UTF-8" in fails(capsys, "fit", "--config", "bad.yaml")


@pytest.mark.parametrize(
    ("key", "value"),
    [("model.rank", 0), ("model.lr", -1), ("model.dropout", 1), ("model.betas", "[2,3]"), ("model.chunk_size", 0),
     ("model.weight_decay", -1), ("model.max_new_tokens", 0), ("model.plan_metrics_dialogues", -1),
     ("data.batch_size", 0), ("data.limit_train", -1), ("data.max_row_tokens", 0), ("data.replay_fraction", -1),
     ("trainer.accumulate_grad_batches", 0)],
)  # fmt: skip
def test_numbers_out_of_range_are_named(key: str, value: object, capsys: pytest.CaptureFixture[str]) -> None:
    line = fails(capsys, *fit_arguments(**{key: value}))
    assert line.startswith(f"{key} is ") and "it must be" in line
    assert not Path("runs").exists()


@pytest.mark.parametrize("text", ["[]", '{"base"', '{"base": 3, %s}', '{"base": {"name": "x"}, %s}'])
def test_a_damaged_base_json_is_named(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("export").mkdir()
    Path("export/base.json").write_text(text.replace("%s", '"schema": "export/1", "template": "1"'))
    assert "export/base.json" in fails(capsys, *fit_arguments(**{"model.init_from": "export"}))


@pytest.mark.parametrize("command", ["test", "predict"])
def test_commands_the_module_lacks(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [command, *fit_arguments()[1:]]
    assert fails(capsys, *arguments) == f"TraceSFT has no {command}: use validate, or fit"
    assert not Path("runs").exists()


def test_ctrl_c_says_how_to_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            sys.exit(1)

    monkeypatch.setattr(cli.LightningCLI, "_run_subcommand", interrupted)
    with pytest.raises(SystemExit):
        cli.main(fit_arguments())
    assert "interrupted: there is no checkpoint to resume yet" in capsys.readouterr().err


def test_shipping_never_loses_an_asset(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What cannot be shipped leaves the assets as they were; `.` inside a run means that run."""
    assets = tmp_path / "assets"
    (assets / "stage2").mkdir(parents=True)
    (assets / "stage2/README.md").write_text("old")
    monkeypatch.setattr(ship, "ASSETS", assets)
    shutil.copytree(done / "runs/stage2", "runs/stage2")
    Path("runs/stage2/metrics.json").rename("metrics.json")
    monkeypatch.chdir("runs/stage2")
    assert ship.main(["."]) == 2 and "metrics.json does not exist" in capsys.readouterr().err
    assert (assets / "stage2/README.md").read_text() == "old"
    (tmp_path / "metrics.json").rename("metrics.json")
    assert ship.main(["."]) == 0
    assert sorted(path.name for path in assets.iterdir()) == ["stage2"]
    assert (assets / "stage2/README.md").read_text().startswith("# stage2")
    assert (assets / "stage2/adapter/adapter_model.safetensors").is_file()


def test_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    line = fails(capsys, *fit_arguments(trainer__accelerator="nonsense"))
    assert line.startswith("trainer.accelerator, trainer.devices: ") and "nonsense" in line


def test_only_a_checkpoint_of_this_stage_resumes(
    done: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    last = done / "runs/stage2/checkpoints/last.ckpt"
    Path("empty.ckpt").write_bytes(b"")
    Path("half.ckpt").write_bytes(last.read_bytes()[:5000])
    torch.save({"a": 1}, "foreign.ckpt")
    for path, expected in (("empty.ckpt", "no checkpoint, damaged"), ("half.ckpt", "no checkpoint, damaged"),
                           ("foreign.ckpt", "not a checkpoint of a run"), (".", "is a directory"),
                           ("", "does not exist")):  # fmt: skip
        assert expected in fails(capsys, *fit_arguments(), "--ckpt_path", path)
    assert not Path("runs").exists()
    # Stage 3 on the same base continues the same weights, so nothing but the record tells the stages apart.
    start = done / "runs/stage2"
    arguments = fit_arguments("stage3.yaml", **{**FAST, "model.init_from": start})
    assert "of another stage" in fails(capsys, *arguments, "--ckpt_path", last)


def test_missing_start_and_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert fails(capsys, *fit_arguments(**{"model.init_from": "gone"})).startswith(
        "model.init_from gone does not exist"
    )
    assert fails(capsys, *fit_arguments(**{"data.path": "gone"})).startswith(
        "data.path gone is not a directory"
    )
    assert "stage1/train.jsonl" in (
        line := fails(capsys, *fit_arguments("stage1.yaml", **{"data.path": "."}))
    ) or ("stage1/dev.jsonl does not exist" in line)


def test_half_written_model_directory(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shutil.copytree(tiny().base, "half")
    size = Path("half/model.safetensors").stat().st_size
    os.truncate("half/model.safetensors", size // 2)
    assert "half/model.safetensors" in fails(capsys, *fit_arguments(**{"model.init_from": "half"}))
    Path("half/tokenizer.json").unlink()
    assert "half/tokenizer.json does not exist" in fails(
        capsys, *fit_arguments(**{"model.init_from": "half"})
    )


def test_malformed_record_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shutil.copytree(tiny().world / "short", "mumu/short")
    lines = Path("mumu/short/train.jsonl").read_text().splitlines()
    record = json.loads(lines[2])
    del record["turns"][0]["traces"][0]["keywords"]
    lines[2] = json.dumps(record)
    Path("mumu/short/train.jsonl").write_text("\n".join(lines))
    line = fails(capsys, *fit_arguments(**{"data.path": "mumu"}))
    assert (
        "mumu/short/train.jsonl" in line and "line 3" in line.replace(":3", " line 3") and "keywords" in line
    )


def test_a_bug_keeps_its_traceback() -> None:
    """Only messages this project raises for users lose the traceback; what a library raises keeps it."""
    try:
        torch.zeros(2).view(3)
    except RuntimeError as error:
        assert cli.users_mistake(error) is None
    try:
        json.loads("{")
    except ValueError as error:
        assert cli.users_mistake(error) is None
    try:
        cli.find_config("none.yaml")
    except FileNotFoundError as error:
        assert cli.users_mistake(error) is not None


@pytest.mark.parametrize("name", ["", "a/b", "../x", "a/../../x", "/tmp/x", ".hidden", "x\ny"])
def test_a_run_never_leaves_its_folder(name: str) -> None:
    with pytest.raises(ValueError, match="--name"):
        run_directory(name)
    assert run_directory("stage2-try.3") == Path("runs/stage2-try.3")


@pytest.mark.skipif(find_spec("deepspeed") is not None, reason="deepspeed is installed")
def test_a_strategy_that_is_not_installed_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "mumu").mkdir()
    arguments = [
        "fit",
        "--config",
        "stage1.yaml",
        "--config",
        "h100x4/stage1.yaml",
        "--data.path",
        str(tmp_path / "mumu"),
    ]
    assert cli.main(arguments) == 2
    assert "deepspeed is not installed: pip install -c constraints.txt" in capsys.readouterr().err
