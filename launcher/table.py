"""The processes of a cluster, and what the loss of each one means."""

from dataclasses import dataclass

from common.config import ClusterConfig


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A child: `python -m module` with `arguments`, beside those that every child gets."""

    name: str
    module: str
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """Processes that live and die together. Replacing them begins a new term (tokenizer, scheduler, detokenizer) or a
    new epoch (scheduler, workers), see Go in common/messages; one that does neither is replaced unnoticed."""

    name: str
    processes: tuple[ProcessSpec, ...]
    new_term: bool = False
    new_epoch: bool = False


WORKERS = "workers"
TOKENIZER = "tokenizer"
GATEWAY = "gateway"


def process_table(config: ClusterConfig) -> list[UnitSpec]:
    """All units, the slowest to load first."""
    ranks = range(config.model.tp)
    workers = tuple(ProcessSpec(f"worker-{r}", "worker_proc.main", ("--rank", str(r))) for r in ranks)

    def single(name: str, module: str, **rule: bool) -> UnitSpec:
        return UnitSpec(name, (ProcessSpec(name, module),), **rule)

    return [
        UnitSpec(WORKERS, workers, new_epoch=True),
        single(TOKENIZER, "tokenizer_proc.tokenizer", new_term=True),
        single("detokenizer", "tokenizer_proc.detokenizer", new_term=True),
        single("scheduler", "scheduler_proc.event_loop", new_term=True, new_epoch=True),
        *([single(GATEWAY, "gateway_proc.main")] if config.http.enabled else []),
    ]
