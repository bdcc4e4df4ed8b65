# All that needs a quiet machine (root, iproute2): emulated clusters for emulated.py, then whole steps.
# About 11 minutes. Writes raw/split/*.json, emulated-split.json, steps.json and two logs.
set -e
cd "$(dirname "$0")"
mkdir -p raw/split
export OMP_NUM_THREADS=1
python=${PYTHON:-python}
# Fitted and predicted clusters take turns, so that a slow minute hits both.
for place in 2x2-100 6x1-150 2x4-200 2x5-300 4x2-400 5x2-200 4x4-200 3x4-250 4x1-200; do
  hosts=${place%%x*}; rest=${place#*x}; ranks=${rest%%-*}; mbit=${rest#*-}
  case $place in
    6x1-*|2x5-*|5x2-*|3x4-*) sizes=32KiB,256KiB,2MiB ;;
    *) sizes=16KiB,128KiB,1MiB,4MiB ;;
  esac
  $python -m paceline bench allreduce --hosts $hosts --ranks-per-host $ranks --link-mbit $mbit \
    --algorithms native,ring,hierarchical,torus2d,tree --bytes $sizes --iterations 45 --warm-up 2 \
    --size-limit-s 9 --json > raw/split/$place.json
  echo "$place: measured at $(date +%T)"
done
$python steps.py steps.json | tee raw/steps.log
$python emulated.py | tee raw/emulated-split.log
$python check.py | tee raw/check.log
