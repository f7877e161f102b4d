"""Rules over waiting for the slowest, simulated events, and messages of the largest entries."""

from __future__ import annotations

from tq.book.claims.ledger import COMPUTED, Claim, Finding, Results, Rule, found
from tq.book.claims.words import Check, compare, in_part
from tq.systems.checkpoint import lost_share, young_interval_s
from tq.systems.failures import mtbf_s

CHAPTER = "synchronisation"
TRAFFIC = "impact-communication"
RUNS = ("7b", "70b", "175b", "405b", "70b-tp16", "8x22b-ep8")
WITHIN = 0.03  # of the mean of the slowest
SLOWER = 1.1  # times the least time that count as negative scaling
NOTICED = 0.01  # share, or messages per event, from which on a cost is there
HALF = 0.5  # of the time, from which on costs dominate
GPUS, WRITE_S = 24_576, 60.0


def negative_scaling(claim: Claim, results: Results) -> Finding:
    """Reproduced if 1,024 processors take at least 10 % longer than the best number both with a barrier that grows with
    the number of processors and with one that grows with its logarithm. A part holds if they do with the first."""
    linear, tree = (results(CHAPTER, f"scaling/{law}/last-over-best") for law in ("linear", "tree"))
    best, law = results(CHAPTER, "scaling/linear/best"), results(CHAPTER, "scaling/n-star")
    first = compare("time on 1,024 over the least, barrier growing with n", linear, SLOWER, unit="x")
    second = compare("the same, growing with log n", tree, SLOWER, unit="x")
    checks = (Check(f"{first.text} and {second.text}", first.holds and second.holds), in_part(first))
    text = (
        f"On virtual processors a barrier that grows with their number makes {best:.0f} the fastest (sqrt(W/a): "
        f"{law:.0f}), and 1,024 take {linear:.1f} times as long. With a tree barrier 1,024, the most that were tried, "
        f"take {tree:.1f} times the least."
    )
    return found(claim, checks, text, "Simulations on more processors, or on real ones.", "medium")


def three_costs(claim: Claim, results: Results) -> Finding:
    """Reproduced if each of barriers, messages and rollbacks is a hundredth at least: of the conservative machine's
    time, per event, and of what Time Warp does."""
    barrier, message, rollback = (results(CHAPTER, f"cost/{cost}") for cost in ("barrier", "message", "rollback"))
    checks = (
        compare("share of the time in barriers", barrier, NOTICED),
        compare("messages per event", message, NOTICED),
        compare("share of the events that are undone", rollback, NOTICED),
    )
    text = (
        f"On 64 virtual processors barriers take {barrier:.0%} of a conservative simulation, there are {message:.2f} "
        f"messages per event, and Time Warp undoes {rollback:.0%} of its events. That nobody had told them apart was "
        "not checked."
    )
    return found(claim, checks, text, "A simulation in which one of the three costs nothing.", "medium")


def slowest_decides(claim: Claim, results: Results) -> Finding:
    """Reproduced if steps of eight real ranks with injected jitter, barrier included, take the mean of the slowest
    drawn time within 3 %, with normal and with exponential jitter. A part holds if they do with one of them. To take
    off an empty barrier, as an earlier rule did, makes steps shorter than their slowest rank."""
    kinds = ("normal", "exponential")
    ratios = {kind: results(CHAPTER, f"barrier/{kind}/with-barrier") for kind in kinds}
    backup = results(CHAPTER, "step-over-synchronous/for-good/one-backup-rank")
    checks = [
        compare(f"step over the mean of the slowest, {kind} jitter", ratio, 1 - WITHIN, 1 + WITHIN)
        for kind, ratio in ratios.items()
    ]
    text = (
        f"Steps of eight processes with a barrier take {ratios['normal']:.3f} and {ratios['exponential']:.3f} times "
        f"the mean of the slowest (normal and exponential jitter, measured). With a backup rank a step need not wait: "
        f"{backup:.2f} times as long. Causes were not measured."
    )
    return found(claim, checks, text, "Training in which ranks do not wait for each other.", "high")


def _together(waiting: float, traffic: float, lost: float) -> float:
    """Share of all time that three costs take: waiting and traffic are shares of a step that has no other cost, lost
    work is a share of all time."""
    step = 1 + waiting / (1 - waiting) + traffic / (1 - traffic)
    return 1 - (1 - lost) / step


def dominate(claim: Claim, results: Results) -> Finding:
    """Reproduced if waiting (2 % of spread on 24,576 GPUs), communication and lost work together are half of all time
    in each of six modelled runs. A part holds if they are in one."""
    waits = results(CHAPTER, "waits/24576/2-percent")
    traffic = {run: results(TRAFFIC, f"waits/{run}/ib-ndr/all") for run in RUNS}
    mtbf = float(mtbf_s(GPUS))
    lost = float(lost_share(young_interval_s(WRITE_S, mtbf), WRITE_S, mtbf))
    low, high = (_together(waits, share, lost) for share in (min(traffic.values()), max(traffic.values())))
    checks = (
        compare("share of all three costs, the least of six runs", low, HALF),
        in_part(compare("the largest", high, HALF)),
    )
    text = (
        f"Modelled on 24,576 GPUs, waiting takes {waits:.0%} of a step, communication {min(traffic.values()):.0%} to "
        f"{max(traffic.values()):.0%} in six runs at 400 Gbit/s, and lost work {lost:.0%} of all time. Together that "
        f"is {low:.0%} to {high:.0%} of all time."
    )
    change = "A profile of a large run with the shares of the three costs."
    formula = "1 - (1 - Young's loss) / (1 + w / (1 - w) + c / (1 - c))"
    return found(claim, checks, text, change, "low", formula, basis=COMPUTED)


def sparse_gradients(claim: Claim, results: Results) -> Finding:
    """Reproduced if one message of a thousandth of the entries, with fp32 values and indices, shrinks by the claimed
    factor. The document speaks of message sizes; the bytes of a run and its loss are shown beside."""
    message, run, gap = (results(CHAPTER, key) for key in ("dgc/message", "fewer/dgc-sgd", "gap/dgc-sgd"))
    checks = (compare("times smaller than fp32, one message", message, *claim.bounds()),)
    text = (
        f"A message of 0.1% of the entries at 64 bits is computed to be {message:.0f} times smaller than fp32. Over "
        f"a run of four ranks, warm-up included, bytes are {run:.0f} times fewer; the loss ends {gap:+.3f} nats from "
        "SGD (measured)."
    )
    return found(claim, checks, text, "Messages with denser entries, or wider indices.", "medium", basis=COMPUTED)


def mitigations(claim: Claim, results: Results) -> Finding:
    """Reproduced if going on without the slowest of ranks and asynchronous updates both reach the loss sooner than
    waiting does, against a rank that is slow for good and against sudden delays. A part holds if one of the two does.
    Replacing a rank was not raced."""
    ways = {"without the slowest": "one-backup-rank", "asynchronous": "staleness-4"}
    said = {
        way: [results(CHAPTER, f"speedup/{kind}/{key}") for kind in ("for-good", "sudden")] for way, key in ways.items()
    }
    checks = [compare(f"times as fast as waiting, {way}", min(each), 1.0, unit="x") for way, each in said.items()]
    both = Check(" and ".join(check.text for check in checks), all(check.holds for check in checks))
    first, second = said.values()
    text = (
        "On a virtual clock, without the slowest the loss is reached "
        f"{first[0]:.2f} (slow for good) and {first[1]:.2f} times as fast (sudden delays), with updates up to four "
        f"steps late {second[0]:.2f} and {second[1]:.2f} times. Replacing ranks was not raced."
    )
    change = "A race in which asynchronous updates have a tuned optimizer of their own."
    return found(claim, (both, *map(in_part, checks)), text, change, "medium")


RULES: dict[str, Rule] = {
    "S3-023": negative_scaling,
    "S3-024": three_costs,
    "S3-025": slowest_decides,
    "S3-029": sparse_gradients,
    "S3-077": dominate,
    "S4-126": mitigations,
}
