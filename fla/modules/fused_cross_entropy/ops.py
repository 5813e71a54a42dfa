"""Cross entropy of logits, with the options that large vocabularies need: scale, soft cap, smoothing, z-loss, shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from fla.backends import check_tensors, dispatch
from fla.modules.checks import check_choice, check_finite, check_floating, check_int, check_launchable
from fla.modules.on_triton import on_triton
from fla.ops.checks import check_given, readable

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


# numbers of a dtype are below this, and at least minus this
_RANGE = {torch.int32: 2**31, torch.int64: 2**63}


def check_loss(
    target: torch.Tensor,
    rows: int | torch.SymInt,
    classes: int | torch.SymInt,
    label_smoothing: float,
    logit_scale: float,
    logit_softcapping: float | None,
    ignore_index: int,
    check_values: bool,
) -> None:
    """Checks the arguments that both cross entropies take: `target` `[rows]` of classes, and the numbers."""
    if target.dtype not in _RANGE:
        raise TypeError(f'target must be int32 or int64, got {target.dtype}')
    if target.dim() != 1 or target.shape[0] != rows:
        raise ValueError(f'target must be [N] = [{rows}], got {list(target.shape)}')
    check_numbers(label_smoothing, logit_scale, logit_softcapping, ignore_index)
    _check_range(ignore_index, target.dtype)
    if check_values or readable(target):
        bad = ((target < 0) | (target >= classes)) & (target != ignore_index)
        if bool(bad.any()):
            worst = int(target[bad][0])
            raise ValueError(f'target must be in [0, {classes}) or ignore_index = {ignore_index}, got {worst}')


def check_numbers(label_smoothing: float, logit_scale: float, logit_softcapping: float | None, ignore_index: int) -> None:
    """Checks the numbers, which the loss classes check already when they are made."""
    check_int('ignore_index', ignore_index)
    _check_range(ignore_index, torch.int64)
    check_finite('label_smoothing', label_smoothing)
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f'label_smoothing must be between 0 and 1, got {label_smoothing}')
    check_finite('logit_scale', logit_scale)
    if logit_softcapping is not None:
        check_finite('logit_softcapping', logit_softcapping)
        if not logit_softcapping > 0:
            raise ValueError(f'logit_softcapping must be positive or None, got {logit_softcapping}')


def _check_range(ignore_index: int, dtype: torch.dtype) -> None:
    """The target's dtype holds ignore_index: PyTorch would compare with its truncated value, which may be another class."""
    if not -_RANGE[dtype] <= ignore_index < _RANGE[dtype]:
        raise ValueError(f'ignore_index must be a number that targets can be, {dtype}, got {ignore_index}')


def _check(
    logits: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float,
    logit_scale: float,
    lse_square_scale: float,
    logit_softcapping: float | None,
    ignore_index: int,
    process_group: ProcessGroup | None,
    check_values: bool,
) -> None:
    check_given(logits=logits, target=target)
    check_floating(logits=logits)
    check_tensors(logits=logits, target=target)
    if logits.dim() != 2 or logits.shape[1] < 1:
        raise ValueError(f'logits must be [N, V] with V at least 1, got shape {list(logits.shape)}')
    check_finite('lse_square_scale', lse_square_scale)
    shards = check_group(process_group)
    rows, classes = logits.shape[0], logits.shape[1] * shards
    check_loss(target, rows, classes, label_smoothing, logit_scale, logit_softcapping, ignore_index, check_values)


def check_group(process_group: object) -> int:
    """The number of ranks of a process group, 1 for None."""
    if process_group is None:
        return 1
    if not torch.distributed.is_available():
        raise RuntimeError('process_group: this PyTorch was built without torch.distributed; pass None')
    if not isinstance(process_group, torch.distributed.ProcessGroup):
        raise TypeError(
            f'process_group must be a torch.distributed.ProcessGroup or None, got {type(process_group).__name__}; '
            'make one by torch.distributed.new_group()'
        )
    return process_group.size()


# `mutates`: the backward may overwrite the logits, so a failed call must not be repeated by another backend
@dispatch('modules', check=_check, default_verifier=on_triton('logits'), mutates=('logits',))
def cross_entropy_loss(
    logits: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    logit_softcapping: float | None = None,
    ignore_index: int = -100,
    inplace_backward: bool = False,
    process_group: ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy of each row, `lse(v) - (1 - e) v[target] - e mean(v) + lse_square_scale lse(v)^2`, in at least float32,
    where `v = cap tanh(logit_scale logits / cap)` and e is the label smoothing.

    Args:
        logits: `[N, V]`, float16, bfloat16, float32 or float64.
        target: `[N]`, int32 or int64, in `[0, V)`. Rows whose target is `ignore_index` have loss and gradient 0. Any other
            number raises on a CPU. On a GPU, where reading it would synchronise, loss and gradient of its row are NaN.
        label_smoothing: e, the part of the target's weight that is spread over all classes.
        logit_scale, logit_softcapping: the scale is applied first, then the positive cap; None: no cap.
        lse_square_scale: weight of the z-loss.
        inplace_backward: allow the backward to write the gradient over the logits, which saves N V numbers. The logits must
            not be read afterwards. It is done in eager code on a GPU if the logits are contiguous, fill their storage, are
            neither a leaf nor a view of one, and no saved-tensor hooks (checkpoints, `save_on_cpu`) are active. If the
            backward of another function reads the logits, autograd raises, except where that function saved them by such
            hooks or in another way that autograd cannot see.
        process_group: its ranks hold V columns each, in rank order, and the same targets, in `[0, V * ranks)`. Every rank
            gets the loss of whole rows and the gradient of its own columns. Differentiable once.

    Returns:
        losses and z_losses, `[N]`, float32 (float64 for float64). The losses include z_losses, which are for logging and
        have no gradient.

    Raises:
        TypeError, ValueError: for invalid arguments, before any backend is tried.
        RuntimeError: for a process group if PyTorch was built without torch.distributed.

    Source: the z-loss of Chowdhery et al. 2022, "PaLM", arXiv 2204.02311; label smoothing of Szegedy et al. 2016,
    "Rethinking the Inception Architecture", arXiv 1512.00567; the soft cap of Gemma Team 2024, "Gemma 2", arXiv 2408.00118.
    """
    check_launchable('cross_entropy_loss', logits=logits, target=target)
    from fla.modules.kernels.cross_entropy_autograd import cross_entropy

    numbers = (label_smoothing, logit_scale, lse_square_scale, logit_softcapping, ignore_index)
    return cross_entropy(logits, target, *numbers, inplace_backward, process_group)


REDUCTIONS = ('mean', 'sum', 'none')


def reduced(losses: torch.Tensor, target: torch.Tensor, ignore_index: int, reduction: str) -> torch.Tensor:
    """Reduces losses `[N]`, which are 0 where the target is ignored: 'mean' over the other targets (NaN if there are none),
    'sum' or 'none'."""
    if reduction == 'none':
        return losses
    total = losses.sum()
    return total if reduction == 'sum' else total / (target != ignore_index).sum()


class FusedCrossEntropyLoss(nn.Module):
    """`cross_entropy_loss`, reduced.

    Args:
        reduction: 'mean' over the targets that are not ignored, 'sum' or 'none'.
        return_z_loss: return the pair of the loss and the z-loss in it, reduced alike and without a gradient.
        ignore_index and the others: as for the function.

    Raises:
        TypeError, ValueError: for an unknown reduction or invalid numbers.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = 'mean',
        label_smoothing: float = 0.0,
        logit_scale: float = 1.0,
        lse_square_scale: float = 0.0,
        logit_softcapping: float | None = None,
        inplace_backward: bool = False,
        process_group: ProcessGroup | None = None,
        return_z_loss: bool = False,
    ) -> None:
        super().__init__()
        check_choice('reduction', reduction, REDUCTIONS)
        check_numbers(label_smoothing, logit_scale, logit_softcapping, ignore_index)
        check_finite('lse_square_scale', lse_square_scale)
        check_group(process_group)
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing
        self.logit_scale, self.lse_square_scale, self.logit_softcapping = logit_scale, lse_square_scale, logit_softcapping
        self.inplace_backward, self.process_group, self.return_z_loss = inplace_backward, process_group, return_z_loss

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The loss of logits `[N, V]` and target `[N]`: a scalar, or `[N]` without a reduction."""
        losses, z_losses = cross_entropy_loss(
            input,
            target,
            self.label_smoothing,
            self.logit_scale,
            self.lse_square_scale,
            self.logit_softcapping,
            self.ignore_index,
            self.inplace_backward,
            self.process_group,
        )
        loss = reduced(losses, target, self.ignore_index, self.reduction)
        if not self.return_z_loss:
            return loss
        return loss, reduced(z_losses, target, self.ignore_index, self.reduction)

    def extra_repr(self) -> str:
        return f'reduction={self.reduction}, ignore_index={self.ignore_index}, label_smoothing={self.label_smoothing}'
