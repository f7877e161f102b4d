"""Rules over impact-communication."""

from tests.book.rules import scaffold as s
from tests.book.rules.scaffold import F, N, P, X, ends, every
from tq.book.claims.rules import impact_communication as rules

RUNS = rules.RUNS
RESULTS: dict[str, s.Values] = {
    rules.CHAPTER: {
        **every("waits/{}/ib-ndr/data-parallel", RUNS, 0.04),
        **every("waits/{}/eth-25g/data-parallel", rules.DATA_PARALLEL, 0.4),
        **every("waits/{}/ib-ndr/all", RUNS, 0.1), **every("waits/{}/eth-100g/all", RUNS, 0.35),
        **every("waits/{}/eth-25g/all", RUNS, 0.45),
        **ends("published-share", 0.3, 0.55), **every("relative/{}/coded-100g", RUNS, 1.06),
        "relative/7b/coded-100g": 1.004, "relative/least": 1.004,
        "effective/100/no-time/fp32": 753, "effective/100/no-time/bf16": 376,
        "fabric/switches-and-cables": 4247, "fabric/17-percent": 8372, "fabric/20-percent": 9850,
        "roce/gpus": 24000, "roce/used": 16000,
        "batch/in-all/32": 0.56, "batch/in-all/128": 0.24, "batch/a-replica/32": 0.04, "batch/a-replica/128": 0.01,
    },
    rules.COST: every("memory/{}/activations", RUNS, 0.3),
}  # fmt: skip
GRADIENTS, ALL, SLOW = "waits/{}/ib-ndr/data-parallel", "waits/{}/ib-ndr/all", "waits/{}/eth-25g/data-parallel"
TURNS: list[s.Turn] = [
    # 15,000 dollars to a twentieth
    ("S0-004", {}, N),
    ("S0-004", {"fabric/20-percent": 14300}, P),
    ("S0-004", every("fabric/{}", rules.FABRIC, 14300), F),
    ("S0-004", every("fabric/{}", rules.FABRIC, 14200), N),
    ("S0-004", every("fabric/{}", rules.FABRIC, 15800), N),
    ("S0-005", {}, X),
    ("S0-006", {}, P),
    ("S0-006", {"relative/7b/coded-100g": 1.03}, N),
    ("S0-006", every("relative/{}/coded-100g", RUNS, 1.01), F),
    # 20 % less a tenth to 55 % and a twentieth more
    ("S0-013", {}, P),  # for what gradients take on 25 Gbit/s
    ("S0-013", every(SLOW, rules.DATA_PARALLEL, 0.1), N),
    ("S0-013", every(SLOW, rules.DATA_PARALLEL, 0.1) | every(ALL, RUNS, 0.3), P),
    ("S0-013", every(SLOW, rules.DATA_PARALLEL, 0.6) | every(ALL, RUNS, 0.17), N),
    ("S0-013", every(SLOW, rules.DATA_PARALLEL, 0.1) | every(GRADIENTS, RUNS, 0.19), F),
    ("S0-015", {}, N),
    ("S0-015", {"roce/used": 0}, F),
    # eight million a thousand GPUs less a tenth
    ("S0-016", {}, X),
    ("S0-016", {"fabric/17-percent": 7100, "fabric/20-percent": 7300}, X),
    ("S0-016", every("fabric/{}", rules.FABRIC, 7100), N),
    # twice, to a tenth
    ("S0-039", {}, P),
    ("S0-039", {"effective/100/no-time/fp32": 376, "effective/100/no-time/bf16": 753}, P),
    ("S0-039", {"effective/100/no-time/fp32": 700}, N),
    ("S0-039", {"relative/least": 0.51}, F),
    ("S0-040", {}, P),
    ("S0-040", {"roce/used": 24000}, F),
    ("S0-040", {"roce/gpus": 22000}, N),
    ("S4-123", {}, F),
    ("S4-123", {"published-share/high": 0.4}, N),
    ("S4-123", {"published-share/high": 0.4, "waits/7b/eth-25g/all": 0.6}, P),
    ("S4-123", {"published-share/high": 0.4, "waits/70b/ib-ndr/all": 0.5}, F),
    ("S0-070", {}, N),
    ("S0-070", every(GRADIENTS, RUNS[:2], 0.06) | every("memory/{}/activations", RUNS[:2], 0.6), N),
    ("S0-070", every(GRADIENTS, RUNS[:3], 0.06), P),
    ("S0-070", every(GRADIENTS, RUNS[:3], 0.06) | every("memory/{}/activations", RUNS[2:5], 0.5), F),
    # 30 % less a tenth to 75 % and a twentieth more
    ("S3-003", {}, N),
    ("S3-003", {"waits/70b/ib-ndr/all": 0.28}, P),
    ("S3-003", every(ALL, RUNS, 0.78), F),
    ("S3-003", every(ALL, RUNS, 0.8), N),
    # below ten per cent, to a tenth
    ("S3-034", {}, P),
    ("S3-034", {"batch/in-all/32": 0.108, "batch/in-all/128": 0.05}, F),
    ("S3-034", {"batch/in-all/32": 0.05}, P),
    ("S3-034", {"batch/a-replica/32": 0.3}, N),
]  # fmt: skip
#: No source prices an Ethernet, so that a saving cannot be shown. Two: one comparison alone.
FEWER = {"S0-005": 1, "S0-015": 2, "S0-016": 2}
BY_HAND = {
    "S3-073": (0.986, 0.941),  # of the step model, which tests/systems compares with published runs
    # 32 and 16 bits over 4 + 16/128 and 4 + 32/128
    "S0-034": (3103, 3012, 1552, 1506),
    "S0-035": (775.8, 752.9, 387.9, 376.5),
    "S0-036": (1.882, 0.9412, 0.25),
    "S0-037": (193.9, 188.2, 96.97, 94.12),
}  # fmt: skip

test_each_rule_follows_the_results, test_every_rule_is_turned_and_waits_for_its_results = s.result_tests(
    rules, RESULTS, TURNS, fewer=FEWER
)
test_each_formula_comes_to, test_every_formula_is_worked_out = s.formula_tests(rules, BY_HAND)
