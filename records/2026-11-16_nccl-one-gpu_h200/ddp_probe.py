import os, sys, time, torch, torch.distributed as dist, torchvision, faulthandler
from torch.nn.parallel import DistributedDataParallel as DDP
mode = sys.argv[1]; faulthandler.enable(); faulthandler.dump_traceback_later(16, exit=True)
torch.cuda.set_device(0); torch.backends.cudnn.benchmark = "nobench" not in mode
t0=time.time(); dist.init_process_group("nccl", device_id=torch.device("cuda",0) if "eager" in mode else None)
net = torchvision.models.resnet50().cuda().to(memory_format=torch.channels_last)
x = torch.randn(64,3,224,224,device="cuda").to(memory_format=torch.channels_last); y = torch.randint(0,1000,(64,),device="cuda")
ddp = DDP(net, device_ids=[0], static_graph="static" in mode, gradient_as_bucket_view=True)
opt = torch.optim.SGD(ddp.parameters(), lr=.1, momentum=.9, fused=True); sc=torch.amp.GradScaler()
def step(m):
    opt.zero_grad(set_to_none=True)
    with torch.autocast("cuda", torch.float16): l = torch.nn.functional.cross_entropy(m(x), y)
    sc.scale(l).backward(); sc.step(opt); sc.update()
if "warm" in mode:
    for _ in range(3):
        with torch.autocast("cuda", torch.float16): torch.nn.functional.cross_entropy(net(x), y).backward()
        net.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    from torch.distributed.distributed_c10d import _get_default_store
    s=_get_default_store(); s.set(f"warm{dist.get_rank()}","1"); s.wait([f"warm{r}" for r in range(dist.get_world_size())])
print("ready", time.time()-t0, flush=True)
for i in range(40):
    t=time.time(); step(ddp); torch.cuda.synchronize()
    if i<4 or i%10==9: print(i, round((time.time()-t)*1e3,1), "ms", flush=True)
dist.destroy_process_group(); print("end", time.time()-t0, flush=True)
