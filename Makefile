# make quickstart   set up, then train CIFAR-10 from the raw files and measure a ledger
# make test         set up if necessary, then lint, types and tests (make test-all: the slow ones, too,
#                   in phases that continue where they stopped, with a report)
# make quick        lint, types, and the tests that start no process and took no time in their last run: on every save
# make install      only set up                     make lock   rewrite requirements.txt and requirements-run.txt
# make wheel        one wheel for all Pythons in dist/, with libjpeg-turbo inside
# make wheels       build and try the wheels of all platforms: x86_64, and aarch64 under emulation (.ci/wheels)
# make release-check   rehearse a release: build, check, and try it in empty environments of each Python (.ci/release.py)
# make check        ruff, import layers and mypy    make bench PHOTOS=FOLDER   loading speed on a folder of photographs
# make bench-peers PHOTOS=FOLDER   the same against DALI, TorchCodec, torchvision and SPDL
# make gpu          on a machine with a GPU: run its tests and measurements, in stages that continue where they stopped
# make gpu-kit      pack what a GPU machine without a network needs, in parts (GPU_PYTHON=python3.12, PHOTOS=FOLDER)
# make same         52 small trainings, compared bit for bit with the revision BASE=HEAD: before and after a rebuilding
# make records      race the quickstart against plain PyTorch: an hour; it continues where it was stopped
# make records-imagenette IMAGENETTE=FOLDER   likewise imagenette-5, -20 and others: 12 hours; FOLDER has train/ and val/
# make records-camvid CAMVID=FOLDER   likewise camvid-segmentation; FOLDER has train/images, train/masks, and likewise val
# make records-methods   the effect of each method on the time to an accuracy on CIFAR-10: three hours, likewise
# make fuzz         a million damaged files through the native library, under the sanitizers; ten million images for leaks
# make libfuzzer    the same library under clang's fuzzer, guided by coverage, for SECONDS=3600 (CC=clang-19)
# make notebooks    run the notebooks, and keep their outputs in them (NOTEBOOKS=… selects some)
# make docs         the documentation as a site in .build/docs/
# make clean        remove what the other targets have created, except runs/

PYTHON ?= $(shell .ci/find-python)
BIN := .venv/bin
PACKAGES := common loaders pipeline strategies transforms
GPU_PYTHON ?= python3.12
NOTEBOOKS ?= $(wildcard notebooks/*.ipynb)
NATIVE := loaders/native/libdrivetrain.so

.PHONY: quickstart records records-camvid records-imagenette records-methods install test test-all quick same check bytecode lock wheel wheels release-check bench bench-peers fuzz libfuzzer gpu gpu-kit notebooks docs clean

# With these, glibc keeps the memory of a step for the next one, in every variant (docs/ledger.md, "On a CPU").
quickstart records records-camvid records-imagenette records-methods: export MALLOC_MMAP_THRESHOLD_ ?= 4294967296
quickstart records records-camvid records-imagenette records-methods: export MALLOC_TRIM_THRESHOLD_ ?= 8589934592
quickstart: .venv/runtime $(NATIVE)
	$(BIN)/drivetrain train cifar10-quickstart --out runs/quickstart --ledger --ledger-seconds 150

install: .venv/installed $(NATIVE)

# A stamp file is newer than everything that determines the installation, so a second call does nothing. Bytecode is
# compiled here, because with PYTHONDONTWRITEBYTECODE every rank would recompile hundreds of library files.
UV_INSTALL := $(BIN)/uv pip install --python $(BIN)/python --quiet --no-deps

# What training needs: Drivetrain itself, its dependencies, and matplotlib for the picture of the ledger.
.venv/runtime: requirements-run.txt pyproject.toml .ci/native .ci/find-python
	.ci/native "$(PYTHON)"
	test -x $(BIN)/python || "$(PYTHON)" -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep -oE '^uv==[^ ;]+' requirements.txt)"
	$(UV_INSTALL) --compile-bytecode -r requirements-run.txt
	$(UV_INSTALL) -e .
	touch $@

# All extras, the references of the tests (FFCV, Composer, ...), and the tools.
.venv/installed: .venv/runtime requirements.txt
	.ci/native "$(PYTHON)" references
	$(UV_INSTALL) --compile-bytecode -r requirements.txt
	touch $@

# Again whenever a source has changed; the installation above has built it the first time.
$(NATIVE): setup.py $(wildcard loaders/native/*.[ch]) | .venv/runtime
	$(BIN)/python setup.py -q build_ext --inplace
	touch $@

# Waiting OpenMP threads sleep instead of spinning, which would take the cores from the other test.
test test-all quick: export OMP_WAIT_POLICY ?= PASSIVE
# pytest keeps the rewritten assertions of the test files, which are a third of the time that collecting takes.
test test-all quick: export PYTHONDONTWRITEBYTECODE =

# Two tests at a time, because they spend most of their time importing torch; those that must run alone are slow, too.
test: install check bytecode
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not gpu and not alone"

# Continues where it was stopped, until a file changes; KEEP=1 takes over what was known before the change.
test-all: install check bytecode
	$(BIN)/python .ci/test_all.py $(if $(KEEP),--keep)

quick: install check bytecode
	DRIVETRAIN_QUICK=1 DRIVETRAIN_INTERPRETERS=refuse $(BIN)/python -m pytest -n 2 --dist loadfile \
		-m "not process and not long and not slow and not gpu and not alone"

# The numbers of the base are recorded in .build/same, once for each kind of processor.
BASE ?= HEAD
same: install
	mkdir -p .build && ln -sfn .. .build/drivetrain
	$(BIN)/python .ci/same.py --base "$(BASE)"

# mypy needs the package under its own name, whatever the name of the clone's folder.
check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	mkdir -p .build && ln -sfn .. .build/drivetrain
	MYPYPATH=.build:benchmarks $(BIN)/mypy --num-workers 2 --cache-dir .mypy_cache -m drivetrain $(PACKAGES:%=-p drivetrain.%) \
		$(patsubst benchmarks/%.py,-m %,$(wildcard benchmarks/*.py))

# Once for all interpreters that tests start: with PYTHONDONTWRITEBYTECODE, they would not cache it themselves.
bytecode: install
	$(BIN)/python -m compileall -q *.py $(PACKAGES) tests

# The second file has the versions of the first, which are there when it is resolved.
LOCK := uv pip compile --quiet --universal --custom-compile-command "make lock" pyproject.toml
lock:
	$(BIN)/$(LOCK) --all-extras --upgrade -o requirements.txt
	cp requirements.txt requirements-run.txt
	$(BIN)/$(LOCK) --extra plot -o requirements-run.txt

wheel: install
	$(BIN)/python .ci/build_wheel.py dist

# Finished runs are kept in the folder, with a table and a picture of all, and a second call continues.
RACE := $(BIN)/drivetrain race
records: install
	$(RACE) cifar10-quickstart epochs=5 --target 0.75 --seeds 3 --out .build/records/cifar10-quickstart

SCENES := .build/records/camvid
CAMVID_CLASSES := sky,building,pole,road,pavement,tree,sign,fence,car,pedestrian,bicyclist
# Plain PyTorch, with AdamW and this learning rate.
PLAIN = loader=torch transforms=[] precision=fp32 optimizer={"name":"adamw","lr":$(1),"weight_decay":0.05}
records-camvid: $(SCENES)/train.beton $(SCENES)/val.beton
	$(RACE) camvid-segmentation --train $(SCENES)/train.beton --val $(SCENES)/val.beton --target 0.40 --seeds 2 \
	    --against '$(call PLAIN,3e-3)' --out $(SCENES)

$(SCENES)/%.beton: install
	mkdir -p $(SCENES)
	test -e $@ || $(BIN)/drivetrain convert "$(CAMVID)/$*/images" $@ --labels "$(CAMVID)/$*/masks" \
	    --classes $(CAMVID_CLASSES) --ignore 11

records-methods: install
	$(BIN)/python benchmarks/methods.py methods methods-others methods-averages

PHOTOGRAPHS := .build/records/imagenette
records-imagenette: $(PHOTOGRAPHS)/train.beton $(PHOTOGRAPHS)/val.beton
	$(RACE) imagenette-5 --train $(PHOTOGRAPHS)/train.beton --val $(PHOTOGRAPHS)/val.beton --target 0.8577 --seeds 2 \
	    --against imagenette-plain --out $(PHOTOGRAPHS)
	$(RACE) imagenette-5 seed=2 --train $(PHOTOGRAPHS)/train.beton --val $(PHOTOGRAPHS)/val.beton --target 0.8577 \
	    --seeds 3 --against none --out $(PHOTOGRAPHS)-seeds
	$(RACE) imagenette-plain epochs=12 eval_every=2 --train $(PHOTOGRAPHS)/train.beton --val $(PHOTOGRAPHS)/val.beton \
	    --target 0.8577 --seeds 2 --against none --out $(PHOTOGRAPHS)-plain
	$(RACE) imagenette-20 eval_every=2 --train $(PHOTOGRAPHS)/train.beton --val $(PHOTOGRAPHS)/val.beton \
	    --target 0.9157 --seeds 3 --against none --out $(PHOTOGRAPHS)-20
	$(RACE) imagenette-fast seed=2 --train $(PHOTOGRAPHS)/train.beton --val $(PHOTOGRAPHS)/val.beton --target 0.78 \
	    --seeds 2 --against imagenette-plain --out $(PHOTOGRAPHS)-fast
	$(RACE) vit-tiny-imagenette --train $(PHOTOGRAPHS)/train.beton --val $(PHOTOGRAPHS)/val.beton --target 0.60 --seeds 2 \
	    --against '$(call PLAIN,1e-3)' --out $(PHOTOGRAPHS)-vit
	$(BIN)/drivetrain ledger imagenette-5 --train $(PHOTOGRAPHS)/train.beton --val $(PHOTOGRAPHS)/val.beton \
	    --seconds 900 --out $(PHOTOGRAPHS)-ledger
	$(BIN)/python benchmarks/methods.py methods-vit train=$(PHOTOGRAPHS)/train.beton val=$(PHOTOGRAPHS)/val.beton
	$(BIN)/python benchmarks/limits.py imagenette-5 train=$(PHOTOGRAPHS)/train.beton val=$(PHOTOGRAPHS)/val.beton \
	    --rounds 5 --batches 6

$(PHOTOGRAPHS)/%.beton: install
	mkdir -p $(PHOTOGRAPHS)
	test -e $@ || $(BIN)/drivetrain convert "$(IMAGENETTE)/$*" $@

wheels: install
	$(BIN)/python .ci/wheels.py

release-check: install
	$(BIN)/python .ci/release.py

bench: install
	$(BIN)/python benchmarks/loaders.py "$(PHOTOS)"

# The peers have an environment of their own: their versions of torch's libraries need not be ours.
bench-peers: install
	test -x .build/peers/bin/python || "$(PYTHON)" -m venv .build/peers
	$(BIN)/uv pip install --python .build/peers/bin/python --quiet -r benchmarks/peers.txt
	$(BIN)/python benchmarks/peers.py "$(PHOTOS)" --python .build/peers/bin/python
	$(BIN)/python benchmarks/streams.py "$(PHOTOS)" --python .build/peers/bin/python

fuzz: install
	$(BIN)/python tests/support/native_fuzz.py --kind address
	$(BIN)/python tests/support/native_fuzz.py --kind plain
	$(BIN)/python tests/support/native_fuzz.py --kind thread
	$(BIN)/python tests/support/native_fuzz.py --kind leaks

SECONDS ?= 3600
libfuzzer: install
	$(BIN)/python tests/support/native_fuzz.py --kind libfuzzer --seconds $(SECONDS)

gpu: install
	$(BIN)/python .ci/gpu/run.py $(if $(PHOTOS),--photos "$(PHOTOS)")

gpu-kit: install
	$(BIN)/python .ci/gpu/kit.py --python "$(GPU_PYTHON)" $(if $(PHOTOS),--photos "$(PHOTOS)")

notebooks: install
	$(BIN)/python .ci/run_notebooks.py $(NOTEBOOKS)

# The sources are the repository: pages link to files of it. Warnings, such as a link that leads nowhere, are errors.
docs: install
	$(BIN)/sphinx-build -q -W --keep-going -n -c docs -d .build/doctrees . .build/docs
	@echo .build/docs/index.html

clean:
	rm -rf .venv .build build dist gpu-kit *.egg-info .mypy_cache .ruff_cache .pytest_cache
