#!/bin/bash
# One run on one machine, one process a GPU; survives preemption and time limits.
#
#   sbatch scripts/slurm_train.sh magrpo configs/magrpo_he_config.yaml runs/he_1 [override …]
#
# SLURM warns 300 s before it ends the job (--signal below): the run finishes its step, saves and
# leaves, and the job puts itself back into the queue. Every start says --resume, which is a fresh
# start where there is no checkpoint yet.
#SBATCH --job-name=comlrl
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=16
#SBATCH --mem=64G
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
#SBATCH --open-mode=append
#SBATCH --output=slurm_%x_%j.out
set -euo pipefail

if [[ $# -lt 3 ]]; then
    echo "usage: sbatch $0 ALGORITHM CONFIG RUN_DIR [key=value …]" >&2
    exit 2
fi
algorithm=$1 config=$2 run_dir=$3
shift 3

cd "${SLURM_SUBMIT_DIR:-$PWD}"
# shellcheck source=scripts/slurm_common.sh
source scripts/slurm_common.sh

# SLURM_GPUS_ON_NODE is not set where no GPU was asked for: one process then.
start_and_wait "$PYTHON" -m torch.distributed.run --standalone \
    --nproc_per_node "${SLURM_GPUS_ON_NODE:-1}" \
    "train_$algorithm.py" --config "$config" --resume --override "output.dir=$run_dir" "$@"
