"""Losses, schedule, what trains, what is saved, what is measured, and what a stage starts from."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Mamba2ForCausalLM

from callbacks.checkpoint import trained_state
from callbacks.dag_picture import dag_figure
from callbacks.plan_samples import as_markdown
from callbacks.rng import capture, restore
from callbacks.run_record import read_metrics
from datamodules.packing import Document, pack
from datamodules.traces import TraceData, encode_dialogue, planned_turns, read_split
from inference.exports import find_base, load_base, load_merged, load_tokens, open_source, source_hash
from inference.generator import Generated, TraceGenerator
from inference.model import export_merged, load_adapter, load_model, make_policy
from inference.traces import TraceDraft, TracePlan
from lightning_modules import runs
from lightning_modules.losses import chunked_token_nll, linear_warmup_decay, token_nll, window_loss
from lightning_modules.metrics import TokenLoss, write_plans
from lightning_modules.trace_sft import TraceSFT
from lightning_modules.zero2 import SingleScalePrecision
from tests.tiny_training import fit_arguments, run_forked, tiny


def module(**more: object) -> TraceSFT:
    """An SFT module on the tiny base, its model built."""
    made = TraceSFT(init_from=str(tiny().base), **more)  # type: ignore[arg-type]
    made.configure_model()
    return made


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stages 1, 2 and 3 run one after another by the command line, a few steps each."""
    tiny()
    folder = tmp_path_factory.mktemp("chain")
    for stage, start in (("stage1", tiny().base), ("stage2", None), ("stage3", None)):
        options = {"model.init_from": start, "model.plan_metrics_dialogues": 2, "model.max_new_tokens": 40}
        assert run_forked(fit_arguments(f"{stage}.yaml", **{**options, "model.lr": 0.01}), folder) == 0
    return folder / "runs"


# -- losses ---------------------------------------------------------------------------------------------------------


def test_window_loss_by_hand() -> None:
    """nll 1, 2, 4 with weights 1, 0, 0.5 in a window of weight 6: (1 + 2) / 6 = 0.5; times accumulate 8, world 2: 8.

    Lightning then divides by 8 and DDP averages over 2, so gradients are those of 0.5.
    """
    nll, weights = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 0.0, 0.5])
    assert window_loss(nll, weights, 6.0).item() == pytest.approx(0.5)
    assert window_loss(nll, weights, 6.0, accumulate=8, world=2).item() == pytest.approx(8.0)
    with pytest.raises(ValueError, match="none of its tokens carries loss"):
        window_loss(nll, weights, 0.0)


def test_token_nll_by_hand() -> None:
    """Logits 0, ln 3: softmax 1/4, 3/4."""
    logits = torch.tensor([[0.0, math.log(3)], [0.0, math.log(3)]])
    expected = torch.tensor([math.log(4), math.log(4 / 3)])
    torch.testing.assert_close(token_nll(logits, torch.tensor([0, 1])), expected)


def test_chunks_change_nothing() -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 50)
    hidden, targets = torch.randn(23, 8, requires_grad=True), torch.randint(50, (23,))
    whole = chunked_token_nll(hidden, targets, head, None)
    (gradient,) = torch.autograd.grad(whole.sum(), hidden)
    parts = chunked_token_nll(hidden, targets, head, 5)
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(torch.autograd.grad(parts.sum(), hidden)[0], gradient)


def test_schedule_by_hand() -> None:
    """40 steps, 5 % warm-up: two steps at 1/3 and 2/3, then 1 at step 2 falling by 1/38 a step to 1/38 at step 39."""
    factors = [linear_warmup_decay(step, 40, 0.05) for step in range(41)]
    assert factors[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert factors[39] == pytest.approx(1 / 38)
    assert factors[40] == 0
    assert linear_warmup_decay(0, 1, 0.05) == 1.0


def test_token_loss_weighs_tokens_not_batches() -> None:
    """(1*1 + 2*1) and (9*0.5): 7.5 / 2.5 = 3."""
    loss = TokenLoss()
    loss.update(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0]))
    loss.update(torch.tensor([9.0]), torch.tensor([0.5]))
    assert loss.compute().item() == pytest.approx(3.0)


# -- the module -----------------------------------------------------------------------------------------------------


def test_packed_loss_is_that_of_each_dialogue_alone() -> None:
    sft = module()
    turns = [planned_turns(d) for d in read_split(tiny().world, "short", "dev")[:5]]
    documents = [d for d in (encode_dialogue(t, sft.tokens, 4096)[0] for t in turns) if d is not None]
    sft.model.eval()  # type: ignore[union-attr]
    with torch.no_grad():
        packed = sft.token_nll(pack(documents, 1.0))
        rows = sft.token_nll(pack(documents, 1.0, max_row_tokens=max(map(len, documents))))
        alone = torch.cat([sft.token_nll(pack([d], 1.0)) for d in documents])
    torch.testing.assert_close(packed, alone, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(rows.sum(), alone.sum(), atol=1e-2, rtol=1e-5)


def test_loss_is_next_token_prediction() -> None:
    """An independent count: full logits of one document, shifted by one."""
    sft = module()
    document = Document.of([5, 6, 7, 8, 9], [0, 1, 0, 1, 1], 3)
    sft.model.eval()  # type: ignore[union-attr]
    with torch.no_grad():
        nll = sft.token_nll(pack([document], 1.0))
        hidden, _ = sft.model.hidden(torch.tensor([[5, 6, 7, 8, 9]]))  # type: ignore[union-attr,operator]
        log_p = sft.model.logits(hidden)[0].log_softmax(-1)  # type: ignore[union-attr,operator]
    expected = torch.stack([-log_p[0, 6], -log_p[2, 8], -log_p[3, 9]])
    torch.testing.assert_close(nll, expected)


def test_only_adapters_and_rows_train_and_are_saved() -> None:
    sft = module(rank=4)
    trained = {name for name, p in sft.named_parameters() if p.requires_grad}
    assert trained == set(sft.state_dict())
    assert {name.split(".")[-3 if "lora" in name else -1] for name in trained} == {
        "lora_A",
        "lora_B",
        "structural_rows",
    }
    assert sum("lora_A" in name for name in trained) == 2 * 2  # in_proj and out_proj of two layers
    whole = module(adapter="none")
    assert len(whole.state_dict()) == len(list(whole.parameters()))  # a tied head once


def test_every_trained_weight_gets_a_gradient_and_takes_a_step() -> None:
    sft = module(dropout=0.0)
    sft.trainer = SimpleNamespace(  # type: ignore[assignment]
        datamodule=SimpleNamespace(steps_per_epoch=10), max_epochs=2, max_steps=-1
    )
    optimizer = sft.configure_optimizers()["optimizer"]
    assert sft.total_steps() == 20
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(sft.state_dict())
    document, _ = encode_dialogue(
        planned_turns(read_split(tiny().world, "short", "dev")[0]), sft.tokens, 4096
    )
    assert document is not None
    frozen = {n: p.clone() for n, p in sft.named_parameters() if not p.requires_grad}
    sft.token_nll(pack([document], 1.0)).mean().backward()
    assert all(p.grad is not None for p in sft.parameters() if p.requires_grad)
    optimizer.step()
    assert all(torch.equal(p, frozen[n]) for n, p in sft.named_parameters() if not p.requires_grad)


def test_checkpointed_layers_give_the_same_gradients() -> None:
    document, _ = encode_dialogue(
        planned_turns(read_split(tiny().world, "short", "dev")[0]), tiny().tokens(), 4096
    )
    assert document is not None
    gradients = []
    for settings in ({}, {"gradient_checkpointing": True, "logit_chunk": 50, "chunk_size": 16}):
        torch.manual_seed(0)
        sft = module(dropout=0.0, **settings)
        sft.token_nll(pack([document], 1.0)).mean().backward()
        gradients.append({n: p.grad for n, p in sft.named_parameters() if p.requires_grad})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-5, rtol=1e-4)


def test_vectors_are_not_decayed() -> None:
    sft = module(adapter="none", weight_decay=0.3)
    sft.trainer = SimpleNamespace(datamodule=SimpleNamespace(steps_per_epoch=1), max_epochs=1, max_steps=-1)  # type: ignore[assignment]
    for group in sft.configure_optimizers()["optimizer"].param_groups:
        assert {p.ndim > 1 for p in group["params"]} == {group["weight_decay"] > 0}


def test_total_steps_needs_an_end() -> None:
    sft = module()
    sft.trainer = SimpleNamespace(datamodule=SimpleNamespace(steps_per_epoch=10), max_epochs=-1, max_steps=7)  # type: ignore[assignment]
    assert sft.total_steps() == 7
    sft.trainer = SimpleNamespace(datamodule=SimpleNamespace(steps_per_epoch=10), max_epochs=-1, max_steps=-1)  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"max_epochs or trainer\.max_steps"):
        sft.total_steps()


def test_a_checkpoint_of_another_base_is_refused(tmp_path: Path) -> None:
    sft = module()
    checkpoint: dict = {}
    sft.on_save_checkpoint(checkpoint)
    sft.on_load_checkpoint(checkpoint)
    other: Any = load_model(tiny().base)
    with torch.no_grad():
        other.backbone.norm_f.weight[0] += 1e-3
    export_merged(other, tiny().tokens(), tmp_path / "base")
    moved = TraceSFT(init_from=str(tmp_path / "base"))
    moved.configure_model()
    with pytest.raises(ValueError, match="belongs to another base model"):
        moved.on_load_checkpoint(checkpoint)
    with pytest.raises(ValueError, match="trained other weights"):
        module(adapter="none").load_state_dict(sft.state_dict())


def test_settings_that_contradict() -> None:
    with pytest.raises(ValueError, match=r"model\.architecture"):
        TraceSFT(architecture={"hidden_size": 8}, adapter="new")
    with pytest.raises(ValueError, match="warmup_fraction is 1"):
        TraceSFT(init_from=str(tiny().base), warmup_fraction=1.0)


def test_dialogues_written_side_by_side_are_those_written_alone() -> None:
    """Rows of one to several turns in one batch: a dialogue that ends leaves it, and the others go on as if alone."""
    sft = module()
    dialogues = [planned_turns(d) for d in read_split(tiny().world, "short", "dev")[:5]]
    dialogues[1] = dialogues[1][:1]
    generator = TraceGenerator(make_policy(sft.model), sft.tokens)  # type: ignore[arg-type]
    together = write_plans(generator, dialogues, constrained=True, max_new_tokens=30, batch=4)
    assert [len(plans) for plans in together] == [len(turns) for turns in dialogues]
    for turns, plans in zip(dialogues, together, strict=True):
        sessions = generator.start(1)
        alone = [generator.generate(sessions, [turn.question], max_new_tokens=30)[0] for turn in turns]
        assert [plan.token_ids for plan in plans] == [plan.token_ids for plan in alone]


# -- stages ---------------------------------------------------------------------------------------------------------


def test_chain_of_stages(chain: Path) -> None:
    """Stage 2 sits on merged stage 1; stage 3 continues stage 2's adapter on that same base."""
    records = {
        stage: json.loads((chain / stage / "export/base.json").read_text())
        for stage in ("stage1", "stage2", "stage3")
    }
    assert records["stage1"]["base"]["name"] == "base"
    assert records["stage2"]["base"]["name"] == "stage1"
    assert records["stage2"]["base"]["hash"] == source_hash(chain / "stage1/export")
    assert records["stage3"]["base"] == records["stage2"]["base"]
    settings = [json.loads((chain / s / "export/adapter/adapter_config.json").read_text()) for s in records]
    assert [s["r"] for s in settings] == [16, 8, 8]
    assert find_base(chain / "stage3/export").resolve() == (chain / "stage1/export").resolve()


@pytest.mark.parametrize("stage", ["stage1", "stage3"])
def test_merged_is_base_with_adapter_and_stock_transformers_agree(chain: Path, stage: str) -> None:
    source = open_source(chain / stage)
    ids = torch.randint(5, 400, (2, 40), generator=torch.Generator().manual_seed(1))
    ids[:, ::7] = torch.tensor(list(load_tokens(source).structural.values()))[None, :6]
    merged: Any = load_merged(source).eval()
    unmerged: Any
    unmerged, adapter = load_base(source)
    load_adapter(unmerged, adapter).eval()
    stock = Mamba2ForCausalLM.from_pretrained(source / "merged").eval()
    n = load_tokens(source).n_tokens
    with torch.no_grad():
        expected = merged.logits(merged.hidden(ids)[0])[..., :n]
        torch.testing.assert_close(
            unmerged.logits(unmerged.hidden(ids)[0])[..., :n], expected, atol=1e-4, rtol=1e-4
        )
        torch.testing.assert_close(stock(ids).logits[..., :n], expected, atol=1e-4, rtol=1e-4)


def test_export_holds_the_best_checkpoint(chain: Path) -> None:
    best = trained_state(chain / "stage2/checkpoints/best.ckpt")
    model, adapter = load_base(chain / "stage2/export")
    load_adapter(model, adapter)
    mine = dict(model.named_parameters())
    for name, value in best.items():
        assert torch.equal(mine[name.removeprefix("model.")], value), name


def test_checkpoints_are_small(chain: Path) -> None:
    state = torch.load(chain / "stage2/checkpoints/last.ckpt", weights_only=True)
    assert all("lora_" in name or name.endswith("structural_rows") for name in state["state_dict"])
    assert "hyper_parameters" not in state


def test_validation_loss_is_sum_over_tokens(chain: Path) -> None:
    """Counted again from the exported model, one dialogue at a time."""
    source = chain / "stage2/export"
    model, tokens = load_merged(source).eval(), load_tokens(source)
    data = TraceData(2, str(tiny().world), limit_dev=6, loss_on_trace_id=True)
    data.tokens = tokens
    data.setup()
    total, n = 0.0, 0
    for document in data.dev_documents:
        ids = torch.tensor(document.ids[None].astype("int64"))
        with torch.no_grad():
            log_p = model.logits(model.hidden(ids)[0])[0].log_softmax(-1)  # type: ignore[operator]
        wanted = [i for i in range(1, len(document)) if document.weights[i] > 0]
        total -= sum(float(log_p[i - 1, ids[0, i]]) for i in wanted)
        n += len(wanted)
    metrics = read_metrics(chain / "stage2")
    assert metrics["after/val_loss"]["n"] == n
    assert metrics["after/val_loss"]["value"] == pytest.approx(total / n, rel=1e-4)
    assert metrics["after/val_loss"]["value"] < metrics["before/val_loss"]["value"]
    names = {
        "plan_exact_match",
        "hop_count_accuracy",
        "sub_question_f1",
        "dependency_f1",
        "keyword_f1",
        "plan_valid",
    }
    assert {f"{when}/{name}" for when in ("before", "after") for name in names} <= set(metrics)
    assert all(set(metric) == {"value", "n", "low", "high"} for metric in metrics.values())


def test_assets_are_chains_of_adapters(chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shipped assets: a base and adapters without merged weights. A stage starts from them as from the runs."""
    for stage in ("stage1", "stage2"):
        shutil.copytree(chain / stage / "export/adapter", tmp_path / stage / "adapter")
        record = json.loads((chain / stage / "export/base.json").read_text())
        record["base"]["path"] = "../gone"
        (tmp_path / stage / "base.json").write_text(json.dumps(record))
    shutil.copytree(tiny().base, tmp_path / "base")
    monkeypatch.setattr("inference.exports.ASSETS", tmp_path)
    monkeypatch.setattr(runs, "ASSETS", tmp_path)
    monkeypatch.chdir(tmp_path)
    start = runs.resolve_start(None, "stage2", "continue")
    assert (start.name, start.weights, start.adapter) == (
        "stage1",
        tmp_path / "stage1",
        tmp_path / "stage2/adapter",
    )
    ids = torch.randint(5, 400, (1, 20), generator=torch.Generator().manual_seed(1))
    shipped, ran = load_merged(tmp_path / "stage2").eval(), load_merged(chain / "stage2/export").eval()
    with torch.no_grad():
        torch.testing.assert_close(shipped.hidden(ids)[0], ran.hidden(ids)[0], atol=1e-5, rtol=1e-5)  # type: ignore[operator]
    assert source_hash(tmp_path / "stage2") == source_hash(chain / "stage2/export")
    with (tmp_path / "base/model.safetensors").open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"\0\0\0@")
    with pytest.raises(ValueError, match="trained on another base"):
        load_merged(tmp_path / "stage1")


def test_where_a_stage_starts(chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        FileNotFoundError, match=r"no runs/nothing and no asset nothing is shipped.*--config nothing\.yaml"
    ):
        runs.resolve_start(None, "nothing", "new")
    with pytest.raises(FileNotFoundError, match="shipped assets are not allowed here"):
        runs.resolve_start(None, "stage1", "new", allow_assets=False)
    with pytest.raises(FileNotFoundError, match=r"model\.init_from gone does not exist"):
        runs.resolve_start("gone", None, "new")
    with pytest.raises(ValueError, match=r"model\.adapter is continue"):
        runs.resolve_start(str(tiny().base), None, "continue")
    with pytest.raises(ValueError, match=r"set model\.init_from"):
        runs.resolve_start(None, None, "new")
    (tmp_path / "runs/stage1").mkdir(parents=True)
    (tmp_path / "runs/stage1/config.yaml").touch()
    with pytest.raises(FileNotFoundError, match="has not ended"):
        runs.resolve_start("runs/stage1", None, "new")
    monkeypatch.chdir(chain.parent)
    assert runs.resolve_start(None, "stage1", "new").source == Path("runs/stage1/export")


# -- small parts ----------------------------------------------------------------------------------------------------


def test_deepspeed_divides_the_loss_once() -> None:
    """The engine gets scale_wrt_gas=False, and batches are not cast to bf16."""
    calls: list[dict] = []
    engine = SimpleNamespace(backward=lambda loss, **kwargs: calls.append(kwargs))
    model = TraceSFT(init_from=str(tiny().base))
    model.trainer = SimpleNamespace(model=engine)  # type: ignore[assignment]
    plugin = SingleScalePrecision("bf16-mixed")
    plugin.backward(torch.tensor(1.0), model, None)
    assert calls == [{"scale_wrt_gas": False}]
    batch = pack([Document.of([1, 2], [0, 0.1], 0)], 1.0)
    assert plugin.convert_input(batch).weights_T.dtype == torch.float32


def test_rng_round_trip() -> None:
    import random

    import numpy as np

    state = capture()
    first = (torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random())
    restore(state)
    assert (torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()) == first


def test_picture_and_text_of_plans() -> None:
    turns = planned_turns(read_split(tiny().world, "short", "dev")[0])
    figure = dag_figure([turn.plan for turn in turns] + [None], "a $title$")
    edges = sum(len(trace.deps) for turn in turns for trace in turn.plan.traces)
    axes = figure.axes[0]
    assert sum(getattr(text, "arrow_patch", None) is not None for text in axes.texts) == edges
    figure.canvas.draw()
    plan = TracePlan((TraceDraft(1, "Who?", "who", ()),))
    text = as_markdown(turns[:2], [Generated(plan, (1,), True), Generated(None, (2,), False, "no end")])
    assert "    [PLAN][TRACE]1[SubQ]Who?" in text and "(no end)" in text
