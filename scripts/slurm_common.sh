# shellcheck shell=bash
# What the SLURM scripts share; sourced, from the repository's root.

# The project's own environment where `make setup` has made one.
export PYTHON=python
[[ -x .venv/bin/python ]] && PYTHON=$PWD/.venv/bin/python

# torchrun gives its processes this long to finish their step and save (its default: 30).
# They wait 120 of them for vLLM servers that are silent (LAST_WAIT in rollout/vllm/servers.py).
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-280}

export HF_HUB_DISABLE_TELEMETRY=1

# start_and_wait COMMAND …: run it and exit with its code. On SLURM's warning (SIGUSR1, as
# --signal=B:USR1@300 asks) end it with SIGTERM, wait until it has saved, and put the job back into
# the queue. SIGTERM is handed on alone: SLURM itself requeues what it preempts, and nobody wants
# back what was cancelled.
start_and_wait() {
    local warned=0 code=0 pid
    trap 'warned=1; kill -TERM "$!" 2>/dev/null' USR1 # set first: a signal may come at once
    trap 'kill -TERM "$!" 2>/dev/null' TERM
    "$@" &
    pid=$!
    wait "$pid" || code=$?
    while kill -0 "$pid" 2>/dev/null; do # a signal ended the wait, not the run
        code=0
        wait "$pid" || code=$?
    done
    if [[ $warned -eq 1 && $code -ne 0 ]]; then
        echo "interrupted (exit code $code): back into the queue"
        scontrol requeue "$SLURM_JOB_ID"
    fi
    exit "$code"
}
