"""What launch.py says of a command line that is meant for another server."""

import click

OURS = {
    "--tensor-parallel-size": "--tp", "--tp-size": "--tp", "--max-model-len": "--context-len",
    "--context-length": "--context-len", "--ctx-size": "--context-len", "--model-path": "--model", "-m": "--model",
    "--gpu-memory-utilization": "--kv-memory", "--mem-fraction-static": "--kv-memory",
    "--max-num-seqs": "--max-running", "--max-running-requests": "--max-running",
    "--max-num-batched-tokens": "--max-batch-tokens",
    "--chunked-prefill-size": "--chunk-tokens", "--block-size": "--page-size", "--schedule-policy": "--policy",
    "--scheduling-policy": "--policy", "--no-enable-prefix-caching": "--no-prefix-cache",
    "--disable-radix-cache": "--no-prefix-cache", "--enforce-eager": "--no-cuda-graphs",
    "--disable-cuda-graph": "--no-cuda-graphs", "--api-key": "--api-key-file", "--speculative-config": "--speculation",
    "--speculative-algorithm": "--speculation",
}  # fmt: skip


class Launch(click.Command):
    """A command that knows what vLLM, SGLang and llama.cpp call its options, and where they take the model."""

    allow_extra_args = True  # to say more of them

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            ours = OURS.get(error.option_name)
            if ours is None:
                raise
            raise click.UsageError(f"No such option {error.option_name!r}; here it is {ours}", ctx) from None
        if rest:
            raise click.UsageError(f"Unexpected argument {rest[0]!r}; the model is given by --model", ctx)
        return rest
