# Measures emulated clusters for emulated.py (root, iproute2, a quiet machine). Writes into raw/.
set -e
cd "$(dirname "$0")"
mkdir -p raw
export OMP_NUM_THREADS=1
for place in 2x2-100 2x4-200 4x2-400 4x4-200 4x1-200 3x3-300 2x3-400 4x3-100; do
  hosts=${place%%x*}; rest=${place#*x}; ranks=${rest%%-*}; mbit=${rest#*-}
  python -m paceline bench allreduce --hosts $hosts --ranks-per-host $ranks --link-mbit $mbit \
    --algorithms native,ring,hierarchical,torus2d,tree --bytes 16KiB,128KiB,1MiB,4MiB --iterations 41 --size-limit-s 14 --json > raw/$place.json
done
