"""From a Hugging Face checkpoint directory to next-token logits.

`describe` reads config files only (no torch); `families` parses them into the small dataclass of `spec`;
`registry.load_model` picks the native decoder (`decoder`, built from `layers`, `rope` and `loading`) or
`transformers_backend`; `interface` is what the model runner sees of either.
"""
