"""Names and shapes of the tensors of heads as speculators and the authors' code write them, without our modules."""

from __future__ import annotations

from draftree.heads.config import DFLASH, DSPARK, EAGLE, EAGLE3, MEDUSA, PEAGLE, HeadConfig

Shapes = dict[str, tuple[int, ...]]


def tensor_shapes(config: HeadConfig) -> Shapes:
    """Shape of each tensor of a head, by name; MTP has none here, since its layers are those of its target."""
    if config.kind == EAGLE:
        found = _eagle(config)
    elif config.kind in (EAGLE3, PEAGLE):
        found = _eagle3(config)
    elif config.kind in (DFLASH, DSPARK):
        found = _block(config)
    else:
        found = _medusa(config)
    if config.own_embedding:
        found["embed_tokens.weight"] = (config.vocab_size, config.hidden)
    if config.own_output and config.kind != MEDUSA:
        found["lm_head.weight"] = (config.draft_vocab_size, config.hidden)
    return found


def layer_shapes(config: HeadConfig, index: int, width: int) -> Shapes:
    """Shapes of a decoder layer without norms before it; `width` is that of the input of its attention."""
    at, inner = f"layers.{index}.", config.intermediate
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    found: Shapes = {
        f"{at}self_attn.q_proj.weight": (queries, width),
        f"{at}self_attn.k_proj.weight": (keys, width),
        f"{at}self_attn.v_proj.weight": (keys, width),
        f"{at}self_attn.o_proj.weight": (config.hidden, queries),
        f"{at}mlp.gate_proj.weight": (inner, config.hidden),
        f"{at}mlp.up_proj.weight": (inner, config.hidden),
        f"{at}mlp.down_proj.weight": (config.hidden, inner),
        f"{at}post_attention_layernorm.weight": (config.hidden,),
    }
    if config.attention_bias:
        sizes = {"q": queries, "k": keys, "v": keys}
        found |= {f"{at}self_attn.{name}_proj.bias": (size,) for name, size in sizes.items()}
    if config.output_bias:
        found[f"{at}self_attn.o_proj.bias"] = (config.hidden,)
    if config.mlp_bias:
        sizes = {"gate": inner, "up": inner, "down": config.hidden}
        found |= {f"{at}mlp.{name}_proj.bias": (size,) for name, size in sizes.items()}
    if config.qk_norm:
        found |= {f"{at}self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
    return found


def _eagle(config: HeadConfig) -> Shapes:
    found: Shapes = {"fc.weight": (config.hidden, config.hidden + config.target_hidden)}
    if config.fc_bias:
        found["fc.bias"] = (config.hidden,)
    for index in range(config.num_layers):
        found |= layer_shapes(config, index, config.hidden)
        if index:
            found[f"layers.{index}.input_layernorm.weight"] = (config.hidden,)
    return found


def _eagle3(config: HeadConfig) -> Shapes:
    width, total = config.hidden, len(config.features) * config.target_hidden
    found: Shapes = {"fc.weight": (width, total), "norm.weight": (width,)}
    if config.fc_bias:
        found["fc.bias"] = (width,)
    for index in range(config.num_layers):
        found |= layer_shapes(config, index, width if index else 2 * width)
        found[f"layers.{index}.input_layernorm.weight"] = (width,)
    found["layers.0.hidden_norm.weight"] = (width,)
    if config.norm_before_fc:
        found["input_norm.weight"] = (total,)
    if config.fc_norm:
        found |= {f"fc_norm.{index}.weight": (config.target_hidden,) for index in range(len(config.features))}
    if config.kind == PEAGLE:
        found["mask_hidden"] = (1, 1, total)
    return found


def _block(config: HeadConfig) -> Shapes:
    width, rank = config.hidden, config.markov_rank
    found: Shapes = {
        "fc.weight": (width, len(config.features) * config.target_hidden),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
    }
    for index in range(config.num_layers):
        found |= layer_shapes(config, index, width)
        found[f"layers.{index}.input_layernorm.weight"] = (width,)
    if rank:
        found["markov_head.markov_w1.weight"] = (config.vocab_size, rank)
        found["markov_head.markov_w2.weight"] = (config.draft_vocab_size, rank)
        if config.markov_type == "gated":
            found["markov_head.gate_proj.weight"] = (rank, width + rank)
            found["markov_head.gate_proj.bias"] = (rank,)
        elif config.markov_type == "rnn":
            found["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + width)
            found["markov_head.joint_proj.bias"] = (3 * rank,)
    if config.has_confidence:
        found["confidence_head.proj.weight"] = (1, width + (rank if config.confidence_with_markov else 0))
        found["confidence_head.proj.bias"] = (1,)
    return found


def _medusa(config: HeadConfig) -> Shapes:
    width, found = config.hidden, Shapes()
    for head in range(config.block_size):
        for index in range(config.head_layers):
            found[f"medusa_head.{head}.{index}.linear.weight"] = (width, width)
            found[f"medusa_head.{head}.{index}.linear.bias"] = (width,)
        found[f"medusa_head.{head}.{config.head_layers}.weight"] = (config.draft_vocab_size, width)
    return found
