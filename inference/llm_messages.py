"""What goes to a language model and what comes back, as plain values: no I/O.

In:  `LLMRequest`. Out: its cache key and its wire form; `read_answer` reads a response body, `Completion` is what
callers get. Wire format: OpenAI's `POST /chat/completions`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class LLMRequest:
    """One chat request.

    messages: objects with `role` and `content`. max_tokens: the most tokens to generate. schema: a JSON schema that the
    answer has to follow (needs a server with structured output). thinking: False asks the server to switch thinking off
    (`chat_template_kwargs`: known to vLLM, llama.cpp and SGLang, refused by OpenAI); True leaves it as it is.
    """

    messages: Sequence[Mapping[str, str]]
    temperature: float = 0.0
    max_tokens: int = 512
    schema: Mapping[str, Any] | None = None
    thinking: bool = True

    def key(self, model: str) -> str:
        """sha256 of the canonical request: all that shapes the answer, neither the URL nor the API key."""
        canonical = {
            "model": model,
            "messages": [{"role": m["role"], "content": m["content"]} for m in self.messages],
            "temperature": float(self.temperature),
            "max_tokens": self.max_tokens,
            "schema": self.schema,
            "thinking": self.thinking,
        }
        return hashlib.sha256(json.dumps(canonical, sort_keys=True).encode()).hexdigest()

    def options(self) -> dict[str, Any]:
        """The arguments of the `openai` client, without the model."""
        out: dict[str, Any] = {
            "messages": list(self.messages),
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
        }
        if self.schema is not None:
            schema = {"name": "answer", "schema": self.schema, "strict": True}
            out["response_format"] = {"type": "json_schema", "json_schema": schema}
        if not self.thinking:
            out["extra_body"] = {"chat_template_kwargs": {"enable_thinking": False}}
        return out


@dataclass(frozen=True)
class Completion:
    """An answer without its thinking text, and the tokens it took; `cached`: the server was not asked this time."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached: bool = field(default=False, compare=False)


def completion(answer: Mapping[str, Any], cached: bool) -> Completion:
    """A stored answer as callers get it."""
    fields = {name: answer[name] for name in ("finish_reason", "prompt_tokens", "completion_tokens")}
    return Completion(strip_thinking(answer["text"]), **fields, cached=cached)


def read_answer(body: bytes) -> dict[str, Any] | None:
    """The first choice of a response as it is stored: `text`, `finish_reason`, `prompt_tokens`, `completion_tokens`.

    None when the body holds no choice. A choice without content (all of it was thinking) has the text "".
    """
    try:
        data = json.loads(body)
        choice, usage = data["choices"][0], data.get("usage") or {}
        text = choice["message"].get("content") or ""
        return {
            "text": text if isinstance(text, str) else json.dumps(text),
            "finish_reason": str(choice.get("finish_reason") or ""),
            "prompt_tokens": int(usage.get("prompt_tokens") or 0),
            "completion_tokens": int(usage.get("completion_tokens") or 0),
        }
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        return None


def strip_thinking(text: str) -> str:
    """The text without `<think>…</think>`, also where the prompt held the opening tag or the closing one never came."""
    text = re.sub(r"<think>.*?</think>", "", text, flags=re.S).rpartition("</think>")[2]
    return text.partition("<think>")[0].strip()
