#!/bin/bash
#SBATCH --job-name=ingot
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1            # one torchrun a node, which starts the ranks of its GPUs
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@120            # two minutes before the end: save, end, and queue again
#SBATCH --requeue
#SBATCH --open-mode=append

set -euo pipefail
recipe=${1:?"usage: sbatch slurm.sh RECIPE STAGE"}
stage=${2:?"usage: sbatch slurm.sh RECIPE STAGE"}
ingot=$(command -v ingot)

again() {
    scancel --signal=TERM --batch=no "$SLURM_JOB_ID.0" || true   # the step: ranks save and end with exit code 130
    wait "$step" || true
    scontrol requeue "$SLURM_JOB_ID"
}
trap again USR1

hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${hosts%%$'\n'*}
srun torchrun \
    --nnodes="$SLURM_NNODES" --nproc-per-node=8 \
    --rdzv-backend=c10d --rdzv-endpoint="$head:29500" --rdzv-id="$SLURM_JOB_ID" \
    "$ingot" run "$recipe" --only "$stage" &
step=$!
wait "$step"
