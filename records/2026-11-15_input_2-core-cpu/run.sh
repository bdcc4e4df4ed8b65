# The input pipeline against torch's DataLoader with Pillow and webdataset, on two cores; 12 minutes.
#   PYTHON=... bash run.sh FOLDER-OF-FULL-SIZE-SHARDS   (200 ImageNet JPEGs in full-*.tar; not shipped)
PYTHON=${PYTHON:-python}
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export OMP_NUM_THREADS=1
mkdir "$work/full"
for shard in "$1"/full-*.tar; do
    ln -s "$(readlink -f "$shard")" "$work/full/train-${shard##*-}"
    ln -s "$(readlink -f "$shard")" "$work/full/val-${shard##*-}"
done
[ ! -f "$1/classes.json" ] || cp "$1/classes.json" "$work/full/"
uptime > "$here/raw/load.txt"
"$PYTHON" -m paceline pack "$work/full" "$work/packed" --short-side 256 --quality 90 --shard-mib 3 > "$here/raw/pack.log" 2>&1
"$PYTHON" -m paceline inspect "$work/packed" --all --json > "$here/raw/inspect.json"
bench() { # NAME ARGUMENTS...
    name=$1
    shift
    "$PYTHON" -m paceline bench input --device cpu --rounds 5 --json "$@" > "$here/raw/$name.json" 2> "$here/raw/$name.log"
    uptime >> "$here/raw/load.txt"
}
bench full-train --data-dir "$work/full" --seconds 3
bench packed-train --data-dir "$work/packed" --seconds 3
bench packed-against-originals --data-dir "$work/packed" --peer-dir "$work/full" --peers dataloader --seconds 3
for split in train val; do # twice each, alternating
    for data in full packed; do
        for turn in 1 2; do
            bench "own-$data-$split-$turn" --data-dir "$work/$data" --split $split --peers "" --seconds 3
        done
    done
done
bench full-val --data-dir "$work/full" --split val --peers dataloader --peer-workers 2,3 --seconds 3
bench full-processes --data-dir "$work/full" --peers processes --peer-workers 2 --seconds 3
bench full-pillow --data-dir "$work/full" --decoder pillow --peers processes --peer-workers 2 --seconds 3
bench memory --data-dir "$work/full" --peers "" --rounds 1 --seconds 1 --synthetic-index 1281167
sed -i "s#$work#WORK#g" "$here"/raw/*
