"""What the training tests share: a small world, its tokenizer, and a random base of 2 layers, made once a session."""

from __future__ import annotations

import functools
import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from datamodules.tokenizer import train_tokenizer
from datamodules.world import build_world, world_text
from inference.model import TraceMambaConfig, TraceMambaForCausalLM, export_merged
from inference.tokens import PlanTokenizer

REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Tiny:
    """Paths: a built MuMu directory, a tokenizer directory, a model directory."""

    world: Path
    tokenizer: Path
    base: Path

    def tokens(self) -> PlanTokenizer:
        return PlanTokenizer.from_pretrained(self.tokenizer).extend()


@functools.cache
def tiny() -> Tiny:
    """Built on first use, in about two seconds."""
    folder = tempfile.TemporaryDirectory(prefix="trace-tiny-")
    _kept.append(folder)
    root = Path(folder.name)
    build_world(root / "world", 7, questions=200, dev_questions=40, paragraphs=False)
    train_tokenizer(islice(world_text(1, 200), 200), 505, root / "tokenizer")
    tokens = PlanTokenizer.from_pretrained(root / "tokenizer")
    torch.manual_seed(0)
    export_merged(TraceMambaForCausalLM(tiny_config()), tokens, root / "base")
    return Tiny(root / "world", root / "tokenizer", root / "base")


def tiny_config() -> TraceMambaConfig:
    return TraceMambaConfig(
        vocab_size=512, hidden_size=32, num_hidden_layers=2, head_dim=16, num_heads=4, state_size=8, n_groups=1,
        chunk_size=32, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip


def fit_arguments(config: str = "stage2.yaml", **options: Any) -> list[str]:
    """Arguments of a `fit` on the tiny world and base: fp32, dropout as in the YAML, one log a step."""
    defaults: dict[str, object] = {
        "model.init_from": tiny().base, "data.path": tiny().world, "data.limit_train": 20, "data.limit_dev": 6,
        "data.batch_size": 2, "trainer.precision": "32-true", "trainer.accelerator": "cpu",
        "trainer.log_every_n_steps": 1, "model.plan_metrics_dialogues": 0, "trainer.callbacks": "null",
    }  # fmt: skip
    arguments = ["fit", "--config", config]
    for name, value in {**defaults, **options}.items():
        if value is not None:
            arguments += [f"--{name.replace('__', '.')}={value}"]
    return arguments


def run_forked(arguments: Sequence[str], folder: Path, extra_callbacks: Sequence[object] = ()) -> int:
    """Run the command line in a forked child (no imports again); returns its exit code, negative for a signal."""
    child = multiprocessing.get_context("fork").Process(
        target=_child, args=(arguments, folder, extra_callbacks)
    )
    child.start()
    child.join(300)
    assert child.exitcode is not None, "the child did not end within 300 s"
    return child.exitcode


def _child(arguments: Sequence[str], folder: Path, extra_callbacks: Sequence[object]) -> None:
    import sys

    os.chdir(folder)
    sys.argv = ["cli"]
    from lightning_modules import cli

    if extra_callbacks:
        made = cli.TraceCLI.instantiate_trainer

        def with_extra(self: cli.TraceCLI, **kwargs: Any) -> Any:
            trainer: Any = made(self, **kwargs)
            trainer.callbacks = [*extra_callbacks, *trainer.callbacks]
            return trainer

        cli.TraceCLI.instantiate_trainer = with_extra  # type: ignore[method-assign]
    sys.exit(cli.main(arguments))


def scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    """TensorBoard scalars of a run: tag -> (step, value), in order."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


_kept: list[tempfile.TemporaryDirectory] = []
