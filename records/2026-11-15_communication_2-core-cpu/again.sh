# The rows that were missed, or unclear, a second time: the same table of sizes, the same tree of sources for both.
set -e
cd "$(dirname "$0")"
export OMP_NUM_THREADS=1
P="${PYTHON:-python} -m paceline"
cat /proc/loadavg > raw/again-load.txt
$P bench allreduce --hosts 4 --ranks-per-host 4 --link-mbit 200 --sizes raw/sizes-4x4-200mbit.toml \
  --algorithms native --bytes 256KiB,4MiB,16000000,16MiB --iterations 25 --json > raw/again-allreduce-4x4-200mbit.json
$P bench exchange --model resnet50 --hosts 2 --ranks-per-host 4 --link-mbit 1000 --algorithm hierarchical --json > raw/again-exchange-2x4-1gbit.json
cat /proc/loadavg >> raw/again-load.txt
