"""Training speed against a named peer: stock Hugging Face Mamba-2, right-padded batches, full logits (`make bench`).

In:  short dialogues of the embedded world and the embedded base's architecture (`pretrain.yaml`), random weights.
Out: a table of plan tokens per second, forward and backward, bf16 autocast, interleaved in one process, the median of
     the rounds; and, beside it, what each of our savings is worth when it alone is taken away.

Both sides hold the same weights and see the same dialogues in the same batches; before anything is timed, their mean
losses over the plan tokens are compared, so that what is timed is the same training.  The peer pads each batch to its
longest dialogue, computes logits at every position and lets Hugging Face compute the loss (labels -100 off the plan).
Its chunk size is 32 here, which is the fastest for it on a CPU (64 is close, the default 256 three times slower).
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
import yaml  # type: ignore[import-untyped]
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import Mamba2Config, Mamba2ForCausalLM
from transformers.utils import logging as hf_logging

from datamodules.packing import Document, PackedBatch, pack
from datamodules.traces import encode_dialogue, planned_turns, read_split
from datamodules.world import default_world
from inference.exports import ASSETS, load_tokens
from inference.model import TraceMambaConfig, TraceMambaForCausalLM, mamba
from inference.model.vocabulary import padded_size
from lightning_modules.cli import CONFIGS
from lightning_modules.losses import token_nll

PEER_CHUNK = 32


def settings(vocabulary: int) -> dict:
    chosen = yaml.safe_load((CONFIGS / "pretrain.yaml").read_text())["model"]["init_args"]["architecture"]
    heads = chosen["hidden_size"] * chosen["expand"] // chosen["head_dim"]
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    return {**chosen, **special, "num_heads": heads, "vocab_size": vocabulary, "tie_word_embeddings": True}


def padded(documents: list[Document]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, attention mask and labels, right-padded."""
    length = max(len(d) for d in documents)
    ids = torch.zeros(len(documents), length, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, d in enumerate(documents):
        tokens = torch.from_numpy(d.ids).long()
        ids[row, : len(d)], mask[row, : len(d)] = tokens, 1
        labels[row, : len(d)] = torch.where(torch.from_numpy(d.weights) > 0, tokens, -100)
    return ids, mask, labels


def packed_step(model: TraceMambaForCausalLM, batch: PackedBatch, all_logits: bool = False) -> torch.Tensor:
    hidden = model.hidden(batch.input_ids_BL, batch.seq_idx_BL)[0].flatten(0, 1)
    if all_logits:
        nll = token_nll(model.logits(hidden).index_select(0, batch.positions_T), batch.targets_T)
    else:
        nll = token_nll(model.logits(hidden.index_select(0, batch.positions_T)), batch.targets_T)
    return (nll * batch.weights_T).sum() / batch.weights_T.sum()


def unpacked_step(model: TraceMambaForCausalLM, batch: tuple) -> torch.Tensor:
    ids, mask, labels = batch
    hidden = model.hidden(ids, lengths_B=mask.sum(1))[0][:, :-1]
    wanted = labels[:, 1:] != -100
    return F.cross_entropy(model.logits(hidden[wanted]), labels[:, 1:][wanted])


def peer_step(model: Mamba2ForCausalLM, batch: tuple) -> torch.Tensor:
    ids, mask, labels = batch
    return model(ids, attention_mask=mask, labels=labels).loss


def timed(step: Callable, batches: list) -> float:
    """Seconds for forward and backward over all batches under bf16 autocast."""
    start = time.perf_counter()
    for batch in batches:
        with torch.autocast("cpu", torch.bfloat16):
            loss = step(batch)
        loss.backward()
    return time.perf_counter() - start


# Operators by what they are spent on; everything else is element-wise work in conv, decays, norms and loss.
PARTS = {
    "projections and head": ("aten::mm", "aten::addmm"),
    "chunk products (scores, states, mixing)": ("aten::bmm", "aten::baddbmm"),
    "copies, casts, layout": ("aten::copy_", "aten::cat", "aten::fill_", "aten::index_select", "aten::index"),
    "multiply-adds (gates, decays, norms)": ("aten::mul", "aten::mul_", "aten::addcmul", "aten::addcmul_",
        "aten::add", "aten::add_"),
    "exponentials and SiLU": ("aten::exp", "aten::exp_", "aten::silu", "aten::silu_backward",
        "aten::masked_fill_", "aten::sub"),
    "sums": ("aten::sum", "aten::cumsum", "aten::linalg_vector_norm", "aten::mean"),
    "depthwise convolution": ("aten::mkldnn_convolution", "aten::convolution_backward"),
}  # fmt: skip


def profile(step: Callable, batches: list, console: Console) -> None:
    """Prints the share of a step's CPU time by part."""
    timed(step, batches)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
        timed(step, batches)
    spent = {event.key: event.self_cpu_time_total for event in trace.key_averages()}
    total, table = sum(spent.values()), Table(title="where the time goes (self CPU time)")
    for column in ("part", "share"):
        table.add_column(column, justify="left" if column == "part" else "right")
    shares = {part: sum(spent.get(name, 0) for name in names) / total for part, names in PARTS.items()}
    shares["everything else"] = 1 - sum(shares.values())
    for part, share in sorted(shares.items(), key=lambda item: -item[1]):
        table.add_row(part, f"{share:.0%}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dialogues", type=int, default=32)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--chunk", type=int, default=mamba.CPU_CHUNK, help="tokens of a chunk of our scan")
    parser.add_argument(
        "--peer-chunk", type=int, default=PEER_CHUNK, help="tokens of a chunk of the peer's scan"
    )
    parser.add_argument(
        "--profile", action="store_true", help="print where the time goes instead of comparing"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    mamba.CPU_CHUNK = options.chunk
    hf_logging.set_verbosity_error()
    tokens = load_tokens(ASSETS / "mamba2-tiny").extend()
    dialogues = read_split(default_world(), "short", "train")[: options.dialogues]
    documents = [
        d for d in (encode_dialogue(planned_turns(x), tokens, 4096)[0] for x in dialogues) if d is not None
    ]
    groups = [documents[i : i + options.batch] for i in range(0, len(documents), options.batch)]
    rows = [pack(group, 1.0) for group in groups]
    pads = [padded(group) for group in groups]
    plan, real = sum(r.plan_tokens for r in rows), sum(r.tokens for r in rows)
    share = real / sum(p[0].numel() for p in pads)

    torch.manual_seed(42)
    arguments = settings(padded_size(tokens.n_tokens))
    peer = Mamba2ForCausalLM(Mamba2Config(**{**arguments, "chunk_size": options.peer_chunk})).train()
    ours = TraceMambaForCausalLM(TraceMambaConfig(**{**arguments, "chunk_size": options.chunk})).train()
    ours.load_state_dict(peer.state_dict())
    with torch.no_grad():  # fp32, so that a difference would be a mistake and not rounding
        a, b = packed_step(ours, rows[0]).item(), peer_step(peer, pads[0]).item()
    if abs(a - b) > 1e-4:
        raise SystemExit(f"not the same training: mean loss {a:.6f} here, {b:.6f} there")

    sides: dict[str, tuple[Callable, list]] = {
        "Trace Memory": (lambda x: packed_step(ours, x), rows),
        "stock Hugging Face": (lambda x: peer_step(peer, x), pads),
        "ours, logits at every position": (lambda x: packed_step(ours, x, all_logits=True), rows),
        "ours, padded instead of packed": (lambda x: unpacked_step(ours, x), pads),
    }
    console = Console()
    if options.profile:
        for name in ("stock Hugging Face", "Trace Memory"):
            console.print(f"\n{name}")
            profile(*sides[name], console)
        return
    times: dict[str, list[float]] = {name: [] for name in sides}
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("rounds", total=len(sides) * (options.rounds + 1))
        for turn in range(options.rounds + 1):
            for name, (step, batches) in sides.items():
                seconds = timed(step, batches)
                if turn:  # the first round warms up
                    times[name].append(seconds)
                bar.advance(task)

    table = Table(title=f"forward + backward, bf16 autocast, {options.threads} threads, {platform.machine()}")
    for column in ("side", "plan tokens/s", "median s", "spread", "times the peer"):
        table.add_column(column, justify="left" if column == "side" else "right")
    base = statistics.median(times["stock Hugging Face"])
    for name, values in times.items():
        median = statistics.median(values)
        spread = f"{min(values):.2f} – {max(values):.2f}"
        table.add_row(name, f"{plan / median:,.0f}", f"{median:.2f}", spread, f"{base / median:.2f}×")
    console.print(table)
    console.print(
        f"{len(documents)} dialogues, {real:,} tokens, {plan:,} plan tokens, batches of {options.batch}; "
        f"{share:.0%} of the padded batches' tokens are real; mean losses agree to {abs(a - b):.1e} in fp32; "
        f"median of {options.rounds} interleaved rounds"
    )


if __name__ == "__main__":
    main()
