#!/usr/bin/env bash
# Training on several nodes with torchrun. Start the same command on every node:
#
#   NODES=4 HEAD_NODE=node0 ./torchrun_multi_node.sh imagenet-resnet50 \
#       --data-dir /data/imagenet --output /shared/runs/resnet50
#
# All arguments go to `paceline train`.
#   NODES           nodes of the job (1)
#   RANKS_PER_NODE  processes on each node (one for each GPU, or 1)
#   HEAD_NODE       a name or address of one of the nodes, that all of them can reach (localhost)
#   PORT            a free port on that node (29400)
#   JOB             any word, the same on all nodes; keeps two jobs on one head node apart (paceline)
#   MAX_RESTARTS    how often failed ranks are started anew (3)
set -euo pipefail

nodes=${NODES:-1}
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)
ranks_per_node=${RANKS_PER_NODE:-$((gpus > 0 ? gpus : 1))}
head_node=${HEAD_NODE:-localhost}

if [ $# -eq 0 ]; then
    echo "usage: NODES=n HEAD_NODE=host $0 RECIPE --output DIR [flags of paceline train]" >&2
    exit 2
fi
if [ "$nodes" -gt 1 ] && [ "$head_node" = localhost ] && [ -z "${HEAD_NODE:-}" ]; then
    echo "$0: NODES=$nodes needs HEAD_NODE, the name of one of the nodes" >&2
    exit 2
fi

# torchrun would print a warning and set 1. Ranks set their own number of threads (run.threads).
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# c10d: the agents number the nodes themselves, so every node runs the same command, and a node that was
# replaced takes part in the next attempt. Rank 0 may come to live on any node: --output and --data-dir
# must be paths that all nodes share. (Only rank 0 writes checkpoints, but every rank its own metrics.)
#
# --max-restarts: after a failure the ranks of all nodes start anew and go on from the last checkpoint;
# a restarted rank behaves as with --resume auto.
#
# exec: a signal to this script is a signal to torchrun, which hands SIGTERM and SIGINT to its ranks and
# waits 30 s for their save.
exec torchrun \
    --nnodes "$nodes" \
    --nproc-per-node "$ranks_per_node" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$head_node:${PORT:-29400}" \
    --rdzv-id "${JOB:-paceline}" \
    --max-restarts "${MAX_RESTARTS:-3}" \
    -m paceline train "$@"
