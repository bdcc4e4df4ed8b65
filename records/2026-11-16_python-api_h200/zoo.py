"""Models of timm and torchvision: pl.Trainer against a plain PyTorch loop, same data, same recipe.

    python zoo.py ours|plain MODEL EPOCHS [--warm]      prints one JSON line
"""
import json
import math
import sys
import time
import os
import numpy as np
import torch
import torch.nn.functional as F
import paceline as pl
from paceline.config import RunConfig
from paceline.data import open_source
HERE = os.path.dirname(os.path.abspath(__file__))
DATA, B, LR, WD, PAD = f"{HERE}/t60", 256, 1e-3, 0.05, 8
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
def create(name):
    kind, _, base = name.partition(":")
    if kind == "timm":
        import timm
        extra = {"img_size": 64} if base.startswith("vit") else {}
        return timm.create_model(base, num_classes=60, **extra)
    import torchvision
    return torchvision.models.get_model(base, num_classes=60)
def ours(name, epochs):
    settings = {"data.augment": "pad_crop", "data.crop_padding": PAD, "data.eval_resize": 0, "optim.weight_decay": WD,
                "optim.warmup_epochs": 1.0, "optim.schedule": "cosine", "run.smoothing": 0.1, "run.log_interval": 10**6,
                "run.eval_interval_epochs": epochs, "checkpoint.interval_epochs": epochs}
    t = pl.Trainer(name, DATA, optimizer="adamw", lr=LR, epochs=epochs, batch_size=B, image_size=64, precision="fp16",
                   output=f"/tmp/zoo/{name.replace(':','-')}-{epochs}-{time.time_ns()}", settings=settings)
    begun = time.time(); r = t.fit()
    ev = [json.loads(l) for l in (r.folder / "metrics.jsonl").read_text().splitlines()]
    s = [e for e in ev if e["event"] == "step"]
    skip = len(s) // epochs  # the first epoch compiles and captures
    rate = sum([B] * len(s[skip:])) / sum(e["step_s"] for e in s[skip:]) if len(s) > skip else 0
    return {"top1": r.top1, "images_per_s": rate, "wall_s": time.time() - begun, "speed": r.summary["chosen"]["speed"], "optimizer": r.summary["chosen"]["optimizer"], "skipped": r.summary["skipped_steps"]}
def pixels(split):
    c = RunConfig().with_values({"data.dir": DATA, "data.image_size": 64})
    from PIL import Image; import io
    from concurrent.futures import ThreadPoolExecutor
    s = open_source(c.data, split)
    def one(i):
        x = s.read(i); return np.asarray(Image.open(io.BytesIO(x)).convert("RGB").resize((64, 64)) if isinstance(x, bytes) else x)
    with ThreadPoolExecutor(12) as p: a = np.stack(list(p.map(one, range(len(s)))))
    return torch.from_numpy(a).cuda(), torch.from_numpy(np.asarray(s.labels)).cuda()
def plain(name, epochs):
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    begun = time.time()
    x, y = pixels("train"); vx, vy = pixels("val")
    net = create(name).cuda().to(memory_format=torch.channels_last)
    decay = [p for p in net.parameters() if p.ndim > 1]; rest = [p for p in net.parameters() if p.ndim <= 1]
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": WD}, {"params": rest, "weight_decay": 0.0}], lr=LR, fused=True)
    scaler, run = torch.amp.GradScaler(), torch.compile(net)
    mean, std = (torch.tensor(v, device="cuda").view(1, 3, 1, 1) * 255 for v in (MEAN, STD))
    n = len(x); per = n // B; total = per * epochs; it = 0; times = []
    ar = torch.arange(64, device="cuda")
    def prep(u): return ((u.permute(0, 3, 1, 2).float() - mean) / std).contiguous(memory_format=torch.channels_last)
    for e in range(epochs):
        net.train(); torch.cuda.synchronize(); t0 = time.time(); order = torch.randperm(n, device="cuda")
        for k in range(per):
            i = order[k * B:(k + 1) * B]; u = F.pad(x[i].permute(0, 3, 1, 2), (PAD,) * 4).permute(0, 2, 3, 1)
            r = torch.randint(0, 2 * PAD + 1, (2, B, 1), device="cuda") + ar
            u = u[torch.arange(B, device="cuda")[:, None, None], r[0][:, :, None], r[1][:, None, :]]
            f = torch.rand(B, device="cuda") < 0.5; u = torch.where(f[:, None, None, None], u.flip(2), u)
            w = it / total; lr = LR * min(1, it / per) if it < per else LR * 0.5 * (1 + math.cos(math.pi * (it - per) / (total - per)))
            for g in opt.param_groups: g["lr"] = max(lr, 1e-8)
            with torch.autocast("cuda", torch.float16): loss = F.cross_entropy(run(prep(u)), y[i], label_smoothing=0.1)
            opt.zero_grad(set_to_none=True); scaler.scale(loss).backward(); scaler.step(opt); scaler.update(); it += 1
        torch.cuda.synchronize(); times.append(time.time() - t0)
    net.eval(); right = 0
    with torch.no_grad(), torch.autocast("cuda", torch.float16):
        for k in range(0, len(vx), 500): right += (net(prep(vx[k:k + 500])).argmax(1) == vy[k:k + 500]).sum().item()
    rate = per * B * (epochs - 1) / sum(times[1:]) if epochs > 1 else 0
    return {"top1": 100 * right / len(vx), "images_per_s": rate, "wall_s": time.time() - begun}
kind, name, epochs = sys.argv[1], sys.argv[2], int(sys.argv[3])
print("ZOO " + json.dumps({"kind": kind, "model": name, "epochs": epochs, **(ours if kind == "ours" else plain)(name, epochs)}), flush=True)
