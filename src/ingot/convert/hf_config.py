"""Converts the `config.json` of a Hugging Face model directory to a `ModelConfig`, and back. No network, no torch.

Supported are GPT-2, Llama, Mistral, Qwen2 and Qwen3, in the format of transformers 4 (`rope_theta`, `rope_scaling`,
`torch_dtype`) and 5 (`rope_parameters`, `dtype`, `layer_types`). A field that would change a logit and is not supported
is an error; an absent field has the default of the architecture's class in transformers. Dropout is not imported,
because it belongs to training, nor is the dtype, because `hf_weights.py` converts any float to fp32.

The exported architecture follows from the model's shape: a Mistral without a window is exported as a Llama. The export
has the format of transformers 4, which version 5 and other readers support too.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from pydantic import ValidationError

from ingot.core.artifact import regular
from ingot.core.errors import UserError
from ingot.core.validation import problems
from ingot.model.config import MAX_DEPTH, Activation, Bias, ModelConfig, RopeScaling

CONFIG = "config.json"
Dtype = Literal["float32", "bfloat16"]

_ACTIVATIONS: dict[str, Activation] = {
    "gelu_new": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh",
    "gelu_fast": "gelu-tanh",
    "gelu": "gelu",
}
_MODEL_TYPES = {
    "GPT2LMHeadModel": "gpt2",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_KV_HEADS = {"MistralForCausalLM": 8, "Qwen2ForCausalLM": 32, "Qwen3ForCausalLM": 32}
"""Default numbers of key-value heads; Llama's is the number of heads."""


def read_config(directory: Path) -> ModelConfig:
    """The configuration of the model in a Hugging Face directory.

    Raises:
        UserError: no readable config.json, or one that `config_from_hf` rejects.
    """
    path = regular(directory / CONFIG)
    try:
        table = json.loads(path.read_text(encoding="utf-8-sig"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{directory}: no {CONFIG}, expected the directory of a Hugging Face model") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({error}); download it again") from None
    if not isinstance(table, dict):
        raise UserError(f"{path}: found a {type(table).__name__}, expected a JSON object; download it again")
    return config_from_hf(table, str(path))


def config_from_hf(table: Mapping[str, Any], where: str = CONFIG) -> ModelConfig:
    """Convert the content of a config.json.

    Args:
        table: the parsed file.
        where: name of the file in errors.

    Raises:
        UserError: an architecture or a field that the transformer does not support.
    """
    fields = _Fields(table, where)
    names = table.get("architectures") or [a for a, t in _MODEL_TYPES.items() if t == table.get("model_type")]
    architecture = names[0] if isinstance(names, list) and len(names) == 1 else None
    if not isinstance(architecture, str) or architecture not in _MODEL_TYPES:
        fields.reject("architectures", f"one of {', '.join(_MODEL_TYPES)}")
    fields.expect("quantization_config", (None,), "nothing: quantised weights are not supported; use the float model")
    try:
        if architecture == "GPT2LMHeadModel":
            return _gpt2(fields)
        return _llama_like(fields, architecture)
    except ValidationError as error:
        raise UserError(f"{where}: {problems(ModelConfig, error)[0]}") from None


def config_to_hf(
    config: ModelConfig,
    *,
    bos: int | None = None,
    eos: int | list[int] | None = None,
    pad: int | None = None,
    dtype: Dtype = "float32",
) -> dict[str, Any]:
    """The content of a config.json for a model.

    Args:
        config: the model's configuration, from which the architecture follows.
        bos, eos, pad: ids of the special tokens; `eos` can be several.
        dtype: type of the exported weights.

    Raises:
        UserError: transformers has no architecture for the model; the message names the field.
    """
    architecture = _architecture(config)
    common = {
        "architectures": [architecture],
        "model_type": _MODEL_TYPES[architecture],
        "vocab_size": config.vocab,
        "tie_word_embeddings": config.tied,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": dtype,
    }
    if architecture == "GPT2LMHeadModel":
        return common | {
            "n_positions": config.context,
            "n_ctx": config.context,
            "n_embd": config.width,
            "n_layer": config.depth,
            "n_head": config.heads,
            "n_inner": config.ffn,
            "activation_function": "gelu_new" if config.activation == "gelu-tanh" else "gelu",
            "layer_norm_epsilon": config.norm_eps,
            "embd_pdrop": config.dropout,
            "attn_pdrop": config.dropout,
            "resid_pdrop": config.dropout,
        }
    biased = config.bias == "all"
    return common | {
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.ffn,
        "hidden_act": "silu",
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": _rope_to_hf(config.rope_scaling),
        "attention_dropout": config.dropout,
        **_window_to_hf(config, architecture),
        **({"attention_bias": biased, "mlp_bias": biased} if architecture == "LlamaForCausalLM" else {}),
    }


@dataclass(frozen=True)
class _Fields:
    """Checked access to the fields of a config.json."""

    table: Mapping[str, Any]
    where: str

    def reject(self, name: str, expected: str) -> NoReturn:
        value = json.dumps(self.table[name]) if name in self.table else "nothing"
        raise UserError(f"{self.where}: {name}: found {value}, expected {expected}")

    def get(self, name: str, default: Any) -> Any:
        """The value of a field; the default if it is absent or null."""
        value = self.table.get(name)
        return default if value is None else value

    def count(self, name: str, default: int | None = None, minimum: int = 1, maximum: int | None = None) -> int:
        value = self.get(name, default)
        if type(value) is not int or value < minimum:
            self.reject(name, f"an integer of at least {minimum}")
        if maximum and value > maximum:
            self.reject(name, f"at most {maximum:,}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
            self.reject(name, "a positive number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if type(value) is not bool:
            self.reject(name, "true or false")
        return value

    def expect(self, name: str, valid: tuple[Any, ...], expected: str, default: Any = None) -> Any:
        value = self.get(name, default)
        if value not in valid:
            self.reject(name, expected)
        return value


def _gpt2(fields: _Fields) -> ModelConfig:
    width, heads = fields.count("n_embd"), fields.count("n_head")
    activation = fields.expect(
        "activation_function", tuple(_ACTIVATIONS), f"one of {', '.join(_ACTIVATIONS)}", "gelu_new"
    )
    fields.expect("scale_attn_weights", (True,), "true: scores are divided by the square root of the head size", True)
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        fields.expect(name, (False,), "false", False)
    if width % heads:
        fields.reject("n_head", f"a divisor of n_embd = {width}")
    return ModelConfig(
        vocab=fields.count("vocab_size"),
        depth=fields.count("n_layer", maximum=MAX_DEPTH),
        width=width,
        heads=heads,
        kv_heads=heads,
        head_size=width // heads,
        ffn=fields.count("n_inner", 4 * width),
        context=fields.count("n_positions"),
        tied=fields.flag("tie_word_embeddings", True),
        positions="learned",
        rope_theta=10_000.0,
        rope_scaling=None,
        window=None,
        norm="layer",
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        qk_norm=False,
        activation=_ACTIVATIONS[activation],
        bias="all",
        dropout=0.0,
    )


def _llama_like(fields: _Fields, architecture: str) -> ModelConfig:
    width, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    head_size = 128 if architecture == "Qwen3ForCausalLM" else None
    if head_size is None and fields.get("head_dim", None) is None:
        if width % heads:
            fields.reject("num_attention_heads", f"a divisor of hidden_size = {width}, or a head_dim")
        head_size = width // heads
    absent = "num_key_value_heads" not in fields.table
    kv_heads = fields.count("num_key_value_heads", _KV_HEADS.get(architecture, heads) if absent else heads)
    if heads % kv_heads:
        fields.reject("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
    fields.expect("hidden_act", ("silu", "swish"), "silu", "silu")
    theta, scaling = _rope(fields)
    return ModelConfig(
        vocab=fields.count("vocab_size"),
        depth=fields.count("num_hidden_layers", maximum=MAX_DEPTH),
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_size=fields.count("head_dim", head_size),
        ffn=fields.count("intermediate_size"),
        context=fields.count("max_position_embeddings"),
        tied=fields.flag("tie_word_embeddings", False),
        positions="rope",
        rope_theta=theta,
        rope_scaling=scaling,
        window=_window(fields, architecture),
        norm="rms",
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        qk_norm=architecture == "Qwen3ForCausalLM",
        activation="swiglu",
        bias=_biases(fields, architecture),
        dropout=0.0,
    )


def _biases(fields: _Fields, architecture: str) -> Bias:
    attention, mlp = fields.flag("attention_bias", False), fields.flag("mlp_bias", False)
    if architecture != "LlamaForCausalLM":
        if attention or mlp:
            fields.reject("attention_bias" if attention else "mlp_bias", f"false for {architecture}")
        return "qkv" if architecture == "Qwen2ForCausalLM" else "none"
    if attention != mlp:
        fields.reject(
            "attention_bias", f"the same as mlp_bias = {json.dumps(mlp)}: bias in only one of them is not supported"
        )
    return "all" if attention else "none"


def _rope(fields: _Fields) -> tuple[float, RopeScaling | None]:
    """Theta and scaling. transformers 5 has both in `rope_parameters`; 4 has the scaling in `rope_scaling`."""
    name = "rope_scaling" if fields.get("rope_scaling", None) else "rope_parameters"
    tables = [fields.get("rope_parameters", {}), fields.get("rope_scaling", {})]
    if any(not isinstance(t, dict) or any(isinstance(value, dict) for value in t.values()) for t in tables):
        fields.reject(name, "one table for all layers")
    rope = {**tables[0], **tables[1]}
    if fields.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0)) != 1.0:
        fields.reject("partial_rotary_factor", "1: partial rotation is not supported")
    rope_fields = _Fields(rope, f"{fields.where}: {name}")
    theta = rope_fields.number("rope_theta", fields.number("rope_theta", 10_000.0))
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type == "default":
        return theta, None
    if rope_type != "llama3":
        rope_fields.reject("rope_type" if "rope_type" in rope else "type", "default or llama3")
    context = fields.count("max_position_embeddings")
    return theta, RopeScaling(
        factor=rope_fields.number("factor"),
        low_freq_factor=rope_fields.number("low_freq_factor"),
        high_freq_factor=rope_fields.number("high_freq_factor"),
        original_context=rope_fields.count("original_max_position_embeddings", context),
    )


def _rope_to_hf(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_context,
    }


def _window(fields: _Fields, architecture: str) -> int | None:
    """The sliding window of all layers, or None. A window in only some layers is rejected."""
    qwen, depth = architecture.startswith("Qwen"), fields.count("num_hidden_layers", maximum=MAX_DEPTH)
    has_window = architecture == "MistralForCausalLM" or (qwen and fields.flag("use_sliding_window", False))
    if fields.table.get("sliding_window", 4096) is None:
        has_window = False
    window = fields.count("sliding_window", 4096) if has_window else None
    layers, source = fields.get("layer_types", None), "layer_types"
    if layers is None and qwen and window is not None:  # the first layers have full attention
        full, source = min(fields.count("max_window_layers", 28, minimum=0), depth), "max_window_layers"
        layers = ["full_attention"] * full + ["sliding_attention"] * (depth - full)
    if layers == ["full_attention"] * depth and (qwen or window is None):
        return None
    if layers is not None and (layers != ["sliding_attention"] * depth or window is None):
        fields.reject(source, "the same attention in all layers: full, or the window of sliding_window")
    return window


def _window_to_hf(config: ModelConfig, architecture: str) -> dict[str, Any]:
    if architecture == "MistralForCausalLM":
        return {"sliding_window": config.window}
    if architecture == "LlamaForCausalLM":
        return {}
    windowed = config.window is not None
    return {
        "use_sliding_window": windowed,
        "sliding_window": config.window,
        "max_window_layers": 0 if windowed else config.depth,
    }


def _architecture(config: ModelConfig) -> str:
    """The architecture of transformers for the model."""
    if config.positions == "learned":
        name = "GPT2LMHeadModel"
        valid: dict[str, list[Any]] = {
            "norm": ["layer"],
            "activation": ["gelu-tanh", "gelu"],
            "bias": ["all"],
            "qk_norm": [False],
        }
        valid |= {"window": [None], "kv_heads": [config.heads], "head_size": [config.width / config.heads]}
    else:
        name = "LlamaForCausalLM"
        if config.qk_norm or config.bias == "qkv":
            name = "Qwen3ForCausalLM" if config.qk_norm else "Qwen2ForCausalLM"
        elif config.window is not None:
            name = "MistralForCausalLM"
        biases = {"Qwen2ForCausalLM": ["qkv"], "LlamaForCausalLM": ["none", "all"]}
        valid = {"norm": ["rms"], "activation": ["swiglu"], "bias": biases.get(name, ["none"])}
        if name == "LlamaForCausalLM":  # transformers requires a multiple of the heads even if head_dim is given
            valid["width"] = [-(-config.width // config.heads) * config.heads]
    for field, values in valid.items():
        if (value := getattr(config, field)) not in values:
            raise UserError(
                f"model.{field}: found {value}, expected {' or '.join(map(str, values))}: {name} is the most similar "
                "architecture of transformers, and it differs in this field; the model cannot be exported"
            )
    return name
