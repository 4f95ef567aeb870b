"""The stateless reader: a resolved sub-question and its paragraphs in, the shortest answer span out (CMT-RAG C.2).

    Question ─► prompt within the context (inference.prompts) ─► model ─► first line, tidied ─► Answer

Two kinds, one interface: `LocalReader` runs a Hugging Face causal LM in this process (with a LoRA adapter where there
is one), `HTTPReader` asks any OpenAI-compatible server. Decoding is greedy; thinking mode is off. A reader keeps
nothing between calls, so equal questions of one call are asked once.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from inference.llm import LLMClient, LLMRequest
from inference.prompts import SYSTEM, PromptTooLong, Question, fit, messages, render

MAX_NEW_TOKENS = 512  # C.2
_BYTES_PER_TOKEN = (
    3  # of text whose tokenizer is unknown: real text has 3.5 to 5, so a prompt is rather too short
)


@dataclass(frozen=True)
class Answer:
    """What the reader said; `text` is "" where it said nothing. `passages`: paragraph ids that were in its prompt."""

    text: str
    passages: tuple[str, ...]
    prompt_tokens: int
    completion_tokens: int


class Reader(Protocol):
    """Answers questions, each for itself."""

    name: str

    def answer(self, questions: Sequence[Question]) -> list[Answer]:
        """One answer a question, in their order."""
        ...

    def fingerprint(self) -> str:
        """A hash of the model and of the prompts: the same reader gives the same one."""
        ...


def tidy(text: str) -> str:
    """The answer span in what a model wrote: its first line that says something, without quotes and label."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    line = re.sub(r"^(?:answer|final answer)\s*:\s*", "", line, flags=re.I)
    for opening, closing in ('""', "“”", "''", "**", "``"):
        if len(line) > 2 and line[0] == opening and line[-1] == closing:
            line = line.strip(opening + closing).strip()
    return line[:-1].rstrip() if re.search(r"\w{3,}\.$", line) and line.count(".") == 1 else line


def prompts_hash() -> str:
    """sha256 of the prompts' fixed text."""
    shape = render(Question("Q"))
    return hashlib.sha256(json.dumps([SYSTEM, shape], sort_keys=True).encode()).hexdigest()[:16]


class HTTPReader:
    """A model behind an OpenAI-compatible URL.

    context: tokens the server's model reads; None leaves prompts as they are. The server's tokenizer is not known here,
    so tokens are taken as three bytes. Raises LLMError (from `answer`) for what the server or the way to it does wrong.
    """

    def __init__(
        self, client: LLMClient, context: int | None = None, max_new_tokens: int = MAX_NEW_TOKENS
    ) -> None:
        self.client, self.context, self.max_new_tokens = client, context, max_new_tokens

    @property
    def name(self) -> str:
        """The model's name at its server."""
        return self.client.model

    def fingerprint(self) -> str:
        """The model's name and the prompts (a server tells no more)."""
        return f"{self.client.model}/{prompts_hash()}"

    def answer(self, questions: Sequence[Question]) -> list[Answer]:
        """All questions at once, at most as many in flight as the client allows."""
        fitted = [self._fit(question) for question in questions]
        requests = [
            LLMRequest(messages(question), 0.0, self.max_new_tokens, thinking=False) for question in fitted
        ]
        done = self.client.complete_many(requests)
        return [
            Answer(
                tidy(completion.text),
                tuple(passage.paragraph_id for passage in question.passages),
                completion.prompt_tokens,
                completion.completion_tokens,
            )
            for question, completion in zip(fitted, done, strict=True)
        ]

    def _fit(self, question: Question) -> Question:
        if self.context is None:
            return question
        room = self.context - self.max_new_tokens
        return fit(
            question, room, lambda q: len((SYSTEM + render(q)).encode("utf-8", "replace")) // _BYTES_PER_TOKEN
        )


class LocalReader:
    """A Hugging Face causal LM in this process.

    model, tokenizer: of `transformers`; the tokenizer has a chat template. context: tokens of prompt and answer
    together. batch_size: questions decoded together. Calls from several threads follow one another. Raises ValueError
    for a tokenizer without a chat template.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        name: str,
        *,
        context: int | None = None,
        max_new_tokens: int = 64,
        batch_size: int = 8,
        weights_hash: str = "",
    ) -> None:
        if not tokenizer.chat_template:
            raise ValueError(f"the tokenizer of {name} has no chat template: name an instruction-tuned model")
        self.model, self.tokenizer, self.name = model.eval(), tokenizer, name
        known = getattr(model.config, "max_position_embeddings", None) or 2048
        self.context = min(context or known, known)
        self.max_new_tokens, self.batch_size = max_new_tokens, batch_size
        self._weights_hash = weights_hash
        self._lock = threading.Lock()
        ends = {tokenizer.eos_token_id, model.generation_config.eos_token_id}
        flat = {e for end in ends for e in (end if isinstance(end, list | tuple) else [end])}
        self._ends = sorted(e for e in flat if e is not None)

    @classmethod
    def load(
        cls, directory: str | Path, adapter: str | Path | None = None, name: str | None = None, **options: Any
    ) -> LocalReader:
        """From a model directory, with a PEFT adapter directory merged in where one is given.

        Raises FileNotFoundError for a directory that holds no model.
        """
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        place = Path(directory)
        if not (place / "config.json").is_file():
            raise FileNotFoundError(f"{place} holds no model (config.json): name a Hugging Face directory")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        model = AutoModelForCausalLM.from_pretrained(place, dtype=dtype, local_files_only=True)
        files = sorted(place.glob("*.safetensors"))
        if adapter is not None:
            from peft import PeftModel

            if not (Path(adapter) / "adapter_config.json").is_file():
                raise FileNotFoundError(f"{adapter} holds no adapter (adapter_config.json)")
            model = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
            files += sorted(Path(adapter).glob("*.safetensors"))
        digest = hashlib.sha256()
        for file in files:
            with file.open("rb") as handle:
                digest.update(hashlib.file_digest(handle, "sha256").digest())
        tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=True)
        return cls(
            model.to(device), tokenizer, name or place.name, weights_hash=digest.hexdigest()[:16], **options
        )

    def fingerprint(self) -> str:
        """Hash of weights and adapter, and of the prompts."""
        return f"{self.name}/{self._weights_hash}/{prompts_hash()}"

    def answer(self, questions: Sequence[Question]) -> list[Answer]:
        """Greedy answers, `batch_size` prompts at a time, the shortest first."""
        room = self.context - self.max_new_tokens
        fitted = [fit(question, room, lambda q: len(self._encode(q))) for question in questions]
        encoded = [self._encode(question) for question in fitted]
        distinct = sorted({tuple(ids) for ids in encoded}, key=lambda ids: (len(ids), ids))
        said: dict[tuple[int, ...], list[int]] = {}
        with self._lock:
            for start in range(0, len(distinct), self.batch_size):
                batch = distinct[start : start + self.batch_size]
                said |= dict(zip(batch, self._generate(batch), strict=True))
        return [
            Answer(
                tidy(self.tokenizer.decode(said[tuple(ids)], skip_special_tokens=True)),
                tuple(passage.paragraph_id for passage in question.passages),
                len(ids),
                len(said[tuple(ids)]),
            )
            for question, ids in zip(fitted, encoded, strict=True)
        ]

    def _encode(self, question: Question) -> list[int]:
        return encode_chat(self.tokenizer, messages(question))

    def _generate(self, batch: Sequence[Sequence[int]]) -> list[list[int]]:
        """New tokens of each prompt up to its end token, which is left out."""
        import torch

        width = max(map(len, batch))
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self._ends[0]
        device = self.model.device
        ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in batch], device=device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch], device=device)
        with torch.inference_mode():
            out = self.model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=self.max_new_tokens, do_sample=False,
                temperature=None, top_p=None, top_k=None, pad_token_id=pad, eos_token_id=self._ends,
            )  # fmt: skip
        answers = []
        for row in out[:, width:].tolist():
            end = next((n for n, token in enumerate(row) if token in self._ends), len(row))
            answers.append(row[:end])
        return answers


def encode_chat(tokenizer: Any, chat: Sequence[dict[str, str]]) -> list[int]:
    """Token ids of a chat up to where the answer begins.

    Special tokens in the text of messages stay text: a paragraph that spells the end-of-turn token cannot end the turn.
    """
    marks = [f"\u0000{n}\u0000" for n in range(len(chat))]
    hollow = [{"role": m["role"], "content": mark} for m, mark in zip(chat, marks, strict=True)]
    options = {"add_generation_prompt": True, "tokenize": False, "enable_thinking": False}
    frame = tokenizer.apply_chat_template(hollow, **options)
    ids: list[int] = []
    for mark, message in zip(marks, chat, strict=True):
        before, _, frame = frame.partition(mark)
        ids += tokenizer.encode(before, add_special_tokens=False)
        text = message["content"].encode("utf-8", "replace").decode("utf-8")
        ids += tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    return ids + tokenizer.encode(frame, add_special_tokens=False)


__all__ = [
    "Answer",
    "HTTPReader",
    "LocalReader",
    "PromptTooLong",
    "Reader",
    "encode_chat",
    "tidy",
]
