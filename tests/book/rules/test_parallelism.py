"""Formulas of sharding, pipelines and layouts."""

from tests.book.rules import scaffold as s
from tq.book.claims.rules import parallelism as rules

BY_HAND = {
    "S1-005": (1, 1.25),
    "S3-028": (46.67, 41.18, 9.859, 14.89),  # 7/15, 7/17, 7/71, 7/47
    "S3-031": (3.988, 7.946),  # 16 over 4 + 12/1024 and 2 + 14/1024
    "S4-045": (1,),
    "S4-050": (2_048,),
    "S4-051": (12.21,),
    "S4-052": (16, 1),
    "S4-054": (400, 800),
    "S4-060": (3.821,),
    "S4-061": (7.211,),
    "S4-062": (1.5,),
}  # fmt: skip

test_each_formula_comes_to, test_every_formula_is_worked_out = s.formula_tests(rules, BY_HAND)
