"""Files and messages that are made to do harm: checkpoints, special files, values in the store."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import socket
import warnings
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import HashStore

from data_sets import png
from fuzz.mutate import mutate_bytes, mutate_tree, to_json
from fuzz.target import Seed, Target
from paceline.comm.agreement import Agreement, Report
from paceline.comm.coordinator import Greeting
from paceline.comm.job import JobIdentity, RankHost, RankHosts, post_hosts
from paceline.comm.losses import LossLog
from paceline.comm.progress import RankProgress
from paceline.config import load_config
from paceline.core.errors import CommError, PacelineError
from paceline.core.topology import Topology
from paceline.core.untrusted import ParseError, parse_table
from paceline.custom_loop.checkpointer import Checkpointer
from paceline.data import DataSettings
from paceline.data.pack.inspect import shard_problems
from paceline.data.sources.array_sets import read_idx, read_labels
from paceline.data.sources.classes import read_classes
from paceline.data.sources.labels import read_metadata
from paceline.data.sources.layouts import open_layout
from paceline.models import load_pretrained
from paceline.plan.plan_file import PlanFile
from paceline.planner.accelerators import own_accelerator
from paceline.report import RunFiles
from paceline.train.checkpoint import FORMAT, Checkpoint
from paceline.train.inference import find_images

# A read from a pipe takes no CPU time, which is what the harness limits.
_LONGEST_WAIT_S = 30


def hostile_targets() -> Sequence[Target]:
    unused = [Seed("f.pt", b"0" * 64)]
    return [
        Target("hostile checkpoint", unused, _checkpoint, 12),
        Target("store message", _messages(), _message, 12, form="json"),
        Target("special file", [Seed("0", b"0" * 64)], _special_file, 8),
    ]


# Pieces of pickles; %m is the number of a memorized value.
_VALUES = (
    b"N", b"\x88", b"K\x05", b"J\xff\xff\xff\x7f", b"\x8a\x08" + b"\xff" * 7 + b"\x7f", b"]", b"}", b")",
    b"G" + b"\x7f" * 8, b"X\x01\x00\x00\x00a", b"X\x06\x00\x00\x00latin1", b"X\x03\x00\x00\x00hex",
    b"X\x00\x00\x01\x00" + b"y" * 65536, b"h%m", b"h%m", b"h%m",
)  # fmt: skip
_FUNCTIONS = (
    b"__builtin__\nbytearray", b"_codecs\nencode", b"torch\nFloatTensor", b"torch\nSize",
    b"torch.storage\nUntypedStorage", b"torch._utils\n_rebuild_tensor_v2", b"__builtin__\nset",
    b"torch._utils\n_rebuild_parameter", b"torch._tensor\n_rebuild_from_type_v2",
    b"torch._utils\n_rebuild_sparse_tensor", b"torch._utils\n_rebuild_meta_tensor_no_storage",
    b"torch._utils\n_rebuild_nested_tensor", b"torch._utils\n_rebuild_wrapper_subclass",
    b"collections\nOrderedDict", b"collections\nCounter", b"torch.nn.parameter\nParameter",
    b"os\nsystem", b"torch\nfloat32", b"torch\ndevice", b"__builtin__\ncomplex",
)  # fmt: skip
_STORAGE = (
    b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu%ntQ"
)
_NUMBERS = (
    b"K\x00",
    b"K\x00",
    b"K\x01",
    b"K\x01",
    b"K\x04",
    b"K\x04",
    b"J\x00\x5e\xd0\xb2",
    b"J\xff\xff\xff\x7f",
    b"J\xff\xff\xff\xff",
)


def _value(rng: random.Random, memorized: int, depth: int = 0) -> bytes:
    """A pickled value, most often a well-formed one."""
    kind = rng.randrange(12 if depth < 4 else 3)
    if kind <= 2:
        return rng.choice(_VALUES).replace(b"%m", bytes([rng.randrange(memorized)]))
    below = [_value(rng, memorized, depth + 1) for _ in range(rng.randrange(4))]
    if kind <= 4:
        return b"](" + b"".join(below) + b"e"
    if kind == 5:
        return b"}(" + b"".join(key + value for key, value in zip(below, below, strict=True)) + b"u"
    if kind <= 7:
        return b"(" + b"".join(below) + b"t"
    if kind == 8:
        return _STORAGE.replace(b"%n", rng.choice(_NUMBERS))
    if kind == 9:
        return _tensor(rng)
    function = b"c" + rng.choice(_FUNCTIONS) + b"\n"
    if kind == 10:
        return function + b"(" + b"".join(below) + b"t" + rng.choice((b"R", b"R", b"\x81"))
    return function


def _tensor(rng: random.Random) -> bytes:
    storage = _STORAGE.replace(b"%n", rng.choice((b"K\x04", rng.choice(_NUMBERS))))
    size, stride, offset = (rng.choice(_NUMBERS) for _ in range(3))
    call = (
        b"ctorch._utils\n_rebuild_tensor_v2\n("
        + storage
        + offset
        + size
        + b"\x85"
        + stride
        + b"\x85"
    )
    return call + b"\x89ccollections\nOrderedDict\n)RtR"


def _pickle(rng: random.Random) -> bytes:
    """A table as of a checkpoint, whose values double one another, call functions and lie."""
    # Values that no table holds are items of a tuple.
    program, memorized = [b"\x80\x02}(K\x00(]q\x00"], 1
    for _ in range(rng.choice((2, 5, 60))):
        last = b"h%c" % (memorized - 1)
        choices = (
            b"](" + 2 * last + b"e",
            last + last + b"\x86",
            _value(rng, memorized),
            _tensor(rng),
        )
        program.append(rng.choice(choices) + b"q%c" % memorized)
        memorized += 1
    program.append(b"tX\x06\x00\x00\x00formatX%c\x00\x00\x00%b" % (len(FORMAT), FORMAT.encode()))
    for name in ("model", "progress", "state_dict", "config"):
        text = b"X%c\x00\x00\x00%b" % (len(name), name.encode())
        program.append(text + _value(rng, memorized))
    program.append(_value(rng, memorized) + b"K\x01" if rng.random() < 0.2 else b"")
    return b"".join([*program, b"u."])


def _file(rng: random.Random) -> bytes:
    pickled = _pickle(rng)
    if rng.random() < 0.2:  # the format before torch 1.6
        stream = io.BytesIO()
        torch.save(1, stream, _use_new_zipfile_serialization=False)
        return stream.getvalue().replace(b"\x80\x02K\x01.", pickled.replace(b"tQ", b"NtQ"), 1)
    stream = io.BytesIO()
    torch.save(torch.zeros(4), stream)
    made = io.BytesIO()
    compression = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    with zipfile.ZipFile(stream) as sound, zipfile.ZipFile(made, "w", compression) as archive:
        for name in sound.namelist():
            content = pickled if name.endswith("data.pkl") else sound.read(name)
            if name.endswith("data/0") and rng.random() < 0.1:
                content = bytes(rng.choice((0, 4, 20_000_000)))
            archive.writestr(name, content)
    content = made.getvalue()
    return mutate_bytes(rng, content, [content]) if rng.random() < 0.3 else content


_NET = nn.Linear(3, 4)


def _checkpoint(content: bytes, name: str, folder: Path) -> None:
    """As `--resume` and `--pretrained` read it."""
    path, made = folder / name, _file(random.Random(content))
    path.write_bytes(made)
    with suppress(PacelineError):
        load_pretrained(_NET, path)
    Checkpoint.from_bytes(made, path)


def _messages() -> list[Seed]:
    job = JobIdentity("environment", "", 2, {"run.seed": 1}, "node0", 17).to_table()
    greeting = {
        "token": "0" * 32,
        "rank": 1,
        "restarts": 0,
        "at": ["node1", "10.0.0.2"],
        "job": job,
    }
    trees: dict[str, Any] = {
        "greeting": greeting, "job": job, "progress": json.loads(RankProgress().to_text()),
        "report": {"rank": 1, "error": "cut off", "code": 1, "kind": "DataError"},
        "digest": {"rank": 1, "digest": "ab"}, "fault": {"rank": 1, "error": "x", "code": 1},
        "hosts": [["node0", "10.0.0.1", 2]], "loss": {"lost": [1, 3], "cause": "killed"},
    }  # fmt: skip
    return [Seed(name, to_json(tree), tree) for name, tree in trees.items()]


def _message(content: bytes, name: str, folder: Path) -> None:
    """What ranks read from the store, also under the key of another message."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_LONGEST_WAIT_S)
    rng, store = random.Random(content), HashStore()
    topology = Topology(rank=0, world_size=2, local_world_size=2, launcher="environment")
    agreement = Agreement(store, topology, 0.0)
    text = content.decode(errors="surrogateescape").encode(errors="replace").decode()
    with suppress(ParseError):
        Greeting.parse(content)
    with suppress(ParseError):
        RankProgress.from_text(text)
    with suppress(ParseError):
        Report.parse(content)
    with suppress(ParseError):
        JobIdentity.from_table(parse_table(content))
    store.set("paceline/elastic/log/1", text)
    with suppress(ParseError):
        LossLog(store).read()
    store.set("paceline/fault", text)
    fault = agreement.read_fault()
    assert fault is None or isinstance(fault.exit_code, int)
    post_hosts(store, {0: RankHost("node0", "10.0.0.1")})
    packed = store.get("paceline/hosts")
    store.set(
        "paceline/hosts",
        text if name == "hosts" else mutate_bytes(rng, packed, [b""]).decode("latin-1"),
    )
    with suppress(ParseError):
        RankHosts.read(store).describe([0, 1])
    base = "paceline/agree/1/phase"
    store.set(f"{base}/reports", text + "\n")
    if rng.random() < 0.7:
        facts = {"world": 1} if rng.random() < 0.5 else mutate_tree(rng, {"world": 1}, dates=False)
        published = json.dumps({"rank": rng.choice((0, 1, -1, "x")), "facts": facts})
        store.set(f"{base}/facts", rng.choice((published, "{}", text)))
    if rng.random() < 0.3:
        store.set("paceline/verdict/1", text)
    elif rng.random() < 0.3:
        agreement.post_fault(CommError("lost"))
    store.add(f"{base}/ranks/0", rng.choice((2, 2, 0, 3, -1, 1 << 40)))
    agreement.agree("phase", facts={"world": 1})


def _load_idx(path: Path) -> None:
    read_idx(path, 3)


def _read_first(kind: str, folder: Path) -> None:
    open_layout(DataSettings(source=kind, dir=str(folder)), "train").read(0)


def _inspect_shard(path: Path) -> None:
    (path.parent / "pack.json").write_text("{}")
    shard_problems(path.parent, [path], True, lambda *_: None)


# Where a user's file is read: its name, and the reader.
_READERS: tuple[tuple[str, Callable[[Path], Any]], ...] = (
    ("r.toml", lambda path: load_config(str(path), {})),
    ("recipe", lambda path: load_config(str(path), {})),
    ("plan.toml", PlanFile.read),
    ("gpu.toml", own_accelerator),
    ("f.pt", Checkpoint.read),
    ("w.pt", lambda path: load_pretrained(_NET, path)),
    ("w.safetensors", lambda path: load_pretrained(_NET, path)),
    ("step-00000001/manifest.json", lambda path: Checkpointer(path.parents[1]).restore()),
    ("classes.json", lambda path: read_classes(path.parent)),
    ("metadata.csv", read_metadata),
    ("train_labels.json", read_labels),
    ("train-images-idx3-ubyte", _load_idx),
    ("train-images-idx3-ubyte.gz", _load_idx),
    ("data/train/a/1.png", lambda path: _read_first("folder", path.parents[2])),
    ("train-0.tar", lambda path: _read_first("shards", path.parent)),
    ("train-0.tar.gz", lambda path: _read_first("shards", path.parent)),
    ("train-0.tar", _inspect_shard),
    ("run/metrics.jsonl", lambda path: RunFiles.read(path.parent)),
    ("run/summary.json", lambda path: RunFiles.read(path.parent)),
    ("run/config.toml", lambda path: RunFiles.read(path.parent)),
    ("images/1.png", lambda path: find_images([path.parent])),
)


def _special_file(content: bytes, name: str, folder: Path) -> None:
    """A pipe, a device, a socket, a loop of links, an endless hole, in the place of any file."""
    rng = random.Random(content)
    name, read = rng.choice(_READERS)
    place = folder / "special"
    path = place / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if name.startswith("run/"):
        (path.parent / "metrics.jsonl").write_text("")
        path.unlink(missing_ok=True)
    target = place / "target"
    kind = rng.choice(
        ("pipe", "zero", "full", "tty", "socket", "loop", "dangling", "hole", "folder", "png")
    )
    made = target if rng.random() < 0.5 else path
    if kind == "pipe":
        os.mkfifo(made)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(made))
    elif kind == "hole":
        made.touch()
        os.truncate(made, 1 << 40)
    elif kind == "folder":
        made.mkdir()
    elif kind == "png":
        made.write_bytes(png(0))
    else:
        places = {"zero": "/dev/zero", "full": "/dev/full", "tty": "/dev/tty", "loop": str(made)}
        made.symlink_to(places.get(kind, "nowhere"))
    if made is target:
        path.symlink_to(target)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_LONGEST_WAIT_S)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read(path)
    finally:
        signal.alarm(0)
        for left in sorted(place.rglob("*"), reverse=True):
            left.rmdir() if left.is_dir() and not left.is_symlink() else left.unlink()
