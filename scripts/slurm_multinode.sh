#!/bin/bash
# One run over several machines, one process a GPU; survives preemption and time limits.
#
#   sbatch --nodes=4 scripts/slurm_multinode.sh magrpo CONFIG RUN_DIR [override …]
#
# RUN_DIR must lie on a file system that all machines share: one process writes, all read.
#SBATCH --job-name=comlrl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
#SBATCH --open-mode=append
#SBATCH --output=slurm_%x_%j.out
set -euo pipefail

if [[ $# -lt 3 ]]; then
    echo "usage: sbatch --nodes=N $0 ALGORITHM CONFIG RUN_DIR [key=value …]" >&2
    exit 2
fi
algorithm=$1 config=$2 run_dir=$3
shift 3

cd "${SLURM_SUBMIT_DIR:-$PWD}"
# shellcheck source=scripts/slurm_common.sh
source scripts/slurm_common.sh

# The first machine of the list is where the processes meet.
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head_node=${nodes%%$'\n'*}
port=$((20000 + SLURM_JOB_ID % 20000))

start_and_wait srun --kill-on-bad-exit=1 "$PYTHON" -m torch.distributed.run \
    --nnodes "$SLURM_JOB_NUM_NODES" --nproc_per_node "${SLURM_GPUS_ON_NODE:-1}" \
    --rdzv_id "$SLURM_JOB_ID" --rdzv_backend c10d --rdzv_endpoint "$head_node:$port" \
    "train_$algorithm.py" --config "$config" --resume --override "output.dir=$run_dir" "$@"
