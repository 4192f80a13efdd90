"""Text to tokens and back: the tokenizer process (requests in, answers out) and the detokenizer process."""
