"""The Python API: models served by a cluster of processes of its own, from ordinary code.

    from rhizome import LLM, SamplingParams

    with LLM("path/to/model", tp=2) as llm:
        for result in llm.generate(["Once upon a time"], SamplingParams(max_tokens=64)):
            print(result.outputs[0].text)

    llm, async_llm     what users call          sampling_params, outputs, errors     what goes in and comes out
    cluster            the cluster behind it    requests     from arguments to requests, from rows to results

No `if __name__ == "__main__"` is needed around it: the cluster is `launch.py` as a process of its own, not a fork or a
second import of the calling program.
"""

from rhizome.async_llm import AsyncLLM
from rhizome.errors import ClusterError, GenerationError
from rhizome.llm import LLM
from rhizome.outputs import CompletionOutput, RequestOutput, StreamOutput
from rhizome.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "ClusterError",
    "CompletionOutput",
    "GenerationError",
    "RequestOutput",
    "SamplingParams",
    "StreamOutput",
]
