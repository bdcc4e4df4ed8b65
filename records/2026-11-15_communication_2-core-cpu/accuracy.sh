# Training by hybrid against native: 4 ranks, three seeds each, 6 epochs of the embedded images; 12 minutes.
#   bash accuracy.sh OUTPUT-DIR
here=$(cd "$(dirname "$0")" && pwd)
for seed in 0 1 2; do
    for kind in native hybrid; do
        more="--set comm.algorithm=native"
        [ $kind = native ] || more="--set comm.algorithm=hybrid --set comm.sizes=$here/raw/accuracy/sizes.toml --set comm.group_size=2"
        paceline train --nproc-per-node 4 --epochs 6 --set optim.warmup_epochs=1 --set run.seed=$seed \
            --set comm.fusion_mib=0.2 $more --output "$1/$kind-$seed"
    done
done
paceline compare "$1"/native-? "$1"/hybrid-?
