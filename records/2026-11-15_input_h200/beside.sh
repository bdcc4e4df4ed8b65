# What the logs beside-* in raw/ were written by. DIR has the shards, OUT is for the logs.
B="python beside.py $DIR"
$B probe,0,2 nothing,0,2 nvjpeg,1,1 nvjpeg,4,2 device,4,1 device,4,2 host,16,2 python,2,2 --seconds 2 --side 64 > $OUT/beside-own.log
CUDA_DEVICE_MAX_CONNECTIONS=32 $B probe,0,2 nothing,0,2 nvjpeg,1,1 nvjpeg,4,2 device,4,1 device,4,2 device,8,2 --seconds 2 --side 64 > $OUT/beside-own-32.log
$B nothing,0,2 device,4,2 nvjpeg,1,1 --seconds 2 --priority -1 --side 64 > $OUT/beside-priority.log
CUDA_DEVICE_MAX_CONNECTIONS=32 $B nothing,0,2 device,4,2 nvjpeg,1,1 host,16,2 --seconds 1 --switch-interval 0.0002 --side 64 --trace $OUT/trace > $OUT/beside-switch.log
# Another machine, with room for large images (the default; those above were before there was any, for which 64 pixels stand in).
$B probe,0,2 nothing,0,2 device,4,2 device,2,2 device,4,1 device,8,2 --seconds 4 --connections 32 --trace $OUT/trace > $OUT/beside-late-room.log
CUDA_DEVICE_MAX_CONNECTIONS=32 $B nothing,0,2 device,4,2 device,8,2 --seconds 4 --default-stream > $OUT/beside-default-32.log
CUDA_DEVICE_MAX_CONNECTIONS=32 $B probe,0,2 nothing,0,2 device,4,2 --seconds 6 --side 64 > $OUT/beside-noroom-32.log
