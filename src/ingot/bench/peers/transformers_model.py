"""transformers' LlamaForCausalLM of a shape, with the weights given."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def build(job):
    """The model, in fp32."""
    shape = job["shape"]
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape["vocab"],
            hidden_size=shape["width"],
            intermediate_size=shape["ffn"],
            num_hidden_layers=shape["depth"],
            num_attention_heads=shape["heads"],
            num_key_value_heads=shape["heads"],
            head_dim=shape["head_size"],
            max_position_embeddings=shape["context"],
            rms_norm_eps=shape["norm_eps"],
            rope_parameters={"rope_type": "default", "rope_theta": shape["rope_theta"]},
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
    )
    weights = torch.load(job["weights"], weights_only=True)
    model.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    return model
