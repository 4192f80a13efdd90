"""The marks of OpenAI's harmony format, in which gpt-oss speaks: special tokens around messages and in their headers.

The format: https://github.com/openai/harmony, docs/format.md. An answer is several messages, of which the prompt has
begun the first:

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
"""

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"


def speaks_harmony(template: str) -> bool:
    """Whether a chat template writes its messages in this format."""
    return all(mark in template for mark in (START, CHANNEL, MESSAGE))
