"""The memory of keys and values."""

import pytest
import torch

from ingot.infer.kv_cache import KVCache
from ingot.infer.ops import TorchOps
from ingot.model.config import ModelConfig, ModelSettings
from tests.infer.cpu import cpu_ops, cpu_params

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
CPU = torch.device("cpu")


@pytest.fixture
def config() -> ModelConfig:
    return ModelSettings(depth=2, width=32, heads=4, kv_heads=2, context=256).resolve(11)


@pytest.mark.parametrize(
    ("ops", "keys", "values"),
    [
        pytest.param(TorchOps(FP32, FP32), FP32, FP32, id="torch, fp32"),
        pytest.param(TorchOps(BF16, FP32), FP32, BF16, id="torch, bf16"),
        pytest.param(TorchOps(FP64, FP64), FP64, FP64, id="torch, fp64"),
        *cpu_params(lambda dtype: (cpu_ops(dtype), dtype, dtype)),
    ],
)
def test_keys_and_values_are_stored_as_the_operations_read_them(
    ops: TorchOps, keys: torch.dtype, values: torch.dtype, config: ModelConfig
) -> None:
    cache = KVCache(config, 3, 20, ops, CPU)
    assert (cache.keys_LBKCD.dtype, cache.values_LBKCD.dtype) == (keys, values)
    assert cache.keys_LBKCD.shape == cache.values_LBKCD.shape == (2, 3, 2, 20, 8)
    assert cache.used == 0
    assert not cache.keys_LBKCD.any(), "recorded steps read slots that are not written yet"
    assert not cache.values_LBKCD.any()


def test_a_layers_tables_are_views(config: ModelConfig) -> None:
    cache = KVCache(config, 3, 20, TorchOps(FP32, FP32), CPU)
    keys, values = cache.layer(1, slice(1, 3))
    keys.fill_(1.0)
    values.fill_(2.0)
    assert cache.keys_LBKCD.sum() == keys.numel() == 2 * 2 * 20 * 8
    assert cache.values_LBKCD[1, 1:].eq(2).all()
    assert cache.layer(0)[0].shape == (3, 2, 20, 8)


def test_rows_that_are_kept_move_to_the_front_with_their_used_slots(config: ModelConfig) -> None:
    cache = KVCache(config, 5, 20, TorchOps(FP32, FP32), CPU)
    for number, table in enumerate((cache.keys_LBKCD, cache.values_LBKCD)):
        table[:, :, :, :7] = torch.randn(2, 5, 2, 7, 8, generator=torch.Generator().manual_seed(number))
    before = cache.keys_LBKCD.clone(), cache.values_LBKCD.clone()
    cache.used = 7
    address = cache.keys_LBKCD.data_ptr()
    for rows, original in (([0, 2, 3], [0, 2, 3]), ([1, 2], [2, 3])):
        cache.keep(torch.tensor(rows))
        for table, old in zip((cache.keys_LBKCD, cache.values_LBKCD), before, strict=True):
            assert torch.equal(table, old[:, original])
            assert all(layer.is_contiguous() for layer in table), "kernels read a layer as one piece of memory"
    assert cache.keys_LBKCD.data_ptr() == address, "no memory beside it is taken"
