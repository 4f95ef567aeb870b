"""The command line: every mistake of a user is one line that names file, line or key, and loses nothing."""

from __future__ import annotations

import json
import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from lightning_modules import cli, ship
from lightning_modules.runs import run_directory
from tests.cli_tools import FAST, fails, yaml_file
from tests.tiny_training import fit_arguments, tiny

pytestmark = pytest.mark.usefixtures("in_tmp")


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
    finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What cannot be shipped leaves the assets as they were; `.` inside a run means that run."""
    assets = tmp_path / "assets"
    (assets / "stage2").mkdir(parents=True)
    (assets / "stage2/README.md").write_text("old")
    monkeypatch.setattr(ship, "ASSETS", assets)
    shutil.copytree(finished_run / "runs/stage2", "runs/stage2")
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
    finished_run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    last = finished_run / "runs/stage2/checkpoints/last.ckpt"
    Path("empty.ckpt").write_bytes(b"")
    Path("half.ckpt").write_bytes(last.read_bytes()[:5000])
    torch.save({"a": 1}, "foreign.ckpt")
    for path, expected in (("empty.ckpt", "no checkpoint, damaged"), ("half.ckpt", "no checkpoint, damaged"),
                           ("foreign.ckpt", "not a checkpoint of a run"), (".", "is a directory"),
                           ("", "does not exist")):  # fmt: skip
        assert expected in fails(capsys, *fit_arguments(), "--ckpt_path", path)
    assert not Path("runs").exists()
    # Stage 3 on the same base continues the same weights, so nothing but the record tells the stages apart.
    start = finished_run / "runs/stage2"
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
