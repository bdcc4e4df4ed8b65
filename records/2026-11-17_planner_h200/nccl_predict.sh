#!/usr/bin/env bash
# nccl_predict.sh FOLDER_OF_SCRIPTS OUT_FOLDER: 2, then 4 NCCL ranks on one GPU. With NCCL_TOOL=…/nccl_on_one_gpu.sh that script starts the
# ranks, else paceline.bench.one_gpu, which does the same (MPS, a host id for each rank, sockets over lo).
set -u
here=$1; out=$2; mkdir -p "$out"
for p in ${RANKS:-2 4}; do
  command=(python "$here/nccl_predict.py" "$out/nccl.jsonl" --share ${ARGS:-})
  if [ -n "${NCCL_TOOL:-}" ]; then
    LIMIT_S=${LIMIT_S:-85} bash "$NCCL_TOOL" "$p" "$out/logs-$p" "${command[@]}"
  else
    python -m paceline.bench.one_gpu --ranks "$p" --limit-s "${LIMIT_S:-85}" --restart-mps --logs "$out/logs-$p" -- "${command[@]:1}"
  fi
  tail -n 3 "$out/logs-$p"/rank*.log
done
