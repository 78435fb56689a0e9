"""What stands in a model's or an adapter's directory: read, refused, or named as not used."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ingot.convert.directories import adapter_files, model_weights, not_used, own_tokenizer
from ingot.convert.hf_config import read_config
from ingot.core.errors import UserError
from ingot.stages.models.imports import model_files, require_adapter, tokenizer_of, unused_files
from ingot.stages.models.settings import ImportSettings
from ingot.tokenizer.files import tokenizer_files
from tests.imports import assert_not_imported

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
ADAPTER = ["adapter_config.json", "adapter_model.safetensors"]


def _fill(directory: Path, *names: str, index: list[str] | None = None) -> Path:
    directory.mkdir(exist_ok=True)
    for name in names:
        if name.endswith("/"):
            (directory / name).mkdir()
        elif name.endswith("|"):
            os.mkfifo(directory / name[:-1])
        else:
            (directory / name).write_text("{}")
    if index is not None:
        (directory / INDEX).write_text(json.dumps({"weight_map": {f"t{n}": name for n, name in enumerate(index)}}))
    return directory


@pytest.mark.parametrize(
    ("names", "index", "expected"),
    [
        ([SINGLE], None, [SINGLE]),
        (SHARDS, SHARDS, SHARDS),
        ([SINGLE, "training_args.bin", "optimizer.bin"], None, [SINGLE]),
        (
            ["first.safetensors", "second.safetensors"],
            ["second.safetensors", "first.safetensors"],
            ["first.safetensors", "second.safetensors"],
        ),
        ([SINGLE], [SINGLE], [SINGLE]),
    ],
)
def test_one_set_of_weights_is_read(
    tmp_path: Path, names: list[str], index: list[str] | None, expected: list[str]
) -> None:
    _fill(tmp_path, *names, index=index)
    assert [file.name for file in model_weights(tmp_path)] == expected


@pytest.mark.parametrize(
    ("names", "index", "first", "second"),
    [
        ([SINGLE, *SHARDS], SHARDS, SINGLE, INDEX),
        ([SINGLE, "pytorch_model.bin"], None, SINGLE, "pytorch_model.bin"),
        ([SINGLE, SHARDS[0]], None, SINGLE, SHARDS[0]),
        ([*SHARDS, "model-00003-of-00003.safetensors"], SHARDS, INDEX, "model-00003-of-00003.safetensors"),
        ([*SHARDS, "pytorch_model-00001-of-00002.bin"], SHARDS, INDEX, "pytorch_model-00001-of-00002.bin"),
        ([SINGLE, "pytorch_model.bin.index.json"], None, SINGLE, "pytorch_model.bin.index.json"),
    ],
)
def test_two_sets_of_weights_are_refused(
    tmp_path: Path, names: list[str], index: list[str] | None, first: str, second: str
) -> None:
    _fill(tmp_path, *names, index=index)
    with pytest.raises(UserError, match=f"found two sets of weights, {first} and {second}, expected one"):
        model_weights(tmp_path)


@pytest.mark.parametrize(
    ("names", "index", "problem"),
    [
        (["weights.safetensors"], None, r"no model\.safetensors and no .*, found weights\.safetensors, expected"),
        (["pytorch_model.bin"], None, r"found pytorch_model\.bin, expected model\.safetensors, because pickled"),
        ([], None, r"no model\.safetensors and no model\.safetensors\.index\.json, expected"),
        (SHARDS[:1], SHARDS, "which is not in"),
        ([f"{SINGLE}|"], None, r"model\.safetensors: not a regular file"),
        ([f"{SHARDS[0]}|", SHARDS[1]], SHARDS, r"names the file .*00001-of-00002\.safetensors, which is not in"),
        ([f"{INDEX}|"], None, r"index\.json: not a regular file"),
        ([], [], "names no file"),
    ],
)
def test_weights_that_cannot_be_read_are_refused(
    tmp_path: Path, names: list[str], index: list[str] | None, problem: str
) -> None:
    with pytest.raises(UserError, match=problem):
        model_weights(_fill(tmp_path, *names, index=index))


def test_an_index_nested_deep_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text('{"weight_map":' * 100_000)
    with pytest.raises(UserError, match="found no weight_map"):
        model_weights(tmp_path)


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        ([*ADAPTER, "adapter_model.bin"], "found two sets of weights, adapter_model.safetensors and adapter_model.bin"),
        (["adapter_config.json", "adapter_model.bin"], "found adapter_model.bin, expected adapter_model.safetensors"),
        (
            ["adapter_config.json", "README.md"],
            "found README.md, adapter_config.json, expected adapter_config.json and",
        ),
        (["adapter_config.json", "adapter_model.safetensors|"], "adapter_model.safetensors: not a regular file"),
    ],
)
def test_an_adapter_is_two_files(tmp_path: Path, names: list[str], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        adapter_files(_fill(tmp_path, *names))


def test_what_is_not_used_is_named(tmp_path: Path) -> None:
    other = [
        "flax_model.msgpack",
        "preprocessor_config.json",
        "extra.safetensors",
        "vocab.txt",
        "onnx/",
        ".gitattributes",
    ]
    _fill(tmp_path, SINGLE, "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", *other)
    used = [tmp_path / SINGLE, tmp_path / "config.json"]
    assert not_used(tmp_path, used) == sorted(name for name in other if name[0] != ".")
    (tmp_path / "merges.txt").write_text("")
    (tmp_path / "vocab.json").write_text("")
    assert {"merges.txt", "vocab.json"} <= set(not_used(tmp_path, used)), "tokenizer.json is read instead"
    (tmp_path / "tokenizer.json").unlink()
    assert not {"merges.txt", "vocab.json"} & set(not_used(tmp_path, used))
    assert own_tokenizer(tmp_path)


def test_an_adapter_beside_a_model_is_refused_unless_it_is_named(tmp_path: Path) -> None:
    model = _fill(tmp_path / "model", SINGLE, "config.json", *ADAPTER)
    _fill(tmp_path / "other", *ADAPTER)
    for adapter in (None, str(tmp_path / "other")):
        with pytest.raises(
            UserError, match=r'contains a model and an adapter .*to merge the two, set adapter = ".*model"'
        ):
            require_adapter(ImportSettings(path=f"hf:{model}", adapter=adapter))
    settings = ImportSettings(path=f"hf:{model}", adapter=f"{model}/../model")
    assert [file.name for file in require_adapter(settings)] == ADAPTER
    assert unused_files(settings) == []


def test_an_adapters_own_tokenizer_and_template_are_taken(tmp_path: Path) -> None:
    model = _fill(tmp_path / "model", SINGLE, "config.json", "tokenizer.json")
    adapter = _fill(tmp_path / "adapter", *ADAPTER, "training_args.bin", "checkpoint-5/")
    settings = ImportSettings(path=f"hf:{model}", adapter=str(adapter))
    assert tokenizer_of(settings) == (model, None)
    (adapter / "chat_template.jinja").write_text("x")
    assert tokenizer_of(settings) == (model, adapter / "chat_template.jinja")
    assert unused_files(settings) == ["adapter/checkpoint-5/", "adapter/training_args.bin"]
    (adapter / "tokenizer.json").write_text("{}")
    assert tokenizer_of(settings) == (adapter, None)
    assert unused_files(settings) == ["adapter/checkpoint-5/", "adapter/training_args.bin"]
    assert tokenizer_of(ImportSettings(path=f"hf:{model}")) == (model, None)


def test_looking_at_directories_needs_no_torch() -> None:
    assert_not_imported("import ingot.convert.directories, ingot.stages.models.imports", "torch")


_LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n"


@pytest.mark.parametrize("stand_in", ["a pipe", "a link to nothing", "a pointer of Git LFS"])
@pytest.mark.parametrize(
    ("name", "read"),
    [
        (SINGLE, lambda directory: model_files(f"hf:{directory}")),
        ("config.json", lambda directory: model_files(f"hf:{directory}")),
        ("config.json", read_config),
        ("tokenizer.json", tokenizer_files),
        ("tokenizer_config.json", tokenizer_files),
        (ADAPTER[1], adapter_files),
    ],
)
def test_a_file_without_its_content_is_refused_by_name(
    tmp_path: Path, name: str, read: Callable[[Path], object], stand_in: str
) -> None:
    model = [SINGLE, "config.json", "tokenizer.json", "tokenizer_config.json"]
    directory = _fill(tmp_path / "model", *(ADAPTER if read is adapter_files else model))
    path = directory / name
    path.unlink()
    if stand_in == "a pipe":
        os.mkfifo(path)
    elif stand_in == "a link to nothing":
        path.symlink_to("nowhere")
    else:
        path.write_text(_LFS)
    says = r"found a pointer of Git LFS.*git lfs pull" if "LFS" in stand_in else "not a regular file, expected one"
    with pytest.raises(UserError, match=rf"{name}: {says}"):
        read(directory)
