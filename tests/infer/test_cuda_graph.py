"""Steps that are recorded for a GPU: the same logits as a full forward, with slots hidden that nobody wrote yet."""

import numpy as np
import pytest
import torch

from ingot.infer import cuda_graph
from ingot.infer import decoder as decoders
from ingot.infer.cuda_graph import FEWEST, slots_read
from ingot.infer.decoder import Decoder, Rows
from ingot.infer.generate import generate
from ingot.infer.sampling import Sampling
from ingot.kernels import cpu_decode
from tests.infer.test_decoder import VOCAB, _ids, _logits, _model

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


class Played:
    """Stands for a recording where there is no GPU: what it was made of, again; inputs are copied as a graph's are."""

    made: int
    played: int

    def __init__(self, step, inputs):
        Played.made += 1
        self.step, self.inputs = step, [x.clone() for x in inputs]

    def __call__(self, *inputs):
        Played.played += 1
        for held, new in zip(self.inputs, inputs, strict=True):
            held.copy_(new)
        return self.step(*self.inputs)


@pytest.fixture
def played(monkeypatch):
    monkeypatch.setattr(cpu_decode, "_library", lambda: None)
    monkeypatch.setattr(decoders, "Graph", Played)
    monkeypatch.setattr(cuda_graph, "FEWEST", 4)
    monkeypatch.setattr(decoders, "WORTH", 1)
    Played.made = Played.played = 0


def _run(model, ids_BT, lengths, dropped_at=None):
    """Logits of each token by recorded steps, and which rows they are of."""
    lengths_B = torch.tensor(lengths)
    new = ids_BT.shape[1] - int(lengths_B.max())
    prompts_BT = ids_BT[:, : int(lengths_B.max())].clone()
    kept_B = torch.arange(len(ids_BT))
    with torch.inference_mode():
        rows = Rows(Decoder(model), prompts_BT, lengths_B, new)
        rows._records = True
        for step in range(new):
            if step == dropped_at:
                rows.keep(torch.tensor([0, 2]))
                kept_B = torch.tensor([0, 2])
            rows.run(ids_BT[kept_B, lengths_B[kept_B] + step])
            yield step, kept_B, rows.logits_BV.clone()


@pytest.mark.parametrize("dropped_at", [None, 9])
@pytest.mark.parametrize("settings", [{}, {"family": "gpt2"}, {"family": "mistral", "window": 7, "kv_heads": 2}])
def test_recorded_steps_give_the_logits_of_the_full_forward(played, settings, dropped_at):
    model = _model(**settings)
    ids_BT, lengths = _ids(4, 30), [12, 3, 1, 9]
    wanted_BTV = _logits(model, ids_BT)
    for step, kept_B, found_BV in _run(model, ids_BT, lengths, dropped_at):
        wanted_BV = wanted_BTV[kept_B, torch.tensor(lengths)[kept_B] + step]
        torch.testing.assert_close(found_BV, wanted_BV, rtol=0, atol=1e-5 * float(wanted_BTV.abs().max()))
    assert Played.made == (2 if dropped_at is None else 3)  # 16 and 30 slots; fewer rows
    assert Played.played == 18 - Played.made  # all but the first step of each kind


def test_a_slot_that_is_not_hidden_is_noticed(played, monkeypatch):
    """The control: what is after the newest slot must not be read."""
    model = _model()
    ids_BT = _ids(2, 30)
    bias = Rows._bias
    monkeypatch.setattr(Rows, "_bias", lambda self, slot, read: torch.zeros_like(bias(self, slot, read)))
    wanted_BTV = _logits(model, ids_BT)
    off = [(found - wanted_BTV[:, 12 + step]).abs().max() for step, _, found in _run(model, ids_BT, [12, 12])]
    assert max(off) > 1e-2


def test_a_step_that_cannot_be_recorded_is_made_plainly(played, monkeypatch):
    def fails(step, inputs):
        raise RuntimeError("no")

    monkeypatch.setattr(decoders, "Graph", fails)
    model = _model()
    ids_BT = _ids(2, 30)
    wanted_BTV = _logits(model, ids_BT)
    with pytest.warns(UserWarning, match="recording one failed: no"):
        found = list(_run(model, ids_BT, [12, 12]))
    for step, _, found_BV in found:
        torch.testing.assert_close(found_BV, wanted_BTV[:, 12 + step], rtol=0, atol=1e-4)


def test_slots_read_are_few_and_enough():
    for slots in (1, 100, 300, 5000):
        for slot in range(slots):
            read = slots_read(slot, slots)
            assert slot < read <= slots
            assert read <= max(FEWEST, 2 * slot)
    assert len({slots_read(slot, 5000) for slot in range(5000)}) == 6


@on_a_gpu
@pytest.mark.parametrize("settings", [{}, {"family": "gpt2"}, {"family": "mistral", "window": 7, "kv_heads": 2}])
def test_a_gpu_continues_as_a_cpu_does(settings, recwarn):
    model = _model(**settings, context=400)
    prompts = [np.arange(1, 1 + n) % VOCAB for n in (9, 2, 5)]
    sampling = Sampling(max_new=300, temperature=0)
    wanted = [c.ids.tolist() for c in generate(model, prompts, sampling)]
    found = [c.ids.tolist() for c in generate(model.cuda(), prompts, sampling)]
    same = np.mean([a == b for x, y in zip(found, wanted, strict=True) for a, b in zip(x, y, strict=True)])
    assert same > 0.9, same
    assert not [w for w in recwarn if "recording one failed" in str(w.message)]


@on_a_gpu
def test_rows_leave_a_recorded_batch():
    model = _model(context=400).cuda()
    prompts = [np.arange(1, 1 + n) % VOCAB for n in range(1, 17)]
    sampling = Sampling(max_new=200, stop=frozenset((0, 1, 2)))
    drawn = generate(model, prompts, sampling, seed=5)
    alone = [generate(model, [p], sampling, seed=5, keys=[(i, 0)])[0] for i, p in enumerate(prompts)]
    assert len({len(c.ids) for c in drawn}) > 4
    same = np.mean([a.ids.tolist() == b.ids.tolist() for a, b in zip(drawn, alone, strict=True)])
    assert same > 0.8, same
