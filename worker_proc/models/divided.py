"""A transformers model of which each tensor-parallel rank holds and computes its part, as `division` says.

Weights are cut while they are loaded, one by one, so that no rank ever holds the whole model. Layers whose outputs are
parts of a sum, the embedding and the head are wrapped in modules that talk to the other ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from worker_proc.models.division import Cut, Division, Share, divide
from worker_proc.parallel import TensorParallel

# Those whose parts have been seen to make the whole.
MODEL_TYPES = (
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
    "lfm2",
    "lfm2_moe",
    "granitemoehybrid",
    "bamba",
    "nemotron_h",
    "falcon_h1",
    "apertus",
    "arcee",
    "cohere",
    "cohere2",
    "cwm",
    "deepseek_v2",
    "deepseek_v3",
    "dots1",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "gemma4_text",
    "gemma4_unified_text",
    "glm",
    "glm4",
    "glm4_moe",
    "granitemoe",
    "helium",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "mamba2",
    "minimax_m2",
    "nemotron",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "seed_oss",
    "solar_open",
    "stablelm",
    "starcoder2",
    "vaultgemma",
)


class Summed(nn.Module):
    """A layer whose output is the sum of what the ranks make."""

    def __init__(self, inner: Any, tp: TensorParallel) -> None:
        super().__init__()
        self.inner = inner
        self._tp = tp

    def forward(self, *args: Any, **named: Any) -> Tensor:
        return self._tp.all_reduce(self.inner(*args, **named).contiguous())


class SharedNorm(nn.Module):
    """A gated RMSNorm (Mamba-2) that goes over the numbers of several ranks: this one has `[..., width]` of a group."""

    def __init__(self, norm: Any, groups: int, group: int, size: int, tp: TensorParallel) -> None:
        """`norm` holds this rank's weights; there are `groups` of `size` numbers, and this rank is in one of them."""
        super().__init__()
        self.weight = norm.weight
        self.variance_epsilon: float = norm.variance_epsilon
        self._groups, self._group, self._size, self._tp = groups, group, size, tp

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        gated = hidden_states.float() * nn.functional.silu(gate.float())
        normed = gated * self.factors(gated.square().sum(-1))[..., None]
        weighted: Tensor = self.weight * normed.to(hidden_states.dtype)
        return weighted

    def factors(self, squares: Tensor) -> Tensor:
        """By what each token's numbers are multiplied: of the sums of their squares on this rank, float32 `[...]`."""
        sums = squares.new_zeros(self._groups, *squares.shape)
        sums[self._group] = squares
        return (self._tp.all_reduce(sums)[self._group] / self._size + self.variance_epsilon).rsqrt()


class RankedNorm(nn.Module):
    """An RMSNorm over the numbers of all ranks, each of which has as many; those that several have count as often."""

    def __init__(self, norm: Any, tp: TensorParallel) -> None:
        super().__init__()
        self.weight = norm.weight
        self._eps: float = norm.variance_epsilon
        self._tp = tp

    def forward(self, x: Tensor) -> Tensor:
        squares = self._tp.all_reduce(x.float().square().sum(-1, keepdim=True))
        normed = x.float() * (squares / (x.shape[-1] * self._tp.size) + self._eps).rsqrt()
        weighted: Tensor = (self.weight.float() * normed).to(x.dtype)
        return weighted


class VocabularyEmbedding(nn.Module):
    """The rows of the tokens from `first` on; others come from their ranks."""

    def __init__(self, inner: nn.Embedding, first: int, tp: TensorParallel) -> None:
        super().__init__()
        inner.padding_idx = None  # would have to be a row of this rank; gradients alone ask for it
        self.inner = inner
        self._first, self._tp = first, tp

    def forward(self, token_ids: Tensor) -> Tensor:
        local = token_ids - self._first
        elsewhere = (local < 0) | (local >= len(self.inner.weight))
        rows = self.inner(local.masked_fill_(elsewhere, 0))
        return self._tp.all_reduce(rows.masked_fill_(elsewhere[..., None], 0))


class VocabularyHead(nn.Module):
    """Makes logits of this rank's tokens; rank 0 gets `[1, S, vocabulary]`, others nothing, `[1, 0, ...]`."""

    def __init__(self, inner: nn.Linear, tp: TensorParallel) -> None:
        super().__init__()
        self.inner = inner
        self._tp = tp

    @property
    def weight(self) -> Tensor:
        """This rank's: Mamba looks at its dtype."""
        weight: Tensor = self.inner.weight
        return weight

    def forward(self, hidden: Tensor) -> Tensor:
        return self._tp.gather_to_rank0(self.inner(hidden)[0])[None]


class DividedModel:
    """Makes one rank's part of a model."""

    def __init__(self, tp: TensorParallel) -> None:
        self._tp = tp
        self._share = Share(tp.rank, tp.size)
        self._divisions: list[tuple[nn.Module, str, Any, Division]] = []  # parent, name there, module
        self._cuts: dict[tuple[nn.Module, str], tuple[Cut, torch.Size]] = {}  # and the shape of the whole

    @property
    def size(self) -> int:
        """Ranks."""
        return self._tp.size

    @contextmanager
    def loading(self, kind: Any) -> Iterator[Any]:
        """Gives a class like `kind`, of which one model is to be made: every weight that its modules are given in here
        becomes this rank's part of it. Raises ModelError naming what cannot be divided."""
        divided = self

        def __init__(model: Any, *args: Any, **named: Any) -> None:
            kind.__init__(model, *args, **named)
            divided._plan(model)

        def cut(module: nn.Module, name: str, given: nn.Parameter) -> nn.Parameter | None:
            found = self._cuts.get((module, name))
            if found is None or given.is_meta or given.shape != found[1]:  # that of a tied head is cut already
                return None
            part = nn.Parameter(found[0].of(given.detach()), requires_grad=False)
            part.__dict__.update(given.__dict__)  # where transformers notes that it has been read
            return part

        register: Any = register_module_parameter_registration_hook  # its annotation forgets what hooks give
        handle = register(cut)
        try:
            yield type(kind.__name__, (kind,), {"__init__": __init__, "__module__": kind.__module__})
        finally:
            handle.remove()

    def finish(self, model: Any) -> None:
        """What has been loaded computes its part, and no more than that."""
        for (module, name), (how, whole) in self._cuts.items():
            tensor = getattr(module, name)
            if tensor.shape == whole:  # a buffer, or given in another way
                part = how.of(tensor.detach())
                held = nn.Parameter(part, requires_grad=False) if name in module._parameters else part
                setattr(module, name, held)
            if isinstance(module, nn.Conv1d) and name == "weight":
                module.in_channels = module.out_channels = module.groups = len(module.weight)
        for parent, name, module, division in self._divisions:
            self._finish(parent, name, module, division)
        self._finish_ends(model)
        self._divisions.clear()  # the model's class knows of this, and layers may be replaced: their weights must go
        self._cuts.clear()

    def _plan(self, model: Any) -> None:
        self._plan_below(model)
        for end in (model.get_input_embeddings(), model.get_output_embeddings()):
            for name in ("weight", "bias"):
                self._cut(end, name, self._share.of_vocabulary(model.config.vocab_size))

    def _plan_below(self, parent: nn.Module) -> None:
        for name, module in parent.named_children():
            division = divide(module, self._share)
            if division is None:
                self._plan_below(module)
                continue
            self._divisions.append((parent, name, module, division))
            for path, how in division.cuts.items():
                above, _, leaf = path.rpartition(".")
                if above and getattr(module, above, None) is None:
                    continue
                self._cut(module.get_submodule(above), leaf, how)

    def _cut(self, module: nn.Module, name: str, how: Cut) -> None:
        tensor = getattr(module, name, None)
        if tensor is not None:
            self._cuts[module, name] = how, tensor.shape

    def _finish(self, parent: nn.Module, name: str, module: Any, division: Division) -> None:
        for size, value in division.sizes.items():
            if hasattr(module, size):
                setattr(module, size, value)
        if division.norm:
            norm, width = module.norm, len(module.norm.weight)
            ranks = getattr(norm, "group_size", width * self._tp.size) // width
            groups, group = self._tp.size // ranks, self._tp.rank // ranks
            module.norm = SharedNorm(norm, groups, group, ranks * width, self._tp)
        for part in division.norms:
            setattr(module, part, RankedNorm(getattr(module, part), self._tp))
        last = getattr(module, division.out) if division.out else module
        if self._tp.rank and getattr(last, "bias", None) is not None:
            last.bias = None  # is added once
        if division.ends:
            setattr(parent, name, Summed(module, self._tp))
        else:
            setattr(module, division.out, Summed(last, self._tp))

    def _finish_ends(self, model: Any) -> None:
        first = self._share.of_vocabulary(model.config.vocab_size).spans[0][0]
        model.set_input_embeddings(VocabularyEmbedding(model.get_input_embeddings(), first, self._tp))
        model.set_output_embeddings(VocabularyHead(model.get_output_embeddings(), self._tp))
        for module in model.modules():  # what is said about a layer is true of its weight again
            if isinstance(module, nn.Linear):
                module.out_features, module.in_features = module.weight.shape
            if isinstance(module, nn.Embedding):
                module.num_embeddings = len(module.weight)
