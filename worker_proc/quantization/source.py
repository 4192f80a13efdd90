"""Which projections of a checkpoint become codes, and how they are read."""

from collections.abc import Callable
from dataclasses import replace

from worker_proc.errors import ModelError
from worker_proc.gguf.blocks import keeps_codes
from worker_proc.models.loading import Part, WeightLoader, is_zero
from worker_proc.quantization.rows import quantize_rows
from worker_proc.quantization.scheme import HEAD_SCHEME, ROUNDED_HEAD, ScaleForm, Scheme
from worker_proc.quantization.stored import Unpacked, is_stored, plan_read
from worker_proc.quantization.stored_blocks import BlocksRead, scheme_of_parts
from worker_proc.quantization.stored_config import StoredQuantization
from worker_proc.quantization.target import Quantize, QuantizedTarget, QuantizingTarget


class WeightSource:
    """Plans the reads of quantized matrices with a `WeightLoader`."""

    def __init__(
        self,
        load: WeightLoader,
        scheme: Scheme | None = None,
        stored: StoredQuantization | None = None,
        quantize: Quantize = quantize_rows,
        *,
        dynamic: bool = False,
        in_groups: bool = False,
        keeps_scales: Callable[[Scheme], bool] | None = None,
    ) -> None:
        """`scheme` quantizes plain weights while they are read, `stored` is what the checkpoint has. Not both, but for
        MXFP4, which experts have, and nothing beside them; and where the scheme is W4A8 or W8A8 and fits what is
        stored, which then has such activations. Unless `dynamic`, matrices do not round what they are multiplied with:
        then a scheme that says so is refused, and what a checkpoint says of it left out. `in_groups` says whether those
        in groups are quicker then. Scales become float32 unless `keeps_scales` says of a scheme that they may stay as
        they are."""
        if scheme is not None and scheme.dynamic and not dynamic:
            reason = "activations are rounded by the native CPU kernels alone, for the models that they compute in "
            raise ModelError("quantization", scheme.name, reason + f"bfloat16: take int{scheme.bits}")
        codes = stored is not None and stored.method != "mxfp4"
        if scheme is not None and stored is not None and codes and not stored.fits(scheme):
            raise ModelError("quantization", stored.method, "the checkpoint is quantized already: leave the option out")
        self._load = load
        self._scheme = None if codes else scheme
        self._rounds = stored is not None and scheme is not None and scheme.dynamic  # what it multiplies
        self._in_blocks = stored is not None and stored.method == "gguf"  # each tensor says how it is held
        self._stored = None if self._in_blocks else stored
        self._quantize = quantize
        self._last = Unpacked()
        self._dynamic, self._in_groups, self._keeps_scales = dynamic, in_groups, keeps_scales

    def scheme(self, parts: tuple[Part, ...]) -> Scheme | None:
        """How the matrix that `parts` make together is held; None: plain. Raises ModelError where only some of them
        are stored as codes."""
        if self._in_blocks:
            scheme = self._rounding(scheme_of_parts(self._load.checkpoint, parts))
            if scheme is None or (self._keeps_scales is not None and self._keeps_scales(scheme)):
                return scheme
            return replace(scheme, scale_form=ScaleForm.FLOAT32)
        found = self._stored_scheme(parts)
        return self._scheme if self._stored is None else self._rounding(found or self._scheme)

    def as_stored(self, parts: tuple[Part, ...]) -> Scheme | None:
        """As `scheme`, for a matrix that no option brings into codes."""
        return self.scheme(parts) if self._in_blocks or self._stored_scheme(parts) is not None else None

    def _stored_scheme(self, parts: tuple[Part, ...]) -> Scheme | None:
        if self._stored is None:
            return None
        stored = [is_stored(self._stored, self._load.checkpoint, part) for part in parts]
        if any(stored) != all(stored):
            plain = parts[stored.index(False)].name
            raise ModelError(plain, "not quantized", "projections that are computed together must be alike")
        return self._stored.scheme if all(stored) else None

    def _rounding(self, scheme: Scheme | None) -> Scheme | None:
        """With activations of 8 bits where they are wanted and known."""
        if scheme is None or not self._dynamic:
            return scheme and replace(scheme, dynamic=False)
        is_fp8 = scheme.floating and scheme.bits == 8
        return replace(scheme, dynamic=True) if self._rounds and not is_fp8 else scheme

    def head_scheme(self, head: Part) -> Scheme | None:
        """How the output head is held."""
        if self._scheme is None:
            return self.scheme((head,))
        return ROUNDED_HEAD if self._scheme.dynamic and self._in_groups else HEAD_SCHEME

    def idle_biases(self) -> set[str]:
        """When all reads are planned: biases of zeros that no layer asked for. AutoGPTQ stored one beside every matrix;
        others than zeros would change the numbers. Raises ModelError when one cannot be read."""
        if self._stored is None or self._stored.method != "gptq":
            return set()
        tensors, used = self._load.checkpoint.tensors, self._load.used()
        modules = (name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight"))
        biases = {f"{module}.bias" for module in modules} & (tensors.keys() - used)
        return {name for name in biases if is_zero(tensors[name])}

    def into(self, part: Part, scheme: Scheme, target: QuantizedTarget) -> None:
        """Plan to copy `part` to `target`. Raises ModelError as `WeightLoader.into` does, and for columns that cut a
        group."""
        cols = part.cols or (0, part.shape[1])
        scheme.check_columns(part.name, cols, part.shape[1])
        if self._in_blocks and keeps_codes(self._load.checkpoint.entry(part.name).dtype, scheme):
            entry = self._load.find(part)
            self._load.add(BlocksRead(entry, part, scheme, target), [entry.name])
            return
        if self._stored is None or not is_stored(self._stored, self._load.checkpoint, part):
            self._load.into(replace(part, cols=None), QuantizingTarget(target, scheme, cols, self._quantize))
            return
        read = plan_read(self._stored, self._load.checkpoint, part, target, self._last)
        names = [entry.name for entry in read.entries.values()]
        self._load.add(read, [*names, *read.unread])
