"""One target under atheris, for wire.py: `python -m tests.fuzz.wire_target frame LIBFUZZER_OPTIONS`."""

import sys

import atheris

with atheris.instrument_imports(include=["common", "gateway_proc", "client_cli"]):
    from tests.fuzz.targets import TARGETS

if __name__ == "__main__":
    atheris.Setup([sys.argv[0], *sys.argv[2:]], TARGETS[sys.argv[1]])
    atheris.Fuzz()
