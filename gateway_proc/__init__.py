"""The gateway process: HTTP, OpenAI's schema and server-sent events, as a client of the tokenizer's socket."""
