"""What PEFT writes and computes, for tests that run without it: `python -m tests.convert.peft_golden` makes it anew.

Models and adapters are closed forms (a sine at every index), so that no generator of random numbers is part of it. For
each case a directory under `peft/` holds the adapter as PEFT saved it, and `logits.json` what PEFT computed with it.
"""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from ingot.convert import hf_weights
from ingot.model.config import ModelConfig, ModelSettings
from ingot.model.transformer import Transformer, empty

GOLDEN = Path(__file__).with_name("peft")
LOGITS = GOLDEN / "logits.json"
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])
EVERY = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-lora": ("llama", {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}),
    "llama-rslora": ("llama", {"r": 4, "lora_alpha": 3, "use_rslora": True, "target_modules": EVERY}),
    "qwen3-dora": ("qwen3", {"r": 2, "lora_alpha": 4, "use_dora": True, "target_modules": EVERY}),
    "gpt2-lora": (
        "gpt2",
        {
            "r": 2,
            "lora_alpha": 4,
            "target_modules": ["c_attn", "mlp.c_proj"],
            "fan_in_fan_out": True,
            "rank_pattern": {"c_attn": 3},
            "alpha_pattern": {"attn.c_attn": 9},
        },
    ),
    "gpt2-dora": (
        "gpt2",
        {"r": 2, "lora_alpha": 4, "use_dora": True, "target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True},
    ),
    "untied-whole": (
        "mistral",
        {"r": 2, "lora_alpha": 4, "target_modules": EVERY, "modules_to_save": ["embed_tokens", "lm_head"]},
    ),
    "untied-head": ("mistral", {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "llama-whole": (
        "llama",
        {
            "r": 2,
            "target_modules": ["q_proj"],
            "modules_to_save": ["model.embed_tokens"],
            "ensure_weight_tying": True,
        },
    ),
    "gpt2-whole": (
        "gpt2",
        {
            "r": 2,
            "target_modules": ["c_fc"],
            "fan_in_fan_out": True,
            "modules_to_save": ["lm_head"],
            "ensure_weight_tying": True,
        },
    ),
}
"""Case -> family, PEFT's settings."""


def shape(family: str) -> ModelConfig:
    tied = family != "mistral"
    table = {"family": family, "depth": 1, "width": 16, "heads": 2, "ffn": 24, "context": 16, "tied": tied}
    return ModelSettings.model_validate(table).resolve(24)


def fill(named: dict[str, torch.Tensor]) -> None:
    """Values that follow from names' order and shapes alone."""
    with torch.no_grad():
        for number, (name, p) in enumerate(sorted(named.items())):
            wave = torch.sin(torch.arange(p.numel(), dtype=torch.float64) * 0.7 + number).reshape(p.shape)
            p.copy_(1 + 0.1 * wave if p.dim() == 1 and not name.endswith("bias") else 0.3 * wave)


def frozen(family: str) -> Transformer:
    """The model that an adapter is for."""
    model = empty(shape(family), "cpu", torch.float32)
    fill(dict(model.named_parameters()))
    return model


def in_transformers(model: Transformer) -> Any:
    """The same model, of transformers."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "model")
        hf_weights.write(path, model.config, dict(model.named_parameters()))
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def adapted_by_peft(case: str) -> Any:
    """PEFT's model of a case."""
    from peft import LoraConfig, get_peft_model

    family, settings = CASES[case]
    model = get_peft_model(in_transformers(frozen(family)), LoraConfig(task_type="CAUSAL_LM", **settings))
    fill({n: p for n, p in model.named_parameters() if "lora_" in n or "modules_to_save" in n})
    return model.eval()


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def main() -> None:
    logits = {}
    for case in CASES:
        model = adapted_by_peft(case)
        logits[case] = logits_of(model)[:, -2:].tolist()
        with tempfile.TemporaryDirectory() as directory:
            model.save_pretrained(directory)
            (GOLDEN / case).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(directory, "adapter_model.safetensors"), GOLDEN / case / "adapter_model.safetensors")
            config = json.loads(Path(directory, "adapter_config.json").read_text()) | {
                "base_model_name_or_path": "made"
            }
            config["target_modules"] = sorted(config["target_modules"])  # a set there
            (GOLDEN / case / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n")
    LOGITS.write_text(json.dumps(logits))


if __name__ == "__main__":
    main()
