"""Our models against transformers' own, on the same randomised weights."""

import pytest
import torch
from helpers.models import DOCUMENTS, VARIANTS, pack, randomised, small
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from sparkgpt.loss import load_balance


def library_model(ours):
    """transformers' model with the weights of ours, copied tensor by tensor."""
    c = ours.config
    shape = {
        "vocab_size": 259,
        "hidden_size": c.model_dim,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.model_layers,
        "num_attention_heads": c.attention_heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "max_position_embeddings": c.max_position_embeddings,
        "rope_parameters": {"rope_theta": c.rope_theta, "rope_type": "default"},
        "tie_word_embeddings": False,
        "attn_implementation": "eager",
    }
    if c.num_experts:
        shape |= {
            "num_experts": c.num_experts,
            "num_experts_per_tok": c.num_experts_per_tok,
            "moe_intermediate_size": c.moe_intermediate_size,
            "decoder_sparse_step": c.decoder_sparse_step,
            "mlp_only_layers": list(c.mlp_only_layers),
            "norm_topk_prob": c.norm_topk_prob,
            "output_router_logits": True,
        }
        theirs = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape))
    else:
        theirs = Qwen3ForCausalLM(Qwen3Config(**shape))
    with torch.no_grad():
        copy_weights(ours, theirs)
    return theirs.eval()


def copy_weights(ours, theirs):
    c, body = ours.config, theirs.model
    body.embed_tokens.weight.copy_(ours.embed_tokens.weight)
    body.norm.weight.copy_(ours.norm.weight)
    theirs.lm_head.weight.copy_(ours.lm_head.weight)
    queries, keys = c.attention_heads * c.head_dim, c.kv_heads * c.head_dim
    for mine, block in zip(ours.layers, body.layers, strict=True):
        attention = block.self_attn
        q, k, v = mine.attention.qkv.weight.split((queries, keys, keys))
        pairs = [
            (attention.q_proj.weight, q),
            (attention.k_proj.weight, k),
            (attention.v_proj.weight, v),
            (attention.o_proj.weight, mine.attention.o.weight),
            (attention.q_norm.weight, mine.attention.q_norm.weight),
            (attention.k_norm.weight, mine.attention.k_norm.weight),
            (block.input_layernorm.weight, mine.input_layernorm.weight),
            (block.post_attention_layernorm.weight, mine.post_attention_layernorm.weight),
        ]
        if mine.sparse:
            experts = block.mlp.experts
            pairs += [
                (block.mlp.gate.weight, mine.moe.router.weight),
                (experts.gate_up_proj, mine.moe.gate_up),
                (experts.down_proj, mine.moe.down),
            ]
        else:
            gate, up = mine.mlp.gate_up.weight.chunk(2)
            pairs += [
                (block.mlp.gate_proj.weight, gate),
                (block.mlp.up_proj.weight, up),
                (block.mlp.down_proj.weight, mine.mlp.down.weight),
            ]
        for target, source in pairs:
            target.copy_(source)


def test_packed_logits_equal_the_library_one_document_at_a_time(variant):
    ours = randomised(variant)
    theirs = library_model(ours)
    tokens_T, _, positions_T, cu_seqlens_S = pack(DOCUMENTS)
    logits_TV, _ = ours(tokens_T, positions_T, cu_seqlens_S)
    for start, end in zip(cu_seqlens_S[:-1], cu_seqlens_S[1:], strict=True):
        expected_TV = theirs(input_ids=tokens_T[None, start:end]).logits[0]
        assert (logits_TV[start:end] - expected_TV).abs().max() <= 1e-4
    assert logits_TV.std() > 0.1  # weights large enough for a difference to show


def test_a_swapped_q_norm_and_k_norm_would_be_noticed():
    ours = randomised(VARIANTS["dense"])
    theirs = library_model(ours)
    attention = ours.layers[0].attention
    attention.q_norm, attention.k_norm = attention.k_norm, attention.q_norm
    tokens_T, _, positions_T, cu_seqlens_S = pack(DOCUMENTS[:1])
    logits_TV, _ = ours(tokens_T, positions_T, cu_seqlens_S)
    assert (logits_TV - theirs(input_ids=tokens_T[None]).logits[0]).abs().max() > 1e-3


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["moe", "moe-top3", "moe-sparse-step"])
def test_aux_loss_equals_the_library(name, masked):
    config = VARIANTS[name]
    ours = randomised(config)
    theirs = library_model(ours)
    tokens_T, _, positions_T, cu_seqlens_S = pack([bytes(range(40, 100))])
    real_T = torch.ones(len(tokens_T), dtype=torch.bool)
    real_T[50:] = not masked
    _, router = ours(tokens_T, positions_T, cu_seqlens_S, real_T)
    found = load_balance(router.prob_sums_LE, router.counts_LE, int(real_T.sum()))
    with torch.no_grad():
        gates = theirs(input_ids=tokens_T[None], output_router_logits=True).router_logits
    # Only the sparse layers' logits; the library's function pools them as it finds them.
    expected = load_balancing_loss_func(
        tuple(gates),
        config.num_experts,
        config.num_experts_per_tok,
        real_T[None].long() if masked else None,
    )
    assert abs(found.item() - float(expected)) < 1e-5


def test_aux_loss_of_a_balanced_router_is_top_k():
    counts_LE = torch.full((3, 8), 20.0)  # 80 positions, 2 of 8 experts each
    prob_sums_LE = torch.full((3, 8), 10.0)
    assert load_balance(prob_sums_LE, counts_LE, 80).item() == pytest.approx(2.0, abs=1e-6)


@pytest.mark.parametrize("shape", [(8,), (5, 8), (5, 3, 8)])
def test_rms_norm_s_own_backward_is_that_of_its_formula(shape):
    from sparkgpt.ops.norm import rms_norm

    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    gain = torch.randn(8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, gain: rms_norm(x, gain, 1e-6), (x, gain))
    exact = torch.nn.functional.rms_norm(x, (8,), gain, 1e-6)
    torch.testing.assert_close(rms_norm(x, gain, 1e-6), exact, rtol=1e-14, atol=1e-14)


def test_bf16_rms_norm_multiplies_after_the_cast():
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    from sparkgpt.ops.norm import rms_norm

    torch.manual_seed(0)
    theirs = Qwen3RMSNorm(64, eps=1e-6).bfloat16()
    theirs.weight.data = (1 + 0.3 * torch.randn(64)).bfloat16()
    x = torch.randn(200, 64).bfloat16()
    assert torch.equal(rms_norm(x, theirs.weight, 1e-6), theirs(x))


def test_rope_tables_equal_the_library_in_bf16():
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    from sparkgpt.ops.rope import rope_tables

    config = library_model(randomised(small())).config
    positions_T = torch.arange(256)
    cos_TH, sin_TH = rope_tables(positions_T, 16, 1e6, torch.bfloat16)
    theirs = Qwen3RotaryEmbedding(config)(torch.zeros(1, dtype=torch.bfloat16), positions_T[None])
    assert torch.equal(cos_TH, theirs[0][0]) and torch.equal(sin_TH, theirs[1][0])
