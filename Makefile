#: make train      set up .venv and train on the embedded images (ARGS="--epochs 3" adds flags)
#: make test       set up .venv and run every check; as root on Debian it installs openmpi-bin, iproute2,
#:                 gcc, g++ and libjpeg-dev too
#: make cluster-test  the part of it that runs on hosts made of network namespaces
#: make scale-test the control plane with 16 to 1,024 forked ranks on this machine (ARGS="--ranks 256
#:                 --only healthy stall")
#: make gpu-test   the tests that need one CUDA device, without those of nccl-test
#: make nccl-test  NCCL with 2 and 4 ranks on one GPU, under NVIDIA MPS (docs/distributed.md)
#: make models-test  models of timm and torchvision, in .venv/models, which has them and the torch of .venv
#: make test-slow  whole trainings, minutes each
#: make docs-test  the commands and programs of README and docs, as they are written; an hour on a busy host
#: make watch-test  pages in a real browser (chromium), W&B and MLflow offline; writes docs/images
#: make fuzz       mutated inputs for every parser (ARGS="--seed 1 --count 100000")
#: make ddp-conformance  PyTorch's tests of DistributedDataParallel, with pl.DataParallel in its place
#: make mutants    deliberate bugs in the code, each of which some test must find
#: make chaos      trainings that are killed and disturbed at random moments (ARGS="--trials 200 --seed 7
#:                 --ranks 1 2 4"), and resumed; jobs that lose ranks and go on (LOSSES="--losses 200")
#: make planner-fit  fit the planner's constants to measured systems (CSV=systems.csv ARGS=--write)
#: make docs       rewrite the references of settings and commands from the code, and build the site in
#:                 docs/_build/html
#: make docs-plots rewrite the plots of the documentation from records and the planner
#: make data       rebuild the embedded images from Debian's package dataset-fashion-mnist
#: make clean      remove .venv and caches
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS ?= constraints.txt
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS)
ARGS ?=
LOSSES ?=
# Container images often set it. The tests start hundreds of interpreters, each of which would compile
# Paceline anew, and three processes that collect the tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help train test lint types contracts unit cluster-test scale-test gpu-test nccl-test models-test test-slow docs-test watch-test fuzz ddp-conformance mutants chaos planner-fit data docs docs-plots clean

help:
	@sed -n 's/^#: //p' Makefile

# A stamp for each set of packages: nothing is installed again until pyproject or constraints change.
$(VENV)/.made:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Paceline needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.installed: $(VENV)/.made pyproject.toml constraints.txt
	@echo "installing into $(VENV); torch is large, this can take minutes"
	$(PIP) -e '.[train]'
	touch $@

$(VENV)/.installed-test: $(VENV)/.made pyproject.toml constraints.txt
	@echo "installing into $(VENV) with the test extras; torch is large, this can take minutes"
	$(PIP) -e '.[test]'
	touch $(VENV)/.installed $@

# A real mpirun for the launcher tests, ip and tc for the emulated cluster, compilers, if this user may
# install them. Tried again until nothing is missing.
$(VENV)/.system: $(VENV)/.made tools/install_system_packages.sh
	sh tools/install_system_packages.sh
	test -n "$$(sh tools/install_system_packages.sh --missing)" || touch $@

train: $(VENV)/.installed
	$(BIN)/paceline train $(ARGS)

test: lint types contracts unit

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-test
	$(BIN)/mypy

contracts: $(VENV)/.installed-test
	$(BIN)/lint-imports

# Three at a time, since many wait more than they compute. Those that start real launchers, jobs of many
# ranks or hosts come after them, file by file (tests/conftest.py). The last line says what was skipped.
unit: export PACELINE_SKIPS := $(VENV)/skips.jsonl
unit: $(VENV)/.installed-test $(VENV)/.system
	rm -f $(PACELINE_SKIPS)
	$(BIN)/python -m pytest -m 'not slow' -n 3 --dist worksteal --ignore tests/cluster --ignore tests/launch --ignore tests/chaos --ignore tests/scale --ignore tests/watch $(ARGS)
	$(BIN)/python -m pytest -m 'not slow' -n 3 --dist loadscope --no-loadscope-reorder tests/cluster tests/scale tests/launch tests/chaos $(ARGS)
	$(BIN)/python tests/allowed_skips.py $(PACELINE_SKIPS)

# A part of `unit`: hosts in network namespaces, with links of a chosen rate (docs/distributed.md).
cluster-test: $(VENV)/.installed-test
	sh tools/install_system_packages.sh iproute2
	$(BIN)/python -m pytest tests/cluster $(ARGS)

# No model and no GPU: rendezvous, agreement, faults and stalls (docs/distributed.md). 64 ranks are in `unit`.
scale-test: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 PYTHONPATH=src:tests $(BIN)/python -m scale $(ARGS)

# Needs a CUDA build of torch in .venv (see constraints.txt).
gpu-test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m 'gpu and not slow' --ignore tests/nccl $(ARGS)

# One job after the other: ranks of two jobs on one MPS server can block each other.
nccl-test: $(VENV)/.installed-test
	$(BIN)/python -m pytest tests/nccl -m gpu $(ARGS)

$(VENV)/models/.installed: $(VENV)/.installed-test tools/make_models_environment.sh
	sh tools/make_models_environment.sh $(BIN)/python $(VENV)/models
	touch $@

models-test: $(VENV)/models/.installed
	$(VENV)/models/bin/python -m pytest tests/models/test_zoo.py tests/models/test_torchvision.py tests/accel/test_own_loop.py 'tests/api/test_examples.py::test_examples_run[timm_model]' $(ARGS)

# Whole trainings and other checks that take minutes.
test-slow: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m slow $(ARGS)

docs-test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m slow tests/tools/test_docs_run.py $(ARGS)

$(VENV)/.installed-watch: $(VENV)/.installed-test
	$(PIP) -e '.[watch-test]'
	touch $@

# Pages in a browser, desktop and phone, light and dark, with screenshots; trackers of others, offline.
watch-test: $(VENV)/.installed-watch
	sh tools/install_system_packages.sh chromium chromium-driver
	$(BIN)/python -m pytest tests/watch $(ARGS)

# Seeded; a small part of it is in `unit`. Findings go to fuzz-findings/ (CONTRIBUTING.md).
fuzz: $(VENV)/.installed-test
	PYTHONPATH=tests $(BIN)/python -m fuzz $(ARGS)

$(VENV)/.installed-ddp: $(VENV)/.installed-test
	$(PIP) -e '.[ddp-conformance]'
	touch $@

# Natively and with algorithm="ring"; fails if a result differs from tests/ddp_conformance/known_failures.toml.
ddp-conformance: $(VENV)/.installed-ddp
	PYTHONPATH=tests $(BIN)/python -m ddp_conformance $(ARGS)

# One bug at a time in a copy of the source (tests/mutants/mutants.toml).
mutants: $(VENV)/.installed-test
	PYTHONPATH=tests $(BIN)/python -m mutants $(ARGS)

# Random kills, signals, full disks and the like; --seed and --trial repeat one (docs/checkpoints.md).
# Then ranks that are lost at the points of the model in tests/elastic; --seed and --job repeat a job.
chaos: $(VENV)/.installed-test
	PYTHONPATH=src:tests $(BIN)/python -m chaos $(ARGS)
	PYTHONPATH=src:tests $(BIN)/python -m elastic $(LOSSES)

# Rebuilds the embedded images from Debian's package dataset-fashion-mnist.
data: $(VENV)/.installed
	$(BIN)/python tools/make_embedded_data.py /usr/share/datasets/fashion-mnist

planner-fit: $(VENV)/.installed
	$(BIN)/python tools/fit_planner.py $(CSV) $(ARGS)

$(VENV)/.installed-docs: $(VENV)/.installed
	$(PIP) -e '.[docs]'
	touch $@

# Warnings are errors: broken links between pages and docstrings that Sphinx cannot read among them.
docs: $(VENV)/.installed-docs
	$(BIN)/python tools/write_settings_reference.py
	$(BIN)/python tools/write_command_line_reference.py
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "built docs/_build/html/index.html"

docs-plots: $(VENV)/.installed
	$(BIN)/python tools/make_plots.py

clean:
	rm -rf $(VENV) docs/_build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
