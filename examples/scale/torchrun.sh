#!/usr/bin/env bash
# Train on several machines with torchrun. Run it on each machine, in a folder that all of them share:
#
#   NODES=2 ENDPOINT=node1:29400 examples/scale/torchrun.sh my-recipe.toml --name big --train.steps 100000
#
# NODES     number of machines (1 if not set)
# ENDPOINT  HOST:PORT of one of the machines, the same on all (any port that is free and open between them)
# JOB       name of the job, the same on all machines; another one for each job at the same endpoint
# PROCESSES processes of each machine: a number, or gpu (the default), one for each GPU
# RESTARTS  how often all ranks are started again after one has failed
#
# `regard train ... --nproc-per-node gpu` does the same without torchrun, and prints one error instead of one for each rank.
# torchrun of Python 3.11 takes --run for an option of its own: choose the run with --name, which is runs/NAME.
set -euo pipefail
[ $# -ge 1 ] || { echo "usage: [NODES=2 ENDPOINT=HOST:PORT JOB=NAME RESTARTS=3] $0 RECIPE [OPTION...]" >&2; exit 2; }

nodes=${NODES:-1}
if [ "$nodes" = 1 ] && [ -z "${ENDPOINT:-}" ]; then
    meeting=(--standalone)
else
    meeting=(--nnodes "$nodes" --rdzv-backend c10d --rdzv-id "${JOB:-regard}"
        --rdzv-endpoint "${ENDPOINT:?set it to HOST:PORT of one of the machines}")
fi

# Seconds that ranks have for saving after SIGTERM or Ctrl-C, before torchrun kills them (torch 2.12 and newer; 2.11: 30).
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-100}

# A store of their own for each start: in a shared one restarted ranks find the addresses of those before them.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# exec: signals reach torchrun itself, which passes them on. The same command again resumes the run.
exec torchrun "${meeting[@]}" --nproc-per-node "${PROCESSES:-gpu}" --max-restarts "${RESTARTS:-3}" -m regard train "$@"
