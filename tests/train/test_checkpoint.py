"""States that are read where they were not written: another rank, other ranks, an older format, another layout."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from tq.quant.bounds import unbiased_nmse
from tq.quant.codec import Codec
from tq.train.coded import BLOCK, CodedTensor, MomentCodecs
from tq.train.offload import OffloadedAdamW
from tq.train.optim import TurboQuantAdamW, simulate_ranks, step_together
from tq.train.schemes import SCHEMES, rival
from tq.train.state import Store

RIVALS = {"bf16": 0.0, "powersgd": 2, "top-k": 0.1}
SHARED = [*(name for name, scheme in SCHEMES.items() if not scheme.per_rank), "bf16"]
OWN = [*(name for name, scheme in SCHEMES.items() if scheme.per_rank), "powersgd", "top-k"]


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20, bias=False))


def group_of(name, ranks, **settings):
    scheme = name if name in SCHEMES else rival(name, RIVALS[name])
    models = [layers() for _ in range(ranks)]
    optimizers = [TurboQuantAdamW(m.parameters(), lr=1e-3, variant=scheme, warmup=1, **settings) for m in models]
    simulate_ranks(optimizers)
    return models, optimizers


def train(models, optimizers, steps, start=0):
    """Steps of a simulated group; every rank has its batch, or all the same where none exchanges."""
    for step in range(start, start + steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            seed = 100 * step + (0 if optimizer.scheme.exchange is None else rank)
            model(torch.randn(8, 40, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
        step_together(optimizers)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def through_a_file(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("name", SHARED)
def test_what_rank_0_saved_goes_on_on_every_rank(name):
    unbroken = group_of(name, 2)
    train(*unbroken, 3)
    saved, kept = through_a_file(unbroken[1][0].state_dict()), copy.deepcopy(unbroken[0][0].state_dict())
    train(*unbroken, 3, start=3)
    models, optimizers = group_of(name, 2)
    for model, optimizer in zip(models, optimizers, strict=True):
        model.load_state_dict(kept)
        optimizer.load_state_dict(saved)
    train(models, optimizers, 3, start=3)
    assert all(torch.equal(weights(a), weights(b)) for a, b in zip(models, unbroken[0], strict=True))
    assert optimizers[1].bytes_sent == unbroken[1][1].bytes_sent


@pytest.mark.parametrize("ranks", (1, 3))
@pytest.mark.parametrize("name", SHARED)
def test_the_number_of_ranks_may_change_where_nothing_is_kept_of_each(name, ranks):
    before, after = group_of(name, 2), group_of(name, ranks)
    train(*before, 3)
    for model, optimizer in zip(*after, strict=True):
        model.load_state_dict(before[0][0].state_dict())
        optimizer.load_state_dict(through_a_file(before[1][1].state_dict()))
        assert optimizer.steps_done == 3
        for p, q in zip(model.parameters(), before[0][0].parameters(), strict=True):
            assert all(torch.equal(x, y) for x, y in zip(optimizer.moments(p), before[1][0].moments(q), strict=True))
    train(*after, 2, start=3)
    assert all(torch.equal(weights(after[0][0]), weights(model)) for model in after[0])


@pytest.mark.parametrize("name", OWN)
def test_what_is_kept_of_each_rank_goes_on_there_only(name):
    (_, pair), (_, three) = group_of(name, 2), group_of(name, 3)
    with pytest.raises(ValueError, match=r"another optimizer \(rank: 1, here 0\)"):
        pair[0].load_state_dict(pair[1].state_dict())
    with pytest.raises(ValueError, match=r"another optimizer \(ranks: 3, here 2\)"):
        pair[0].load_state_dict(three[0].state_dict())
    pair[1].load_state_dict(pair[1].state_dict())


@pytest.mark.parametrize("change", ("nothing", "a field less", "a field more", "format 2"))
def test_codecs_are_compared_field_by_field(change):
    model = layers()
    optimizer = TurboQuantAdamW(model.parameters(), codec=(Codec(4), Codec(2)))
    saved = copy.deepcopy(optimizer.state_dict())
    settings = saved["turboquant"]["settings"]
    codecs = settings["codecs"]
    if change == "a field less":  # written before the field was thought of: it had its default
        for fields in codecs:
            del fields["search"]
    elif change == "a field more":  # written by a later version
        for fields in codecs:
            fields["later"] = "7"
    elif change == "format 2":
        saved["turboquant"]["format"] = 2
        settings["codecs"] = [f"{k}{phase + 1}: {v}" for phase, fields in enumerate(codecs) for k, v in fields.items()]
        settings |= {"rank": 1, "ranks": 5}
    if change == "a field more":
        with pytest.raises(ValueError, match=r"codecs\[0\].later: 7, here None"):
            optimizer.load_state_dict(saved)
        return
    optimizer.load_state_dict(saved)
    other = TurboQuantAdamW(model.parameters(), codec=(Codec(4, search=3), Codec(3)))
    with pytest.raises(ValueError, match=r"codecs\[0\].search: 1, here 3; .*codecs\[1\].bits: 2, here 3"):
        other.load_state_dict(saved)


# --- by parameter: what torch.distributed.checkpoint sees -----------------------------------------------------


@pytest.mark.parametrize("bits", (None, (4, 8), (3, 2)))
@pytest.mark.parametrize("flat", (False, True))
def test_torchs_own_functions_save_and_load_a_state(bits, flat):
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    models, optimizers = group_of("exact", 1, state=bits, bucket_elements=1000)
    train(models, optimizers, 3)
    optimizers[0].zero_grad()
    saved = through_a_file(get_optimizer_state_dict(models[0], optimizers[0], options=options))
    assert optimizers[0].steps_done == 3  # torch takes a step where it finds no state
    others, loaded = group_of("exact", 1, state=bits, bucket_elements=1000)
    others[0].load_state_dict(models[0].state_dict())
    set_optimizer_state_dict(others[0], loaded[0], saved, options=options)
    assert loaded[0].steps_done == 3
    train(models, optimizers, 3, start=3)
    train(others, loaded, 3, start=3)
    assert torch.equal(weights(models[0]), weights(others[0]))


@pytest.mark.parametrize("bits", (None, (4, 8)))
def test_another_layout_of_buckets_codes_anew_and_fp32_stays_exact(bits):
    models, optimizers = group_of("exact", 1, state=bits, bucket_elements=1 << 20)
    train(models, optimizers, 4)
    saved = get_optimizer_state_dict(models[0], optimizers[0])
    others, loaded = group_of("exact", 1, state=bits, bucket_elements=1)
    set_optimizer_state_dict(others[0], loaded[0], saved)
    for p, q in zip(models[0].parameters(), others[0].parameters(), strict=True):
        (m, v), (m_new, v_new) = optimizers[0].moments(p), loaded[0].moments(q)
        if bits is None:
            assert torch.equal(m, m_new) and torch.equal(v, v_new)
        elif q is not others[0][0].weight:  # the first parameter begins where its bucket does: in the same blocks
            assert (m - m_new).norm() / m.norm() < 1.2 * unbiased_nmse(bits[0]) ** 0.5
            assert (v - v_new).norm() / v.norm() < 0.1


def test_a_state_in_few_bits_is_read_by_adamw_and_its_size_is_that_of_the_codes():
    models, optimizers = group_of("exact", 1, state=(4, 8))
    train(models, optimizers, 3)
    state = optimizers[0].state_dict()
    size = len(state["state"])
    adamw = torch.optim.AdamW(models[0].parameters())
    adamw.load_state_dict({"state": state["state"], "param_groups": adamw.state_dict()["param_groups"]})
    for p in models[0].parameters():
        m, v = optimizers[0].moments(p)
        assert torch.equal(adamw.state[p]["exp_avg"].add(0), m) and torch.equal(adamw.state[p]["exp_avg_sq"].add(0), v)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    assert size == 3 and buffer.getbuffer().nbytes < optimizers[0].state_nbytes + 5000 * size  # nothing is there twice


@pytest.mark.parametrize("name", OWN)
def test_what_is_kept_of_each_rank_has_a_name_of_its_own(name):
    unbroken, broken = group_of(name, 2), group_of(name, 2)
    train(*unbroken, 3)
    train(*broken, 3)
    for optimizer in broken[1]:
        optimizer.zero_grad()
    saved = [through_a_file(get_optimizer_state_dict(*each)) for each in zip(*broken, strict=True)]
    keys = [{key for entry in state["state"].values() for key in entry} for state in saved]
    assert keys[0] - keys[1] == {"rank0of2"} and keys[1] - keys[0] == {"rank1of2"}
    for model, optimizer, state in zip(*broken, saved, strict=True):
        set_optimizer_state_dict(model, optimizer, state)
    train(*unbroken, 2, start=3)
    train(*broken, 2, start=3)
    assert all(torch.equal(weights(a), weights(b)) for a, b in zip(unbroken[0], broken[0], strict=True))
    with pytest.raises(ValueError, match="of rank0of2 0 of them are here"):
        broken[1][0].load_state_dict(saved[1])


@pytest.mark.parametrize("place", ("host", "files"))
def test_a_state_that_lies_elsewhere_is_seen_by_parameter_as_well(place, tmp_path):
    settings = {"state": (4, 8), "bucket_elements": 700}
    models, optimizers = group_of("exact", 1, **settings)
    train(models, optimizers, 3)
    saved = get_optimizer_state_dict(models[0], optimizers[0])
    model, where = layers(), "host" if place == "host" else tmp_path
    moved = OffloadedAdamW(model.parameters(), lr=1e-3, variant="exact", place=where, **settings)
    set_optimizer_state_dict(model, moved, saved)
    assert moved.steps_done == 3 and moved.state_nbytes == optimizers[0].state_nbytes
    for entry, again in zip(saved["state"].values(), moved.state.values(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(entry[key].cell["codes"], again[key].cell["codes"])


# --- the tensor of codes --------------------------------------------------------------------------------------


def coded(numel=300, start=70, shape=(10, 20)):
    codecs, x = MomentCodecs((4, 8)), torch.randn(numel, generator=torch.Generator().manual_seed(0)).abs()
    tensors = {**codecs.encode("m", x, 5), **codecs.encode("v", x, 5)}
    pieces = {name: codecs.piece(name, tensors, start, torch.Size(shape), 5) for name in ("m", "v")}
    whole = {name: codecs.decode(name, tensors, numel, 5) for name in ("m", "v")}
    return pieces, {name: x[start : start + shape[0] * shape[1]].view(shape) for name, x in whole.items()}


@pytest.mark.parametrize("name", ("m", "v"))
def test_a_coded_tensor_is_its_numbers_and_travels_as_codes(name):
    piece, numbers = (found[name] for found in coded())
    assert torch.equal(piece + 0, numbers) and torch.equal(piece[3:5], numbers[3:5]) and piece.sum() == numbers.sum()
    assert type(piece * 2) is torch.Tensor and piece.dtype == torch.float32
    piece = coded()[0][name]
    twins = piece.clone(), copy.deepcopy(piece), through_a_file(piece), piece.detach(), piece.to("cpu", copy=True)
    for twin in twins:
        assert type(twin) is CodedTensor and torch.equal(twin.cell["codes"], piece.cell["codes"])
        assert torch.equal(twin + 0, numbers) and twin.cell["dense"] is None
    assert piece.to(torch.float64).dtype == torch.float64
    size = io.BytesIO()
    torch.save(piece.clone(), size)
    assert size.getbuffer().nbytes < 0.6 * 4 * numbers.numel() + 4000


@pytest.mark.parametrize("name", ("m", "v"))
def test_writing_to_a_coded_tensor_is_seen_by_its_views(name):
    piece, numbers = (found[name] for found in coded())
    new = torch.randn(10, 20, generator=torch.Generator().manual_seed(1))
    view = piece.detach()
    for row in (slice(0, 4), slice(4, 10)):
        piece.narrow(0, row.start, row.stop - row.start).copy_(new[row])
    assert torch.equal(view + 0, new)
    other = coded()[0][name]
    view.copy_(other)  # all of it, from codes: these are taken over
    assert piece.cell["dense"] is None and torch.equal(piece + 0, numbers)
    piece.zero_()
    assert not (view + 0).any() and torch.equal(other + 0, numbers)


def test_pieces_join_to_the_bit_or_not_at_all():
    shapes = [torch.Size(s) for s in ((5, 30), (7,), (0, 4), (100,), (3, 90))]
    store, again = Store(shapes, (4, 8)), Store(shapes, (4, 8))
    numel = sum(s.numel() for s in shapes)
    for seed in range(3):
        g = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
        store.commit({"m": g.clone(), "v": g.square()})
    pieces = {name: [store.piece(name, i).clone() for i in range(5)] for name in ("m", "v")}
    again.join(store.done, [3] * 5, pieces, torch.device("cpu"))
    assert all(torch.equal(store.tensors[key], again.tensors[key]) for key in store.tensors)
    shuffled = {name: [*of[:3], of[3].clone(), of[4]] for name, of in pieces.items()}
    shuffled["m"][3].cell["codes"][0] ^= 1  # what two share is not the same in both
    assert MomentCodecs((4, 8)).joined("m", shuffled["m"], 3) is None
    assert MomentCodecs((4, 8)).joined("m", pieces["m"][1:], 3) is None  # not the blocks of such a row
    assert MomentCodecs((4, 8)).joined("m", pieces["m"], 4) is None  # of another step: rotated otherwise
    assert MomentCodecs((5, 8)).joined("m", pieces["m"], 3) is None
    assert store.tensors["m.payload"].shape[0] == -(-numel // BLOCK)
