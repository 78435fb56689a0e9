"""Steps made again from a tape equal steps computed anew, to the bit; what cannot be made again is noticed."""

import subprocess
import sys

import pytest
import torch

from ingot.infer.decoder import Decoder, Rows
from ingot.infer.linear import Way
from ingot.kernels import cpu_decode, replay
from ingot.model.config import ModelSettings
from ingot.model.transformer import build

VOCAB, STEPS = 37, 9

pytestmark = pytest.mark.skipif(
    not cpu_decode.available(torch.device("cpu"), torch.float32, torch.float32), reason="no compiler"
)


def _rows(family="llama", lengths=(6, 6, 6), dtype=torch.float32, **settings):
    model = build(
        ModelSettings(**{"depth": 2, "width": 48, "heads": 6, "family": family, **settings}).resolve(VOCAB), 2
    )
    generator = torch.Generator().manual_seed(1)
    ids_BT = torch.randint(VOCAB, (len(lengths), max(lengths)), generator=generator)
    with torch.inference_mode():
        return Rows(Decoder(model, dtype), ids_BT, torch.tensor(lengths), STEPS)


def _run(rows, taped, dropped_at=None):
    """Logits of some steps."""
    rows.decoder.native = taped  # the functions are bound already: this is about recording alone
    ids_SB, found = torch.randint(VOCAB, (STEPS, 3), generator=torch.Generator().manual_seed(4)), []
    with torch.inference_mode():
        for step, ids_B in enumerate(ids_SB):
            if step == dropped_at:
                rows.keep(torch.tensor([0, 2]))
            rows.run(ids_B[: len(rows.length_B)])
            found.append(rows.logits_BV.clone())
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [(6, 6, 6), (6, 2, 5)])
@pytest.mark.parametrize("dropped_at", [None, 1, 5])
@pytest.mark.parametrize(
    "settings", [{}, {"kv_heads": 2, "tied": True}, {"bias": "all"}, {"family": "gpt2"}, {"family": "qwen3"}]
)
def test_steps_made_again_equal_steps_computed_anew(settings, dropped_at, lengths, dtype):
    again, anew = (_rows(lengths=lengths, dtype=dtype, **settings) for _ in range(2))
    for one, other in zip(_run(again, True, dropped_at), _run(anew, False, dropped_at), strict=True):
        assert torch.equal(one, other)
    assert again._tape.whole or dtype != torch.float32  # beside matrix tiles oneDNN multiplies in bf16
    assert anew._tape is None


def test_steps_are_made_again_without_python(monkeypatch):
    rows, called, calls = _rows(), [], replay.call
    monkeypatch.setattr(replay, "call", lambda *words: (called.append(words), calls(*words)))
    _run(rows, True)
    assert rows._tape.whole
    assert len(called) == rows._tape.calls == 2 * 7 + 2  # norm, q k v, attention, o, norm, SwiGLU, down; norm, head


@pytest.mark.parametrize(
    "settings", [{"norm": "layer", "qk_norm": True}, {"heads": 5, "head_size": 7, "positions": "learned"}]
)
def test_what_torch_takes_part_in_is_computed_anew(settings):
    again, anew = (_rows(dtype=torch.bfloat16, **settings) for _ in range(2))
    found, wanted = _run(again, True, 5), _run(anew, False, 5)
    padded = cpu_decode._of("pair", torch.bfloat16) > 1 or again.decoder.way is not Way.PANELS
    assert again._tape.whole == (not padded and "head_size" in settings)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_a_window_that_moves_is_no_tape():
    rows = _rows("mistral", window=8)
    _run(rows, True)
    assert rows._tape is None
    again, anew = (_rows("mistral", window=40) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(_run(again, True), _run(anew, False), strict=True))
    assert again._tape.whole


def test_outputs_of_a_kind_share_memory_while_calls_are_written_down():
    gain = torch.ones(4)
    with cpu_decode.recorded() as recorded:
        x = torch.empty(2, 4)
        norms = [cpu_decode.rms_norm(gain, 1e-5, torch.float32, x) for _ in range(2)]
        other = cpu_decode.rms_norm(gain, 1e-5, torch.float32, x[:1])
    assert norms[0].data_ptr() == norms[1].data_ptr() != other.data_ptr()
    assert (recorded.calls, recorded.whole) == (3, True)
    x.copy_(torch.arange(8.0).view(2, 4))
    recorded.again()
    assert torch.equal(norms[0], cpu_decode.rms_norm(gain, 1e-5, torch.float32, x))


@pytest.mark.parametrize(
    "copy",
    [
        lambda x: x + 1,
        lambda x: x.to(torch.bfloat16).float(),
        lambda x: x.t().contiguous(),
        lambda x: x.t().reshape(-1),
        lambda x: x.copy_(torch.ones(4)),
        lambda x: torch.cat((x, x)),
    ],
)
@pytest.mark.parametrize("inference", [True, False])
def test_what_is_no_call_of_ours_is_noticed(inference, copy):
    """In inference mode a copy may come as an operation that calls itself a view."""
    gain, x = torch.ones(4), torch.ones(3, 4)
    with torch.inference_mode(inference):
        with cpu_decode.recorded() as recorded:
            cpu_decode.rms_norm(gain, 1e-5, torch.float32, x.view(4, 3).view(3, 4)[:2].to(torch.float32).contiguous())
        assert recorded.whole
        with cpu_decode.recorded() as recorded:
            copy(x)
        assert not recorded.whole


def test_recording_does_not_import_torchs_compiler():
    """Which takes a second and 100 MB."""
    program = (
        "import sys, torch\nfrom ingot.infer import native\n"
        "with native.recorded(): torch.empty(1)\n"
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
