"""transformers' LlamaForCausalLM or GPT2LMHeadModel of a shape, with the job's weights."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM


def build(job):
    """The model, in fp32."""
    weights = torch.load(job["weights"], weights_only=True)
    if job["shape"]["positions"] == "learned":
        model, embedding = gpt2(job["shape"]), weights["transformer.wte.weight"]
    else:
        model, embedding = llama(job["shape"]), weights["model.embed_tokens.weight"]
    model.load_state_dict(weights | {"lm_head.weight": embedding})
    return model


def llama(shape):
    """RMSNorm, SwiGLU, rotary positions."""
    return LlamaForCausalLM(
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


def gpt2(shape):
    """LayerNorm, the exact GELU, learned positions, biases."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=shape["vocab"],
            n_positions=shape["context"],
            n_embd=shape["width"],
            n_layer=shape["depth"],
            n_head=shape["heads"],
            n_inner=shape["ffn"],
            activation_function="gelu",
            layer_norm_epsilon=shape["norm_eps"],
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
