"""Common code of all measured processes, ours and the peers': the clock, the batches, the protocol.

A process reads its job as a line of JSON from standard input, and prints its result as the last line of its output. In
between it may print `TURN` and wait for a line, before each timed window; at the end of its input it does not wait.

This file and the scripts of this directory run in a peer's environment, so they import only torch, that peer and the
standard library.
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
"""The optimizer of all contenders."""


TURN = "@turn"
"""The line that announces waiting; `process.py` has the same."""


def read_job():
    """Read the job from standard input, and seed torch."""
    job = json.loads(sys.stdin.readline())
    torch.manual_seed(1)
    return job


def take_turn():
    """Wait for this process's turn, while other processes are measured."""
    print(f"\n{TURN}", flush=True)  # the newline ends a line that a peer left unfinished
    sys.stdin.readline()


def print_result(result):
    """Print the result as the last line of standard output."""
    print(json.dumps(result), flush=True)


def device():
    """The GPU if there is one, else the CPU; this is the default of all tools."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def peak_bytes():
    """Peak memory of this process: allocated by torch on a GPU, else resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would include the peak that is inherited from the parent process
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Rows:
    """Rows of a file of int32 ids: context + 1 ids every `context` ids, in order, repeated from the start."""

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
        """Inputs and targets of a 0-based step, [rows, context] int64."""
        number = torch.arange(step * self.rows, (step + 1) * self.rows) % self.total
        ids = self.ids[number[:, None] * self.context + torch.arange(self.context + 1)].long()
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


class Clock:
    """Times training steps.

    The first `checked` steps warm up, and their losses are stored. Then steps are timed for `seconds`, at least `least`
    of them, in `turns` windows, before each of which other processes may have a turn. On a GPU steps run
    asynchronously, so complete windows are timed and divided by their steps.
    """

    def __init__(self, job):
        self.checked, self.turns = job["shape"]["checked"], job.get("turns", 1)
        self.seconds, self.least = job["seconds"] / self.turns, -(-job["least"] // self.turns)
        self.on_gpu = torch.cuda.is_available()
        self.losses, self.times, self.steps = [], [], 0
        self.window_steps, self.window_start, self.last = 0, 0.0, 0.0

    def tick(self, loss):
        """Call after each step with its loss (a tensor); returns whether to continue."""
        if self.steps < self.checked:
            self.losses.append(loss.detach())
        self.steps += 1
        if self.steps <= self.checked:
            if self.steps == self.checked:
                self._start_window()
            return True
        now = time.perf_counter()
        if not self.on_gpu:
            self.times.append(now - self.last)
            self.last = now
        done = self.steps - self.window_steps
        if done < self.least or now - self.window_start < self.seconds:
            return True
        if self.on_gpu:
            self._synchronize()
            self.times += [(time.perf_counter() - self.window_start) / done] * done
        self.turns -= 1
        self._start_window()  # also after the last window: no process exits while another one is measured
        return self.turns > 0

    def _start_window(self):
        self._synchronize()
        take_turn()
        self.window_steps, self.window_start = self.steps, time.perf_counter()
        self.last = self.window_start

    def _synchronize(self):
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
            "losses": [float(loss) for loss in self.losses],
        }


def work(model, layers, attention_width, context):
    """Parameters (tied ones counted once), and FLOPs per token, 6 N + 12 L d T.

    N counts the weights of the model's linear layers, including the head.
    """
    linear_classes = ("Linear", "Conv1D")  # Conv1D is transformers' linear layer of GPT-2
    linear = {id(m.weight): m.weight.numel() for m in model.modules() if type(m).__name__ in linear_classes}
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "flops_per_token": 6 * sum(linear.values()) + 12 * layers * attention_width * context,
    }


def versions(*packages):
    """Versions of torch and these packages."""
    from importlib.metadata import version

    return {name: version(name) for name in ("torch", *packages)}


def train_plainly(job, model, loss_of):
    """A plain PyTorch loop: batch, forward, backward, clipping, AdamW with default arguments. Returns `Clock.result`.

    Args:
        loss_of: (ids, targets) -> the mean loss.
    """
    on = device()
    model = model.to(on).train()
    rows, clock, step = Rows(job), Clock(job), 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
    running = True
    while running:
        ids, targets = (tensor.to(on) for tensor in rows.batch(step))
        with torch.autocast(on, dtype=torch.bfloat16, enabled=job["autocast"]):
            loss = loss_of(ids, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        running = clock.tick(loss)
    return clock.result()


def prompts(job):
    """Prompts of `prompt` ids each, [rows, prompt] int64."""
    rows = job["shape"]["rows"]
    return Rows(job).ids[: rows * job["prompt"]].long().view(rows, job["prompt"])


def timed_generation(job, generate):
    """Time generations, after a short one to warm up: at least two, for the job's seconds, in `turns` windows.

    Args:
        generate: new tokens -> ids, [rows, new].

    Returns:
        `seconds` for all new tokens, `first_s` for the first one (which includes the prompt), `token_s` for each
        further one, the number of `runs`, and the `tokens`.
    """
    generate(min(8, job["new"]))
    complete, first, tokens, turns = [], [], [], job.get("turns", 1)
    for turn in range(1, turns + 1):
        take_turn()
        window_start = time.perf_counter()
        while len(complete) < 2 * turn / turns or time.perf_counter() - window_start < job["seconds"] / turns:
            for new, times in ((1, first), (job["new"], complete)):
                start = time.perf_counter()
                tokens = generate(new)
                times.append(time.perf_counter() - start)
    take_turn()
    seconds, first_s = statistics.median(complete), statistics.median(first)
    token_s = (seconds - first_s) / max(1, job["new"] - 1)
    return {"seconds": seconds, "first_s": first_s, "token_s": token_s, "runs": len(complete), "tokens": tokens}


def questions(job, rows):
    """`rows` prompts of `prompt` ids each, as lists; the last id of the vocabulary is not used."""
    ids = Rows(job).ids[: rows * job["prompt"]].clamp(max=job["shape"]["vocab"] - 2)
    return ids.view(rows, -1).tolist()


def preferences(job):
    """`pairs` pairs of a chosen and a rejected row: a prompt, then `new` ids, of which the last is the end."""
    all_prompts, new, end = questions(job, job["pairs"]), job["new"] - 1, job["shape"]["vocab"] - 1
    answers = Rows(job).ids[-2 * len(all_prompts) * new :].clamp(max=end - 1).view(-1, 2, new).tolist()
    return [[prompt + answer + [end] for answer in pair] for prompt, pair in zip(all_prompts, answers, strict=True)]


def record_updates():
    """A list to which every future step of any optimizer appends an item."""
    steps = []
    register_optimizer_step_post_hook(lambda *_: steps.append(1))
    return steps
