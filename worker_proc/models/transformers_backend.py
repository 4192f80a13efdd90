"""Decoder-only models that the native decoder does not know, computed by `transformers` with our paged attention.

transformers lets a model's attention be replaced by a registered function (its AttentionInterface). Ours takes the
step and the cache as a keyword argument of the model's `forward`, so there is no global state, and since no mask
function is registered under the same name, transformers builds no masks.

Models differ in what they hand to that function and in what they do around it. Rather than trusting a list, loading
ends with a check (`backend_check`) of the loaded weights against the model's own attention.
"""

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from worker_proc.attention.chunks import in_chunks
from worker_proc.attention.interface import AttentionBackend, ForwardBatch
from worker_proc.checkpoint import open_checkpoint
from worker_proc.cpu.library import NativeLibrary
from worker_proc.cpu.modules import NativeHead, pack_modules, plain_bytes
from worker_proc.cpu.sampling import NativeDraws
from worker_proc.cpu.weights import compresses
from worker_proc.errors import ModelError
from worker_proc.kv_cache import KVCache, KVSpec
from worker_proc.models.divided import MODEL_TYPES, DividedModel
from worker_proc.models.families import check_servable
from worker_proc.models.language_part import NAMES, WHOLE, is_multimodal, name_alone
from worker_proc.models.loading import Progress
from worker_proc.models.mixers import Mixers, keeps_states
from worker_proc.models.own_attention import OwnAttention, asks_interface, computes_attention
from worker_proc.models.paged_call import ATTENTION_NAME, AttentionCall, PagedStep
from worker_proc.models.query_temperature import QueryTemperature
from worker_proc.parallel import TensorParallel
from worker_proc.quantization.scheme import Scheme
from worker_proc.weights import Checkpoint

hf: Any = transformers  # its annotations vary between the versions that are supported

_WITHOUT_MEMORY = ("mlp", "moe")  # kinds of layers that know nothing of other tokens (Nemotron-H)
_RECURRENT = ("linear_attention", "mamba", "conv", "hybrid")  # `hybrid` has attention beside it or after it
_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
_CHUNKED = "chunked_attention"
_LAYER_KINDS = ("full_attention", "sliding_attention", _CHUNKED, *_RECURRENT, *_WITHOUT_MEMORY)


class TransformersModel:
    """A transformers model as a `LanguageModel`."""

    def __init__(self, model: Any, attention: AttentionBackend, native: NativeLibrary | None = None) -> None:
        """`model` is a `PreTrainedModel` for causal language modelling, made with what `_implementation` says; `native`
        kernels compute recurrent layers that they know. Raises ModelError if one of its layers does not go through the
        attention interface, or not as its config says."""
        self.model = model
        self.attention = attention
        self.config = model.config.get_text_config(decoder=True)
        takes = inspect.signature(model.forward).parameters
        anything = any(each.kind is each.VAR_KEYWORD for each in takes.values())
        self._keeps_logits = "logits_to_keep" in takes
        self._named = {name for name in ("position_ids", "logits_to_keep", "rhizome_step") if anything or name in takes}
        self._mixers = Mixers(model, native)
        self._own = OwnAttention(model)
        self._asks = model.config._attn_implementation == ATTENTION_NAME
        self._temperature = QueryTemperature(model)
        kinds = getattr(self.config, "layer_types", None) or ()
        self._chunked = frozenset(layer for layer, kind in enumerate(kinds) if kind == _CHUNKED)
        self._chunk = int(self.config.attention_chunk_size) if self._chunked else None
        self._kv_spec, self._places = self._probe()

    @property
    def kv_spec(self) -> KVSpec:
        """See `LanguageModel`."""
        return self._kv_spec

    @property
    def vocab_size(self) -> int:
        """Tokens in the vocabulary."""
        return int(self.config.vocab_size)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """See `LanguageModel`."""
        chunks = in_chunks(batch, self._chunk, cache.page_size) if self._chunk is not None else None
        step = PagedStep(batch, cache, self.attention, self._places, chunked=self._chunked, chunks=chunks)
        with self._mixers.on(batch, cache.states) if cache.states is not None else nullcontext():
            return self._run(batch.token_ids, batch.positions, batch.logit_rows, step)

    @torch.inference_mode()
    def forward_plain(self, token_ids: Tensor) -> Tensor:
        """Float32 logits `[T, vocab]` of one sequence from its start, by the model's own unpaged attention."""
        positions = torch.arange(token_ids.shape[0], device=token_ids.device)
        if not self._asks:
            return self._run(token_ids, positions, positions)
        self.model.set_attn_implementation("eager")
        try:
            with self._temperature.own():
                return self._run(token_ids, positions, positions)
        finally:
            self.model.set_attn_implementation(ATTENTION_NAME)

    def _run(self, token_ids: Tensor, positions: Tensor, rows: Tensor, step: PagedStep | None = None) -> Tensor:
        named: dict[str, Any] = {"position_ids": positions[None], "logits_to_keep": rows}
        if step is not None:
            named["rhizome_step"] = step
        named = {name: value for name, value in named.items() if name in self._named}
        with self._own.on(step) if step is not None else nullcontext():
            output = self.model(input_ids=token_ids[None], use_cache=False, **named)
        logits = output.logits[0] if self._keeps_logits else output.logits[0].index_select(0, rows)
        return logits[:, : self.vocab_size].float()  # type: ignore[no-any-return]

    @torch.inference_mode()
    def _probe(self) -> tuple[KVSpec, dict[int, int]]:
        """Run two tokens to see which attention calls the layers make, and what recurrent ones keep. Returns what the
        cache holds, and whose keys and values each layer reads: those of layers that take an earlier one's are held
        once (Gemma 4)."""
        tokens = torch.arange(2, device=self.model.device)
        step = PagedStep(None, None, self.attention)
        with self._mixers.recorded() as recorder:
            self._run(tokens, tokens, tokens, step)
        self._check_layers({call.layer for call in step.calls}, len(step.calls))
        held: list[AttentionCall] = []
        places: dict[int, int] = {}
        for call in sorted(step.calls, key=lambda call: call.layer):
            _check_window(self.config, call)
            place = next((i for i, other in enumerate(held) if other.key is call.key), len(held))
            if place == len(held):
                held.append(call)
            places[call.layer] = place
        states = tuple(recorder.specs[key] for key in sorted(recorder.specs))
        spec = KVSpec(tuple(call.heads for call in held), self.model.dtype, states=states, chunk=self._chunk)
        return spec, places

    def _check_layers(self, attending: set[int], calls: int) -> None:
        """Every layer must have asked attention, once, or be one whose state is known, or have neither."""
        layers = int(self.config.num_hidden_layers)
        kinds = getattr(self.config, "layer_types", None) or [None] * layers
        bare = {layer for layer, kind in enumerate(kinds) if kind in _WITHOUT_MEMORY}
        bare |= set(getattr(self.config, "cross_attention_layers", None) or ())  # left out where there is no image
        seen = attending | self._mixers.layers | bare
        if seen != set(range(layers)) or calls != len(attending):
            raise ModelError(
                "num_hidden_layers", layers, f"only layers {sorted(seen)} go through the attention interface"
            )


class GreedyTransformersModel(TransformersModel):
    """One whose head is a `NativeHead`, of all tokens. Implements `GreedyModel`."""

    def __init__(self, model: Any, attention: AttentionBackend, native: NativeLibrary) -> None:
        super().__init__(model, attention, native)
        self._head: NativeHead = model.get_output_embeddings()
        self._best = NativeDraws(native).best
        self.gives_logits_of_head = self._passes_on()
        if not self.gives_logits_of_head:
            self._head.screen = None

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """See `LanguageModel`."""
        self._head.filters = batch.filters
        try:
            return super().forward(batch, cache)
        finally:
            self._head.filters = None

    def greedy(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """See `GreedyModel`."""
        if not self.gives_logits_of_head:  # they are scaled or capped, after which others may be the largest
            return self._best(self.forward(batch, cache))[1]
        return self._head.find(lambda: self.forward(batch, cache))

    def _passes_on(self) -> bool:
        """Whether the model gives what its head does, as it is: tried with numbers in its place."""
        tokens = torch.arange(2) % self.vocab_size
        given = 40 * torch.randn(1, len(tokens), self._head.out_features, generator=torch.Generator().manual_seed(1))
        handle = self._head.register_forward_hook(lambda *_: given.clone())
        try:
            return torch.equal(self.forward_plain(tokens), given[0])
        finally:
            handle.remove()


def _check_window(config: Any, call: AttentionCall) -> None:
    """Some models express a sliding window only in the mask, which paged attention does not see."""
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", None) is False:
        window = None
    kinds = getattr(config, "layer_types", None)
    sliding = kinds[call.layer] == "sliding_attention" if kinds else window is not None
    expected = window if sliding else None
    if expected is not None and call.window is None and expected >= config.max_position_embeddings:
        return  # all that there can be (Phi-3.5-MoE)
    if call.window != expected and not (kinds is None and call.window is not None):
        raise ModelError("sliding_window", expected, f"layer {call.layer} asks attention for {call.window} instead")


def load_transformers_model(
    directory: Path,
    raw_config: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    device: torch.device,
    tp: TensorParallel,
    attention: AttentionBackend,
    native: NativeLibrary | None = None,
    quantization: Scheme | None = None,
    compression: str = "auto",
    progress: Progress | None = None,
) -> TransformersModel:
    """See `registry.load_model`. `progress` is called at the start and at the end only."""
    from worker_proc.models.backend_check import check_against_plain_attention

    check_servable(raw_config)
    model_type = raw_config["model_type"]
    if tp.size > 1 and model_type not in MODEL_TYPES:
        reason = (
            f"{model_type} runs through transformers, of which these are split over ranks: {', '.join(MODEL_TYPES)}"
        )
        raise ModelError("tp", tp.size, f"{reason}; use tp = 1")
    checkpoint = open_checkpoint(directory)
    total = checkpoint.nbytes
    if progress is not None:
        progress(0, total)
    divided = DividedModel(tp) if tp.size > 1 else None
    model = _read_model(directory, raw_config, checkpoint, dtype, divided).eval().to(device)
    if native is not None and dtype == torch.bfloat16:
        with torch.inference_mode():
            compress = compresses(native, compression, plain_bytes(model))
            head = model.get_output_embeddings()
            head = head.inner if divided is not None else head
            pack_modules(model, native, compress=compress, scheme=quantization, head=head)
    if progress is not None:
        progress(total, total)
    native = native if dtype == torch.bfloat16 else None
    try:
        if native is not None and isinstance(model.get_output_embeddings(), NativeHead):
            served: TransformersModel = GreedyTransformersModel(model, attention, native)
        else:
            served = TransformersModel(model, attention, native)
        check_against_plain_attention(served, device)
    except ModelError:
        raise
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise ModelError("model_type", model_type, f"a trial run through paged attention failed: {error}") from error
    return served


def _read_model(
    directory: Path,
    raw_config: Mapping[str, Any],
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    divided: DividedModel | None,
) -> Any:
    model_type = str(raw_config["model_type"])
    try:
        config, kind, known, multimodal, whole = _kind_of(directory, raw_config)
        if whole and divided is not None:
            raise ModelError("tp", divided.size, f"{config.model_type} is read as a whole, with its towers; use tp = 1")
        renamed = NAMES if multimodal and not whole else None
        asked = _implementation(config, kind, known)
        # Builds the model on the meta device, streams memory-mapped tensors into it, and recomputes buffers that are
        # not stored, such as rotary frequencies.
        with divided.loading(known[type(config)]) if divided is not None else nullcontext(kind) as kind:
            model, found = kind.from_pretrained(
                directory,
                config=config,
                key_mapping=renamed,
                dtype=dtype,
                attn_implementation=asked,
                use_safetensors=True,
                output_loading_info=True,
                **_LOCAL,
            )
    except ModelError:
        raise
    except (ValueError, OSError, KeyError, RuntimeError, ImportError) as error:
        raise ModelError("model_type", model_type, f"transformers cannot load the model: {error}") from error
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        names = sorted(str(name) for name in found.get(problem) or ())
        if problem == "unexpected_keys":
            names = [name for name in names if not _is_old_mask(name, checkpoint)]
            if multimodal:
                names = [name for name in names if name_alone(name) in checkpoint.tensors]  # the others are of towers
        if names:
            raise ModelError(names[0], problem, f"{len(names)} tensors do not fit the model")
    if whole:
        _drop_towers(model)
    if divided is not None:
        divided.finish(model)
    return model


def _is_old_mask(name: str, checkpoint: Checkpoint) -> bool:
    """Whether a stored tensor is a causal mask, or the number that took the place of masked scores: old versions of
    GPT-Neo, GPT-J and CodeGen kept them beside their weights."""
    entry = checkpoint.tensors.get(name)
    if entry is None or not name.endswith((".bias", ".masked_bias", ".causal_mask")):
        return False
    return not entry.shape or (len(entry.shape) == 4 and entry.shape[:2] == (1, 1) and entry.shape[2] == entry.shape[3])


def _kind_of(directory: Path, raw_config: Mapping[str, Any]) -> tuple[Any, Any, Any, bool, bool]:
    """The configuration, the class that makes its model and those that it knows; whether the checkpoint is multimodal,
    and then whether the model is made as a whole. Raises ModelError, and whatever transformers does."""
    hf.utils.logging.set_verbosity_error()
    hf.utils.logging.disable_progress_bar()
    classes = hf.models.auto.modeling_auto
    config: Any = hf.AutoConfig.from_pretrained(directory, **_LOCAL)
    multimodal = whole = is_multimodal(config.to_dict())
    if multimodal:
        alone = hf.AutoConfig.for_model(**raw_config)
        if type(alone) in classes.MODEL_FOR_CAUSAL_LM_MAPPING and config.model_type not in WHOLE:
            config, whole = alone, False
    kind, known = hf.AutoModelForCausalLM, classes.MODEL_FOR_CAUSAL_LM_MAPPING
    if whole or type(config) not in known:  # (Mistral 4 is no part of another model, and among these)
        kind, known = hf.AutoModelForImageTextToText, classes.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    _check_config(config, known, str(raw_config["model_type"]))
    return config, kind, known, multimodal, whole


def _implementation(config: Any, kind: Any, known: Mapping[type, Any]) -> str | None:
    """Of attention, for a model whose class says that it asks for it, or one of whose modules does; None, which leaves
    it to transformers, where all that compute it do that by themselves. Raises ModelError before weights are read."""
    kinds = set(getattr(config.get_text_config(decoder=True), "layer_types", None) or ()).intersection(_RECURRENT)
    if not kinds and getattr(known[type(config)], "_supports_attention_backend", False):
        return ATTENTION_NAME
    modules = list(_without_weights(config, kind).modules())
    if kinds and not any(map(keeps_states, modules)):
        raise ModelError("layer_types", kinds.pop(), f"how layers of {config.model_type} keep states is not known")
    if any(map(keeps_states, modules)):
        return ATTENTION_NAME
    if any(map(computes_attention, modules)):
        return None
    if not any(map(asks_interface, modules)):
        reason = "its layers do not go through transformers' attention interface"
        raise ModelError("model_type", config.model_type, reason)
    if "position_ids" not in inspect.signature(known[type(config)].forward).parameters:
        raise ModelError(
            "model_type", config.model_type, "it counts positions by itself, as if a step were one sequence"
        )
    return ATTENTION_NAME


def _without_weights(config: Any, kind: Any) -> nn.Module:
    """A model that takes no memory. Raises whatever transformers does."""
    with torch.device("meta"):
        model: nn.Module = kind.from_config(deepcopy(config))
    return model


def has_modules(directory: Path, raw_config: Mapping[str, Any], kind_of: Callable[[nn.Module], bool]) -> bool:
    """Whether a model has modules of a kind, before any weight is read: it is made without memory. What transformers
    cannot make has none; loading says why."""
    try:
        config, kind, *_ = _kind_of(directory, raw_config)
        model = _without_weights(config, kind)
    except (ModelError, ValueError, OSError, KeyError, RuntimeError, ImportError):
        return False
    return any(map(kind_of, model.modules()))


def _drop_towers(model: Any) -> None:
    """Free what is neither the language model nor its head, nor around them."""
    kept = {*model.get_decoder().modules(), *model.get_output_embeddings().modules()}

    def drop(parent: nn.Module) -> None:
        for name, child in parent.named_children():
            if kept.isdisjoint(child.modules()):
                setattr(parent, name, None)
            elif child not in kept:
                drop(child)

    drop(model)


def _check_config(config: Any, known: Mapping[type, Any], model_type: str) -> None:
    """Refuse by name what cannot be right, before any weight is read. `known` are the classes of models by config."""
    if type(config) not in known:
        raise ModelError("model_type", model_type, "transformers has no causal language model of this type")
    config = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        raise ModelError("is_encoder_decoder", True, "only decoder-only models are served")
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in _LAYER_KINDS:
            raise ModelError("layer_types", kind, f"only layers of these kinds are served: {', '.join(_LAYER_KINDS)}")
    for key, causal in (("is_causal", True), ("use_bidirectional_attention", False)):
        if getattr(config, key, causal) not in (causal, None):
            raise ModelError(key, getattr(config, key), "only causal attention is served")
