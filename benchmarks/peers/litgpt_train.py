"""litgpt's GPT in a plain loop with litgpt's chunked cross-entropy; compiled on a GPU."""

import torch
from common import device, peak_bytes, print_result, read_job, train_plainly, versions, work
from litgpt.config import Config
from litgpt.model import GPT
from litgpt.utils import chunked_cross_entropy


def build(job):
    """The model with the job's weights; litgpt does not tie its head by itself."""
    shape = job["shape"]
    model = GPT(
        Config(
            name="bench",
            block_size=shape["context"],
            vocab_size=shape["vocab"],
            padded_vocab_size=shape["vocab"],
            n_layer=shape["depth"],
            n_head=shape["heads"],
            n_query_groups=shape["heads"],
            n_embd=shape["width"],
            head_size=shape["head_size"],
            intermediate_size=shape["ffn"],
            rotary_percentage=1.0,
            rope_base=int(shape["rope_theta"]),
            parallel_residual=False,
            bias=False,
            norm_class_name="RMSNorm",
            norm_eps=shape["norm_eps"],
            mlp_class_name="LLaMAMLP",
        )
    )
    model.lm_head.weight = model.transformer.wte.weight
    tensors = torch.load(job["weights"], weights_only=True)
    names = {"model.embed_tokens.weight": "transformer.wte.weight", "model.norm.weight": "transformer.ln_f.weight"}
    for i in range(shape["depth"]):
        theirs, ours = f"transformer.h.{i}.", f"model.layers.{i}."
        projections = [tensors.pop(f"{ours}self_attn.{name}_proj.weight") for name in "qkv"]
        tensors[ours + "qkv"] = torch.cat(projections)
        names |= {
            ours + "qkv": theirs + "attn.qkv.weight",
            ours + "self_attn.o_proj.weight": theirs + "attn.proj.weight",
            ours + "input_layernorm.weight": theirs + "norm_1.weight",
            ours + "post_attention_layernorm.weight": theirs + "norm_2.weight",
            ours + "mlp.gate_proj.weight": theirs + "mlp.fc_1.weight",
            ours + "mlp.up_proj.weight": theirs + "mlp.fc_2.weight",
            ours + "mlp.down_proj.weight": theirs + "mlp.proj.weight",
        }
    weights = {names[name]: tensor for name, tensor in tensors.items()}
    model.load_state_dict(weights | {"lm_head.weight": weights["transformer.wte.weight"]})
    return model


def main():
    """Run the job."""
    job = read_job()
    model, shape = build(job), job["shape"]
    counts = work(model, shape["depth"], shape["heads"] * shape["head_size"], shape["context"])
    if device() == "cuda":
        model = torch.compile(model.cuda())  # as litgpt's own pretraining script does
    result = train_plainly(job, model, lambda ids, targets: chunked_cross_entropy(model(ids), targets))
    print_result({**result, **counts, "peak_bytes": peak_bytes(), "versions": versions("litgpt")})


if __name__ == "__main__":
    main()
