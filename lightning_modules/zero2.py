"""DeepSpeed ZeRO-2 as this project needs it. design.md section 5 ("DeepSpeed ZeRO-2 or DDP, not ZeRO-3").

In:  Trainer settings. Out: a strategy that saves only what trains, and scales the loss once.

* `exclude_frozen_parameters`: checkpoints hold adapters and new rows, not the 2.7B base.
* Lightning divides the loss by `accumulate_grad_batches`, and DeepSpeed's engine divides gradients by it once more
  unless `scale_wrt_gas=False` is passed (https://github.com/Lightning-AI/pytorch-lightning/issues/6170). AdamW hides
  the difference; the clipped gradient norm does not.
* Batches pass through unchanged: Lightning would cast loss weights to bf16.

DeepSpeed is imported when a strategy is made, not before.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.plugins.precision import DeepSpeedPrecision, Precision
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor


class SingleScalePrecision(DeepSpeedPrecision):
    """DeepSpeedPrecision whose loss is divided by the accumulation factor once (by Lightning), not twice."""

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Back-propagates without DeepSpeed's own division."""
        super().backward(tensor, model, optimizer, *args, scale_wrt_gas=False, **kwargs)

    def convert_input(self, data: Any) -> Any:
        """Token ids and float32 loss weights stay what they are."""
        return data


class Zero2Strategy(DeepSpeedStrategy):
    """DeepSpeedStrategy at stage 2 with adapter-only checkpoints and `SingleScalePrecision`.

    Args:
        reduce_bucket_size: elements reduced at a time.
        overlap_comm: overlap reduction with the backward pass.
    """

    def __init__(self, reduce_bucket_size: int = 200_000_000, overlap_comm: bool = True) -> None:
        super().__init__(
            stage=2,
            exclude_frozen_parameters=True,
            reduce_bucket_size=reduce_bucket_size,
            overlap_comm=overlap_comm,
        )

    @property
    def precision_plugin(self) -> Precision:
        """The plugin the Trainer chose for its `precision`, replaced by ours."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if isinstance(plugin, DeepSpeedPrecision) and not isinstance(plugin, SingleScalePrecision):
            plugin = SingleScalePrecision(plugin.precision)
        self._precision_plugin = plugin
