"""The tokenizer and chat template of a GGUF file, as transformers reads them."""

from pathlib import Path

# Tokens that end a turn, as llama.cpp has them: files name one or two of a model's
_ENDS = (
    "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<end_of_turn>",
)  # fmt: skip


def convert_tokenizer(file: Path, directory: Path) -> set[int]:
    """Writes them to the directory. Returns the ids of tokens that end an answer by their names."""
    from transformers import AutoTokenizer  # takes seconds, for a file that is new only

    tokenizer = AutoTokenizer.from_pretrained(
        str(file.parent), gguf_file=file.name, local_files_only=True, trust_remote_code=False
    )
    tokenizer.save_pretrained(str(directory))
    return {index for index, token in tokenizer.added_tokens_decoder.items() if token.special and str(token) in _ENDS}
