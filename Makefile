# make demo   install, start a cluster on the demo model, stream an answer, shut down
# make test   install with the test extra, then lint, check types and run the tests: those without processes on all cores, those
#             that start clusters two at a time
# PYTHON=python3.12 chooses the interpreter of the virtual environment.

PYTHON ?= python3
PY := .venv/bin/python
TEST_FLAGS := --durations 15 --soak 2000 --hypothesis-seed 0
IN_PROCESS := tests/unit tests/client tests/worker
SET_UP := pyproject.toml constraints.txt scripts/set_up.sh

unexport PYTHONDONTWRITEBYTECODE  # else each process of each cluster compiles all modules again

.PHONY: demo test lint clean

demo: .venv/installed
	scripts/demo.sh

test: lint
	$(PY) -m pytest $(IN_PROCESS) $(TEST_FLAGS) --numprocesses logical --maxprocesses 8 --dist worksteal
	$(PY) -m pytest $(IN_PROCESS:%=--ignore %) $(TEST_FLAGS) --numprocesses logical --maxprocesses 2 --dist worksteal

lint: .venv/installed-test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

clean:
	rm -rf .venv build *.egg-info

.venv/installed: $(SET_UP)
	scripts/set_up.sh $(PYTHON)
	touch $@

.venv/installed-test: $(SET_UP)
	scripts/set_up.sh $(PYTHON) '[test]'
	touch .venv/installed $@
