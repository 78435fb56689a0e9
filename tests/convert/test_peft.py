"""PEFT's format: what it wrote is read, what we write it reads, to 1e-5 of its logits (its numbers are committed)."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ingot.convert import peft
from ingot.core.errors import UserError
from ingot.model import lora
from ingot.model.adapter_config import AdapterSettings
from ingot.model.transformer import Transformer
from tests.convert.peft_golden import (
    CASES,
    GOLDEN,
    IDS,
    LOGITS,
    adapted_by_peft,
    fill,
    frozen,
    in_transformers,
    logits_of,
)

OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("llama", {"rank": 3, "alpha": 5}),
    "some layers": ("llama", {"rank": 3, "targets": ["attention.[qv]", "ffn.down"]}),
    "rslora": ("qwen3", {"kind": "rslora", "rank": 4, "alpha": 3}),
    "dora": ("qwen3", {"kind": "dora", "rank": 2}),
    "gpt2": ("gpt2", {"rank": 2, "alpha": 3}),
    "gpt2, queries and values": ("gpt2", {"rank": 2, "targets": ["q", "v", "ffn.down"]}),
    "gpt2, rslora": ("gpt2", {"kind": "rslora", "rank": 2}),
    "gpt2, dora": ("gpt2", {"kind": "dora", "rank": 2, "targets": ["q", "v", "o"]}),
    "whole": ("mistral", {"rank": 2, "modules_to_save": ["embedding", "head"]}),
    "whole head": ("mistral", {"rank": 2, "modules_to_save": ["head"]}),
    "whole, tied": ("llama", {"rank": 2, "targets": ["q"], "modules_to_save": ["head"]}),
    "gpt2, whole": ("gpt2", {"rank": 2, "alpha": 3, "modules_to_save": ["embedding"]}),
}
"""Adapters of ours: family, settings."""


def _logits(model: Transformer) -> torch.Tensor:
    with torch.no_grad():
        out = model.eval()(IDS)
        return out.head(out.hidden)


def _adapted(name: str) -> tuple[Transformer, AdapterSettings]:
    family, table = OURS[name]
    settings = AdapterSettings.model_validate(table)
    model = frozen(family)
    lora.add_adapters(model, settings, 0)
    fill({n: p for n, p in model.named_parameters() if p.requires_grad})
    return model, settings


@pytest.mark.parametrize("case", CASES)
def test_2_6_an_adapter_that_peft_wrote_gives_its_logits(case: str) -> None:
    expected = torch.tensor(json.loads(LOGITS.read_text())[case])
    model = frozen(CASES[case][0])
    before = _logits(model)[:, -2:]
    peft.merge(GOLDEN / case, model)
    assert (_logits(model)[:, -2:] - expected).abs().max() < 1e-5
    assert (before - expected).abs().max() > 0.1, "the control: without the adapter it is another model"


@pytest.mark.parametrize("name", OURS)
def test_2_6_what_is_written_is_read_as_the_merged_model(name: str, tmp_path: Path) -> None:
    model, settings = _adapted(name)
    peft.write(tmp_path, model, settings)
    read = frozen(OURS[name][0])
    assert (_logits(read) - _logits(model)).abs().max() > 0.01
    peft.merge(tmp_path, read)
    assert (_logits(read) - _logits(model)).abs().max() < 1e-5
    lora.merge(model)
    for n, p in model.named_parameters():
        assert torch.allclose(p, read.get_parameter(n), rtol=0, atol=1e-6), n


@pytest.mark.parametrize(
    ("case", "kind"), [("llama-rslora", "rslora"), ("qwen3-dora", "dora"), ("untied-whole", "lora")]
)
def test_2_6_the_files_are_those_that_peft_writes(case: str, kind: str, tmp_path: Path) -> None:
    """The same adapter in our modules, written: names, numbers to the bit, and every field that both have."""
    family, table = CASES[case]
    theirs = load_file(GOLDEN / case / peft.WEIGHTS)
    more = {"modules_to_save": ["embedding", "head"]} if "modules_to_save" in table else {}
    settings = AdapterSettings.model_validate({"kind": kind, "rank": table["r"], "alpha": table["lora_alpha"], **more})
    model = frozen(family)
    lora.add_adapters(model, settings, 0)
    names = {t.removeprefix("model.layers.0."): o for t, (o,) in peft.linear_modules(model.config).items()}
    for stored, tensor in theirs.items():
        name = stored.removeprefix("base_model.model.").removesuffix(".weight")
        if saved := peft.embedding_modules(model.config).get(name):
            model.get_parameter(f"{saved}.weight").data = tensor
            continue
        module, part = stored.removeprefix("base_model.model.model.layers.0.").split(".lora_")
        part = part.removesuffix(".weight").removesuffix("_vector")
        model.get_parameter(f"{names[module]}.lora_{part}").data = tensor
    peft.write(tmp_path, model, settings, base="made")
    ours = load_file(tmp_path / peft.WEIGHTS)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[n], theirs[n]) for n in theirs)
    one, two = (json.loads((p / peft.CONFIG).read_text()) for p in (tmp_path, GOLDEN / case))
    assert one == {field: two[field] for field in one}


def test_the_configuration_says_which_modules_briefly(tmp_path: Path) -> None:
    found, saved = {}, {}
    for name in OURS:
        peft.write(tmp_path / name, *_adapted(name))
        config = json.loads((tmp_path / name / peft.CONFIG).read_text())
        found[name] = (config["target_modules"], config["rank_pattern"], config["alpha_pattern"])
        saved[name] = (config["modules_to_save"], config.get("ensure_weight_tying"))
    fused = "transformer.h.0.attn.c_attn"
    assert found["some layers"] == (["down_proj", "q_proj", "v_proj"], {}, {})
    assert found["gpt2"] == (["c_attn", "c_fc", "c_proj"], {fused: 6}, {fused: 9})
    assert found["gpt2, queries and values"] == ([fused, "transformer.h.0.mlp.c_proj"], {fused: 4}, {fused: 64})
    assert found["gpt2, rslora"][1:] == ({fused: 6}, {fused: pytest.approx(32 * 3**0.5)})
    assert saved["lora"] == (None, None)
    assert saved["whole"] == (["embed_tokens", "lm_head"], None)
    assert saved["whole head"] == (["lm_head"], None)
    assert saved["whole, tied"] == (["embed_tokens", "lm_head"], True)
    assert saved["gpt2, whole"] == (["lm_head", "wte"], True)


def _changed(tmp_path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor | None]) -> Path:
    """The adapter of `llama-lora`, with fields and tensors changed (None: left out)."""
    shutil.copytree(GOLDEN / "llama-lora", tmp_path / "changed")
    file = tmp_path / "changed" / peft.CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    held = {n: t for n, t in (load_file(file.with_name(peft.WEIGHTS)) | tensors).items() if t is not None}
    save_file(held, file.with_name(peft.WEIGHTS))
    return tmp_path / "changed"


_BASE = "base_model.model"
_Q = f"{_BASE}.model.layers.0.self_attn.q_proj"
_HEAD = f"{_BASE}.lm_head.weight"
_ELSEWHERE = f"{_BASE}.model.layers.1.mlp.up_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("config", "tensors", "says"),
    [
        ({"peft_type": "IA3"}, {}, r'peft_type = "IA3", expected low-rank matrices only .*merge the adapter with PEFT'),
        ({"bias": "all"}, {}, r'bias = "all"'),
        ({"modules_to_save": ["lm_head", "norm"]}, {}, r'"norm" in modules_to_save, expected only .*tokens and lm_'),
        ({"modules_to_save": ["lm_head"]}, {}, r"no base_model\.model\.lm_head\.weight, expected all"),
        ({"modules_to_save": ["lm_head"]}, {_HEAD: torch.zeros(20, 16)}, r"has shape \[20, 16\], expected \[24, 16\]"),
        ({"modules_to_save": ["lm_head"]}, {_HEAD: torch.zeros(24, 16)}, r"a head that differs from the embedding"),
        ({}, {_HEAD: torch.zeros(24, 16)}, r"a head that differs from the embedding"),
        ({"init_lora_weights": "pissa_niter_16"}, {}, r'init_lora_weights = "pissa_niter_16"'),
        ({"use_dora": True}, {}, r"without lora_magnitude_vector, expected it"),
        ({"lora_alpha": "16"}, {}, r'found lora_alpha = "16", expected PEFT.s format'),
        ({"lora_alpha": None}, {}, r"found lora_alpha = null, expected PEFT"),
        ({"alpha_pattern": {"(": 1}}, {}, r"found alpha_pattern = .*, expected PEFT"),
        ({"alpha_pattern": ["a"]}, {}, r"found alpha_pattern = .*, expected PEFT"),
        ({"modules_to_save": 3}, {}, r"found modules_to_save = 3, expected PEFT"),
        ({}, {f"{_Q}.lora_A.weight": torch.tensor(1.0)}, r"lora_A\.weight has shape \[\], expected \[1, 16\]"),
        ({}, {f"{_Q}.lora_A.weight": torch.zeros(0, 16)}, r"lora_A\.weight has shape \[0, 16\], expected \[1, 16\]"),
        ({}, {f"{_Q}.lora_A.weight": torch.full((2, 16), torch.nan)}, r"lora_A\.weight contains non-finite"),
        ({}, {f"{_Q}.lora_magnitude_vector": torch.ones(16)}, r"lora_magnitude_vector without use_dora, expected it"),
        ({}, {f"{_Q}.lora_B.weight": None}, r"q_proj without lora_B\.weight, expected it"),
        ({}, {f"{_Q}.lora_A.weight": torch.zeros(2, 8)}, r"lora_A\.weight has shape \[2, 8\], expected \[2, 16\]"),
        ({}, {f"{_Q}.lora_B.weight": torch.zeros(16, 3)}, r"has shape \[16, 3\], expected \[16, 2\]"),
        ({}, {f"{_BASE}.lm_head.lora_A.weight": torch.zeros(2, 16)}, r"lm_head\.lora_A\.weight, expected only"),
        ({}, {_ELSEWHERE: torch.zeros(2, 16)}, r"expected only linear modules"),
        ({}, {"model.embed_tokens.lora_embedding_A": torch.zeros(2, 16)}, r"and names such as base_model\."),
    ],
)  # fmt: skip
def test_an_adapter_that_matrices_alone_do_not_make_is_refused(
    tmp_path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor | None], says: str
) -> None:
    model = frozen("llama")
    with pytest.raises(UserError, match=says) as caught:
        peft.merge(_changed(tmp_path, config, tensors), model)
    assert "\n" not in str(caught.value)
    assert torch.equal(_logits(model), _logits(frozen("llama")))


def _with_embeddings(tmp_path: Path, family: str, rows: int, names: tuple[str, ...]) -> tuple[Path, torch.Tensor]:
    """An adapter with embeddings beside the corrections, as PEFT saves it after resize_token_embeddings."""
    model = frozen(family)
    settings = AdapterSettings(rank=2, targets=("q",))
    lora.add_adapters(model, settings, 0)
    fill({n: p for n, p in model.named_parameters() if p.requires_grad})
    peft.write(tmp_path, model, settings)
    weight = torch.sin(torch.arange(rows * 16.0)).reshape(rows, 16)
    tensors = load_file(tmp_path / peft.WEIGHTS)
    save_file(tensors | {f"{_BASE}.{name}.weight": weight.clone() for name in names}, tmp_path / peft.WEIGHTS)
    return tmp_path, weight


EMBED = "model.embed_tokens"


@pytest.mark.parametrize(
    ("family", "rows", "names"),
    [
        ("llama", 24, (EMBED,)),
        ("llama", 27, (EMBED,)),
        ("llama", 27, (EMBED, "lm_head")),
        ("llama", 20, (EMBED, "lm_head")),
        ("mistral", 29, (EMBED, "lm_head")),
        ("mistral", 24, ("lm_head",)),
        ("mistral", 24, (EMBED,)),
        ("gpt2", 25, ("transformer.wte", "lm_head")),
    ],
)
def test_embeddings_beside_the_corrections_are_read(
    tmp_path: Path, family: str, rows: int, names: tuple[str, ...]
) -> None:
    directory, weight = _with_embeddings(tmp_path, family, rows, names)
    plain = frozen(family)
    merged = peft.merge(directory, frozen(family))
    assert merged.config == plain.config.model_copy(update={"vocab": rows})
    saved = {peft.embedding_modules(plain.config)[name] for name in names}
    for name, parameter in merged.named_parameters():
        if name.split(".")[0] in saved:
            assert torch.equal(parameter, weight)
        elif name in ("embedding.weight", "head.weight"):
            assert torch.equal(parameter, plain.get_parameter(name))
        else:
            assert torch.equal(parameter, plain.get_parameter(name)) != name.endswith("attention.q.weight"), name


SAVED = ("", ".modules_to_save", ".original_module")


@pytest.mark.parametrize("endings", [SAVED, SAVED[1:], SAVED[1:2], SAVED[:2]])
def test_a_saved_module_under_the_names_of_its_wrapper_is_read(tmp_path: Path, endings: tuple[str, ...]) -> None:
    """PEFT writes all three names for embeddings that are in modules_to_save and whose vocabulary was resized."""
    names = tuple(name + ending for name in (EMBED, "lm_head") for ending in endings)
    directory, weight = _with_embeddings(tmp_path, "mistral", 27, names)
    merged = peft.merge(directory, frozen("mistral"))
    assert torch.equal(merged.get_parameter("embedding.weight"), weight)
    assert torch.equal(merged.get_parameter("head.weight"), weight)


def test_two_weights_of_a_saved_module_are_refused(tmp_path: Path) -> None:
    directory, weight = _with_embeddings(tmp_path, "mistral", 24, (EMBED, "lm_head"))
    tensors = load_file(directory / peft.WEIGHTS)
    save_file(tensors | {f"{_BASE}.lm_head.modules_to_save.weight": weight + 1}, directory / peft.WEIGHTS)
    with pytest.raises(UserError, match="found two weights of lm_head that differ"):
        peft.merge(directory, frozen("mistral"))


@pytest.mark.parametrize(
    ("family", "rows", "names", "says"),
    [
        ("mistral", 27, (EMBED,), r"embed_tokens\.weight has shape \[27, 16\], expected \[24, 16\]"),
        ("mistral", 27, ("lm_head",), r"lm_head\.weight has shape \[27, 16\], expected \[24, 16\]"),
        ("llama", 24, ("lm_head",), "a head that differs from the embedding"),
        (
            "llama",
            24,
            ("model.norm",),
            r"found base_model\.model\.model\.norm\.weight, expected the embedding, the head",
        ),
        (
            "mistral",
            24,
            ("model.embed_tokens.base_layer",),
            r"base_layer\.weight, expected the embedding, .*merge the ad",
        ),
    ],
)
def test_embeddings_that_do_not_fit_are_refused(
    tmp_path: Path, family: str, rows: int, names: tuple[str, ...], says: str
) -> None:
    directory, _ = _with_embeddings(tmp_path, family, rows, names)
    with pytest.raises(UserError, match=says):
        peft.merge(directory, frozen(family))


# -- with PEFT itself, where it is installed ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", OURS)
def test_2_6_peft_loads_our_adapter(name: str, tmp_path: Path) -> None:
    installed = pytest.importorskip("peft")
    model, settings = _adapted(name)
    peft.write(tmp_path, model, settings)
    theirs = installed.PeftModel.from_pretrained(in_transformers(frozen(OURS[name][0])), tmp_path).eval()
    assert (logits_of(theirs) - _logits(model)).abs().max() < 1e-5
    assert (logits_of(theirs.merge_and_unload()) - _logits(model)).abs().max() < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_2_6_we_load_pefts_adapter(case: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    theirs = adapted_by_peft(case)
    theirs.save_pretrained(tmp_path)
    model = frozen(CASES[case][0])
    peft.merge(tmp_path, model)
    assert (logits_of(theirs) - _logits(model)).abs().max() < 1e-5
