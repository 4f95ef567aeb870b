"""Any Hugging Face causal language model behind the same two calls as the Mamba-2 model: ``hidden`` and ``logits``.

In:  token ids, packed (``seq_idx``) or right-padded (``lengths``).  Out: hidden states and logits.
Paper: CMT-RAG Table 3 (the Transformer generator, which re-encodes the history at every turn).

A packed row is laid out as a right-padded batch of its documents before attention and put back afterwards: no
attention implementation has to know about packing, and no document attends to another.
"""

import torch
from torch import Tensor, nn

from inference.model.scan import padding_mask
from inference.model.vocabulary import StructuralVocabulary


class TransformerGenerator(StructuralVocabulary, nn.Module):
    """A causal LM with structural rows.  ``config`` is the wrapped model's."""

    base_model_prefix = "model"  # PEFT asks every model for it

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.config = model.config
        self.init_structural()

    def get_input_embeddings(self) -> nn.Embedding:
        """The wrapped model's embedding."""
        return self.model.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Linear:
        """The wrapped model's head."""
        return self.model.get_output_embeddings()

    def resize_token_embeddings(self, size: int) -> None:
        """Grows the vocabulary to ``size`` rows."""
        self.model.resize_token_embeddings(size)

    def hidden(
        self,
        input_ids_BL: Tensor,
        seq_idx_BL: Tensor | None = None,
        states: None = None,
        lengths_B: Tensor | None = None,
        return_states: bool = False,
    ) -> tuple[Tensor, None]:
        """Token ids (B, L) to (hidden (B, L, D), None).

        Raises:
            ValueError: states given or asked for; a Transformer re-encodes its history instead.
        """
        if states is not None or return_states:
            raise ValueError("a Transformer carries no recurrent state: give it the whole history")
        if seq_idx_BL is not None:
            return self._packed(input_ids_BL, seq_idx_BL), None
        mask = None if lengths_B is None else padding_mask(lengths_B, input_ids_BL.shape[1])
        return self._encode(input_ids_BL, mask), None

    def _encode(self, ids_BL: Tensor, mask_BL: Tensor | None) -> Tensor:
        embedded = self.with_structural_inputs(ids_BL, self.get_input_embeddings()(ids_BL))
        mask = None if mask_BL is None else mask_BL.long()
        return self.model.base_model(
            inputs_embeds=embedded, attention_mask=mask, use_cache=False
        ).last_hidden_state

    def _packed(self, ids_BL: Tensor, seq_idx_BL: Tensor) -> Tensor:
        batch, length = ids_BL.shape
        first = torch.ones_like(seq_idx_BL, dtype=torch.bool)
        first[:, 1:] = seq_idx_BL[:, 1:] != seq_idx_BL[:, :-1]
        document = first.flatten().cumsum(0) - 1  # (B*L,) number of each token's document
        starts = first.flatten().nonzero()[:, 0]
        lengths = torch.diff(starts, append=starts.new_tensor([batch * length]))
        column = torch.arange(batch * length, device=ids_BL.device) - starts[document]
        padded = ids_BL.new_zeros(len(starts), int(lengths.max()))
        padded[document, column] = ids_BL.flatten()
        hidden = self._encode(padded, padding_mask(lengths, padded.shape[1]))
        return hidden[document, column].view(batch, length, -1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states (..., D) to fp32 logits (..., V)."""
        head = self.get_output_embeddings()
        return self.with_structural_logits(hidden, head(hidden.to(head.weight.dtype)).float())
