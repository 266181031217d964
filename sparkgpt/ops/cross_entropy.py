"""The head and its cross-entropy as one operation that holds only a chunk of logits at a time.

Shapes: T packed positions, D model width, V vocabulary, C positions of a chunk.
The forward computes the gradients too, while a chunk's logits are at hand; the backward scales
them. CUDA tensors go to `ops.kernels.cross_entropy`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from sparkgpt.vocab import IGNORE_INDEX

CHUNK = 4096  # positions


def head_nats_sum(x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> Tensor:
    """Sum of nats over the real targets, float64 scalar: `loss.cross_entropy_sum` of the head's
    logits.

    x (T, D) any float dtype, which is the dtype of the products; weight (V, D) float32; targets
    (T,) int64, -100 is ignored, so that a window of filler alone gives 0. Softmax, each target's
    nats and the weight's gradient are float32. Not for evaluation: it always computes gradients.
    """
    return torch.ops.sparkgpt.head_nats(x_TD, weight_VD, targets_T)[0]


@torch.library.custom_op("sparkgpt::head_nats", mutates_args=(), device_types="cpu")
def _head_nats(x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    weight_VD = weight_VD.to(x_TD.dtype)
    nats = torch.zeros((), dtype=torch.float64)
    grad_x_TD, grad_VD = x_TD.new_empty(x_TD.shape), torch.zeros(weight_VD.shape)
    chunks = zip(*(v.split(CHUNK) for v in (x_TD, targets_T, grad_x_TD)), strict=True)
    for x_CD, targets_C, grad_x_CD in chunks:
        nats_C, grad_CV = _softmax_gradient((x_CD @ weight_VD.T).float(), targets_C)
        nats += nats_C.double().sum()
        grad_CV = grad_CV.to(x_TD.dtype)
        grad_x_CD.copy_(grad_CV @ weight_VD)
        grad_VD += grad_CV.float().T @ x_CD.float()
    return nats, grad_x_TD, grad_VD


def _softmax_gradient(logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
    """Nats (C,) = logsumexp - logit of the target; gradient (C, V) = softmax - one-hot."""
    real_C = targets_C != IGNORE_INDEX
    targets_C = targets_C.where(real_C, 0)
    log_probs_CV = logits_CV.log_softmax(-1)
    nats_C = -log_probs_CV.gather(1, targets_C[:, None])[:, 0]
    grad_CV = log_probs_CV.exp() - F.one_hot(targets_C, logits_CV.shape[1])
    return nats_C.where(real_C, 0), grad_CV.where(real_C[:, None], 0)


@_head_nats.register_kernel("cuda")
def _(x_TD, weight_VD, targets_T):
    from sparkgpt.ops.kernels.cross_entropy import head_nats

    nats_T, *gradients = head_nats(x_TD, weight_VD, targets_T, IGNORE_INDEX)
    return nats_T.double().sum(), *gradients


@_head_nats.register_fake
def _(x_TD, weight_VD, targets_T):
    nats = x_TD.new_empty((), dtype=torch.float64)
    grad_VD = weight_VD.new_empty(weight_VD.shape, dtype=torch.float32)
    return nats, x_TD.new_empty(x_TD.shape), grad_VD


def _save_gradients(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)  # nothing flows into the gradients
    ctx.save_for_backward(*output[1:])


def _scale_gradients(ctx, grad: Tensor, *_unused):
    grad_x_TD, grad_VD = ctx.saved_tensors
    grad = grad.float()
    return (grad_x_TD * grad).to(grad_x_TD.dtype), grad_VD * grad, None


_head_nats.register_autograd(_scale_gradients, setup_context=_save_gradients)
