#!/usr/bin/env bash
# Training with Open MPI's mpirun (4 and 5). MPI only starts the ranks; they talk through NCCL or Gloo.
#
#   ./mpirun.sh quickstart --output runs/first                            this node alone
#   HOSTS=node0,node1 ./mpirun.sh imagenet-resnet50 \
#       --data-dir /data/imagenet --output /shared/runs/resnet50          several nodes
#
# All arguments go to `paceline train`.
#   HOSTS           nodes, parted by commas; the first one gets rank 0 (this node)
#   RANKS_PER_NODE  processes on each node (one for each GPU, or 1)
#   MASTER_PORT     a free port on the first node (29500)
#   PYTHON          the Python that has paceline, at the same path on all nodes (python3)
set -euo pipefail

gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)
ranks_per_node=${RANKS_PER_NODE:-$((gpus > 0 ? gpus : 1))}

if [ $# -eq 0 ]; then
    echo "usage: HOSTS=a,b $0 RECIPE --output DIR [flags of paceline train]" >&2
    exit 2
fi

export MASTER_PORT=${MASTER_PORT:-29500}
options=(-x MASTER_PORT)
nodes=1
if [ -n "${HOSTS:-}" ]; then
    IFS=, read -r -a hosts <<<"$HOSTS"
    nodes=${#hosts[@]}
    # mpirun tells a rank its number but not where rank 0 lives. On one node that is this node; on several
    # somebody has to say it.
    export MASTER_ADDR=${MASTER_ADDR:-${hosts[0]}}
    options+=(-x MASTER_ADDR --host "$(printf "%s:$ranks_per_node," "${hosts[@]}" | sed 's/,$//')")
else
    # mpirun insists on a way to other nodes, even where there are none: most containers have no ssh.
    export OMPI_MCA_plm_rsh_agent=${OMPI_MCA_plm_rsh_agent:-sh}
fi
for name in "${!NCCL_@}" GLOO_SOCKET_IFNAME; do
    # Other nodes see none of this shell's variables unless they are named.
    [ -z "${!name:-}" ] || options+=(-x "$name")
done

# On SIGTERM mpirun waits this long, sends SIGTERM to the ranks, waits this long again, and kills them. Its
# default of 1 s is too short to save a model. The first name is that of Open MPI 4, the second of 5.
export OMPI_MCA_odls_base_sigkill_timeout=${OMPI_MCA_odls_base_sigkill_timeout:-15}
export PRTE_MCA_odls_base_sigkill_timeout=${PRTE_MCA_odls_base_sigkill_timeout:-15}

# --map-by ppr: so many ranks on each node, one node after the other, as Paceline counts them.
# --bind-to none: mpirun would tie each rank to one core, and its decoding threads with it.
exec mpirun -n $((nodes * ranks_per_node)) \
    --map-by "ppr:$ranks_per_node:node" --bind-to none "${options[@]}" \
    "${PYTHON:-python3}" -m paceline train "$@"
