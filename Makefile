# One environment in $(VENV), made by uv where it is on PATH, else by $(PYTHON) and pip. POSIX sh throughout.

PYTHON ?= python3
VENV ?= .venv
# The environment of test-all, which has more in it than what make test promises to do with.
ALL := $(if $(filter file,$(origin VENV)),.venv-all,$(VENV))
ALL_EXTRAS := dev,mlflow,trackio,tpu,gpu-aot
ARGS ?=
SHELL := /bin/sh
# uv and pip say what they did only when it failed.
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: help demo install test test-all lint docs docs-links gpu-gate stale clean FORCE

help:
	@echo 'make demo      install into $(VENV), then train a small code model on 8 simulated devices'
	@echo 'make test      install, then run the tests (ARGS="-k layout" chooses some)'
	@echo 'make test-all  install into $(ALL), then run every test: those too that compile for absent TPUs and GPUs, and the longest'
	@echo 'make lint      install, then ruff, mypy and import-linter'
	@echo 'make docs      install, then build the documentation site; docs-links checks its links to other sites (network)'
	@echo 'make gpu-gate  install (Python 3.12 or newer: add PYTHON=python3.12 VENV=.venv-312), then compile every GPU kernel for an'
	@echo '               H200 that is not here'
	@echo 'make install   install into $(VENV) (EXTRAS=dev,tpu chooses what with)'
	@echo 'make stale     list committed results whose sources changed since they were measured (ARGS="--record NAME": measured again)'
	@echo 'make clean     remove environments and caches; runs/ stays'
	@echo
	@echo 'PYTHON=/path/to/python3.12 chooses the interpreter, VENV=.venv-312 the environment; without VENV, .venv is made'
	@echo 'anew where it has another Python.'

demo: install-$(or $(EXTRAS),plot)
	@'$(VENV)/bin/jaxscale' train experiments/demo.gin --devices 8 --continue

install: install-$(or $(EXTRAS),plot)

test: install-$(or $(EXTRAS),dev)
	@'$(VENV)/bin/python' -m pytest -n 2 --dist worksteal -m 'not long' $(ARGS)

test-all:
	@$(MAKE) --no-print-directory install-$(or $(EXTRAS),$(ALL_EXTRAS)) VENV='$(ALL)'
	@JAXSCALE_TEST_ALL=1 '$(ALL)/bin/python' -m pytest -n 2 --dist worksteal $(ARGS)

lint: install-$(or $(EXTRAS),dev)
	@'$(VENV)/bin/ruff' check .
	@'$(VENV)/bin/mypy'
	@'$(VENV)/bin/lint-imports' --no-logo --no-cache

# Warnings are errors. The extra goes into the environment of the other targets.
docs: install-$(or $(EXTRAS),docs)
	@JAX_PLATFORMS=cpu '$(VENV)/bin/python' -m sphinx -q -W --keep-going -b html docs docs/_build/html $(ARGS)
	@echo "the site: $$(pwd -P)/docs/_build/html/index.html"

docs-links: install-$(or $(EXTRAS),docs)
	@JAX_PLATFORMS=cpu '$(VENV)/bin/python' -m sphinx -q -b linkcheck docs docs/_build/links $(ARGS)

gpu-gate: install-$(or $(EXTRAS),gpu-aot)
	@JAX_PLATFORMS=cpu '$(VENV)/bin/python' -m pallas_kernels.gate $(ARGS)

stale:
	@'$(PYTHON)' experiments/stale.py $(ARGS)

clean:
	@rm -rf .venv .venv-all .venv-new .jax_cache .cache .pytest_cache .ruff_cache .mypy_cache build dist docs/_build
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# install-dev,tpu: nothing to do when $(VENV) works, belongs to this folder, and holds these extras of this very
# pyproject.toml (a copy of which is the stamp). `.unfinished` marks an install that was interrupted: start afresh.
install-%: FORCE
	@stop() { echo "jaxscale: $$1" >&2; exit 1; }; \
	case '$(VENV)' in .venv*) ;; *) stop "VENV must be a name that starts with .venv, not '$(VENV)'" ;; esac; \
	venv='$(VENV)'; stamp="$$venv/.installed-$*"; log="$$venv/install.log"; here=$$(pwd -P); \
	version='import sys; print("%d.%d.%d" % sys.version_info[:3])'; \
	has=$$("$$venv/bin/python" -c "$$version" 2>/dev/null </dev/null) || has=; \
	wanted=$$('$(PYTHON)' -c "$$version" 2>/dev/null </dev/null) || wanted=; \
	[ '$(origin PYTHON)' = file ] && [ -n "$$has" ] && wanted=$$has; \
	if [ -z "$$has" ] || [ "$$has" != "$$wanted" ] || [ -e "$$venv/.unfinished" ] \
	    || [ "$$(cat "$$venv/.folder" 2>/dev/null)" != "$$here" ]; then fresh=yes; else fresh=; fi; \
	if [ -z "$$fresh" ] && cmp -s pyproject.toml "$$stamp"; then exit 0; fi; \
	[ -n "$$wanted" ] || stop "'$(PYTHON)' is missing or does not run; install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3.12"; \
	case $$wanted in 2.*|3.[0-9].*|3.10.*) \
	  stop "'$(PYTHON)' is Python $$wanted, and jaxscale needs 3.11 or newer; name one: make PYTHON=/path/to/python3.12" ;; esac; \
	free=$$(df -Pk . | awk 'NR == 2 { print int($$4 / 1024) }'); \
	[ "$${free:-9999}" -ge 2048 ] || stop "$$here has $$free MB of free disk, and the install needs 2048 MB"; \
	uv=$$(command -v uv) && uv --version >/dev/null 2>&1 || uv=; \
	[ -n "$$uv" ] || '$(PYTHON)' -c 'import venv, ensurepip' >/dev/null 2>&1 || \
	  stop "'$(PYTHON)' cannot make environments (its venv or ensurepip module is missing); install python3-venv, or uv"; \
	if [ -n "$$fresh" ]; then \
	  echo "installing jaxscale into $$venv (first time: about half a minute)..."; rm -rf "$$venv"; mkdir "$$venv" || exit 1; \
	else echo "installing jaxscale into $$venv..."; fi; \
	: >"$$venv/.unfinished"; : >"$$log"; \
	with_uv() { \
	  { [ -z "$$fresh" ] || uv venv --quiet --allow-existing --python "$$('$(PYTHON)' -c 'import sys; print(sys.executable)')" "$$venv"; } && \
	  uv pip install --quiet --python "$$venv/bin/python" -e '.[$*]'; }; \
	with_pip() { \
	  { "$$venv/bin/python" -m pip --version >/dev/null 2>&1 || '$(PYTHON)' -m venv "$$venv"; } && \
	  "$$venv/bin/python" -m pip install --quiet --no-input -e '.[$*]'; }; \
	{ [ -n "$$uv" ] && with_uv >>"$$log" 2>&1 </dev/null; } || with_pip >>"$$log" 2>&1 </dev/null || \
	  { tail -n 40 "$$log" >&2; stop "the install failed, as said above ($$log); run the same command again to retry"; }; \
	echo "$$here" >"$$venv/.folder"; cp pyproject.toml "$$stamp"; rm -f "$$venv/.unfinished"
