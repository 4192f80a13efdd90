"""Run public clients against a cluster on the demo model; exit with 1 when a check failed."""

import argparse
import secrets
import signal
import sys
import tempfile
from pathlib import Path

from tests.conformance.environments import Unavailable
from tests.conformance.server import Server, report
from tests.conformance.suites import SUITES
from tests.integration.cluster import ROOT, running


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/conformance.sh", description=__doc__)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"all by default: {', '.join(SUITES)}")
    parser.add_argument("--home", type=Path, help="keep the environments in this directory, for the next run")
    options = parser.parse_args()
    unknown = sorted(set(options.clients) - set(SUITES))
    if unknown:
        parser.error(f"no such client: {', '.join(unknown)}; there are {', '.join(SUITES)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the cluster is shut down
    with tempfile.TemporaryDirectory(prefix="rhizome-conformance-") as scratch:
        home = options.home.resolve() if options.home else Path(scratch)
        home.mkdir(parents=True, exist_ok=True)
        key = f"sk-{secrets.token_hex(16)}"
        keys = Path(scratch) / "keys"
        keys.touch(mode=0o600)
        keys.write_text(f"conformance:{key}\n")
        # float32, so that log probabilities can be compared with those of transformers
        flags = ("--port", "0", "--api-key-file", str(keys), "--dtype", "float32")
        with running(ROOT / "demo_model", *flags) as cluster:
            server = Server(cluster.info["addresses"]["http"], key, keys, ROOT / "demo_model", home)
            failed = [name for name in options.clients or SUITES if not _passes(name, server)]
            cluster.remember()
    print(f"Failed: {', '.join(failed)}" if failed else "All passed.")
    return 1 if failed else 0


def _passes(name: str, server: Server) -> bool:
    """One broken client must not hide what the others find."""
    try:
        return SUITES[name](server)
    except Unavailable as problem:
        return report(False, name, "installs", str(problem))
    except Exception as error:
        return report(False, name, "runs", f"{type(error).__name__}: {error}"[:400])


sys.exit(main())
