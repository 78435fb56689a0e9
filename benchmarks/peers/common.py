"""What every measured process does alike, ours and the peers': the clock, the batches, the numbers it prints.

A job comes as a line of JSON on standard input, and the result goes as one to standard output. Between them a process
may say that it is ready to be measured, and waits for a line then; where nobody holds its input open it goes on.

This file and the scripts beside it run in a peer's own environment, so they import torch, that peer and the standard
library, and nothing of ours.
"""

import json
import resource
import statistics
import sys
import time
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

BETAS, EPS, WEIGHT_DECAY, CLIP, LR = (0.9, 0.95), 1e-8, 0.1, 1.0, 1e-3
"""The optimizer of every training that is measured, ours included."""


TURN = "@turn"
"""The line that says so, as `process.py` expects it."""


def read_job():
    """The job, with the process set up for it."""
    job = json.loads(sys.stdin.readline())
    torch.manual_seed(1)
    return job


def take_turn():
    """Wait until the others have been measured for a while."""
    print(f"\n{TURN}", flush=True)  # some peers leave a line unfinished
    sys.stdin.readline()


def answer(result):
    """Print the result as the last line of standard output."""
    print(json.dumps(result), flush=True)


def device():
    """Where to compute: a GPU if there is one, as every tool here does by default."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def peak_bytes():
    """The most memory this process had: of the GPU where it computes there, else resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    if status.exists():  # unlike getrusage, not inherited from the process that started this one
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Rows:
    """The rows of a file of int32 ids, a row of context + 1 every `context` ids, in order and then from the start."""

    def __init__(self, job):
        shape = job["shape"]
        size = Path(job["ids"]).stat().st_size // 4
        self.ids = torch.from_file(job["ids"], size=size, dtype=torch.int32)
        self.context, self.rows = shape["context"], shape["rows"]
        self.total = (size - 1) // self.context

    def row(self, number):
        """Inputs and targets of one row, int64."""
        start = number % self.total * self.context
        ids = self.ids[start : start + self.context + 1].long()
        return ids[:-1], ids[1:]

    def batch(self, step):
        """Inputs and targets of a 0-based step, rows x context, int64."""
        number = torch.arange(step * self.rows, (step + 1) * self.rows) % self.total
        ids = self.ids[number[:, None] * self.context + torch.arange(self.context + 1)].long()
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


class Clock:
    """Times steps: first `checked` ones that warm up and whose losses are kept, then for `seconds`, `least` at least.

    The latter are done in `turns` windows, before each of which the others may have their turn. On a GPU steps are not
    waited for, so a window as a whole is timed and divided by its steps.
    """

    def __init__(self, job):
        self.checked, self.turns = job["shape"]["checked"], job.get("turns", 1)
        self.seconds, self.least = job["seconds"] / self.turns, -(-job["least"] // self.turns)
        self.on_gpu = torch.cuda.is_available()
        self.kept, self.times, self.steps = [], [], 0
        self.first, self.began, self.last = 0, 0.0, 0.0

    def tick(self, loss):
        """After a step, with its loss (a tensor): whether to go on."""
        if self.steps < self.checked:
            self.kept.append(loss.detach())
        self.steps += 1
        if self.steps <= self.checked:
            if self.steps == self.checked:
                self._begin()
            return True
        now = time.perf_counter()
        if not self.on_gpu:
            self.times.append(now - self.last)
            self.last = now
        done = self.steps - self.first
        if done < self.least or now - self.began < self.seconds:
            return True
        if self.on_gpu:
            self._wait()
            self.times += [(time.perf_counter() - self.began) / done] * done
        self.turns -= 1
        self._begin()  # after the last window too, so that nobody ends while another is measured
        return self.turns > 0

    def _begin(self):
        self._wait()
        take_turn()
        self.first, self.began = self.steps, time.perf_counter()
        self.last = self.began

    def _wait(self):
        if self.on_gpu:
            torch.cuda.synchronize()

    def result(self):
        """Step times in seconds, and the losses of the checked steps."""
        times = sorted(self.times)
        return {
            "step_s": statistics.median(times),
            "p10_s": times[len(times) // 10],
            "p90_s": times[len(times) * 9 // 10],
            "steps": len(times),
            "losses": [float(loss) for loss in self.kept],
        }


def work(model, layers, attention_width, context):
    """What is trained: parameters (shared ones once), and FLOPs of a token by the 6 N + 12 L d T count.

    N is read off the linear layers that the model has, the head among them; transformers' GPT-2 calls them otherwise.
    """
    names = ("Linear", "Conv1D")
    linear = {id(m.weight): m.weight.numel() for m in model.modules() if type(m).__name__ in names}
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "flops_per_token": 6 * sum(linear.values()) + 12 * layers * attention_width * context,
    }


def versions(*packages):
    """Versions of torch and these packages."""
    from importlib.metadata import version

    return {name: version(name) for name in ("torch", *packages)}


def train_plainly(job, model, loss_of):
    """The loop that everybody writes: batch, forward, backward, clip, AdamW as it comes. Returns the clock's numbers.

    Args:
        loss_of: (ids, targets) -> the mean loss.
    """
    where = device()
    model = model.to(where).train()
    rows, clock, step = Rows(job), Clock(job), 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
    going = True
    while going:
        ids, targets = (part.to(where) for part in rows.batch(step))
        with torch.autocast(where, dtype=torch.bfloat16, enabled=job["autocast"]):
            loss = loss_of(ids, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        going = clock.tick(loss)
    return clock.result()


def prompts(job):
    """The first tokens of as many rows as the job has, rows x prompt, int64."""
    rows = job["shape"]["rows"]
    return Rows(job).ids[: rows * job["prompt"]].long().view(rows, job["prompt"])


def timed_generation(job, generate):
    """Times of `generate(new)`, which gives rows x new ids: a short one to warm up, then for the job's seconds, two
    at least, in `turns` windows.

    Returns `seconds` for all new tokens, `first_s` for one (the prompt's pass), `token_s` for each after it, the ids.
    """
    generate(min(8, job["new"]))
    whole, first, tokens, turns = [], [], [], job.get("turns", 1)
    for turn in range(1, turns + 1):
        take_turn()
        began = time.perf_counter()
        while len(whole) < 2 * turn / turns or time.perf_counter() - began < job["seconds"] / turns:
            for new, times in ((1, first), (job["new"], whole)):
                start = time.perf_counter()
                tokens = generate(new)
                times.append(time.perf_counter() - start)
    take_turn()
    seconds, first_s = statistics.median(whole), statistics.median(first)
    token_s = (seconds - first_s) / max(1, job["new"] - 1)
    return {"seconds": seconds, "first_s": first_s, "token_s": token_s, "runs": len(whole), "tokens": tokens}


def questions(job, rows):
    """So many prompts of `prompt` ids each, as lists, without the last id of the vocabulary."""
    ids = Rows(job).ids[: rows * job["prompt"]].clamp(max=job["shape"]["vocab"] - 2)
    return ids.view(rows, -1).tolist()


def preferences(job):
    """`pairs` pairs of a chosen and a rejected conversation: a prompt, and `new` ids of which the last is the end."""
    asked, new, end = questions(job, job["pairs"]), job["new"] - 1, job["shape"]["vocab"] - 1
    answers = Rows(job).ids[-2 * len(asked) * new :].clamp(max=end - 1).view(-1, 2, new).tolist()
    return [[prompt + answer + [end] for answer in pair] for prompt, pair in zip(asked, answers, strict=True)]


def counted():
    """A list that grows by one with every step that any optimizer makes from now on."""
    steps = []
    register_optimizer_step_post_hook(lambda *_: steps.append(1))
    return steps
