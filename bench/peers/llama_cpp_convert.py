"""A checkpoint as llama.cpp reads it: bfloat16 stays bfloat16.

    python llama_cpp_convert.py LLAMA_CPP_SOURCE MODEL OUT.gguf [PRE_TOKENIZER]

It runs llama.cpp's own convert_hf_to_gguf.py, which refuses tokenizers whose way to split text it does not recognise.
The comparison sends token ids, so nothing is ever split: such a tokenizer is written as PRE_TOKENIZER (default gpt-2).
Needs torch, transformers and what llama.cpp's gguf-py needs (numpy, tqdm, pyyaml, requests) and sentencepiece.
"""

import sys
from pathlib import Path


def main(source, model, out, pre_tokenizer="gpt-2"):
    sys.path[:0] = [str(Path(source)), str(Path(source) / "gguf-py")]
    import convert_hf_to_gguf
    from conversion.base import TextModel

    recognised = TextModel.get_vocab_base_pre

    def recognise(self, tokenizer):
        try:
            return recognised(self, tokenizer)
        except NotImplementedError:
            return pre_tokenizer

    TextModel.get_vocab_base_pre = recognise
    sys.argv = ["convert_hf_to_gguf.py", "--outtype", "bf16", "--outfile", str(out), str(model)]
    convert_hf_to_gguf.main()


if __name__ == "__main__":
    main(*sys.argv[1:])
