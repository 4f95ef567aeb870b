"""The runtime of trace memory: trace plans, their tokenizer and grammar, the generator, retrieval, and the models.

Importing this package loads nothing heavy (no torch, transformers or lightning): a public name is imported from
its module on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "TraceDraft": "traces",
    "TracePlan": "traces",
    "PlanParseError": "traces",
    "linearise": "traces",
    "parse": "traces",
    "check_plan": "traces",
    "PlanTokenizer": "tokens",
    "PlanGrammar": "grammar",
    "TraceGenerator": "generator",
    "Generated": "generator",
    "load_model": "model",
    "SessionStore": "sessions",
    "SessionBusy": "sessions",
    "SessionChanged": "sessions",
    "SessionInfo": "sessions",
    "StoreError": "sessions",
    "Turn": "sessions",
    "dump_state": "state_blob",
    "load_state": "state_blob",
    "state_hash": "state_blob",
    "Paragraph": "corpus",
    "read_corpus": "corpus",
    "Encoder": "encoders",
    "load_encoder": "encoders",
    "Hit": "retrieval",
    "Retriever": "retrieval",
    "build_index": "retrieval",
    "open_index": "retrieval",
    "Reranker": "rerank",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
