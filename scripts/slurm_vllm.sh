#!/bin/bash
# One run on one machine: vLLM servers on its last GPUs, training on the others.
#
#   sbatch --gres=gpu:4 scripts/slurm_vllm.sh MODEL magrpo CONFIG runs/he_1 [override …]
#
# SERVERS is how many GPUs serve (default: half of them), VLLM the server's command (default: vllm),
# and VLLM_ARGUMENTS what to add to it, e.g. "--max-model-len 2048". MAX_LORAS (default: 4) must be
# at least twice the agents of a server. FIRST_PORT is the first server's (default: each job number
# modulo 1000 has 16 ports, from 8000 to 23999). Training starts when all servers answer.
#SBATCH --job-name=comlrl_vllm
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gres=gpu:2
#SBATCH --cpus-per-task=32
#SBATCH --mem=128G
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
#SBATCH --open-mode=append
#SBATCH --output=slurm_%x_%j.out
set -euo pipefail

if [[ $# -lt 4 ]]; then
    echo "usage: sbatch $0 MODEL ALGORITHM CONFIG RUN_DIR [key=value …]" >&2
    exit 2
fi
model=$1 algorithm=$2 config=$3 run_dir=$4
shift 4

cd "${SLURM_SUBMIT_DIR:-$PWD}"
# shellcheck source=scripts/slurm_common.sh
source scripts/slurm_common.sh

IFS=, read -r -a gpus <<< "${CUDA_VISIBLE_DEVICES:-}"
servers=${SERVERS:-$((${#gpus[@]} / 2))}
training=$((${#gpus[@]} - servers))
if [[ $servers -lt 1 || $training -lt 1 ]]; then
    echo "error: ${#gpus[@]} GPUs for $servers servers and the training; ask for more GPUs" >&2
    exit 2
fi

pids=()
trap 'kill "${pids[@]}" 2>/dev/null || true' EXIT
urls=()
read -r -a extra <<< "${VLLM_ARGUMENTS:-}"
first_port=${FIRST_PORT:-$((8000 + SLURM_JOB_ID % 1000 * 16))}
for ((i = 0; i < servers; i++)); do
    port=$((first_port + i))
    if (: < "/dev/tcp/127.0.0.1/$port") 2>/dev/null; then # its server would answer in ours' place
        echo "error: port $port is taken; set FIRST_PORT to the first of $servers free ones" >&2
        exit 1
    fi
    CUDA_VISIBLE_DEVICES=${gpus[training + i]} VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 \
        "${VLLM:-vllm}" serve "$model" --port "$port" --host 127.0.0.1 --enable-lora \
        --max-loras "${MAX_LORAS:-4}" --max-lora-rank "${MAX_LORA_RANK:-64}" \
        --logprobs-mode processed_logprobs --generation-config vllm \
        --enable-prefix-caching "${extra[@]}" &
    pids+=("$!")
    urls+=("http://127.0.0.1:$port")
done

require_alive() { # INDEX: of a server
    if ! kill -0 "${pids[$1]}" 2>/dev/null; then
        echo "error: the server at ${urls[$1]} has ended; its messages are above" >&2
        exit 1
    fi
}
for ((i = 0; i < servers; i++)); do
    until curl --silent --fail --output /dev/null "${urls[i]}/health"; do
        require_alive "$i"
        sleep 2
    done
    require_alive "$i" # or another program answers at its port
done

CUDA_VISIBLE_DEVICES=$(IFS=,; echo "${gpus[*]:0:training}")
export CUDA_VISIBLE_DEVICES
start_and_wait "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node "$training" \
    "train_$algorithm.py" --config "$config" --resume \
    --override "output.dir=$run_dir" generation.backend=vllm \
    "generation.vllm_url=[$(IFS=,; echo "${urls[*]}")]" "$@"
