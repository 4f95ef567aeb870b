"""The trace generator's backbone: Mamba-2 whose state survives turns, batches, packing and LoRA.

In:  token ids, optionally with states to continue from, row lengths (right padding) or document borders (packing).
Out: hidden states after the final norm, logits where they are asked for, states after each row's last token.
Paper: CMT-RAG 3.1 (h_t carried between turns), B.1 (LoRA on in_proj and out_proj only), C.3.

Differences from the stock mixer, each for a reason measured upstream:
* ``out_proj`` is called as a module on every path, so an adapter on it is never bypassed by a fused kernel;
* any number of tokens continues from a state; ragged rows are exact (dt = 0 on pads, windows gathered per row);
* states are fp32 whatever the weights' dtype; ``seq_idx`` works in training on every device;
* its own ``model_type``, because PEFT refuses ``out_proj`` on ``mamba2``.
Parameter names equal the stock ones: a stock directory loads here and an exported one loads there.

Legend: B batch, L tokens, D hidden size, V vocabulary; the rest as in scan.py.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import (
    Mamba2Block,
    Mamba2ForCausalLM,
    Mamba2Mixer,
    Mamba2Model,
    Mamba2PreTrainedModel,
)
from transformers.utils import ModelOutput

from inference.model.norms import gated_rms_norm, rms_norm
from inference.model.scan import causal_conv, chunk_scan, padding_mask, state_update
from inference.model.states import RecurrentStates
from inference.model.vocabulary import StructuralVocabulary

# On a CPU the scan's cost grows with the chunk; the result does not depend on it.
CPU_CHUNK = 32


class TraceMambaConfig(Mamba2Config):
    """Stock Mamba-2 settings under a model type of our own."""

    model_type = "trace_mamba2"


@dataclass
class TraceMambaOutput(ModelOutput):
    """logits (B, L, V) fp32 and, when asked for, the states after each row's last token."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    states: RecurrentStates | None = None


class TraceMambaMixer(Mamba2Mixer):
    """One layer: in_proj, causal convolution, selective scan, gated norm, out_proj."""

    def forward(  # type: ignore[override]
        self,
        hidden_BLD: Tensor,
        *,
        conv_BCK: Tensor | None = None,
        ssm_BHPN: Tensor | None = None,
        seq_idx_BL: Tensor | None = None,
        lengths_B: Tensor | None = None,
        backend: str = "auto",
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (output (B, L, D), convolution window (B, C, K-1), scan state (B, H, P, N))."""
        batch, length, _ = hidden_BLD.shape
        groups, state, heads, dim = self.n_groups, self.ssm_state_size, self.num_heads, self.head_dim
        gate, xBC, dt = self.in_proj(hidden_BLD).split([self.intermediate_size, self.conv_dim, heads], dim=-1)
        xBC, conv_out = causal_conv(
            xBC, self.conv1d.weight.squeeze(1), self.conv1d.bias,
            initial_BCK=conv_BCK, seq_idx_BL=seq_idx_BL, lengths_B=lengths_B, backend=backend,
        )  # fmt: skip
        x, B, C = xBC.split([self.intermediate_size, groups * state, groups * state], dim=-1)
        A = -torch.exp(self.A_log.float())
        limit = (float(self.time_step_limit[0]), float(self.time_step_limit[1]))
        if length == 1 and ssm_BHPN is not None and lengths_B is None and not torch.is_grad_enabled():
            ssm_out = ssm_BHPN.clone()
            y = state_update(
                ssm_out, x.reshape(batch, heads, dim), dt[:, 0], A, B.reshape(batch, groups, state),
                C.reshape(batch, groups, state), self.D, self.dt_bias, dt_limit=limit, backend=backend,
            )  # fmt: skip
        else:
            y, ssm_out = chunk_scan(
                x.reshape(batch, length, heads, dim), dt, A, B.reshape(batch, length, groups, state),
                C.reshape(batch, length, groups, state), self.D, self.dt_bias,
                chunk_size=min(self.chunk_size, CPU_CHUNK) if x.device.type == "cpu" else self.chunk_size,
                initial_states_BHPN=ssm_BHPN, seq_idx_BL=seq_idx_BL, lengths_B=lengths_B, dt_limit=limit,
                backend=backend,
            )  # fmt: skip
        y = gated_rms_norm(
            y.reshape(batch, length, -1),
            gate,
            self.norm.weight,
            self.norm.variance_epsilon,
            self.norm.group_size,
        )
        return self.out_proj(y), conv_out, ssm_out


class TraceMambaBlock(Mamba2Block):
    """Pre-norm residual block around the mixer."""

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.mixer = TraceMambaMixer(config, layer_idx=layer_idx, initialize_mixer_weights=False)

    def forward(self, hidden_BLD: Tensor, **mixer_args) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        """Returns (hidden, window, state) of this layer."""
        normed = rms_norm(hidden_BLD.to(self.norm.weight.dtype), self.norm.weight, self.norm.variance_epsilon)
        out, conv, ssm = self.mixer(normed, **mixer_args)
        residual = hidden_BLD.float() if self.residual_in_fp32 else hidden_BLD
        return residual + out, conv, ssm


class TraceMambaPreTrainedModel(Mamba2PreTrainedModel):
    """Initialisation and loading as in the stock family."""

    config_class = TraceMambaConfig
    _no_split_modules = ["TraceMambaBlock"]  # noqa: RUF012


class TraceMambaModel(TraceMambaPreTrainedModel, Mamba2Model):
    """Embeddings, blocks, final norm; states in, states out."""

    def __init__(self, config: TraceMambaConfig):
        TraceMambaPreTrainedModel.__init__(self, config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            [TraceMambaBlock(config, layer_idx=i) for i in range(config.num_hidden_layers)]
        )
        self.norm_f = type(self.layers[0].norm)(config.hidden_size, eps=config.layer_norm_epsilon)
        self.gradient_checkpointing = False
        self._register_load_state_dict_pre_hook(self.load_hook)
        self.post_init()

    def forward(  # type: ignore[override]
        self,
        inputs_embeds_BLD: Tensor,
        *,
        states: RecurrentStates | None = None,
        seq_idx_BL: Tensor | None = None,
        lengths_B: Tensor | None = None,
        return_states: bool = False,
        backend: str = "auto",
    ) -> tuple[Tensor, RecurrentStates | None]:
        """Embeddings to (hidden after the final norm, states or None)."""
        hidden = inputs_embeds_BLD
        convs, ssms = [], []
        for i, block in enumerate(self.layers):
            args = {
                "conv_BCK": None if states is None else states.conv_ESCK[i],
                "ssm_BHPN": None if states is None else states.ssm_ESHPN[i],
                "seq_idx_BL": seq_idx_BL, "lengths_B": lengths_B, "backend": backend,
            }  # fmt: skip
            if self.gradient_checkpointing and self.training:
                hidden, conv, ssm = checkpoint(block, hidden, use_reentrant=False, **args)
            else:
                hidden, conv, ssm = block(hidden, **args)
            if return_states:
                convs.append(conv)
                ssms.append(ssm)
        hidden = rms_norm(
            hidden.to(self.norm_f.weight.dtype), self.norm_f.weight, self.norm_f.variance_epsilon
        )
        return hidden, RecurrentStates(torch.stack(convs), torch.stack(ssms)) if return_states else None


class TraceMambaForCausalLM(StructuralVocabulary, TraceMambaPreTrainedModel, Mamba2ForCausalLM):
    """The language model: ``hidden`` and ``logits`` are its two halves, ``forward`` joins them.

    ``structural_rows`` (R, D) fp32 are the rows of the structural tokens once the vocabulary was extended
    (inference/model/vocabulary.py); they replace the rows ``structural_ids`` of the tied matrix, as input and output.
    """

    _tied_weights_keys = {"lm_head.weight": "backbone.embeddings.weight"}  # noqa: RUF012

    def __init__(self, config: TraceMambaConfig):
        TraceMambaPreTrainedModel.__init__(self, config)
        self.backbone = TraceMambaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.init_structural()
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        """The tied embedding matrix, without the structural rows."""
        return self.backbone.embeddings

    def set_input_embeddings(self, embeddings: nn.Embedding) -> None:
        """Replaces the embedding matrix."""
        self.backbone.embeddings = embeddings

    def hidden(
        self,
        input_ids_BL: Tensor,
        seq_idx_BL: Tensor | None = None,
        states: RecurrentStates | None = None,
        lengths_B: Tensor | None = None,
        return_states: bool = False,
        backend: str = "auto",
    ) -> tuple[Tensor, RecurrentStates | None]:
        """Token ids to hidden states after the final norm.

        Args:
            input_ids_BL: int64 token ids, right-padded when ``lengths_B`` (B,) is given.
            seq_idx_BL: document number of each token for packed rows; both states reset where it changes.
            states: where each row continues; fresh when None.
            return_states: whether to return the states after each row's last token.

        Returns:
            (hidden (B, L, D), RecurrentStates or None).

        Raises:
            ValueError: ``lengths_B`` outside 1..L, or ``seq_idx_BL`` together with ``lengths_B``.
        """
        if lengths_B is not None:
            if seq_idx_BL is not None:
                raise ValueError("packed rows (seq_idx) have no padding: give seq_idx or lengths, not both")
            if int(lengths_B.min()) < 1 or int(lengths_B.max()) > input_ids_BL.shape[1]:
                raise ValueError(
                    f"row lengths {lengths_B.tolist()} must lie within 1..{input_ids_BL.shape[1]}"
                )
            if int(lengths_B.min()) == input_ids_BL.shape[1]:
                lengths_B = None
        return self.backbone(
            self.embed(input_ids_BL), states=states, seq_idx_BL=seq_idx_BL, lengths_B=lengths_B,
            return_states=return_states, backend=backend,
        )  # fmt: skip

    def embed(self, input_ids_BL: Tensor) -> Tensor:
        """Input embeddings, structural rows put in place."""
        return self.with_structural_inputs(input_ids_BL, self.backbone.embeddings(input_ids_BL))

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states (..., D) to fp32 logits (..., V)."""
        logits = self.lm_head(hidden.to(self.lm_head.weight.dtype)).float()
        return self.with_structural_logits(hidden, logits)

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        states: RecurrentStates | None = None,
        seq_idx: Tensor | None = None,
        return_states: bool = False,
    ) -> TraceMambaOutput:
        """The usual call: (B, L) ids, right-padding mask and labels (-100 ignored) to loss and logits.

        Raises:
            ValueError: a mask that is not right padding (left padding cannot continue a state exactly).
        """
        lengths = None
        if attention_mask is not None:
            lengths = attention_mask.sum(1)
            if not torch.equal(padding_mask(lengths, input_ids.shape[1]), attention_mask.bool()):
                raise ValueError("attention_mask must be right padding: ones, then zeros")
        hidden, states = self.hidden(input_ids, seq_idx, states, lengths, return_states)
        logits = self.logits(hidden)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return TraceMambaOutput(loss=loss, logits=logits, states=states)
