"""A model that babbles bytes, with a tokenizer of bytes and a few merges, in memory and as a stage's directory."""

from pathlib import Path

import pytest
import torch

from ingot.api import LanguageModel
from ingot.core.artifact import atomic_json
from ingot.distributed import checkpoint
from ingot.model.config import ModelSettings
from ingot.model.transformer import build
from ingot.stages.models.load import LoadedModel, save_description
from ingot.tokenizer.byte_bpe import ByteBPE

EURO = "€".encode()


@pytest.fixture(scope="session")
def babbler() -> LanguageModel:
    """It writes letters, spaces and euro signs; some euro signs are one token, some three, some a half and the rest."""
    words = [b"a", b"b", b" ", b"ab", b"ba ", EURO, EURO[:2], EURO[2:]]
    tokens = [bytes([i]) for i in range(256)]
    tokens += [token for token in words if len(token) > 1]
    tokenizer = ByteBPE(tokens, r"(?s).+")
    config = ModelSettings(depth=1, width=32, heads=2, context=96, tied=False).resolve(tokenizer.vocab)
    model = build(config, seed=0)
    with torch.no_grad():
        model.head.weight.mul_(3)
        likely = torch.tensor([tokens.index(token) for token in words])
        rest = torch.ones(config.vocab, dtype=torch.bool).index_fill(0, likely, False)
        model.head.weight[rest] *= 0.0
        model.norm.weight.fill_(1.0)
        direction = torch.ones(config.width)
        model.embedding.weight += 3 * direction  # every state points there, and so do the heads of these words
        model.head.weight[likely] += 0.2 * direction
    return LanguageModel(LoadedModel(model, tokenizer, config, Path("none")))


@pytest.fixture
def stage(babbler: LanguageModel, tmp_path: Path) -> Path:
    """The same as the directory of a train stage whose data were conversations."""
    path = tmp_path / "stage"
    path.mkdir()
    loaded = babbler.loaded
    save_description(path, loaded.config, loaded.tokenizer)
    tensors = {f"model.{name}": p.detach() for name, p in loaded.model.named_parameters()}
    checkpoint.save(path / "checkpoints" / "00000001", tensors, {"step": 1}, {})
    atomic_json(
        path / "inputs.json",
        {"kind": "train", "settings": {}, "inputs": {"data:talk": {"name": "talk", "key": "", "dir": "gone"}}},
    )
    atomic_json(path / "result.json", {"steps": 1})
    (path / "DONE").write_text("{}")
    return path
