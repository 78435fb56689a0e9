"""The contenders of a measurement: our own processes, and peers in virtual environments of their own.

The dependencies of the peers exclude each other, so each peer has a virtual environment below the cache, which pip
creates at its first use, and small scripts in `peers/` that run in it. INGOT_PEER_LITGPT=/path/to/python (likewise
INGOT_PEER_TRANSFORMERS etc.) selects an existing environment, and INGOT_PEER_NANOGPT_SOURCE=/path/to/nanoGPT an
existing checkout of nanoGPT, which is not a package.

Peers run as shipped, without the allocator settings of a stage's process.
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

from ingot.core.allocator import ALLOCATOR_ENVIRONMENT
from ingot.core.artifact import atomic_json, cache_directory
from ingot.core.errors import UserError, nearest
from ingot.core.process import SHORT_SPIN
from ingot.pipeline.run import QUIET, child_environment

Log = Callable[[str], None]
"""Prints a line of progress."""
SCRIPTS = Path(__file__).parent / "peers"
TORCH = "torch==2.13.*"
"""The version that ingot is tested with (constraints.txt); a ratio must not compare two versions of torch."""
STAMP = "ingot-peer.json"
"""File in a peer's environment that lists its requirements, written after a complete installation."""


@dataclass(frozen=True)
class Peer:
    """A tool to compare with."""

    requirements: tuple[str, ...]
    """Packages that pip installs."""
    scripts: Mapping[str, Mapping[str, str]]
    """Command -> variant's name -> script in `peers/`."""
    families: tuple[str, ...] = ("llama",)
    """Model families that it can build."""
    checkout: tuple[str, ...] = ()
    """URL and commit of a tool that is not a package; it is cloned into `source` in the environment."""


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
"""Peers by the name that `--against` takes."""


@dataclass(frozen=True)
class Contender:
    """A process to measure: a command that reads a job and prints a result."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the job that differ for this contender."""
    ours: bool = False
    """An error of ours ends the measurement, while a peer that fails is left out."""
    families: tuple[str, ...] = ("llama", "gpt2")
    """Model families that it can build."""

    def variant(self, name: str, **changes: Any) -> "Contender":
        """The same contender under another name, with further changes of its job."""
        return replace(self, name=name, changes={**self.changes, **changes})


def own_environment(short_spin: bool = False) -> dict[str, str]:
    """The environment of our own processes: that of a stage, with this package on the path."""
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**child_environment(short_spin=short_spin), "PYTHONPATH": os.pathsep.join(paths)}


def ours(command: str, name: str = "ingot", **changes: Any) -> Contender:
    """Our own process for a command of `ours.py`, in the environment of a stage's process."""
    return Contender(
        name,
        (sys.executable, "-m", "benchmarks.ours", command),
        own_environment(short_spin=command == "train"),
        changes,
        ours=True,
    )


def peers(
    command: str, against: list[str], log: Log, families: Collection[str] = ("llama",), **changes: Any
) -> tuple[list[Contender], dict[str, str]]:
    """Every variant of the named peers that has a script for a command, and why others are left out.

    Args:
        against: names of peers; empty for all, ["none"] for none.
        families: families of the measured shapes; a peer that can build none of them is not installed.

    Raises:
        UserError: there is no peer of that name, or it has no script for the command.
    """
    available = [name for name, peer in PEERS.items() if command in peer.scripts]
    if against == ["none"]:
        return [], {}
    for name in against:
        if name not in available:
            raise UserError(
                f"--against: found '{name}', expected none or a peer of `bench {command}`; {nearest(name, available)}"
            )
    variants: list[Contender] = []
    skipped: dict[str, str] = {}
    for name in against or available:
        if not set(families) & set(PEERS[name].families):
            if name in against:
                skipped[name] = f"{name}: left out, since it has only blocks of {' and '.join(PEERS[name].families)}"
                log(skipped[name])
            continue
        try:
            python = interpreter(name, log)
        except UserError as error:
            log(str(error))
            skipped[name] = str(error)
            continue
        for variant, script in PEERS[name].scripts[command].items():
            arguments = (python, str(SCRIPTS / script))
            variants.append(Contender(variant, arguments, peer_environment(), changes, families=PEERS[name].families))
    return variants, skipped


def peer_environment() -> dict[str, str]:
    """The user's environment, without the variables that are set for our own processes."""
    own = {*ALLOCATOR_ENVIRONMENT, *SHORT_SPIN, "PYTHONPATH", "VIRTUAL_ENV"}
    return QUIET | {name: value for name, value in os.environ.items() if name not in own}


def interpreter(name: str, log: Log) -> str:
    """The Python interpreter of a peer; its environment is created if it does not exist.

    Raises:
        UserError: pip could not install the peer, or the interpreter that the user names does not exist.
    """
    variable = f"INGOT_PEER_{name.upper()}"
    if path := os.environ.get(variable):
        if shutil.which(path) is None:
            raise UserError(f"{variable}: found '{path}', which is no program, expected the Python that has {name}")
        return path
    peer, home = PEERS[name], cache_directory() / "peers" / name
    requirements = [*peer.requirements, *peer.checkout]
    python, stamp = home / "bin" / "python", home / STAMP
    if stamp.exists() and json.loads(stamp.read_text()) == requirements:
        return str(python)
    log(f"{name}: installing {', '.join(requirements)} into {home}, once (network)")
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
        done = subprocess.run(command, capture_output=True, text=True, env=peer_environment(), check=False)
        if done.returncode:
            why = next((line for line in done.stderr.splitlines() if line.startswith("ERROR")), done.stderr[-200:])
            raise UserError(
                f"{name}: left out, since it could not be installed ({why.strip()}); to use an existing environment, "
                f"set {variable}"
            )
    atomic_json(stamp, requirements)
    return str(python)
