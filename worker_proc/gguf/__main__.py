"""`python -m worker_proc.gguf FILE.gguf` prints the model directory of the file, see `directory`. The launcher, which
knows nothing of models, runs it as a process of its own.
"""

import sys
from pathlib import Path

from worker_proc.gguf.directory import GgufError, directory_for

if __name__ == "__main__":
    try:
        print(directory_for(Path(sys.argv[1])))
    except GgufError as error:
        sys.exit(str(error))
