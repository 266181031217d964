"""Causal attention over packed documents by tiles of plain matrix products: back end "tiles" of
`sparkgpt.ops.attention`, for CPUs.

Each thread computes strips of a document by itself, and sums over strips have a fixed order: the
bits are the same for any number of threads.

Shapes: T packed positions, N query heads, K key/value heads, G = N / K, H head dimension,
S = segments + 1; of a tile P positions, R = P * G rows (position, then head), C keys at a time; of
a strip n keys. Scores are in base 2, times H ** -0.5.
Sources: online softmax, Milakov and Gimelshein 2018 (arXiv:1805.02867); its backward by tiles, Dao
et al. 2022 (arXiv:2205.14135).
"""

import math
import threading

import torch
from torch import Tensor

from sparkgpt.ops.cpu_tiles import Cut, Strip, Tile
from sparkgpt.ops.workers import share_out

LOG2_E = math.log2(math.e)


def tiled_attention(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, cu_seqlens_S: Tensor) -> Tensor:
    """As `varlen_attention`; computed in float32, or in float64 for such inputs."""
    wide = torch.promote_types(q_TNH.dtype, torch.float32)
    qkv = (x.to(wide) for x in (q_TNH, k_TKH, v_TKH))
    return _TiledAttention.apply(*qkv, cu_seqlens_S.diff().tolist()).to(q_TNH.dtype)


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_TNH, k_TKH, v_TKH, lengths):
        out_TNH, lse_TN = forward(q_TNH, k_TKH, v_TKH, lengths)
        ctx.save_for_backward(q_TNH, k_TKH, v_TKH, out_TNH, lse_TN)
        ctx.lengths = lengths
        return out_TNH

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout_TNH):
        return *backward(dout_TNH, *ctx.saved_tensors, ctx.lengths), None


def forward(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, lengths: list[int]
) -> tuple[Tensor, Tensor]:
    """Output (T, N, H), and base-2 logarithms (T, N) of the softmax's sums."""
    cut = Cut(q_TNH, k_TKH.shape[1], lengths)
    out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype)
    lse_TN = torch.empty(q_TNH.shape[:2], dtype=q_TNH.dtype)
    mask_RP = cut.mask()

    def work(strips):
        head_dim = q_TNH.shape[-1]
        room = cut.room(head_dim, head_dim, cut.widest)
        for strip in strips:
            for tile in cut.tiles(strip):
                _forward_tile(cut, tile, q_TNH, k_TKH, v_TKH, out_TNH, lse_TN, mask_RP, room)

    share_out(work, cut.strips, cut.threads)
    return out_TNH, lse_TN


def _forward_tile(cut: Cut, tile: Tile, q_TNH, k_TKH, v_TKH, out_TNH, lse_TN, mask_RP, room):
    head_dim, positions = q_TNH.shape[-1], tile.end - tile.first
    rows = positions * cut.groups
    q_PGH, out_PGH, lse_PG = (x[tile.part] for x in (q_TNH, out_TNH, lse_TN))
    q_RH, sum_RH = (x[: rows * head_dim].view(rows, head_dim) for x in room[:2])
    torch.mul(q_PGH, LOG2_E * head_dim**-0.5, out=q_RH.view(q_PGH.shape))
    total_R1 = top_R1 = None
    for first, end in cut.key_ranges(tile):
        k_CH, v_CH = k_TKH[first:end, tile.head], v_TKH[first:end, tile.head]
        scores_RC = room[2][: rows * (end - first)].view(rows, end - first)
        torch.mm(q_RH, k_CH.T, out=scores_RC)
        if end == tile.end:
            scores_RC[:, tile.first - first :].add_(mask_RP[:rows, :positions])
        before_R1, top_R1 = top_R1, scores_RC.amax(1, keepdim=True)
        if before_R1 is not None:
            top_R1 = torch.maximum(before_R1, top_R1)
        weights_RC = scores_RC.sub_(top_R1).exp2_()
        part_R1 = weights_RC.sum(1, keepdim=True)
        if before_R1 is None:
            total_R1 = part_R1
            torch.mm(weights_RC, v_CH, out=sum_RH)
        else:
            shrink_R1 = before_R1.sub_(top_R1).exp2_()
            total_R1.mul_(shrink_R1).add_(part_R1)
            sum_RH.mul_(shrink_R1).addmm_(weights_RC, v_CH)
    total_PG1 = total_R1.view(positions, cut.groups, 1)
    torch.div(sum_RH.view(q_PGH.shape), total_PG1, out=out_PGH)
    lse_PG.copy_(total_R1.log2_().add_(top_R1).view(positions, cut.groups))


def backward(
    dout_TNH: Tensor,
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    out_TNH: Tensor,
    lse_TN: Tensor,
    lengths: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. With weights w = 2 ** (scores - lse) and each row's d = out . dout:
    dv = w dout, ds = w (dout v - d), dq = ds k * H ** -0.5, dk likewise."""
    cut = Cut(q_TNH, k_TKH.shape[1], lengths)
    dq_TNH, head_dim = torch.empty(q_TNH.shape, dtype=q_TNH.dtype), q_TNH.shape[-1]
    by_query = (dout_TNH, q_TNH, dq_TNH, lse_TN, (dout_TNH * out_TNH).sum(-1))
    mask_PR = cut.mask().T.contiguous()
    sums = _Sums(k_TKH)

    def work(strips):
        room = cut.room(head_dim, head_dim, head_dim, cut.widest, cut.widest)
        for strip in strips:
            dk_nH, dv_nH = (x.new_zeros(strip.end - strip.start, head_dim) for x in (k_TKH, v_TKH))
            for tile in cut.tiles(strip):
                _backward_tile(cut, tile, by_query, k_TKH, v_TKH, dk_nH, dv_nH, mask_PR, room)
            sums.add(strip, dk_nH, dv_nH)

    share_out(work, cut.strips, cut.threads)
    return dq_TNH, sums.dk_TKH, sums.dv_TKH


def _backward_tile(cut: Cut, tile: Tile, by_query, k_TKH, v_TKH, dk_nH, dv_nH, mask_PR, room):
    # Scores are held transposed: the products that have them on the left are a third faster so.
    head_dim, positions = k_TKH.shape[-1], tile.end - tile.first
    rows = positions * cut.groups
    dout_PGH, q_PGH, dq_PGH, lse_PG, delta_PG = (x[tile.part] for x in by_query)
    dout_RH, q_RH, dq_RH = (x[: rows * head_dim].view(rows, head_dim) for x in room[:3])
    lse_1R, delta_1R = lse_PG.reshape(1, rows), delta_PG.reshape(1, rows)
    dout_RH.view(q_PGH.shape).copy_(dout_PGH)
    torch.mul(q_PGH, LOG2_E * head_dim**-0.5, out=q_RH.view(q_PGH.shape))
    for first, end in cut.key_ranges(tile):
        keys, size = slice(first - tile.start, end - tile.start), (end - first) * rows
        k_CH, v_CH = k_TKH[first:end, tile.head], v_TKH[first:end, tile.head]
        weights_CR, ds_CR = (x[:size].view(end - first, rows) for x in room[3:])
        torch.addmm(lse_1R, k_CH, q_RH.T, beta=-1, out=weights_CR)
        if end == tile.end:
            weights_CR[tile.first - first :].add_(mask_PR[:positions, :rows])
        weights_CR.exp2_()
        torch.addmm(delta_1R, v_CH, dout_RH.T, beta=-1, out=ds_CR)
        ds_CR.mul_(weights_CR)
        dv_nH[keys].addmm_(weights_CR, dout_RH)
        dk_nH[keys].addmm_(ds_CR, q_RH)
        torch.addmm(dq_RH, ds_CR.T, k_CH, beta=int(first > tile.start), out=dq_RH)
    torch.mul(dq_RH.view(q_PGH.shape), head_dim**-0.5, out=dq_PGH)


class _Sums:
    """Gradients of keys and values: those of a document's strips added in turn, whichever thread
    is done first."""

    def __init__(self, k_TKH: Tensor):
        self.dk_TKH, self.dv_TKH = (k_TKH.new_zeros(k_TKH.shape) for _ in range(2))
        self.early: dict[tuple[int, int, int], tuple[int, Tensor, Tensor]] = {}
        self.next_turn: dict[tuple[int, int], int] = {}
        self.lock = threading.Lock()

    def add(self, strip: Strip, dk_nH: Tensor, dv_nH: Tensor) -> None:
        place = strip.head, strip.start
        with self.lock:
            self.early[*place, strip.turn] = strip.end, dk_nH, dv_nH
            turn = self.next_turn.get(place, 0)
            while (*place, turn) in self.early:
                end, dk_nH, dv_nH = self.early.pop((*place, turn))
                self.dk_TKH[strip.start : end, strip.head].add_(dk_nH, alpha=1 / LOG2_E)
                self.dv_TKH[strip.start : end, strip.head].add_(dv_nH)
                turn += 1
            self.next_turn[place] = turn
