"""AdamW whose replicas exchange compressed gradients or momenta, and whose own state may be kept in few bits.

What is exchanged is a scheme (``tq.train.schemes``). Its means come from a process group, from nobody (one rank still
quantizes what it would have sent), or from the other simulated workers of ``step_together``."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tq.quant.codec import Codec
from tq.quant.rotation import derive_seed, step_seed
from tq.train import captured, checkpoint, compiled, fused, unfused
from tq.train.adamw import check_dense, clip_, flat_gradients, what_is_not_finite
from tq.train.collectives import WARMUP, Averaged, Codecs, Mean, mean_in_process, over_group
from tq.train.options import check, check_capturable, check_parameter
from tq.train.schemes import SCHEMES, Bucket, Exchanged, Scheme, adam, side_by_side
from tq.train.shards import gradient_norm, local, local_gradient, rank_and_size, sharded_like
from tq.train.state import MOMENTS, Run, Store, lent_once

VARIANT = "gradient"  # shipped default
UNCODED = ("exact", "local")  # variants that quantize nothing

Step = Generator[list[Mean], list[Averaged], None]


class TurboQuantAdamW(Optimizer):
    """Drop-in for ``torch.optim.AdamW`` that exchanges and keeps quantized values.

    Parameters without a gradient are left alone on one rank, with "local" and where they do not require one; else they
    count as zeros. Of DTensors (FSDP2) each rank updates and keeps its own shards; their saved state continues on any
    number of ranks (``tq.train.checkpoint``). ``bytes_sent``: what this rank has sent so far.

    bf16 and fp16 weights have no fp32 copy and are rounded to nearest after each step: an update below half a unit of a
    weight's last place (1/512 to 1/256 of it in bf16) vanishes. At small learning rates keep fp32 weights and compute
    in bf16 (autocast, or FSDP2's ``MixedPrecisionPolicy``), or set ``stochastic_rounding``.

    Under ``torch.amp.GradScaler`` all ranks skip a step together, but only those whose own gradients overflowed lower
    their scale. That is exact, as each divides by its own; for equal scales use ``unscale_`` before ``step`` and
    ``torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler``.

    Args:
        params: tensors or parameter groups, as AdamW's; real, on one device, with dense gradients; moments are fp32.
        lr: learning rate >= 0; may be a tensor with ``capturable``.
        betas: decay rates of m and v per step, in [0, 1).
        eps: added to the root of v, >= 0.
        weight_decay: decoupled, >= 0; the step multiplies weights by 1 - lr * weight_decay.
        codec: of what is sent, or a pair for the phases of an all-reduce. None: 4 bits, blocks of 128, unbiased (for
            schemes with state per rank, such as error feedback, least squares). NaN and Inf pass through it.
        variant: a name in ``SCHEMES`` or a ``Scheme``. None: "gradient"; DTensor parameters go with "local" only.
        state: bits of (m, v) between steps: m 2-8, v 2, 4 or 8; None keeps fp32. (4, 8) takes 1.55 bytes per parameter.
            Moments of a parameter without a gradient are requantized with their neighbours, so they move a little.
        group: process group; None is the default group where ``torch.distributed`` is initialised.
        warmup: first steps with exact exchange, in which chance outweighs quantization; at least one with "frozen-v"
            and "one-bit-adam". None: ``WARMUP``, 50, and 0 for "exact" and "local".
        max_norm: largest global norm of the gradient that enters the moments; None does not clip. Clip here and not
            before: what a rank sees before the exchange is not yet the gradient.
        v_every: K of "synced-v", steps between two averages of v.
        correct_v: subtract from v what the codec's noise is known to add to it (with "gradient" only).
        bucket_elements: parameters of a group pass in runs of about this many elements. With "local", or "exact" on one
            rank, at most one run is held in fp32 beside the state; else all gradients are.
        maximize: as AdamW's.
        stochastic_rounding: round bf16 weights up or down at random, unbiased.
        nonfinite: "raise", or "propagate": weights take NaN or Inf, and gradients are not read a second time to look
            for them. A step that needs their norm (``max_norm``, a GradScaler, an exchange) looks anyway.
        impl: "auto", "reference" (a pass per operation), "cpu" (one pass, the same bits) or "triton" (one pass, GPU).
        capturable: nothing waits on the host, so a CUDA graph can hold the step. Goes with parameters on a GPU, with
            "local", or "exact" on one rank, and nonfinite="propagate". Steps that a GradScaler skips, or whose norm is
            not finite with ``max_norm``, are skipped on the device. State that is read is a copy, up to date then.
    Raises:
        TypeError, ValueError: an argument, parameter or gradient is not as above (there is no amsgrad).
        FloatingPointError: in ``step`` on every rank, before any change: a gradient is not finite (no GradScaler).
        RuntimeError: in ``step``: ``impl`` or ``capturable`` does not cover it.
    References:
        AdamW (Loshchilov & Hutter 2019); states in 8 bits (Dettmers et al. 2022) and in 4 (Li, Chen & Zhu 2023).
    Example:
        >>> import torch
        >>> from tq.train.optim import TurboQuantAdamW
        >>> model = torch.nn.Linear(256, 256)
        >>> optimizer = TurboQuantAdamW(model.parameters(), lr=1e-3, state=(4, 8))
        >>> model(torch.ones(1, 256)).sum().backward()
        >>> optimizer.step()
        >>> round(optimizer.state_nbytes / sum(p.numel() for p in model.parameters()), 2)  # bytes per parameter
        1.55
    """
    _step_supports_amp_scaling = True  # GradScaler hands over its scale and what it found

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        codec: Codec | Codecs | None = None,
        variant: str | Scheme | None = None,
        state: tuple[int, int] | None = None,
        group: dist.ProcessGroup | None = None,
        warmup: int | None = None,
        *,
        max_norm: float | None = None,
        v_every: int = 50,
        correct_v: bool = False,
        bucket_elements: int = 1 << 22,
        maximize: bool = False,
        stochastic_rounding: bool = False,
        nonfinite: str = "raise",
        impl: str = "auto",
        capturable: bool = False,
    ) -> None:
        check(
            lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, warmup=warmup, max_norm=max_norm, v_every=v_every,
            bucket_elements=bucket_elements, nonfinite=nonfinite, impl=impl, state=state,
        )  # fmt: skip
        variant = VARIANT if variant is None else variant
        if isinstance(variant, str) and variant not in SCHEMES:
            raise ValueError(f"variant must be one of {', '.join(SCHEMES)}, or a Scheme; got {variant!r}")
        if not isinstance(variant, str | Scheme):
            raise TypeError(f"variant must be one of {', '.join(SCHEMES)}, or a Scheme; got {variant!r}")
        self.scheme = SCHEMES[variant] if isinstance(variant, str) else variant
        self.variant = variant if isinstance(variant, str) else self.scheme.name
        warmup = (0 if self.variant in UNCODED else WARMUP) if warmup is None else warmup
        if self.scheme.needs_warmup and warmup < 1:
            raise ValueError(f"variant={self.variant!r} keeps the v of its warm-up: warmup must be >= 1, got {warmup}")
        if correct_v and self.variant != "gradient":
            raise ValueError(f"correct_v=True goes with variant='gradient', got {self.variant!r}")
        if state is not None and self.scheme.moments is not adam:
            raise ValueError(f"state={state} goes with schemes that exchange gradients, got {self.variant!r}")
        if capturable:
            check_capturable(variant=self.variant, nonfinite=nonfinite, warmup=warmup, impl=impl)
        self.codecs = self.scheme.pair(codec)
        self.state_bits, self.group, self.warmup, self.max_norm = state, group, warmup, max_norm
        self.v_every, self.correct_v, self.bucket_elements = v_every, correct_v, bucket_elements
        self.stochastic_rounding, self.nonfinite, self.impl = stochastic_rounding, nonfinite, impl
        self.capturable = capturable
        self._counter: captured.Counter | None = None  # of steps that only the device has counted
        self.simulated: tuple[int, int] | None = None  # (rank, ranks) among workers of one process
        self._steps_done, self.bytes_sent = 0, 0.0
        self._stores: list[list[tuple[list[Tensor], Store]]] = []
        given = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, given)
        self._number = compiled.register(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """``param_group`` as in torch; its parameters: dense floating-point tensors on the device of the others."""
        if self.scheme.needs_warmup and self.steps_done >= self.warmup:
            raise ValueError(f"variant={self.variant!r} has no v for parameters that come after its warm-up")
        captured.settle(self)
        super().add_param_group(param_group)
        parameters = self.param_groups[-1]["params"]
        device = next((p.device for group in self.param_groups for p in group["params"]), None)
        try:
            for parameter in parameters:
                check_parameter(parameter, device, None if self.scheme.exchange is None else self.variant)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        runs: list[list[Tensor]] = []
        run: list[Tensor] = []
        size = 0
        for parameter in parameters:
            numel = local(parameter).numel()
            if run and size + numel > self.bucket_elements:
                runs.append(run)
                run, size = [], 0
            run.append(parameter)
            size += numel
        runs += [run] if run else []
        self._stores.append([(run, Store([local(p).shape for p in run], self.state_bits)) for run in runs])
        if self._counter is not None:
            self._counter.set(self)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles; torch's own leaves out what subclasses have."""
        captured.settle(self)
        ours = {name: value for name, value in self.__dict__.items() if not name.startswith("_optimizer_")}
        ours.pop("step", None)  # torch puts a wrapper there
        ours["_counter"] = None
        return {**ours, **super().__getstate__(), "state": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._number = compiled.register(self)

    @property
    def steps_done(self) -> int:
        """Steps that changed something; with ``capturable`` it waits for the device, which counts them."""
        captured.settle(self)
        return self._steps_done

    @property
    def rank_and_size(self) -> tuple[int, int]:
        """(rank, ranks) among those that exchange."""
        return rank_and_size(self.group, self.simulated)

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """By parameter, as AdamW's (``tq.train.checkpoint``): views of what the buckets hold, made at each access."""
        return defaultdict(dict, self._by_parameter())

    @state.setter
    def state(self, value: Any) -> None:
        """torch sets an empty one: what there is lies in the buckets."""

    def _by_parameter(self) -> dict[Tensor, dict[str, Any]]:
        buckets = [(parameters, store) for _, parameters, store in self._buckets()]
        with lent_once([store for _, store in buckets]):
            return dict(checkpoint.by_parameter(buckets, self._own_key, self.steps_done, self.bytes_sent))

    @property
    def _own_key(self) -> str | None:
        rank, ranks = self.rank_and_size
        return f"rank{rank}of{ranks}" if self.scheme.per_rank else None

    @property
    def state_nbytes(self) -> int:
        """Bytes of the state between steps."""
        return sum(store.nbytes for _, _, store in self._buckets())

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update; returns the closure's loss, if one is given."""
        if self.simulated is not None and self.simulated[1] > 1:
            raise RuntimeError(f"a worker of {self.simulated[1]} in this process: step_together steps all of them")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if torch.compiler.is_dynamo_compiling():
            compiled.step(self, self._number)
        else:
            self.eager_step()
        return loss

    def eager_step(self) -> None:
        """The step itself, which no graph looks into."""
        together = self.simulated is None and self.rank_and_size[1] > 1
        run, answers = self._step(), None
        while (asked := _next(run, answers)) is not None:
            answers = over_group(asked, self.group) if together else [mean_in_process([each])[0] for each in asked]

    def _buckets(self) -> Iterator[Run]:
        for group, stores in zip(self.param_groups, self._stores, strict=True):
            for parameters, store in stores:
                yield Run(group, parameters, store)

    def _bucket(self, number: int, run: Run) -> Bucket:
        gradient, scaled = flat_gradients(run.parameters), getattr(self, "grad_scale", None)
        gradient = gradient.neg_() if run.group.get("maximize") else gradient
        rank, ranks = self.rank_and_size
        return Bucket(
            shapes=run.store.shapes, gradient=gradient if scaled is None else gradient.div_(scaled),
            stored=run.store.get, step=run.store.done + 1, betas=run.group["betas"], codecs=self.codecs,
            key=(self.steps_done, number), rank=rank, ranks=ranks, every=self.v_every,
        )  # fmt: skip

    def _step(self) -> Step:
        """The step, which asks for means on its way: for those of all buckets together."""
        scheme = SCHEMES["exact"] if self._steps_done < self.warmup else self.scheme
        if self.impl in ("cpu", "triton"):  # what they do not cover raises before anything moves
            for run in self._buckets():
                self._kernels(scheme, run, [p.grad for p in run.parameters])
        if scheme.exchange is None or (scheme is SCHEMES["exact"] and self.rank_and_size[1] == 1):
            self._local_step(scheme) if not self.capturable else captured.step(self)
            return
        if self.capturable:
            raise RuntimeError(f"capturable=True goes with variant 'local' among ranks, got {self.variant!r}")
        buckets = [self._bucket(number, run) for number, run in enumerate(self._buckets())]
        finite, limit = True, math.inf if self.max_norm is None else self.max_norm
        if scheme.sends == "momentum":
            finite, limit = clip_([b.gradient for b in buckets], limit), math.inf
        found = yield from side_by_side([scheme.exchange(bucket) for bucket in buckets])
        if not (clip_([each.gradient for each in found], limit) and finite):
            self._refuse()
            return
        for number, (run, bucket) in enumerate(zip(self._buckets(), buckets, strict=True)):
            with self._state_at_hand(number, run.store):
                self._update(scheme, run, bucket, found.pop(0))
            bucket.gradient = bucket.gradient.new_empty(0)
        self._steps_done += 1

    def _local_step(self, scheme: Scheme) -> None:
        """A step without exchange: bucket by bucket, so that no more than one is held."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        scaled, length = getattr(self, "grad_scale", None), 0.0
        plain = scaled is None and self.max_norm is None
        if not (plain and (self.nonfinite == "propagate" or fused.surely_finite(self.impl, parameters))):
            norm = gradient_norm(parameters)
            length = (norm if scaled is None else norm / scaled).item()
        if not math.isfinite(length):
            self._refuse()
            return
        check_dense(parameters)
        factor = min(1.0, self.max_norm / (length + 1e-6)) if self.max_norm is not None else 1.0
        for number, run in enumerate(self._buckets()):
            gradients = [local_gradient(p) for p in run.parameters]
            with self._state_at_hand(number, run.store):
                if (kernels := self._kernels(scheme, run, gradients)) is not None:
                    fused.step(
                        kernels, run.store, run.parameters, gradients, run.group, seed=self._seed(number, run.store),
                        divisor=1.0 if scaled is None else float(scaled), factor=factor,
                        negated=bool(run.group.get("maximize")),
                    )  # fmt: skip
                    continue
                bucket = self._bucket(number, run)
                if factor < 1.0:
                    bucket.gradient.mul_(factor)
                self._update(scheme, run, bucket, Exchanged(bucket.gradient, {}))
        self._steps_done += 1

    @contextmanager
    def _state_at_hand(self, number: int, store: Store) -> Iterator[None]:
        """While a bucket is updated, its state lies on the device."""
        yield

    def _kernels(self, scheme: Scheme, run: Run, gradients: Sequence[Tensor | None]) -> ModuleType | None:
        """The kernels that update this bucket in one pass, if they can."""
        fits = scheme.moments is adam and not (self.correct_v and scheme is self.scheme)
        if not fits and self.impl in ("cpu", "triton"):
            raise RuntimeError(f"impl={self.impl!r} covers Adam's moments without correct_v, got {self.variant!r}")
        return fused.kernels(self.impl, run.parameters, gradients) if fits else None

    def _seed(self, number: int, store: Store) -> int | None:
        """Of the rounding of a bucket's weights in its next step, alike on all ranks."""
        seed = self._weights_seed(number)
        return None if seed is None else step_seed(seed, store.done)

    def _weights_seed(self, number: int) -> int | None:
        """Which the seeds of all steps are under."""
        return derive_seed(0, "weights", number) if self.stochastic_rounding else None

    def _refuse(self) -> None:
        if getattr(self, "found_inf", None) is None:
            raise FloatingPointError(f"step {self.steps_done}: {what_is_not_finite(self.param_groups)}")

    def _update(self, scheme: Scheme, run: Run, bucket: Bucket, found: Exchanged) -> None:
        """The parameters of a bucket move, and its state is committed."""
        group, parameters, store = run
        alone = self.rank_and_size[1] == 1 or scheme.exchange is None
        unused = [i for i, p in enumerate(parameters) if p.grad is None and (alone or not p.requires_grad)]
        number = bucket.key[1]
        self.bytes_sent += bucket.sent
        pieces: list[Tensor | None] = [
            None if i in unused else x for i, x in enumerate(found.gradient.split(store.sizes))
        ]
        if (kernels := self._kernels(scheme, run, pieces)) is not None:
            fused.step(kernels, store, parameters, pieces, group, seed=self._seed(number, store))
            store.tensors |= found.renewed
            return
        noisy = self.codecs if self.correct_v and scheme is self.scheme else None
        unfused.step(
            scheme, bucket, found, store, parameters, group, unused=unused, noisy=noisy, seed=self._seed(number, store)
        )

    def _settings(self) -> dict[str, Any]:
        """What must agree for a state to continue here."""
        rank, ranks = self.rank_and_size
        return {
            "variant": self.variant, "codecs": checkpoint.codec_fields(self.codecs),
            "state": list(self.state_bits or ()), "warmup": self.warmup, "v_every": self.v_every,
            "correct_v": self.correct_v, "max_norm": self.max_norm,
            "buckets": [[list(shape) for shape in store.shapes] for _, _, store in self._buckets()],
            **({"rank": rank, "ranks": ranks} if self.scheme.per_rank else {}),
        }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and texts, which ``torch.load(weights_only=True)`` reads. "state" and "param_groups" are as
        AdamW's, for ``torch.distributed.checkpoint``; the whole form is added unless parameters are sharded. The
        tensors are those of the optimizer, in either form the same ones."""
        stores = [store for _, _, store in self._buckets()]
        with lent_once(stores):
            found: dict[str, Any] = super().state_dict()
            if not any(isinstance(p, DTensor) for group in self.param_groups for p in group["params"]):
                found[checkpoint.NOTE] = checkpoint.whole(stores, self._settings(), self.steps_done, self.bytes_sent)
        return found

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """``state_dict``: its own or that of a ``torch.optim.AdamW`` over the same parameters; else ``ValueError``. The
        whole form requires the settings that it was saved with. A scheme with residuals or moments per rank continues
        on the same rank of as many, any other on all ranks, however many."""
        captured.settle(self)
        buckets = [(run, Store(store.shapes, self.state_bits)) for _, run, store in self._buckets()]
        device = self._load_device()
        if checkpoint.NOTE in state_dict:
            loaded = checkpoint.read_whole(state_dict, self._settings(), buckets, device)
        else:
            groups = [len(group["params"]) for group in self.param_groups]
            loaded = checkpoint.read_by_parameter(state_dict, groups, buckets, device, self._own_key)
        super().load_state_dict({"state": {}, "param_groups": loaded.param_groups})
        self._steps_done, self.bytes_sent = loaded.steps_done, loaded.bytes_sent
        for (_, _, store), new in zip(self._buckets(), loaded.stores, strict=True):
            store.take(new.done, new.steps, new.tensors)
        if self._counter is not None:
            self._counter.set(self)

    def _load_device(self) -> torch.device:
        """Where a state goes that is loaded."""
        return next((p.device for group in self.param_groups for p in group["params"]), torch.device("cpu"))

    def moments(self, parameter: Tensor) -> tuple[Tensor, Tensor]:
        """(m, v) of one parameter as fp32 copies, laid out as it is; zeros before the first step."""
        captured.settle(self)
        for _, run, store in self._buckets():
            for number, p in enumerate(run):
                if p is parameter:
                    start, end = store.starts[number], store.starts[number] + store.sizes[number]
                    kept = [store.get(name) for name in MOMENTS]
                    zeros = torch.zeros(store.numel, dtype=torch.float32, device=p.device)
                    flat = [zeros if x is None else x for x in kept]
                    m, v = (x[start:end].reshape(store.shapes[number]).clone() for x in flat)
                    return sharded_like(p, m), sharded_like(p, v)
        raise ValueError(f"not a parameter of this optimizer: tensor of shape {tuple(parameter.shape)}")


def step_together(optimizers: Sequence[TurboQuantAdamW]) -> None:
    """One step of the workers of a simulated group, which were numbered by ``simulate_ranks``; else ValueError."""
    places = [optimizer.simulated for optimizer in optimizers]
    if places != [(rank, len(optimizers)) for rank in range(len(optimizers))]:
        raise ValueError(f"workers must be numbered by simulate_ranks, all of them and in order; got {places}")
    runs = [optimizer._step() for optimizer in optimizers]
    answers: list[list[Averaged] | None] = [None for _ in runs]
    with torch.no_grad():
        while any(asked := [_next(run, given) for run, given in zip(runs, answers, strict=True)]):
            means = [mean_in_process(each) for each in zip(*asked, strict=True)]
            answers = [list(given) for given in zip(*means, strict=True)]
    for optimizer in optimizers:
        optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers look for it

def simulate_ranks(optimizers: Sequence[TurboQuantAdamW]) -> None:
    """Makes these optimizers, one for each replica of a model in this process, the ranks of one group."""
    for rank, optimizer in enumerate(optimizers):
        optimizer.simulated = rank, len(optimizers)

def _next(run: Step, answers: list[Averaged] | None) -> list[Mean] | None:
    """What a step asks for next, None at its end."""
    try:
        return next(run) if answers is None else run.send(answers)
    except StopIteration:
        return None
