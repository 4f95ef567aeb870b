"""Supervised training of the trace generator: pretraining of the embedded base and curriculum stages 1 to 3.

In:  packed batches of dialogues (datamodules/packing.py) and a model to start from.
Out: adapters and structural rows (or all weights, where the whole model trains), selected by validation loss.
CMT-RAG 3.3, B.1, B.3: AdamW, 5 % linear warm-up then linear decay, gradient norm clipped to 1.0, LoRA on in_proj and
out_proj, the rows of the structural tokens trained beside it.

One step, in order:
1. hidden states of one packed row (documents told apart by seq_idx);
2. logits only at the positions that carry loss, and their -log p;
3. sum(weight * nll) / weights of the whole accumulation window over all processes (losses.window_loss).

Left out: label smoothing, loss spikes, gradient checkpointing by layer choice. The paper names none of them.
"""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from datamodules.packed_data import PlannedTurn
from datamodules.packing import PackedBatch
from inference.exports import clear_export, load_merged, load_tokens, source_hash, write_base
from inference.generator import Generated, TraceGenerator
from inference.metrics import aggregate_plan_metrics
from inference.model import (
    TraceMambaConfig,
    TraceMambaForCausalLM,
    attach_adapter,
    export_merged,
    extend_vocabulary,
    load_adapter,
    load_model,
    make_policy,
    merge_adapter,
    save_adapter,
)
from inference.model.vocabulary import padded_size
from inference.tokens import PlanTokenizer
from inference.traces import STRUCTURAL_TOKENS
from lightning_modules.losses import chunked_token_nll, linear_warmup_decay, window_loss
from lightning_modules.metrics import TokenLoss, gather, plan_pairs, write_plans
from lightning_modules.runs import Start, resolve_start

log = logging.getLogger("trace_memory.train")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TraceSFT(LightningModule):
    """Trains a trace generator on packed dialogues.

    Args:
        predecessor: the run whose result this stage starts from where `init_from` is null (`stage1` for stage 2).
        init_from: a run, export or model directory to take weights from (resuming is `--ckpt_path`).
        allow_assets: whether the shipped asset may stand in for a predecessor that was never run.
        architecture: settings of a new Mamba-2 (hidden_size, num_hidden_layers, …) trained from scratch instead.
        tokenizer: a tokenizer directory; null takes the one beside the weights.
        adapter: `new` on the merged start, `continue` the start's own, or `none` to train every weight.
        rank, alpha, dropout: of LoRA (`continue` keeps the start's rank and alpha).
        lr, weight_decay, betas: of AdamW. Vectors (norms, biases, decay rates) are not decayed.
        warmup_fraction: share of the steps over which the learning rate rises; then it falls linearly to 0.
        base_dtype: of the frozen weights; adapters and new rows are float32 whatever it is.
        chunk_size: tokens per chunk of the scan; null keeps the model's.
        logit_chunk: tokens whose logits are held at a time; null holds all.
        gradient_checkpointing: compute each layer again in the backward pass, to save memory.
        plan_metrics_dialogues: development dialogues written greedily before and after training (0: none).
        plan_metrics_raw: measure `plan_valid` by a second pass without the grammar (with it, every plan is valid).
        max_new_tokens: of one plan.
    """

    def __init__(
        self,
        predecessor: str | None = None,
        init_from: str | None = None,
        allow_assets: bool = True,
        architecture: dict[str, Any] | None = None,
        tokenizer: str | None = None,
        adapter: Literal["new", "continue", "none"] = "new",
        rank: int = 8,
        alpha: float = 16,
        dropout: float = 0.1,
        lr: float = 5e-5,
        weight_decay: float = 0.05,
        betas: tuple[float, float] = (0.9, 0.999),
        warmup_fraction: float = 0.05,
        base_dtype: Literal["float32", "bfloat16"] = "float32",
        chunk_size: int | None = None,
        logit_chunk: int | None = None,
        gradient_checkpointing: bool = False,
        plan_metrics_dialogues: int = 0,
        plan_metrics_raw: bool = True,
        max_new_tokens: int = 512,
    ) -> None:
        super().__init__()
        if architecture is not None and (init_from is not None or adapter != "none"):
            raise ValueError(
                "model.architecture trains a new model: it goes with adapter none and without init_from"
            )
        if not 0 <= warmup_fraction < 1:
            raise ValueError(
                f"model.warmup_fraction is {warmup_fraction}: it is a share of the steps, from 0 to below 1"
            )
        for name, value, valid, wanted in (
            ("rank", rank, rank >= 1, "1 or more"),
            ("dropout", dropout, 0 <= dropout < 1, "from 0 to below 1"),
            ("lr", lr, lr > 0, "above 0"),
            ("weight_decay", weight_decay, weight_decay >= 0, "0 or more"),
            ("betas", betas, all(0 <= beta < 1 for beta in betas), "two numbers from 0 to below 1"),
            ("chunk_size", chunk_size, chunk_size is None or chunk_size >= 1, "1 or more"),
            ("logit_chunk", logit_chunk, logit_chunk is None or logit_chunk >= 1, "1 or more"),
            ("plan_metrics_dialogues", plan_metrics_dialogues, plan_metrics_dialogues >= 0, "0 or more"),
            ("max_new_tokens", max_new_tokens, max_new_tokens >= 1, "1 or more"),
        ):
            if not valid:
                raise ValueError(f"model.{name} is {value}: it must be {wanted}")
        self.architecture, self.tokenizer, self.adapter = architecture, tokenizer, adapter
        self.rank, self.alpha, self.dropout = rank, alpha, dropout
        self.lr, self.weight_decay, self.betas = lr, weight_decay, tuple(betas)
        self.warmup_fraction = warmup_fraction
        self.base_dtype = DTYPES[base_dtype]
        self.chunk_size, self.logit_chunk, self.gradient_checkpointing = (
            chunk_size,
            logit_chunk,
            gradient_checkpointing,
        )
        self.plan_metrics_dialogues, self.plan_metrics_raw = plan_metrics_dialogues, plan_metrics_raw
        self.max_new_tokens = max_new_tokens
        self.start: Start | None = None
        if architecture is None:
            self.start = resolve_start(init_from, predecessor, adapter, allow_assets)
        self.model: nn.Module | None = None
        self.base_hash: str | None = None
        self.validation_loss = TokenLoss()
        self._tokens: PlanTokenizer | None = None
        self._window_loss: Tensor | float = 0.0
        # Frozen weights are not in a checkpoint, so loading one finds them missing; on_load_checkpoint checks the rest.
        self.strict_loading = False

    # -- the model ----------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> PlanTokenizer:
        """The generator's tokenizer, structural tokens included (a base from scratch has none of them yet)."""
        if self._tokens is None:
            if self.start is None:
                self._tokens = self.trainer.datamodule.tokens  # type: ignore[attr-defined]
            elif self.tokenizer is not None:
                self._tokens = PlanTokenizer.from_pretrained(self.tokenizer)
            else:
                self._tokens = load_tokens(self.start.source)
            if self.adapter != "none":
                self._tokens.extend()
        return self._tokens

    def configure_model(self) -> None:
        """Build the model once, on the CPU; Lightning moves it. Called by the Trainer before weights are restored."""
        if self.model is None:
            self.model = self.build_model()
            trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
            total = sum(p.numel() for p in self.model.parameters())
            log.info("model: %s parameters, %s of them trained", f"{total:,}", f"{trained:,}")

    def build_model(self, meta: bool = False) -> nn.Module:
        """The model with what trains attached.

        Args:
            meta: without weights, from config.json alone (to count parameters at full size).
        """
        if self.start is None:
            model: nn.Module = TraceMambaForCausalLM(self._new_config())
        else:
            start = self.start
            model = (
                load_model(start.weights, self.base_dtype, meta=True)
                if meta
                else load_merged(start.weights, self.base_dtype)
            )
            self.base_hash = None if meta or self.adapter == "none" else source_hash(start.weights)
        if self.adapter == "none":
            model.requires_grad_(True)
        else:
            extend_vocabulary(model, self.tokens)
            if self.adapter == "continue" and not meta:
                assert self.start is not None and self.start.adapter is not None
                load_adapter(model, self.start.adapter, trainable=True, dropout=self.dropout)
            else:
                attach_adapter(model, self.rank, self.alpha, self.dropout)
        self._apply_settings(model)
        return model.train()

    def _new_config(self) -> TraceMambaConfig:
        settings = dict(self.architecture or {})
        if settings.get("vocab_size") is None:  # room for the structural tokens, a multiple of 16
            settings["vocab_size"] = padded_size(self.tokens.n_tokens + len(STRUCTURAL_TOKENS))
        if "num_heads" not in settings:
            settings["num_heads"] = (
                settings["hidden_size"] * settings.get("expand", 2) // settings["head_dim"]
            )
        special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), self.tokens.bos_id)
        return TraceMambaConfig(**{**special, "tie_word_embeddings": True, **settings})

    def _apply_settings(self, model: nn.Module) -> None:
        if self.chunk_size is not None:
            for module in model.modules():
                if hasattr(module, "chunk_size"):
                    module.chunk_size = self.chunk_size
        if self.gradient_checkpointing and isinstance(model, TraceMambaForCausalLM):
            model.backbone.gradient_checkpointing = True
        elif self.gradient_checkpointing:
            model.model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator,union-attr]

    # -- training -----------------------------------------------------------------------------------------------

    def token_nll(self, batch: PackedBatch) -> Tensor:
        """-log p of every token of the batch that carries loss, fp32 (T,)."""
        assert self.model is not None
        hidden_BLD, _ = self.model.hidden(batch.input_ids_BL, batch.seq_idx_BL)  # type: ignore[operator]
        hidden_TD = hidden_BLD.flatten(0, 1).index_select(0, batch.positions_T)
        return chunked_token_nll(hidden_TD, batch.targets_T, self.model.logits, self.logit_chunk)  # type: ignore[arg-type]

    def on_train_start(self) -> None:
        """Checks the Trainer's limits and lets the YAML's rates win over those of a resumed checkpoint.

        Raises:
            ValueError: a limit that would break accumulation windows which the loader has already weighed.
        """
        trainer, batches = self.trainer, self.trainer.fit_loop.max_batches
        whole = len(trainer.train_dataloader) if trainer.train_dataloader is not None else batches
        if batches < whole and batches % trainer.accumulate_grad_batches:
            raise ValueError(
                "trainer.limit_train_batches cuts an accumulation window; limit dialogues instead: --data.limit_train N"
            )
        for config in trainer.lr_scheduler_configs:
            self._use_own_rates(config.scheduler)

    def _use_own_rates(self, scheduler: Any) -> None:
        """An optimizer and its schedule restore the rates they were saved with; take this run's instead."""
        factor = linear_warmup_decay(scheduler.last_epoch, self.total_steps(), self.warmup_fraction)
        scheduler.base_lrs = [self.lr] * len(scheduler.base_lrs)
        scheduler._last_lr = [self.lr * factor] * len(scheduler.base_lrs)
        for group in scheduler.optimizer.param_groups:
            group["initial_lr"], group["lr"], group["betas"] = self.lr, self.lr * factor, self.betas
            if group["weight_decay"]:
                group["weight_decay"] = self.weight_decay

    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        """The batch's share of the window's loss; logs the window's loss when it is complete."""
        accumulate, world = self.trainer.accumulate_grad_batches, self.trainer.world_size
        loss = window_loss(
            self.token_nll(batch), batch.weights_T, batch.window_plan_tokens, accumulate, world
        )
        self._window_loss = self._window_loss + loss.detach() / (accumulate * world)
        if (batch_idx + 1) % accumulate == 0 or self.trainer.is_last_batch:
            total = self.trainer.strategy.reduce(self._window_loss, reduce_op="sum")
            self.log("train/loss", total, on_step=True, on_epoch=False, prog_bar=True, batch_size=1)
            self._window_loss = 0.0
        return loss

    def validation_step(self, batch: PackedBatch, batch_idx: int) -> None:
        """Adds the batch to the development loss."""
        self.validation_loss.update(self.token_nll(batch), batch.weights_T)

    def on_validation_epoch_end(self) -> None:
        """Logs sum(nll) / tokens over the development set, over all processes."""
        self.log("val/loss", self.validation_loss.compute(), prog_bar=True)
        self.validation_loss.reset()

    def configure_optimizers(self) -> dict[str, Any]:
        """AdamW over what trains, with the schedule of B.3 over an explicit number of steps."""
        assert self.model is not None
        trained = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        groups = [
            {"params": [p for _, p in trained if p.ndim > 1], "weight_decay": self.weight_decay},
            {"params": [p for _, p in trained if p.ndim <= 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=self.lr, betas=self.betas)  # type: ignore[arg-type]
        total = self.total_steps()
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: linear_warmup_decay(step, total, self.warmup_fraction)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def total_steps(self) -> int:
        """Optimizer steps of the whole run.

        From the data module's own count: reading `trainer.estimated_stepping_batches` here would drop the loader's
        restored place (https://github.com/Lightning-AI/pytorch-lightning/issues/20550).
        """
        steps, epochs = self.trainer.datamodule.steps_per_epoch, self.trainer.max_epochs  # type: ignore[attr-defined]
        by_epochs = steps * epochs if epochs is not None and epochs > 0 else None
        limits = [n for n in (by_epochs, self.trainer.max_steps) if n is not None and n > 0]
        if not limits:
            raise ValueError(
                "set trainer.max_epochs or trainer.max_steps: the learning rate needs to know its end"
            )
        return min(limits)

    # -- checkpoints --------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Only what trains, each tensor once (a tied head is the embedding)."""
        state = super().state_dict(*args, **kwargs)
        trained = {name for name, p in self.named_parameters() if p.requires_grad}
        prefix = kwargs.get("prefix", "")
        for key in [key for key in state if key.removeprefix(prefix) not in trained]:
            del state[key]
        return state

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Loads what `state_dict` holds; ValueError where the trained weights are other ones."""
        mine, given = set(self.state_dict()), set(state_dict)
        if mine != given:
            odd = sorted(mine ^ given)
            raise ValueError(
                f"the checkpoint trained other weights than this run ({len(odd)} differ, such as {odd[0]!r}): "
                "model.adapter or the start differ"
            )
        return super().load_state_dict(state_dict, strict=False, assign=assign)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Notes what the trained weights sit on."""
        checkpoint["trace_memory"] = {
            "base_hash": self.base_hash,
            "tokenizer": self.tokens.fingerprint(),
            "adapter": self.adapter,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """ValueError where the checkpoint's adapter sits on another base or speaks another vocabulary."""
        noted = checkpoint.get("trace_memory", {})
        for key, mine in (("base_hash", self.base_hash), ("tokenizer", self.tokens.fingerprint())):
            if noted.get(key) != mine:
                raise ValueError(
                    f"the checkpoint belongs to another {key.replace('_hash', ' model')} ({str(noted.get(key))[:12]}…) "
                    f"than this run ({str(mine)[:12]}…): resume with the run's own config.yaml"
                )
        # Stage 3 continues the adapter of stage 2 on the same base: only how it was begun tells them apart.
        fitting = self._trainer is not None and self._trainer.state.fn == "fit"
        if fitting and noted.get("adapter", self.adapter) != self.adapter:
            raise ValueError(
                f"the checkpoint is of another stage: its model.adapter was {noted['adapter']}, this run's is "
                f"{self.adapter}. --ckpt_path resumes a run; to start from its weights use --model.init_from"
            )

    # -- what a run measures and leaves behind ------------------------------------------------------------------

    def write_plans(
        self, dialogues: list[list[PlannedTurn]], constrained: bool = True
    ) -> list[list[Generated]]:
        """Plans of the dialogues, greedily and free-running; the training mode is as before afterwards."""
        assert self.model is not None
        was_training = self.model.training
        with self.trainer.precision_plugin.forward_context():
            generator = TraceGenerator(make_policy(self.model), self.tokens)
            written = write_plans(
                generator, dialogues, constrained=constrained, max_new_tokens=self.max_new_tokens
            )
        self.model.train(was_training)
        return written

    @property
    def writes_plans(self) -> bool:
        """Whether there is anything to write plans with and to compare them to."""
        return self.adapter != "none" and hasattr(self.trainer.datamodule, "held_out_turns")  # type: ignore[attr-defined]

    @torch.no_grad()
    def held_out_metrics(self) -> dict[str, dict[str, float | int | None]]:
        """Development loss, and plan metrics on `plan_metrics_dialogues` dialogues, shared out over the processes."""
        metrics = self._held_out_loss()
        if not self.writes_plans or self.plan_metrics_dialogues == 0:
            return metrics
        rank, world = self.trainer.global_rank, self.trainer.world_size
        dialogues = self.trainer.datamodule.held_out_turns(self.plan_metrics_dialogues)  # type: ignore[attr-defined]
        mine = dialogues[rank::world]
        metrics |= aggregate_plan_metrics(gather(plan_pairs(self.write_plans(mine), mine)))
        if self.plan_metrics_raw:
            raw = gather(plan_pairs(self.write_plans(mine, constrained=False), mine))
            metrics["plan_valid"] = aggregate_plan_metrics(raw)["plan_valid"]
        return metrics

    def _held_out_loss(self) -> dict[str, dict[str, float | int | None]]:
        assert self.model is not None
        was_training = self.model.training
        self.model.eval()
        loss = TokenLoss().to(self.device)
        for batch in self.trainer.datamodule.val_dataloader():  # type: ignore[attr-defined]
            batch = self.trainer.strategy.batch_to_device(batch)
            with self.trainer.precision_plugin.forward_context():
                loss.update(self.token_nll(batch), batch.weights_T)
        self.model.train(was_training)
        value = float(
            loss.compute()
        )  # sums over processes first; afterwards the states are this process's again
        tokens = self.trainer.strategy.reduce(loss.weight.clone(), reduce_op="sum")
        return {"val_loss": {"value": value, "n": round(float(tokens)), "low": None, "high": None}}

    def export(self, directory: Path, state: dict[str, Tensor] | None = None) -> None:
        """Write `adapter/`, `base.json` and `merged/` (the main process calls it).

        Args:
            directory: runs/NAME/export.
            state: trained weights of a checkpoint, which may be finer than the module's own (DeepSpeed trains bf16
                copies of fp32 masters); None takes the module's.
        """
        assert self.model is not None
        clear_export(directory)
        model = copy.deepcopy(self.model).cpu().eval()
        for name, parameter in model.named_parameters():
            if state is not None and f"model.{name}" in state:
                parameter.data = state[f"model.{name}"].detach().cpu().clone()
        if self.adapter == "none":
            export_merged(model, self.tokens, directory / "merged")
            write_base(directory, None, None, None, self.tokens)
            return
        assert self.start is not None
        save_adapter(model, directory / "adapter")
        export_merged(merge_adapter(model), self.tokens, directory / "merged")
        write_base(directory, self.start.name, self.start.weights, self.base_hash, self.tokens)
