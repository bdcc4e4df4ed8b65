# OUT is the folder for the results.
export PYTHONWARNINGS=ignore PYTHONPATH=src
date > $OUT/when.txt; nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,power.limit --format=csv >> $OUT/when.txt
B="python -m paceline bench step --json --warm-up 15"
$B -b 256 --together 4 --row-limit-s 200 --row ours --row "ours N>1" --row "ours no graphs" --row "ours bf16" --row "plain fp16 default" --row "plain fp16 reduce-overhead" --row "plain bf16 default" --row "plain bf16 reduce-overhead" --row "ours fp32" --row "ours tf32" --row "plain fp32" > $OUT/step-resnet50-256.json 2> $OUT/step-resnet50-256.log
date >> $OUT/when.txt
$B -b 512 --together 3 --row-limit-s 140 --row ours --row "plain fp16 reduce-overhead" --row "plain bf16 reduce-overhead" > $OUT/step-resnet50-512.json 2> $OUT/step-resnet50-512.log
date >> $OUT/when.txt
$B --model alexnet_bn -b 512 --together 4 --row-limit-s 100 --row ours --row "plain fp16 default" --row "plain fp16 reduce-overhead" --row "plain bf16 reduce-overhead" > $OUT/step-alexnet_bn-512.json 2> $OUT/step-alexnet_bn-512.log
date >> $OUT/when.txt
python -m paceline bench optimizer --json > $OUT/optimizer-resnet50.json 2>> $OUT/when.txt
date >> $OUT/when.txt
cat $OUT/*.log $OUT/when.txt; grep -h "/ " $OUT/step*.json
