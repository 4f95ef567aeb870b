"""Every shipped YAML and overlay parses, is built tiny, and says what Table 8 of the paper says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import yaml  # type: ignore[import-untyped]
from lightning.pytorch.strategies import DeepSpeedStrategy

from inference.model import export_merged, load_model
from inference.tokens import PlanTokenizer
from lightning_modules import cli
from lightning_modules.zero2 import SingleScalePrecision, Zero2Strategy
from tests.tiny_training import fit_arguments, run_forked, tiny

OVERLAYS = {"musique.yaml", "transformer.yaml"}
TESTS = {"traces.yaml"}  # `test` has tests of its own
STAGES = {"stage1.yaml", "stage2.yaml", "stage3.yaml"}
SHIPPED = sorted(str(path.relative_to(cli.CONFIGS)) for path in cli.CONFIGS.rglob("*.yaml"))
# What a stage, or a stage under an overlay, is asked for with.
COMMANDS = sorted(
    [(name,) for name in SHIPPED if (STAGES | {"pretrain.yaml"}) & {name}]
    + [("pretrain.yaml", "references.yaml"), ("pretrain.yaml", "lines.yaml")]
    + [(Path(name).name, name) for name in SHIPPED if name.startswith("h100x4/")]
    + [(stage, overlay) for stage in sorted(STAGES) for overlay in sorted(OVERLAYS)]
)
ON_THE_CPU = (
    "--trainer.accelerator=cpu",
    "--trainer.devices=1",
    "--trainer.strategy=auto",
    "--trainer.precision=32-true",
)
# Table 8: items aside, (learning rate, max length, epochs, global batch, rank, alpha, dropout, weight decay).
TABLE_8 = {
    "stage1": (5e-4, 1024, 3, 4, 16, 32, 0.05, 0.05),
    "stage2": (5e-5, 4096, 3, 8, 8, 16, 0.10, 0.05),
    "stage3": (2e-5, 8192, 3, 8, None, None, 0.10, 0.05),  # rank and alpha are the continued adapter's
}


class Parsed(cli.TraceCLI):
    """Stops where the Trainer would start; writes no run directory."""

    def after_instantiate_classes(self) -> None:
        pass

    def _run_subcommand(self, subcommand: str) -> None:
        pass


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory where every stage finds its predecessor, and data, tiny."""
    tiny()
    folder = tmp_path_factory.mktemp("home")
    for stage, start in (("stage1", tiny().base), ("stage2", None)):
        options = {"model.init_from": start, "trainer.max_steps": 1, "data.limit_dev": 2}
        assert run_forked(fit_arguments(f"{stage}.yaml", **options), folder) == 0
    export_merged(load_model(tiny().base), tiny().tokens(), folder / "runs/pretrain/export/merged")
    (folder / "runs/pretrain/export/base.json").write_text(
        (folder / "runs/stage1/export/base.json").read_text()
    )
    record = json.loads((folder / "runs/pretrain/export/base.json").read_text())
    (folder / "runs/pretrain/export/base.json").write_text(json.dumps({**record, "base": None}))
    (folder / "state-spaces").mkdir()
    (folder / "state-spaces/mamba2-2.7b").symlink_to(tiny().base)
    (folder / "mumu").symlink_to(tiny().world)
    return folder


@pytest.fixture(autouse=True)
def _argv(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["cli"])
    monkeypatch.chdir(home)


def parsed(names: tuple[str, ...], *more: str) -> Parsed:
    configs = [argument for name in names for argument in ("--config", name)]
    return Parsed(["fit", *configs, *more])


def test_all_are_covered() -> None:
    assert {name for command in COMMANDS for name in command} | TESTS == set(SHIPPED)
    assert set(SHIPPED) >= STAGES | OVERLAYS | {"pretrain.yaml"} | {f"h100x4/{stage}" for stage in STAGES}


@pytest.mark.parametrize("names", COMMANDS, ids="+".join)
def test_is_built_tiny(names: tuple[str, ...]) -> None:
    """Parsed, instantiated, model built, one batch through it, optimizer and schedule made."""
    tiny_options = ["--data.batch_size=2", "--data.limit_dev=2", "--data.limit_train=4"]
    if names[0] == "pretrain.yaml":
        tiny_options += [
            "--data.path=mumu", "--data.seeds=[5]", "--data.paragraphs_per_world=3",
            f"--data.tokenizer={tiny().tokenizer}",
        ]  # fmt: skip
        if len(names) > 1:  # a later pass
            tiny_options.append("--model.init_from=runs/pretrain")
        else:
            small = {"hidden_size": 32, "num_hidden_layers": 2, "head_dim": 16}
            tiny_options += [f"--model.architecture.{key}={value}" for key, value in small.items()]
    elif "musique.yaml" not in names:
        tiny_options.append("--data.path=mumu")
    made = parsed(names, *ON_THE_CPU, *tiny_options)
    module, data, trainer = made.model, made.datamodule, made.trainer
    trainer.strategy.connect(module)
    module.trainer, data.trainer = trainer, trainer
    trainer._data_connector.attach_datamodule(module, datamodule=data)
    data.prepare_data()
    data.setup("fit")
    module.configure_model()
    loss = module.token_nll(next(iter(data.train_dataloader()))).mean()
    loss.backward()
    assert torch.isfinite(loss)
    assert module.configure_optimizers()["lr_scheduler"]["interval"] == "step"
    assert trainer.gradient_clip_val == 1.0
    assert made.config.fit.seed_everything == 42


@pytest.mark.parametrize("stage", sorted(TABLE_8))
def test_paper_scale_is_table_8(stage: str) -> None:
    made = parsed((f"{stage}.yaml", f"h100x4/{stage}.yaml"), *ON_THE_CPU, "--data.path=mumu")
    overlay = yaml.safe_load((cli.CONFIGS / f"h100x4/{stage}.yaml").read_text())
    lr, length, epochs, batch, rank, alpha, dropout, decay = TABLE_8[stage]
    model, data, trainer = made.model, made.datamodule, made.trainer
    assert (model.lr, model.dropout, model.weight_decay) == (lr, dropout, decay)
    assert (data.max_length, trainer.max_epochs) == (length, epochs)
    devices = overlay["trainer"]["devices"]
    assert devices == 4 and devices * data.batch_size * trainer.accumulate_grad_batches == batch
    assert rank is None or (model.rank, model.alpha) == (rank, alpha)
    assert model.adapter == ("continue" if stage == "stage3" else "new")
    assert (model.warmup_fraction, trainer.gradient_clip_val) == (0.05, 1.0)
    assert data.node_limit == {"stage1": None, "stage2": 64, "stage3": 128}[stage]
    assert model.base_dtype == torch.bfloat16 and overlay["trainer"]["precision"] == "bf16-mixed"
    strategy = overlay["trainer"]["strategy"]["class_path"]
    assert strategy == f"{Zero2Strategy.__module__}.{Zero2Strategy.__name__}"


@pytest.mark.parametrize("stage", sorted(TABLE_8))
def test_paper_scale_takes_no_assets(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mumu").mkdir()
    monkeypatch.chdir(tmp_path)
    arguments = ["fit", "--config", f"{stage}.yaml", "--config", f"h100x4/{stage}.yaml", *ON_THE_CPU]
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    if stage == "stage1":
        assert "model.init_from state-spaces/mamba2-2.7b does not exist" in error
    else:
        assert "shipped assets are not allowed here" in error and "--model.init_from" in error
    assert not (tmp_path / "runs").exists()


def test_full_size_on_the_meta_device(tmp_path: Path) -> None:
    """h100x4/stage2.yaml at 2.7B: a rank-8 adapter on in_proj (2560 -> 10576) and out_proj (5120 -> 2560) of 64 layers
    has 64 * 8 * (2560 + 10576 + 5120 + 2560) = 10,657,792 weights, the paper's 10.7M; seven rows of 2560 come on top.
    """
    directory = tmp_path / "mamba2-2.7b"
    PlanTokenizer.from_pretrained(tiny().tokenizer).save(directory)
    config = {
        "d_model": 2560, "d_intermediate": 0, "n_layer": 64, "vocab_size": 50277, "ssm_cfg": {"layer": "Mamba2"},
        "attn_layer_idx": [], "attn_cfg": {}, "rms_norm": True, "residual_in_fp32": True, "fused_add_norm": True,
        "pad_vocab_size_multiple": 16, "tie_embeddings": True,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    made = parsed(
        ("stage2.yaml", "h100x4/stage2.yaml"),
        *ON_THE_CPU,
        f"--model.init_from={directory}",
        "--data.path=mumu",
    )
    model = made.model.build_model(meta=True)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    lora = sum(p.numel() for n, p in trained.items() if "lora_" in n)
    assert lora == 64 * 8 * (2560 + 10576 + 5120 + 2560) == 10_657_792
    assert sum(p.numel() for p in trained.values()) - lora == 7 * 2560
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert 2.7e9 < sum(p.numel() for p in model.parameters()) - lora < 2.75e9
    assert model.backbone.gradient_checkpointing  # type: ignore[union-attr]


def test_zero2_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage 2, adapter-only checkpoints, and the Trainer's precision plugin replaced by the one that scales once."""
    kept: dict = {}
    monkeypatch.setattr(DeepSpeedStrategy, "__init__", lambda self, **kwargs: kept.update(kwargs))
    strategy = Zero2Strategy()
    assert kept["stage"] == 2 and kept["exclude_frozen_parameters"]
    from lightning.pytorch.plugins.precision import DeepSpeedPrecision

    strategy.precision_plugin = DeepSpeedPrecision("bf16-mixed")
    assert isinstance(strategy.precision_plugin, SingleScalePrecision)
    assert strategy.precision_plugin.precision == "bf16-mixed"


@pytest.mark.parametrize("name", SHIPPED)
def test_keys_are_explained(name: str) -> None:
    """A recipe says at its top what it is for."""
    first = (cli.CONFIGS / name).read_text().splitlines()[0]
    assert first.startswith("# ") and len(first) > 30
