"""The commands of client.py, one module each: complete, chat, batch, bench, top, status, trace.

    target        which server: a local cluster over ipc, or --url over HTTP      link      what both can do
    local_link    the cluster's own socket      http_link     OpenAI's API behind the same interface
    sse, openai_body    its formats      http_models   who is there, and what it serves
    display       answers on a terminal or a pipe      runs   follow requests to their ends, interruptions
    errors        exit codes, for every command        options   flags of several commands
    batch_*, bench_*, conversation, snapshot      the parts of the larger commands that do no I/O

Modules import only click and each other at the top; sockets, rich and aiohttp are imported where they are used, so that
help and usage errors are instant.
"""
