"""The files of docs/cluster.md: valid, and with what torchrun needs to start `ingot run` as ranks."""

import subprocess
from pathlib import Path

import pytest

CLUSTER = Path(__file__).parents[1] / "docs" / "cluster"


def test_the_slurm_script_is_bash_and_asks_for_its_arguments() -> None:
    script = CLUSTER / "slurm.sh"
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    done = subprocess.run(["bash", script], capture_output=True, text=True)
    assert done.returncode != 0
    assert "usage: sbatch slurm.sh RECIPE STAGE" in done.stderr


def test_the_slurm_script_starts_a_torchrun_a_node(tmp_path: Path) -> None:
    """With commands of the cluster replaced by ones that print."""
    for name, text in {
        "srun": 'echo "$@"',
        "scontrol": "echo node7; echo node8",
        "ingot": "true",
        "scancel": "true",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_NNODES": "2",
        "SLURM_JOB_ID": "5",
    }
    command = ["bash", CLUSTER / "slurm.sh", "recipe.toml", "base"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        *("torchrun", "--nnodes=2", "--nproc-per-node=8", "--rdzv-backend=c10d"),
        *("--rdzv-endpoint=node7:29500", "--rdzv-id=5", f"{tmp_path}/ingot", "run", "recipe.toml", "--only", "base"),
    ]


def test_the_kubernetes_job_gives_every_pod_a_number_and_a_name() -> None:
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text())
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (service["kind"], service["spec"]["clusterIP"]) == ("Service", "None")
    assert (job["kind"], spec["completionMode"]) == ("Job", "Indexed")
    assert spec["completions"] == spec["parallelism"]
    assert pod["subdomain"] == service["metadata"]["name"]
    (text,) = pod["containers"][0]["args"]
    assert f"--nnodes={spec['completions']} " in text
    assert "--node-rank=$JOB_COMPLETION_INDEX" in text
    assert f"--rdzv-endpoint={job['metadata']['name']}-0.{pod['subdomain']}:29500" in text
    assert f"--nproc-per-node={pod['containers'][0]['resources']['limits']['nvidia.com/gpu']} " in text
