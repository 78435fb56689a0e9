"""Hugging Face directories in and out, transformers as the oracle: tiny random weights, logits and greedy texts."""

import functools
import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ingot.convert import hf_weights
from ingot.convert.hf_config import config_from_hf, config_to_hf, read_config
from ingot.core.errors import UserError
from ingot.infer.generate import generate
from ingot.infer.sampling import Sampling
from ingot.model.config import ModelSettings, RopeScaling
from ingot.model.transformer import build
from tests.imports import assert_not_imported

TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SIZES = {
    **{"vocab_size": 67, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40},
    **{"max_position_embeddings": 96, "num_key_value_heads": 2, **TOKENS},
}
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 50_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    **{"original_max_position_embeddings": 24},
}
GPT2 = {"vocab_size": 67, "n_positions": 96, "n_embd": 48, "n_layer": 2, "n_head": 4, **TOKENS}
THEIRS = {
    "gpt2": ("GPT2", GPT2),
    "gpt2-untied-exact": ("GPT2", {**GPT2, "tie_word_embeddings": False, "activation_function": "gelu", "n_inner": 50}),
    "llama": ("Llama", SIZES),
    "llama3-tied": ("Llama", {**SIZES, "rope_parameters": LLAMA3, "tie_word_embeddings": True, "head_dim": 16}),
    "llama-biases": ("Llama", {**SIZES, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {**SIZES, "sliding_window": 9}),
    "mistral-open": ("Mistral", {**SIZES, "sliding_window": None, "head_dim": 8}),
    "qwen2": ("Qwen2", {**SIZES, "tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {**SIZES, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}),
    "qwen3": ("Qwen3", {**SIZES, "head_dim": 16}),
}
OURS = {
    "gpt2": {"family": "gpt2"},
    "gpt2-untied": {"family": "gpt2", "tied": False, "activation": "gelu", "ffn": 50},
    "llama": {"family": "llama", "kv_heads": 2},
    "llama3": {
        **{"family": "llama", "kv_heads": 1, "tied": True, "head_size": 24},
        "rope_scaling": RopeScaling(factor=8, low_freq_factor=1, high_freq_factor=4, original_context=24),
    },
    "llama-biases": {"family": "llama", "bias": "all"},
    "mistral": {"family": "mistral", "kv_heads": 2, "window": 9},
    "qwen2": {"family": "qwen2", "kv_heads": 2, "tied": True},
    "qwen2-window": {"family": "qwen2", "window": 9, "head_size": 16},
    "qwen3": {"family": "qwen3", "kv_heads": 2, "head_size": 16},
    "qwen3-window": {"family": "qwen3", "window": 9},
}


@functools.cache
def _transformers():
    module = pytest.importorskip("transformers", reason="transformers is the oracle of these tests")
    module.utils.logging.set_verbosity_error()
    module.utils.logging.disable_progress_bar()
    return module


def _ids(*shape, vocab=67, seed=0):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def _noisy(model, seed=1):
    """Weights in which every bias and gain matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            small = "embed" in name or ".wte" in name  # else a tied model repeats the token it has just read
            parameter += (0.03 if small else 0.2) * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def _theirs(name):
    kind, table = THEIRS[name]
    torch.manual_seed(0)
    config = getattr(_transformers(), f"{kind}Config")(**table, attn_implementation="eager")
    return _noisy(_transformers().AutoModelForCausalLM.from_config(config))


def _ours(name):
    table = {"depth": 2, "width": 48, "heads": 4, "context": 96, **OURS[name]}
    return _noisy(build(ModelSettings(**table).resolve(67), seed=0))


def _open(directory, **options):
    options["attn_implementation"] = "eager"
    return _transformers().AutoModelForCausalLM.from_pretrained(directory, **options).eval()


def _same_logits(ours, theirs):
    ids = _ids(2, 60)
    with torch.no_grad():
        expected = theirs(ids).logits
        torch.testing.assert_close(ours(ids).logits, expected, rtol=1e-5, atol=1e-5)
    assert expected.std() > 0.1


def _same_greedy(ours, theirs):
    """64 tokens, past the window and past the context before stretching, without and with a repetition penalty."""
    prompt, found = _ids(1, 12, seed=2), []
    for penalty in (1.0, 1.2):
        with torch.no_grad():
            expected = theirs.generate(
                prompt, max_new_tokens=64, do_sample=False, use_cache=True, repetition_penalty=penalty
            )[0, 12:]
        sampling = Sampling(max_new=64, temperature=0, repetition_penalty=penalty)
        (completion,) = generate(ours, [prompt[0].numpy()], sampling)
        assert completion.ids.tolist() == expected.tolist()
        assert len(set(expected.tolist())) > 2
        found.append(expected.tolist())
    assert found[0] != found[1], "the penalty changed nothing: the test shows nothing"


def _state(model):
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", THEIRS)
def test_theirs_computes_the_same_here(name, tmp_path):
    theirs = _theirs(name)
    theirs.save_pretrained(tmp_path)
    ours = hf_weights.load(tmp_path)
    assert ours.config.parameters == sum(p.numel() for p in theirs.parameters())
    _same_logits(ours, theirs)
    _same_greedy(ours, theirs)


@pytest.mark.parametrize("name", OURS)
def test_ours_computes_the_same_there_and_comes_back_to_the_bit(name, tmp_path):
    ours = _ours(name)
    hf_weights.write(tmp_path, ours.config, _state(ours), eos=3)
    theirs = _open(tmp_path)
    assert theirs.config.eos_token_id == 3
    assert theirs.dtype == torch.float32
    theirs.generation_config.eos_token_id = None
    _same_logits(ours, theirs)
    _same_greedy(ours, theirs)
    back = hf_weights.load(tmp_path)
    assert back.config == ours.config
    for parameter, value in _state(ours).items():
        assert torch.equal(back.get_parameter(parameter), value), parameter


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3"])
def test_what_they_write_of_ours_is_what_we_wrote(name, tmp_path):
    """Their own save of an exported model holds the same tensors under the same names."""
    ours = _ours(name)
    hf_weights.write(tmp_path / "ours", ours.config, _state(ours))
    _open(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    first, second = (load_file(tmp_path / d / hf_weights.SINGLE) for d in ("ours", "theirs"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[n], second[n]) for n in first)
    assert read_config(tmp_path / "theirs") == ours.config  # transformers 5's own format


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_files_load_to_float32(dtype, tmp_path):
    theirs = _theirs("llama").to(dtype)
    theirs.save_pretrained(tmp_path)
    ours = hf_weights.load(tmp_path)
    for parameter in ours.parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter.to(dtype).float(), parameter)
    _same_logits(ours, _open(tmp_path, dtype=torch.float32))


def test_export_in_bfloat16_rounds_and_says_so(tmp_path):
    ours = _ours("qwen3")
    hf_weights.write(tmp_path, ours.config, _state(ours), dtype="bfloat16")
    assert _open(tmp_path).dtype == torch.bfloat16
    for name, value in hf_weights.read_weights(tmp_path, ours.config):
        assert torch.equal(value, ours.get_parameter(name).bfloat16().float())


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_shards_and_their_index(name, tmp_path):
    ours = _ours(name)
    hf_weights.write(tmp_path / "ours", ours.config, _state(ours), shard_bytes=20_000)
    files = sorted((tmp_path / "ours").glob("model-*-of-*.safetensors"))
    assert len(files) > 2
    assert files[-1].name == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "ours" / hf_weights.INDEX).read_text())
    assert index["metadata"]["total_size"] == 4 * ours.config.parameters
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            assert set(tensors.keys()) == {n for n, f in index["weight_map"].items() if f == file.name}
    theirs = _open(tmp_path / "ours")
    _same_logits(ours, theirs)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert (tmp_path / "theirs" / hf_weights.INDEX).exists()
    for parameter, value in hf_weights.read_weights(tmp_path / "theirs", ours.config):
        assert torch.equal(value, ours.get_parameter(parameter))


def test_openais_own_file_has_no_prefix_and_old_ones_have_constants(tmp_path):
    ours = _ours("gpt2")
    hf_weights.write(tmp_path, ours.config, _state(ours))
    path = tmp_path / hf_weights.SINGLE
    tensors = {n.removeprefix("transformer."): t for n, t in load_file(path).items()}
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    tensors |= {"h.0.attn.bias": torch.ones(1, 1, 96, 96).tril(), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    save_file(tensors, path)
    for parameter, value in hf_weights.read_weights(tmp_path, ours.config):
        assert torch.equal(value, ours.get_parameter(parameter))


CONFIGS = {
    "openai-community/gpt2": (
        {
            **{"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1},
            **{"bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02},
            **{"layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12},
            **{"n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "vocab_size": 50257},
        },
        ModelSettings(family="gpt2", depth=12, context=1024).resolve(50_257),
        124_439_808,
    ),
    "Llama-3.2-1B": (
        {
            **{"architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0},
            **{"bos_token_id": 128000, "eos_token_id": 128001, "head_dim": 64, "hidden_act": "silu"},
            **{"hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192, "mlp_bias": False},
            **{"max_position_embeddings": 131072, "model_type": "llama", "num_attention_heads": 32},
            **{"num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05},
            "rope_scaling": {
                **{"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0},
                **{"original_max_position_embeddings": 8192, "rope_type": "llama3"},
            },
            **{"rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": 128256},
        },
        ModelSettings(
            **{"depth": 16, "width": 2048, "heads": 32, "kv_heads": 8, "ffn": 8192, "context": 131_072, "tied": True},
            rope_theta=5e5,
            rope_scaling=RopeScaling(factor=32, low_freq_factor=1, high_freq_factor=4, original_context=8192),
        ).resolve(128_256),
        1_235_814_400,
    ),
    "Mistral-7B-v0.1": (
        {
            **{"architectures": ["MistralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096},
            **{"intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral"},
            **{"num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05},
            **{"rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 32000},
        },
        ModelSettings(
            **{"family": "mistral", "depth": 32, "width": 4096, "heads": 32, "kv_heads": 8, "ffn": 14_336},
            context=32_768,
        ).resolve(32_000),
        7_241_732_096,
    ),
    "Qwen2.5-0.5B": (
        {
            **{"architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "hidden_size": 896},
            **{"intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24},
            **{"model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2},
            **{"rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True},
            **{"use_mrope": False, "use_sliding_window": False, "vocab_size": 151936, "torch_dtype": "bfloat16"},
        },
        ModelSettings(
            **{"family": "qwen2", "depth": 24, "width": 896, "heads": 14, "kv_heads": 2, "ffn": 4864, "tied": True},
            context=32_768,
        ).resolve(151_936),
        494_032_768,
    ),
    "Qwen3-0.6B": (
        {
            **{"architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 128, "hidden_act": "silu"},
            **{"hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 40960},
            **{"max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28},
            **{"num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000},
            **{"sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936},
        },
        ModelSettings(
            **{"family": "qwen3", "depth": 28, "width": 1024, "heads": 16, "kv_heads": 8, "head_size": 128},
            **{"ffn": 3072, "tied": True, "context": 40_960},
        ).resolve(151_936),
        596_049_920,
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_published_configs_in_both_formats(name):
    table, expected, count = CONFIGS[name]
    config = config_from_hf(table)
    assert config == expected
    assert config.parameters == count
    written = config_to_hf(config, bos=1, eos=[2, 3], pad=0)
    assert config_from_hf(written) == config
    assert written["eos_token_id"] == [2, 3]
    theirs = _transformers().AutoConfig.for_model(**table)  # what transformers 5 makes of the file of 4
    assert config_from_hf(theirs.to_dict()) == config
    for key, value in _transformers().AutoConfig.for_model(**written).to_dict().items():
        if key in table and key not in ("rope_scaling", "rope_theta", "architectures", "attn_pdrop", "sliding_window"):
            known = {"bos_token_id": 1, "eos_token_id": [2, 3], "embd_pdrop": 0.0, "resid_pdrop": 0.0}
            assert value == known.get(key, getattr(theirs, key)), key


def test_defaults_are_those_of_their_classes():
    """A file of sizes alone means what transformers makes of it."""
    for kind, heads in (("Llama", 4), ("Mistral", 8), ("Qwen2", 64), ("Qwen3", 64)):
        sizes = {k: v for k, v in SIZES.items() if k not in (*TOKENS, "num_key_value_heads")}
        sizes |= {"num_attention_heads": heads, "hidden_size": 2 * heads}
        whole = getattr(_transformers(), f"{kind}Config")(**sizes).to_dict()
        architecture = {"architectures": [f"{kind}ForCausalLM"]}
        assert config_from_hf(sizes | architecture) == config_from_hf(whole | architecture), kind
    sizes = {k: v for k, v in GPT2.items() if k not in TOKENS}
    whole = _transformers().GPT2Config(**sizes).to_dict()
    architecture = {"architectures": ["GPT2LMHeadModel"]}
    assert config_from_hf(sizes | architecture) == config_from_hf(whole | architecture)


def _table(architecture, **changes):
    sizes = GPT2 if architecture.startswith("GPT2") else SIZES
    table = {"architectures": [architecture], **sizes, **changes}
    return {name: value for name, value in table.items() if value != "absent"}


LAYERS = ["full_attention", "sliding_attention"]
REFUSALS = [
    ("LlamaForCausalLM", {"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
    ("LlamaForCausalLM", {"architectures": "absent"}, "architectures"),
    ("LlamaForCausalLM", {"architectures": [{}]}, "architectures"),
    ("LlamaForCausalLM", {"rope_scaling": [1]}, "rope_scaling"),
    ("LlamaForCausalLM", {"rms_norm_eps": float("inf")}, "rms_norm_eps"),
    ("Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": "all"}, "max_window_layers"),
    ("LlamaForCausalLM", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ("LlamaForCausalLM", {"hidden_act": "gelu"}, "hidden_act"),
    ("LlamaForCausalLM", {"attention_bias": True}, "attention_bias"),
    ("LlamaForCausalLM", {"mlp_bias": True}, "attention_bias"),
    ("LlamaForCausalLM", {"hidden_size": "absent"}, "hidden_size"),
    ("LlamaForCausalLM", {"hidden_size": 48.5}, "hidden_size"),
    ("LlamaForCausalLM", {"hidden_size": 50}, "num_attention_heads"),
    ("LlamaForCausalLM", {"num_key_value_heads": 3}, "num_key_value_heads"),
    ("LlamaForCausalLM", {"rms_norm_eps": -1}, "rms_norm_eps"),
    ("LlamaForCausalLM", {"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ("LlamaForCausalLM", {"head_dim": 7}, "head_size"),
    ("LlamaForCausalLM", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling: type"),
    ("LlamaForCausalLM", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling: rope_type"),
    ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters: rope_type"),
    ("LlamaForCausalLM", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters"),
    ("LlamaForCausalLM", {"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling: factor"),
    ("LlamaForCausalLM", {"rope_theta": 0}, "rope_theta"),
    ("LlamaForCausalLM", {"rope_theta": 10**400}, "rope_theta"),
    ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("LlamaForCausalLM", {"layer_types": LAYERS}, "layer_types"),
    ("MistralForCausalLM", {"attention_bias": True}, "attention_bias"),
    ("MistralForCausalLM", {"sliding_window": 0}, "sliding_window"),
    ("MistralForCausalLM", {"layer_types": LAYERS}, "layer_types"),
    ("MistralForCausalLM", {"layer_types": ["full_attention"] * 2}, "layer_types"),
    ("Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": 1}, "max_window_layers"),
    ("Qwen2ForCausalLM", {"use_sliding_window": True, "layer_types": LAYERS}, "layer_types"),
    ("Qwen2ForCausalLM", {"layer_types": ["sliding_attention"] * 2}, "layer_types"),
    ("Qwen2ForCausalLM", {"mlp_bias": True}, "mlp_bias"),
    ("Qwen3ForCausalLM", {"attention_bias": True}, "attention_bias"),
    ("Qwen3ForCausalLM", {"layer_types": ["linear_attention"] * 2}, "layer_types"),
    ("GPT2LMHeadModel", {"activation_function": "relu"}, "activation_function"),
    ("GPT2LMHeadModel", {"scale_attn_weights": False}, "scale_attn_weights"),
    ("GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ("GPT2LMHeadModel", {"add_cross_attention": True}, "add_cross_attention"),
    ("GPT2LMHeadModel", {"n_head": 5}, "n_head"),
    ("GPT2LMHeadModel", {"n_layer": 10**9}, "n_layer"),
    ("LlamaForCausalLM", {"num_hidden_layers": 10**9}, "num_hidden_layers"),
]


@pytest.mark.parametrize(("architecture", "change", "field"), REFUSALS)
def test_a_config_we_do_not_compute_is_refused_by_its_field(architecture, change, field):
    config_from_hf(_table(architecture))
    with pytest.raises(UserError, match=rf"^config\.json: {field}: found|^config\.json: .*{field}$") as caught:
        config_from_hf(_table(architecture, **change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("table", "field"),
    [
        ({"norm": "layer"}, "norm"),
        ({"activation": "gelu"}, "activation"),
        ({"family": "qwen3", "bias": "qkv"}, "bias"),
        ({"window": 9, "bias": "all"}, "bias"),
        ({"heads": 5, "head_size": 16}, "width"),
        ({"family": "gpt2", "bias": "none"}, "bias"),
        ({"family": "gpt2", "kv_heads": 1}, "kv_heads"),
        ({"family": "gpt2", "window": 9}, "window"),
        ({"family": "gpt2", "qk_norm": True}, "qk_norm"),
        ({"family": "gpt2", "norm": "rms"}, "norm"),
        ({"family": "gpt2", "activation": "swiglu"}, "activation"),
        ({"family": "gpt2", "head_size": 16}, "head_size"),
    ],
)
def test_a_shape_without_an_architecture_is_refused_by_its_setting(table, field, tmp_path):
    ours = build(ModelSettings(**{"depth": 1, "width": 48, "heads": 4, "context": 8, **table}).resolve(9), seed=0)
    with pytest.raises(UserError, match=rf"^model\.{field}: found .*expected") as caught:
        hf_weights.write(tmp_path / "out", ours.config, _state(ours))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def _damage(directory, change):
    path = directory / hf_weights.SINGLE
    tensors = load_file(path)
    tied = "model.embed_tokens.weight"
    if change == "pickled":
        path.rename(directory / "pytorch_model.bin")
    elif change == "none":
        path.unlink()
    elif change == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif change == "no index":
        (directory / hf_weights.INDEX).write_text("{}")
    elif change == "lost shard":
        (directory / hf_weights.INDEX).write_text(
            json.dumps({"weight_map": {"a": hf_weights.SINGLE, "b": "model-2.safetensors"}})
        )
    elif change == "outside":
        (directory / hf_weights.INDEX).write_text(
            json.dumps({"weight_map": {"a": f"../{directory.name}/{hf_weights.SINGLE}"}})
        )
    elif change == "twice":
        save_file({tied: tensors[tied]}, directory / "model-2.safetensors")
        (directory / hf_weights.INDEX).write_text(
            json.dumps({"weight_map": {"a": hf_weights.SINGLE, "b": "model-2.safetensors"}})
        )
    else:
        if change == "missing":
            del tensors["model.norm.weight"], tensors["model.layers.1.self_attn.q_proj.weight"]
        elif change == "extra":
            tensors["model.layers.2.self_attn.q_proj.weight"] = torch.zeros(48, 48)
        elif change == "bias":
            tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(48)
        elif change == "shape":
            tensors[tied] = tensors[tied][:-1].clone()
        elif change == "integers":
            tensors[tied] = tensors[tied].to(torch.int8)
        elif change == "untied":
            tensors["lm_head.weight"] = tensors[tied] + 1
        save_file(tensors, path)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("pickled", r"found pytorch_model\.bin, .*convert them to safetensors"),
        ("none", r"no model\.safetensors and no model\.safetensors\.index\.json"),
        ("cut", r"model\.safetensors: not a readable safetensors file"),
        ("no index", r"index\.json: found no weight_map"),
        ("lost shard", r"names the file model-2\.safetensors, which is not in"),
        ("outside", r"names the file \.\./"),
        ("twice", r"found tensor model\.embed_tokens\.weight, which is also in"),
        ("missing", r"no tensor .*model\.(norm|layers\.1\.self_attn\.q_proj)\.weight and 1 more"),
        ("extra", r"found tensor model\.layers\.2\.self_attn\.q_proj\.weight"),
        ("bias", r"found tensor model\.layers\.0\.self_attn\.q_proj\.bias"),
        ("shape", r"tensor model\.embed_tokens\.weight has shape \[66, 48\], expected \[67, 48\]"),
        ("integers", r"tensor model\.embed_tokens\.weight is of type I8, expected one of"),
        ("untied", r"lm_head\.weight differs from model\.embed_tokens\.weight"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_file_and_tensor(change, sentence, tmp_path):
    ours = _ours("llama3")
    hf_weights.write(tmp_path, ours.config, _state(ours))
    _damage(tmp_path, change)
    with pytest.raises(UserError, match=sentence) as caught:
        hf_weights.load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, r"no config\.json"),
        ("{", "not valid JSON"),
        ("[1]", "found a list, expected a JSON object"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_an_unreadable_config_is_one_sentence(text, sentence, tmp_path):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=sentence):
        read_config(tmp_path)


def test_a_directory_that_holds_a_model_is_not_written_over(tmp_path):
    ours = _ours("llama")
    hf_weights.write(tmp_path, ours.config, _state(ours))
    with pytest.raises(UserError, match=r"already contains config\.json"):
        hf_weights.write(tmp_path, ours.config, _state(ours))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_resized_embeddings(name):
    ours = _ours(name)
    for vocab in (80, 60):
        tensors, config = hf_weights.resize_embeddings(_state(ours), ours.config, vocab)
        assert config.vocab == vocab
        model = build(config, seed=0)
        model.load_state_dict(tensors)
        for key in {"embedding.weight", "head.weight"} & tensors.keys():
            old = ours.get_parameter(key)
            assert torch.equal(tensors[key][:67], old[:vocab])
            torch.testing.assert_close(tensors[key][67:], old.mean(0).expand(max(0, vocab - 67), -1))
        ids = _ids(1, 20, vocab=60)
        with torch.no_grad():
            before, after = ours(ids).logits, model(ids).logits
        shared = min(67, vocab)
        torch.testing.assert_close(before[..., :shared], after[..., :shared])
    with pytest.raises(UserError, match="expected at least 1"):
        hf_weights.resize_embeddings(_state(ours), ours.config, 0)


def test_config_reading_needs_no_torch():
    assert_not_imported("import ingot.convert.hf_config", "torch")


def test_ids_of_numpy_prompts_are_plain(tmp_path):
    """A loaded model takes part in sampling like any other."""
    ours = _ours("mistral")
    first = generate(ours, [np.arange(5), np.arange(20)], Sampling(max_new=30), seed=1)
    again = generate(ours, [np.arange(20)], Sampling(max_new=30), seed=1, keys=[(1, 0)])
    assert first[1].ids.tolist() == again[0].ids.tolist()
