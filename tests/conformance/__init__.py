"""Public clients against a real cluster on the demo model: `scripts/conformance.sh`.

It installs the clients into environments of its own, so pytest does not collect it. `clients` holds a script for each
client that is a library, run by the interpreter of its environment; `lm_eval_tasks` small local tasks for lm-eval;
`environments` makes the environments; `suites` knows how each client is run; `reference` computes with transformers
what lm-eval should have got.
"""
