"""ResNet-18 on 2,500 images of 25 classes (100 each), from scratch and from weights trained on 60 other classes."""
import json
import os
import paceline as pl
HERE = os.path.dirname(os.path.abspath(__file__))
common = {"data.augment": "pad_crop", "data.crop_padding": 8, "data.eval_resize": 0, "run.log_interval": 10**6, "optim.weight_decay": 5e-4}
def train(data, epochs, out, **more):
    s = {**common, **more.pop("settings", {})}
    r = pl.Trainer("resnet18", f"{HERE}/{data}", epochs=epochs, image_size=64, batch_size=128, output=f"/tmp/fine/{out}", settings=s, **more).fit()
    print("FINE " + json.dumps({"run": out, "top1": r.top1, "best_top1": r.best_top1, "notes": r.summary["chosen"].get("pretrained", ""), "images_per_s": r.images_per_s}), flush=True)
    return r
base = train("t60", 30, "t60", lr=0.1)
for seed in (0, 1, 2):
    train("t25s", 30, f"scratch-{seed}", lr=0.1, seed=seed)
    train("t25s", 30, f"tuned-{seed}", lr=0.02, seed=seed, pretrained=base.weights)
