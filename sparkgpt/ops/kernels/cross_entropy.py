"""Head and cross-entropy in chunks of positions, the gradient in the same pass.

Shapes: T packed positions, D model width, V vocabulary, P = V padded to a multiple of 16,
C positions of a chunk, S slices of a chunk.

A chunk's logits, its gradient in their place, and both products from it happen while the chunk lies
in the 24 MB of L2: 4 MB of x, 2 of logits, 4 of the gradient of x, and 2 to 4 of sums. DRAM then
sees x once and its gradient once, 4 T D bytes in bf16. The loss is a sum, so its gradient scales as
a whole: the backward multiplies by one number, which inductor fuses into the norm's backward.

At T = 49,152, D = 512, V = 259 in bf16, on GB10 at 220 GB/s:

| way | bytes | time |
| --- | --- | --- |
| eager: logits in bf16 and fp32, log-softmax and its backward, three products | 0.68 GB | 3.1 ms |
| inductor: logits written, read, their gradient written, read twice | 0.30 GB | 1.4 ms |
| the forward as here, but the logits once more in the backward | 0.15 GB | 0.7 ms |
| here | 0.10 GB | 0.5 ms |

FLOPs: 6 T P D = 41 G, 0.4 ms at 98 TFLOP/s. Recomputing would add a third of them. One kernel for
all three products is no choice: the gradient of the weights (P x D in fp32, 557 KB) fits no SM.
Padding to 272 columns costs 5 % and makes every row begin at a multiple of 16 bytes: with 259, all
three products read or write rows at odd addresses, for which libraries have only slow kernels.
Small either way: at most 1 ms of the dense 50M's 334 ms, and 130 MB of logits never allocated.
Softmax: one read and one write in L2, 16 bytes at a time (LDG.E.128, STG.E.128), about 10 FLOPs an
element. The sums of slices are `newton_schulz.gemm` (HMMA.16816.F32.BF16), in order: equal bits.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkgpt.ops.kernels.newton_schulz import gemm, gemm_specimen
from sparkgpt.ops.kernels.specimen import Config, Specimen

FAMILY = "cross_entropy"
CHUNK_BYTES = 2**22  # of x: a sixth of the L2 cache
SLICES = 4  # of the positions behind a gradient of the weights: 12 tiles x 4 fill 48 SMs once


@triton.jit
def _softmax_gradient(
    logits_ptr,
    targets_ptr,
    nats_ptr,
    T,
    V: tl.constexpr,
    P: tl.constexpr,
    IGNORE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """nats[t] = logsumexp - logit of the target; logits = softmax - one-hot; 0 where ignored."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    p = tl.arange(0, BLOCK_P)
    inside = (t < T)[:, None] & (p < P)[None, :]
    at = t[:, None] * P + p[None, :]
    logits = tl.load(logits_ptr + at, mask=inside, other=0.0).to(tl.float32)
    logits = tl.where((p < V)[None, :], logits, float("-inf"))
    target = tl.load(targets_ptr + t, mask=t < T, other=IGNORE)
    hit = p[None, :] == target[:, None]
    highest = tl.max(logits, 1)
    shares = tl.exp(logits - highest[:, None])
    total = tl.sum(shares, 1)
    chosen = tl.sum(tl.where(hit, logits, 0.0), 1)
    nats = tl.where(target != IGNORE, tl.log(total) + (highest - chosen), 0.0)
    tl.store(nats_ptr + t, nats, mask=t < T)
    grad = shares / total[:, None] - tl.where(hit, 1.0, 0.0)
    grad = tl.where((target != IGNORE)[:, None], grad, 0.0)
    tl.store(logits_ptr + at, grad.to(logits_ptr.dtype.element_ty), mask=inside)


def default_config(padded: int) -> Config:
    """A row of logits at once, and rows to make 2,048 elements."""
    block = triton.next_power_of_2(padded)
    return Config({"BLOCK_T": max(2048 // block, 1), "BLOCK_P": block}, num_stages=1)


def softmax_gradient_(
    logits_CP: Tensor,
    targets_C: Tensor,
    nats_C: Tensor,
    vocab: int,
    ignore: int,
    config: Config | None = None,
) -> None:
    """Replace contiguous logits (C, P) by the gradient of their nats and write those, (C,) float32.

    Columns from `vocab` on don't count and get 0; targets (C,) int64, `ignore` has neither.
    """
    positions, padded = logits_CP.shape
    config = config or default_config(padded)
    _softmax_gradient[(triton.cdiv(positions, config.tiles["BLOCK_T"]),)](
        *(logits_CP, targets_C, nats_C, positions, vocab, padded, ignore), **config.options
    )


def head_nats(
    x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, ignore: int, chunk: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Nats of each position (T,) float32, and the gradients of their sum: (T, D) in x's dtype and
    (V, D) float32. The weight is cast to x's dtype; `chunk` positions at once."""
    x_TD, targets_T = x_TD.contiguous(), targets_T.contiguous()
    (positions, width), vocab = x_TD.shape, weight_VD.shape[0]
    like, padded = {"dtype": x_TD.dtype, "device": x_TD.device}, triton.cdiv(vocab, 16) * 16
    chunk = chunk or max(CHUNK_BYTES // (width * x_TD.element_size()), 1)
    weight_PD = torch.zeros(padded, width, **like)
    weight_PD[:vocab] = weight_VD
    nats_T = torch.empty(positions, dtype=torch.float32, device=x_TD.device)
    grad_x_TD = torch.empty(positions, width, **like)
    sums_SPD = torch.zeros(SLICES, padded, width, dtype=torch.float32, device=x_TD.device)
    logits_CP = torch.empty(min(chunk, positions), padded, **like)
    for start in range(0, positions, chunk):
        here = slice(start, min(start + chunk, positions))
        x_CD, part_CP = x_TD[here], logits_CP[: here.stop - start]
        torch.mm(x_CD, weight_PD.T, out=part_CP)
        softmax_gradient_(part_CP, targets_T[here], nats_T[here], vocab, ignore)
        torch.mm(part_CP, weight_PD, out=grad_x_TD[here])
        slices = math.gcd(len(x_CD), SLICES)
        grad_SCP, x_SCD = (v.view(slices, -1, v.shape[1]) for v in (part_CP, x_CD))
        sums = sums_SPD[:slices]
        gemm(grad_SCP.mT, x_SCD, c_BMN=sums, beta=1.0, out_BMN=sums)
    return nats_T, grad_x_TD, sums_SPD.sum(0)[:vocab]


def specimens() -> list[Specimen]:
    """The softmax over 259 ids, and the sums of the gradient of the weights, in bf16 and fp32."""
    found = []
    for dtype, kind in ((torch.bfloat16, "*bf16"), (torch.float32, "*fp32")):
        types = {"logits_ptr": kind, "targets_ptr": "*i64", "nats_ptr": "*fp32", "T": "i32"}
        constants = {"V": 259, "P": 272, "IGNORE": -100}
        found.append(Specimen(_softmax_gradient, types, constants, default_config(272)))
        found.append(gemm_specimen(dtype, 272, out="*fp32", c=True, a_transposed=True, beta=1.0))
    return found
