"""AdamW whose replicas exchange compressed gradients or momenta, and whose own state may be kept in few bits.

What is exchanged is a rule (``tq.train.rules``); who answers is a process group, nobody (one rank still codes what it
would have sent), or the other simulated workers of ``step_together``.

Refused: sparse and complex gradients, amsgrad, maximize, parameters on several devices. A gradient that is not finite
raises before anything has changed, on every rank; under a GradScaler the step is skipped on every rank instead.

Sources: AdamW (Loshchilov & Hutter 2019); states in 8 bits (Dettmers et al. 2022) and in 4 (Li, Chen & Zhu 2023).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from tq.quant.bounds import unbiased_nmse
from tq.quant.codec import Code, Codec
from tq.quant.logscale import LogCodec
from tq.train.collectives import Codecs, Mean, over_group, simulate
from tq.train.rules import RULES, Bucket, New, Rule, adam

FORMAT = 2  # of TurboQuantAdamW.state_dict
VARIANT = "gradient"  # shipped default
ROTATIONS = 64  # that a low-bit momentum goes through in turn: signs are cached, and no error repeats soon
_ADAMW = {"step", "exp_avg", "exp_avg_sq"}  # state of torch.optim.AdamW
_ADAMW_ONLY = {"amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"}
_V_FLOOR = 0.1  # what noise correction leaves of v at least


class _Store:
    """State of a bucket between steps; m and v may lie there in few bits.

    done: steps of the bucket; steps: of each of its parameters, which may have joined later.
    """

    def __init__(self, shapes: list[torch.Size], bits: tuple[int, int] | None) -> None:
        self.shapes, self.done, self.steps = shapes, 0, [0] * len(shapes)
        self.tensors: dict[str, Tensor] = {}
        self.numel = sum(shape.numel() for shape in shapes)
        self.v_codec = None if bits is None else LogCodec(bits[1])
        self.m_codec = None
        if bits is not None:
            scale_dtype = torch.bfloat16 if bits[0] <= 6 else torch.float32
            self.m_codec = Codec(bits[0], rounds=1, scale_dtype=scale_dtype, nonfinite="propagate")

    def _m_codec(self, step: int) -> Codec:
        assert self.m_codec is not None
        return self.m_codec.derive("m", step % ROTATIONS)

    def get(self, name: str) -> Tensor | None:
        """A tensor of the state: the stored one itself if it is fp32, else decoded."""
        if name not in ("m", "v") or self.v_codec is None or not self.done:
            return self.tensors.get(name)
        if name == "v":
            return self.v_codec.decode(self.tensors["v.codes"], self.tensors["v.ranges"], self.numel)
        codec = self._m_codec(self.done)
        payload, scales = self.tensors["m.payload"], self.tensors["m.scales"]
        return codec.decode(Code(codec, (self.numel,), torch.float32, payload, scales))

    def commit(self, new: New) -> None:
        """The state after a step."""
        self.done += 1
        if self.v_codec is not None and self.m_codec is not None:
            new["v.codes"], new["v.ranges"] = self.v_codec.encode(new.pop("v"), self.done)
            code = self._m_codec(self.done).encode(new.pop("m"))
            new["m.payload"], new["m.scales"] = code.payload, code.scales
        self.tensors |= new

    def load(self, done: int, steps: list[int], tensors: dict[str, Tensor], device: torch.device) -> None:
        """Takes a state over; ValueError if it is not one of such a bucket."""
        self.done, self.steps = int(done), [int(step) for step in steps]
        self.tensors = {name: t.to(device, copy=True) for name, t in tensors.items()}
        try:
            found = {name: self.get(name) for name in ("m", "v")} if done else {}
        except (KeyError, RuntimeError, ValueError) as error:
            raise ValueError(f"state of another optimizer: m and v cannot be decoded ({error})") from error
        numbers = {name: 0 if x is None else x.numel() for name, x in found.items()}
        if len(steps) != len(self.shapes) or any(count != self.numel for count in numbers.values()):
            raise ValueError(f"state of another optimizer: {numbers} in a bucket of {self.numel} numbers")

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())


class TurboQuantAdamW(Optimizer):
    """Drop-in for ``torch.optim.AdamW``.

    Arguments:
        params, lr, betas, eps, weight_decay: as AdamW's.
        codec: of what is sent, or a pair for the two legs of an all-reduce. None: 4 bits, blocks of 128, unbiased (for
            rules with error feedback the scale becomes least squares). NaN and infinity pass through it.
        variant: a name in ``RULES`` or a ``Rule``. None: "gradient".
        state: bits of (m, v) between steps: m 2-8, v 2, 4 or 8; None keeps fp32. (4, 8) takes 1.55 bytes a parameter.
            What a parameter without a gradient has there is coded anew with its neighbours, so it moves a little.
        group: process group; None is the default group where ``torch.distributed`` is initialised.
        warmup: first steps with exact exchange; at least one with "frozen-v" and "one-bit-adam".
        max_norm: largest global norm of the gradient that enters the moments; None does not clip. Clip here and not
            before: what a rank sees before the exchange is not yet the gradient.
        v_every: K of "synced-v".
        correct_v: subtract from v what the codec's noise is known to add to it (with "gradient" only).
        bucket_elements: parameters of a group go through in runs of about so many numbers. With "local", or "exact" on
            one rank, no more than one run is ever held in fp32 beside the state; else all gradients are.

    ``bytes_sent``: what this rank has sent so far. All parameters must lie on one device; moments are fp32 whatever
    the parameters' dtype. Parameters without a gradient are left alone on one rank, with "local" and where they do
    not require one; among several ranks the others count as zeros.
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
        variant: str | Rule | None = None,
        state: tuple[int, int] | None = None,
        group: dist.ProcessGroup | None = None,
        warmup: int = 0,
        *,
        max_norm: float | None = None,
        v_every: int = 50,
        correct_v: bool = False,
        bucket_elements: int = 1 << 22,
    ) -> None:
        _check("lr", lr, lr >= 0 and math.isfinite(lr), "a finite number >= 0")
        pair = isinstance(betas, (tuple, list)) and len(betas) == 2
        _check("betas", betas, pair and all(0 <= b < 1 for b in betas), "two numbers in [0, 1)")
        _check("eps", eps, eps >= 0, "a number >= 0")
        _check("weight_decay", weight_decay, weight_decay >= 0, "a number >= 0")
        _check("warmup", warmup, isinstance(warmup, int) and warmup >= 0, "an integer >= 0")
        _check("max_norm", max_norm, max_norm is None or max_norm > 0, "a number > 0 or None")
        _check("v_every", v_every, isinstance(v_every, int) and v_every >= 1, "an integer >= 1")
        _check("bucket_elements", bucket_elements, bucket_elements >= 1, "an integer >= 1")
        variant = VARIANT if variant is None else variant
        if isinstance(variant, str):
            _check("variant", variant, variant in RULES, f"one of {', '.join(RULES)}, or a Rule")
        elif not isinstance(variant, Rule):
            raise TypeError(f"variant must be one of {', '.join(RULES)}, or a Rule; got {variant!r}")
        self.rule = RULES[variant] if isinstance(variant, str) else variant
        self.variant = variant if isinstance(variant, str) else self.rule.name
        if self.rule.frozen and warmup < 1:
            raise ValueError(f"variant={self.variant!r} keeps the v of its warm-up: warmup must be >= 1, got {warmup}")
        if correct_v and self.variant != "gradient":
            raise ValueError(f"correct_v=True goes with variant='gradient', got {self.variant!r}")
        if state is not None:
            fits = isinstance(state, tuple) and len(state) == 2 and state[0] in range(2, 9) and state[1] in (2, 4, 8)
            _check("state", state, fits, "None or (bits of m 2-8, bits of v 2, 4 or 8)")
            if self.rule.moments is not adam:
                raise ValueError(f"state={state} goes with rules that exchange gradients, got {self.variant!r}")
        self.codecs = _legs(codec, self.rule)
        self.state_bits, self.group, self.warmup, self.max_norm = state, group, warmup, max_norm
        self.v_every, self.correct_v, self.bucket_elements = v_every, correct_v, bucket_elements
        self.simulated: tuple[int, int] | None = None  # (rank, ranks) among workers of one process
        self.steps_done, self.bytes_sent = 0, 0.0
        self._stores: list[list[tuple[list[Tensor], _Store]]] = []
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; parameters must be dense floating-point tensors on the device of the others."""
        if self.rule.frozen and self.steps_done >= self.warmup:
            raise ValueError(f"variant={self.variant!r} has no v for parameters that come after its warm-up")
        super().add_param_group(param_group)
        parameters = self.param_groups[-1]["params"]
        device = next((p.device for group in self.param_groups for p in group["params"]), None)
        for parameter in parameters:
            if not parameter.is_floating_point():
                self.param_groups.pop()
                raise TypeError(f"params must be floating-point tensors, got {parameter.dtype}")
            if parameter.device != device:
                self.param_groups.pop()
                raise ValueError(f"params must lie on one device, got {device} and {parameter.device}")
        runs: list[list[Tensor]] = []
        run: list[Tensor] = []
        size = 0
        for parameter in parameters:
            if run and size + parameter.numel() > self.bucket_elements:
                runs.append(run)
                run, size = [], 0
            run.append(parameter)
            size += parameter.numel()
        runs += [run] if run else []
        self._stores.append([(run, _Store([p.shape for p in run], self.state_bits)) for run in runs])

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles; torch's own leaves out what subclasses have."""
        ours = {name: value for name, value in self.__dict__.items() if not name.startswith("_optimizer_")}
        ours.pop("step", None)  # torch puts a wrapper there
        return {**ours, **super().__getstate__()}

    @property
    def place(self) -> tuple[int, int]:
        """(rank, ranks) among those that exchange."""
        if self.simulated is not None:
            return self.simulated
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(self.group), dist.get_world_size(self.group)
        return 0, 1

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
        together = self.simulated is None and self.place[1] > 1
        for asked in self._step():
            if together:
                over_group(asked, self.group)
            else:
                simulate([asked])
        return loss

    def _buckets(self) -> Iterator[tuple[dict[str, Any], list[Tensor], _Store]]:
        for group, stores in zip(self.param_groups, self._stores, strict=True):
            for parameters, store in stores:
                yield group, parameters, store

    def _bucket(self, number: int, group: dict[str, Any], parameters: list[Tensor], store: _Store) -> Bucket:
        gradient, scaled = _flatten(parameters), getattr(self, "grad_scale", None)
        return Bucket(
            store.shapes, gradient if scaled is None else gradient.div_(scaled), store.get, store.done + 1,
            group["betas"], self.codecs, (self.steps_done, number), *self.place, self.v_every,
        )  # fmt: skip

    def _step(self) -> Iterator[Mean]:
        """The step, which asks for means on its way."""
        rule = RULES["exact"] if self.steps_done < self.warmup else self.rule
        if rule.exchange is None or (rule is RULES["exact"] and self.place[1] == 1):
            self._local_step(rule)
            return
        buckets = [self._bucket(number, *each) for number, each in enumerate(self._buckets())]
        finite, renewed = True, []
        if rule.clips_local and self.max_norm is not None:
            finite = _clip([b.gradient for b in buckets], self.max_norm)
        for bucket in buckets:
            renewed.append((yield from rule.exchange(bucket)))
        limit = math.inf if rule.clips_local or self.max_norm is None else self.max_norm
        if not (_clip([b.gradient for b in buckets], limit) and finite):
            self._refuse()
            return
        for each, bucket, new in zip(self._buckets(), buckets, renewed, strict=True):
            self._update(rule, *each, bucket, new)
            bucket.gradient = bucket.gradient.new_empty(0)
        self.steps_done += 1

    def _local_step(self, rule: Rule) -> None:
        """A step without exchange: bucket by bucket, so that no more than one is held."""
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        dense = [g for g in gradients if g.layout == torch.strided]  # the others raise below, before any change
        wide = torch.float64 if any(g.dtype == torch.float64 for g in dense) else torch.float32
        norm = torch.stack(torch._foreach_norm(dense, dtype=wide)).norm() if dense else torch.zeros(())
        scaled = getattr(self, "grad_scale", None)
        length = (norm if scaled is None else norm / scaled).item()
        if not math.isfinite(length):
            self._refuse()
            return
        if len(dense) < len(gradients):
            _flatten([p for group in self.param_groups for p in group["params"]])
        factor = min(1.0, self.max_norm / (length + 1e-6)) if self.max_norm is not None else 1.0
        for number, each in enumerate(self._buckets()):
            bucket = self._bucket(number, *each)
            if factor < 1.0:
                bucket.gradient.mul_(factor)
            self._update(rule, *each, bucket, {})
        self.steps_done += 1

    def _refuse(self) -> None:
        if getattr(self, "found_inf", None) is None:
            raise FloatingPointError(self._explain())

    def _update(
        self, rule: Rule, group: dict[str, Any], parameters: list[Tensor], store: _Store, bucket: Bucket, new: New
    ) -> None:
        alone = self.place[1] == 1 or rule.exchange is None
        unused = [i for i, p in enumerate(parameters) if p.grad is None and (alone or not p.requires_grad)]
        starts = _starts(bucket.sizes)
        slices = [slice(starts[i], starts[i] + bucket.sizes[i]) for i in unused]
        before = {name: [bucket.kept(name)[s].clone() for s in slices] for name in ("m", "v")} if unused else {}
        direction, v = rule.moments(bucket, new)
        if self.correct_v and rule is self.rule:
            v = denoised(v, self.codecs)
        used = [i for i in range(len(parameters)) if i not in unused]
        for i in used:
            store.steps[i] += 1
        root = v.sqrt()
        for step in sorted({store.steps[i] for i in used}):  # one, unless parameters joined later than others
            chosen = [i for i in used if store.steps[i] == step]
            directions, roots = (
                [x[starts[i] : starts[i] + bucket.sizes[i]].view(bucket.shapes[i]) for i in chosen]
                for x in (direction, root)
            )
            _move([parameters[i] for i in chosen], directions, roots, group, step)
        for name, kept in before.items():  # as if the unused parameters had not been there
            for s, old in zip(slices, kept, strict=True):
                if name in new:
                    new[name][s] = old
        store.commit(new)
        self.bytes_sent += bucket.sent

    def _explain(self) -> str:
        for g, group in enumerate(self.param_groups):
            for i, p in enumerate(group["params"]):
                if p.grad is not None and not bool(p.grad.isfinite().all()):
                    bad = p.grad[~p.grad.isfinite()].flatten()[0].item()
                    return (
                        f"step {self.steps_done}: the gradient of parameter {i} of group {g}, shape {tuple(p.shape)}, "
                        f"holds {bad}; nothing was changed"
                    )
        length = math.hypot(*(float(p.grad.norm(dtype=torch.float64)) for g in self.param_groups for p in g["params"]
                              if p.grad is not None))  # fmt: skip
        if length > torch.finfo(torch.float32).max ** 0.5:
            return f"step {self.steps_done}: the gradient's norm, {length:.3g}, is beyond fp32; nothing was changed"
        return f"step {self.steps_done}: another rank's gradient is not finite; nothing was changed"

    def _settings(self) -> dict[str, Any]:
        """What must agree for a state to continue here."""
        rank, ranks = self.place
        codecs = [f"{k}{leg + 1}: {v}" for leg, c in enumerate(self.codecs) for k, v in dataclasses.asdict(c).items()]
        return {
            "variant": self.variant, "codecs": codecs, "state": list(self.state_bits or ()), "warmup": self.warmup,
            "v_every": self.v_every, "correct_v": self.correct_v, "max_norm": self.max_norm, "rank": rank,
            "ranks": ranks, "buckets": [[list(shape) for shape in store.shapes] for _, _, store in self._buckets()],
        }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and strings only: loads with ``weights_only=True``. Of this rank: residuals differ."""
        stores = [store for _, _, store in self._buckets()]
        return {
            "state": {},
            "param_groups": super().state_dict()["param_groups"],
            "turboquant": {
                "format": FORMAT,
                "settings": self._settings(),
                "steps_done": self.steps_done,
                "bytes_sent": self.bytes_sent,
                "done": [store.done for store in stores],
                "steps": [list(store.steps) for store in stores],
                "buckets": [dict(store.tensors) for store in stores],
            },
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Its own state, or that of a ``torch.optim.AdamW`` over the same parameters. Anything else: ``ValueError``."""
        ours = state_dict.get("turboquant")
        if ours is None:
            self._load_adamw(state_dict)
            return
        if ours.get("format") != FORMAT:
            raise ValueError(f"not a state of TurboQuantAdamW of format {FORMAT}: format {ours.get('format')!r}")
        missing = {"settings", "steps_done", "bytes_sent", "done", "steps", "buckets"} - set(ours)
        if missing or "param_groups" not in state_dict:
            raise ValueError(f"not a whole state of TurboQuantAdamW: it lacks {sorted(missing) or 'param_groups'}")
        here, there = self._settings(), ours["settings"]
        differing = [f"{key}: {there.get(key)!r}, here {here[key]!r}" for key in here if there.get(key) != here[key]]
        if differing:
            raise ValueError(f"state of another optimizer ({'; '.join(differing)})")
        found = list(zip(ours["done"], ours["steps"], ours["buckets"], strict=False))
        buckets = list(self._buckets())
        if not len(found) == len(ours["done"]) == len(buckets):
            raise ValueError(f"state of another optimizer ({len(found)} buckets, here {len(buckets)})")
        loaded = [_Store(store.shapes, self.state_bits) for _, _, store in buckets]
        for (_, parameters, _), store, each in zip(buckets, loaded, found, strict=True):
            store.load(*each, parameters[0].device)
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self.steps_done, self.bytes_sent = ours["steps_done"], ours["bytes_sent"]
        for (_, _, store), new in zip(buckets, loaded, strict=True):
            store.done, store.steps, store.tensors = new.done, new.steps, new.tensors

    def _load_adamw(self, state_dict: dict[str, Any]) -> None:
        groups, found = state_dict.get("param_groups"), state_dict.get("state")
        if not isinstance(groups, list) or not isinstance(found, dict) or not all("betas" in g for g in groups):
            raise ValueError("neither a state of TurboQuantAdamW nor of torch.optim.AdamW")
        for group in groups:
            if not group.get("decoupled_weight_decay") or group.get("amsgrad") or group.get("maximize"):
                raise ValueError(
                    "state of another optimizer than AdamW as it is here: decoupled_weight_decay="
                    f"{group.get('decoupled_weight_decay')}, amsgrad={group.get('amsgrad')}, "
                    f"maximize={group.get('maximize')}"
                )
        if any(set(entry) != _ADAMW for entry in found.values()):
            keys = sorted({key for entry in found.values() for key in entry})
            raise ValueError(f"state of AdamW must hold {sorted(_ADAMW)} for each parameter, got {keys}")
        if [len(g["params"]) for g in groups] != [len(g["params"]) for g in self.param_groups]:
            raise ValueError(
                f"state has groups of {[len(g['params']) for g in groups]} parameters, "
                f"here {[len(g['params']) for g in self.param_groups]}"
            )
        numbers = iter(i for g in groups for i in g["params"])
        per_bucket = [[found.get(next(numbers)) for _ in run] for _, run, _ in self._buckets()]
        for (_, run, _), entries in zip(self._buckets(), per_bucket, strict=True):
            for p, entry in zip(run, entries, strict=True):
                if entry is not None and entry["exp_avg"].shape != p.shape:
                    raise ValueError(f"state for shape {tuple(entry['exp_avg'].shape)}, parameter has {tuple(p.shape)}")
        slim = [{key: value for key, value in group.items() if key not in _ADAMW_ONLY} for group in groups]
        super().load_state_dict({"state": {}, "param_groups": slim})
        self.steps_done = max((int(e["step"]) for entries in per_bucket for e in entries if e), default=0)
        for (_, run, store), entries in zip(self._buckets(), per_bucket, strict=True):
            if not any(entries):
                continue
            new = {
                name: torch.cat([
                    torch.zeros(p.numel(), device=p.device) if e is None else e[key].reshape(-1).to(p.device).float()
                    for p, e in zip(run, entries, strict=True)
                ])
                for name, key in (("m", "exp_avg"), ("v", "exp_avg_sq"))
            }  # fmt: skip
            store.steps = [int(e["step"]) if e else 0 for e in entries]
            store.done = max(store.steps) - 1
            store.commit(new)

    def moments(self, parameter: Tensor) -> tuple[Tensor, Tensor]:
        """(m, v) of one parameter as fp32 copies of its shape; zeros before the first step."""
        for _, run, store in self._buckets():
            for p, start in zip(run, _starts([q.numel() for q in run]), strict=True):
                if p is parameter:
                    found = []
                    for name in ("m", "v"):
                        kept = store.get(name)
                        flat = torch.zeros(store.numel, device=p.device) if kept is None else kept
                        found.append(flat[start : start + p.numel()].reshape(p.shape).clone())
                    return found[0], found[1]
        raise ValueError(f"not a parameter of this optimizer: tensor of shape {tuple(parameter.shape)}")


def step_together(optimizers: Sequence[TurboQuantAdamW]) -> None:
    """One step of the workers of a simulated group, which were numbered by ``simulate_ranks``; else ValueError."""
    places = [optimizer.simulated for optimizer in optimizers]
    if places != [(rank, len(optimizers)) for rank in range(len(optimizers))]:
        raise ValueError(f"workers must be numbered by simulate_ranks, all of them and in order; got {places}")
    with torch.no_grad():
        for asked in zip(*(optimizer._step() for optimizer in optimizers), strict=True):
            simulate(asked)
    for optimizer in optimizers:
        optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers look for it


def simulate_ranks(optimizers: Sequence[TurboQuantAdamW]) -> None:
    """Makes these optimizers, one for each replica of a model in this process, the ranks of one group."""
    for rank, optimizer in enumerate(optimizers):
        optimizer.simulated = rank, len(optimizers)


def _move(
    parameters: list[Tensor], directions: list[Tensor], roots: list[Tensor], group: dict[str, Any], step: int
) -> None:
    """AdamW's update of parameters in their ``step``-th step; roots: of v, in place."""
    beta1, beta2 = group["betas"]
    torch._foreach_div_(roots, math.sqrt(1 - beta2**step))
    torch._foreach_add_(roots, group["eps"])
    size = group["lr"] / (1 - beta1**step)
    whole = (torch.float32, torch.float64)  # fp64 keeps its digits, though the moments are fp32
    weights = [p if p.dtype in whole else p.float() for p in parameters]
    torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
    torch._foreach_addcdiv_(weights, directions, roots, value=-size)
    for p, weight in zip(parameters, weights, strict=True):
        if p is not weight:
            p.copy_(weight)


def denoised(v: Tensor, codecs: Codecs) -> Tensor:
    """v less what the noise of both legs adds to squares, from the mean of v in each block; at least a tenth stays.

    An unbiased code of relative error d adds d times the mean square of its block. The first leg codes single
    ranks' gradients, whose noise is averaged; where those are mostly noise of the data, the sum over ranks is again d
    times the mean square of the mean gradient.
    """
    share = 1.0
    for codec in codecs:
        share *= 1 + unbiased_nmse(codec.bits)
    block = codecs[0].block
    padded = torch.nn.functional.pad(v, (0, -v.numel() % block)).view(-1, block)
    noise = padded.mean(1, keepdim=True) * (1 - 1 / share)
    return torch.maximum(padded - noise, _V_FLOOR * padded).view(-1)[: v.numel()]


def _check(name: str, value: object, fits: bool, accepted: str) -> None:
    if not fits:
        raise ValueError(f"{name} must be {accepted}; got {value!r}")


def _legs(codec: Codec | Codecs | None, rule: Rule) -> Codecs:
    if codec is None:
        codec = Codec(scale="mse") if rule.fed_back else Codec()
    legs = codec if isinstance(codec, tuple) else (codec, codec)
    if len(legs) != 2 or not all(isinstance(leg, Codec) for leg in legs):
        raise TypeError(f"codec must be a Codec, a pair of them or None; got {codec!r}")
    if legs[0].block != legs[1].block:
        raise ValueError(f"both legs must have one block size, got {legs[0].block} and {legs[1].block}")
    first, second = (dataclasses.replace(leg, nonfinite="propagate") for leg in legs)
    return first, second


def _starts(sizes: Sequence[int]) -> list[int]:
    starts, at = [], 0
    for size in sizes:
        starts.append(at)
        at += size
    return starts


def _flatten(parameters: list[Tensor]) -> Tensor:
    """Gradients as one new fp32 vector; zeros where there is none."""
    parts = []
    for p in parameters:
        if p.grad is None:
            parts.append(torch.zeros(p.numel(), device=p.device))
        elif p.grad.layout != torch.strided:
            raise ValueError(f"gradients must be dense, got layout {p.grad.layout} for shape {tuple(p.shape)}")
        else:
            parts.append(p.grad.reshape(-1).float())
    return torch.cat(parts)


def _clip(gradients: list[Tensor], limit: float) -> bool:
    """Scales them in place to a global norm of at most ``limit``; False if they are not finite."""
    if not gradients:
        return True
    norm = torch.stack(torch._foreach_norm(gradients)).norm().item()
    if norm > limit and math.isfinite(norm):
        torch._foreach_mul_(gradients, limit / (norm + 1e-6))
    return math.isfinite(norm)
