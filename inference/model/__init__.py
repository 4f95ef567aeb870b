"""Models: the stateful Mamba-2, its states, vocabulary, adapters and files (CMT-RAG 3.1, B.1)."""

from inference.model.adapters import (
    attach_adapter,
    load_adapter,
    merge_adapter,
    save_adapter,
    trainable_parameters,
)
from inference.model.checkpoint import export_merged, load_model
from inference.model.mamba import TraceMambaConfig, TraceMambaForCausalLM
from inference.model.policy import MambaPolicy, TransformerPolicy, make_policy
from inference.model.states import RecurrentStates
from inference.model.transformer import TransformerGenerator
from inference.model.vocabulary import extend_vocabulary

__all__ = [
    "MambaPolicy", "RecurrentStates", "TraceMambaConfig", "TraceMambaForCausalLM", "TransformerGenerator",
    "TransformerPolicy", "attach_adapter", "export_merged", "extend_vocabulary", "load_adapter",
    "load_model", "make_policy", "merge_adapter", "save_adapter", "trainable_parameters",
]  # fmt: skip
