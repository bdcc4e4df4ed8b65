#!/bin/sh
# Makes a virtual environment with timm and torchvision that uses the torch of another one and leaves it
# as it is: tools/make_models_environment.sh PYTHON FOLDER (`make models-test`).
set -eu
python=$1 folder=$2
where='import sysconfig; print(sysconfig.get_path("purelib"))'
"$python" -m venv "$folder"
packages=$("$folder/bin/python" -c "$where")
"$python" -c "$where" >"$packages/torch.pth"
"$python" -c 'from importlib.metadata import version; print("torch==" + version("torch"))' >"$folder/torch.txt"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check -c "$folder/torch.txt" \
    -e '.[timm,torchvision]'
# A torchvision built for CUDA does not import with a torch for CPUs: it registers shapes for operators
# that its library then lacks. Its models need none of them.
"$folder/bin/python" -W ignore -c 'import torchvision' 2>/dev/null ||
    : >"$packages/torchvision/_meta_registrations.py"
"$folder/bin/python" -W ignore -c 'import timm, torch, torchvision
print(f"timm {timm.__version__}, torchvision {torchvision.__version__}, torch {torch.__version__}")'
