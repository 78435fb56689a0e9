"""Who is measured: our own processes, and peers that each live in a virtual environment of their own.

Peers cannot be installed together (their dependencies exclude each other), so a peer is a directory below the cache
with its own Python, made by pip the first time it is asked for, and some small scripts (`peers/`) that run in it. An
environment that is there already is named by INGOT_PEER_LITGPT=/path/to/python, INGOT_PEER_TRANSFORMERS and so on, and
the checkout of a peer that is no package by INGOT_PEER_NANOGPT_SOURCE=/path/to/nanoGPT.
Peers run as they are shipped; the allocator settings that a stage's process gets are for ours alone.

Rejected: peers as extras of ours (no set of versions satisfies all), and a container (needs more than Python).
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ingot.core.allocator import ALLOCATOR
from ingot.core.artifact import atomic_json, cache
from ingot.core.errors import UserError, nearest
from ingot.core.process import WAITING
from ingot.pipeline.run import QUIET, child_environment

Say = Callable[[str], None]
SCRIPTS = Path(__file__).parent / "peers"
TORCH = "torch==2.13.*"
"""What ours is tested with (constraints.txt): peers get the same, so that a ratio never compares two torches."""
STAMP = "ingot-peer.json"


@dataclass(frozen=True)
class Peer:
    """A tool to compare with: what pip installs, and its scripts by command and variant."""

    requirements: tuple[str, ...]
    scripts: Mapping[str, Mapping[str, str]]
    families: tuple[str, ...] = ("llama",)
    """Whose blocks it can build."""
    checkout: tuple[str, ...] = ()
    """URL and commit of what is no package: cloned into `source` in its environment."""


PEERS: dict[str, Peer] = {
    "litgpt": Peer((TORCH, "litgpt==0.5.13"), {"train": {"litgpt": "litgpt_train.py"}}),
    "transformers": Peer(
        (TORCH, "transformers==5.23.0", "accelerate==1.15.0"),
        {
            "train": {
                "transformers": "transformers_train.py",
                "transformers Trainer": "transformers_trainer.py",
            },
            "generate": {"transformers": "transformers_generate.py"},
        },
        families=("llama", "gpt2"),
    ),
    "nanogpt": Peer(
        (TORCH, "numpy>=2,<3"),
        {"train": {"nanoGPT": "nanogpt_train.py"}},
        families=("gpt2",),
        checkout=("https://github.com/karpathy/nanoGPT", "3adf61e154c3fe3fca428ad6bc3818b27a3b8291"),
    ),
    "trl": Peer(
        (TORCH, "trl==1.10.0", "transformers==5.23.0", "accelerate==1.15.0", "datasets==5.2.0", "requests"),
        {"align": {"trl": "trl_align.py"}},
    ),
    "datatrove": Peer(("datatrove==0.10.1", "orjson", "regex"), {"data": {"datatrove": "datatrove_data.py"}}),
}
"""By the name that `--against` takes; of several variants the better one counts."""


@dataclass(frozen=True)
class Contender:
    """One that is measured: a command that reads a job and prints a result."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)
    """What its job says besides what all jobs say."""
    ours: bool = False
    """Without it there is nothing to measure; a peer that fails is left out."""
    families: tuple[str, ...] = ("llama", "gpt2")
    """Whose blocks it can build."""

    def told(self, name: str, **changes: Any) -> "Contender":
        """The same under another name, with more to its job."""
        return replace(self, name=name, changes={**self.changes, **changes})


def environment(patient: bool = False) -> dict[str, str]:
    """The environment of our own processes: that of a stage, with this package on the path."""
    return {**child_environment(patient=patient), "PYTHONPATH": str(Path(__file__).parents[1])}


def ours(what: str, name: str = "ingot", **changes: Any) -> Contender:
    """Our own process, in the environment that a stage's process gets."""
    return Contender(
        name,
        (sys.executable, "-m", "benchmarks.ours", what),
        environment(patient=what == "train"),
        changes,
        ours=True,
    )


def peers(
    what: str, against: list[str], say: Say, families: Collection[str] = ("llama",), **changes: Any
) -> tuple[list[Contender], dict[str, str]]:
    """Every variant of the named peers that has a script for this command, and why others are left out.

    Args:
        against: names of peers; empty for all, ["none"] for none.
        families: of the shapes that are measured; a peer that builds none of them is not asked for.

    Raises:
        UserError: a name that no peer has, or one that cannot do `what`.
    """
    able = [name for name, peer in PEERS.items() if what in peer.scripts]
    if against == ["none"]:
        return [], {}
    for name in against:
        if name not in able:
            raise UserError(
                f"--against: found '{name}', expected none or a peer of `bench {what}`; {nearest(name, able)}"
            )
    found: list[Contender] = []
    skipped: dict[str, str] = {}
    for name in against or able:
        if not set(families) & set(PEERS[name].families):
            if name in against:
                skipped[name] = f"{name}: left out, since it has blocks of {' and '.join(PEERS[name].families)} alone"
                say(skipped[name])
            continue
        try:
            python = interpreter(name, say)
        except UserError as error:
            say(str(error))
            skipped[name] = str(error)
            continue
        for variant, script in PEERS[name].scripts[what].items():
            command = (python, str(SCRIPTS / script))
            found.append(Contender(variant, command, shipped(), changes, families=PEERS[name].families))
    return found, skipped


def shipped() -> dict[str, str]:
    """The user's environment, without what is meant for our own processes."""
    own = {*ALLOCATOR, *WAITING, "PYTHONPATH", "VIRTUAL_ENV"}
    return QUIET | {name: value for name, value in os.environ.items() if name not in own}


def interpreter(name: str, say: Say) -> str:
    """The Python of a peer; its environment is made first where there is none.

    Raises:
        UserError: pip could not install it, or the interpreter that the user names is not there.
    """
    variable = f"INGOT_PEER_{name.upper()}"
    if given := os.environ.get(variable):
        if shutil.which(given) is None:
            raise UserError(f"{variable}: found '{given}', which is no program, expected the Python that {name} is in")
        return given
    peer, home = PEERS[name], cache() / "peers" / name
    wanted = [*peer.requirements, *peer.checkout]
    python, stamp = home / "bin" / "python", home / STAMP
    if stamp.exists() and json.loads(stamp.read_text()) == wanted:
        return str(python)
    say(f"{name}: installing {', '.join(wanted)} into {home}, once (network)")
    shutil.rmtree(home, ignore_errors=True)
    commands = [
        [sys.executable, "-m", "venv", str(home)],
        [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *peer.requirements],
    ]
    if peer.checkout:
        url, commit = peer.checkout
        commands.append(["git", "clone", "--quiet", url, str(home / "source")])
        commands.append(["git", "-C", str(home / "source"), "checkout", "--quiet", commit])
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, env=shipped(), check=False)
        if done.returncode:
            why = next((line for line in done.stderr.splitlines() if line.startswith("ERROR")), done.stderr[-200:])
            raise UserError(
                f"{name}: left out, since it could not be installed ({why.strip()}); or name it by {variable}"
            )
    atomic_json(stamp, wanted)
    return str(python)
