#!/bin/bash
# A sweep as a job array: task i runs the i-th line of a file of overrides.
#
#   printf '%s\n' 'seed=1 magrpo.learning_rate=1e-4' 'seed=2 magrpo.learning_rate=1e-4' > lines.txt
#   sbatch --array=1-"$(wc -l < lines.txt)" scripts/slurm_array.sh magrpo CONFIG lines.txt runs/sweep
#
# Each line's run has a directory of its own, runs/sweep/<line number>, and resumes by itself when
# its task is preempted or started again; lines that are done end at once.
#SBATCH --job-name=comlrl_sweep
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=8
#SBATCH --mem=48G
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
#SBATCH --open-mode=append
#SBATCH --output=slurm_%x_%A_%a.out
set -euo pipefail

if [[ $# -ne 4 || -z "${SLURM_ARRAY_TASK_ID:-}" ]]; then
    echo "usage: sbatch --array=1-N $0 ALGORITHM CONFIG LINES_FILE BASE_DIR" >&2
    exit 2
fi
algorithm=$1 config=$2 lines=$3 base_dir=$4

cd "${SLURM_SUBMIT_DIR:-$PWD}"
# shellcheck source=scripts/slurm_common.sh
source scripts/slurm_common.sh

line=$(sed -n "${SLURM_ARRAY_TASK_ID}p" "$lines")
if [[ -z "$line" ]]; then
    echo "error: $lines has no line $SLURM_ARRAY_TASK_ID" >&2
    exit 2
fi
read -r -a overrides <<< "$line"
echo "line $SLURM_ARRAY_TASK_ID: $line"

start_and_wait "$PYTHON" "train_$algorithm.py" --config "$config" --resume \
    --override "${overrides[@]}" "output.dir=$base_dir/$SLURM_ARRAY_TASK_ID"
