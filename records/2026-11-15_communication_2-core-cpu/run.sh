# All measurements of this record, on a quiet machine (root, iproute2). Writes into raw/.
set -e
cd "$(dirname "$0")"
mkdir -p raw
export OMP_NUM_THREADS=1
P="python -m paceline"
cat /proc/loadavg > raw/load.txt
# 16 ranks, 4 hosts x 4, 200 Mbit/s
$P tune --hosts 4 --ranks-per-host 4 --link-mbit 200 --limit-s 150 --max-bytes 16MiB --force -o raw/sizes-4x4-200mbit.toml > raw/tune-4x4-200mbit.log
$P bench allreduce --hosts 4 --ranks-per-host 4 --link-mbit 200 --sizes raw/sizes-4x4-200mbit.toml \
  --algorithms native --bytes 4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16000000,16MiB --iterations 15 --json > raw/allreduce-4x4-200mbit.json
cat /proc/loadavg >> raw/load.txt
# 8 ranks, 2 hosts x 4, 1 Gbit/s: ResNet-50's whole exchange
$P bench exchange --model resnet50 --hosts 2 --ranks-per-host 4 --link-mbit 1000 --algorithm hierarchical --json > raw/exchange-2x4-1gbit.json
cat /proc/loadavg >> raw/load.txt
# 4 hosts x 1: overlap
python overlap.py raw/overlap-4x1-200mbit.json > raw/overlap-4x1-200mbit.log
cat /proc/loadavg >> raw/load.txt
# 8 ranks, one host
$P tune --ranks 8 --limit-s 120 --force -o raw/sizes-8.toml > raw/tune-8.log
$P bench allreduce --ranks 8 --sizes raw/sizes-8.toml --min-bytes 1KiB --max-bytes 64MiB --factor 4 \
  --algorithms native,ring,hierarchical,torus2d,halving_doubling,tree --iterations 60 --size-limit-s 22 --json > raw/allreduce-8.json
cat /proc/loadavg >> raw/load.txt
python judge.py raw/allreduce-8.json > raw/judge-8.log
