"""Checks scripts/common.py: its statistics against printed tables and a published test, counts in messages;
for test_compare.sh."""
import sys

sys.path.insert(0, "scripts")
from common import counted, counted_range, paired, t_quantile, t_tail  # noqa: E402

# Student's t at 95%, two-sided, of 1 to 30 degrees of freedom, as textbooks print it
TABLE = """12.706 4.303 3.182 2.776 2.571 2.447 2.365 2.306 2.262 2.228 2.201 2.179 2.160 2.145 2.131 2.120 2.110
    2.101 2.093 2.086 2.080 2.074 2.069 2.064 2.060 2.056 2.052 2.048 2.045 2.042"""
# Student's own data, hours of sleep with two drugs: paired t = 4.0621, 9 degrees, p = 0.002833, 0.7001 to 2.4599
SLEEP = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]


def near(got, want, tolerance):
    assert abs(got - want) <= tolerance, (got, want)


for degrees, want in enumerate(map(float, TABLE.split()), 1):
    near(t_quantile(degrees), want, 5.001e-4)
    near(t_tail(t_quantile(degrees), degrees), 0.05, 1e-12)
near(t_quantile(4, 0.99), 4.604, 5e-4)
near(t_tail(0, 3), 1, 0)
near(t_tail(-1, 1), 0.5, 1e-15)  # Cauchy's quartile
assert 0 <= t_tail(1e9, 30) < 1e-15

mean, error, n, half_width, p = paired(SLEEP)
assert n == 10
near(mean, 1.58, 1e-12)
near(mean / error, 4.0621, 5e-5)
near(p, 0.002833, 5e-7)
near(mean - half_width, 0.7001142, 5e-8)
near(mean + half_width, 2.4598858, 5e-8)

# nothing is claimed from two pairs or fewer
assert paired([2.0]) == (2, None, 1, None, None)
assert paired([1.0, 3.0]) == (2, 1, 2, None, None)
assert paired([1, 3, 2]).half_width > 0
# equal differences have no error
assert paired([2, 2, 2]) == (2, 0, 3, 0, 0) and paired([0, 0, 0]) == (0, 0, 3, 0, 1)

# As dev/test/llmc/test_numbers.c has them for llmc/base/common.h
for n, noun, want in ((1, "token", "1 token"), (0, "token", "0 tokens"), (2, "token", "2 tokens"),
                      (2, "micro-batch", "2 micro-batches"), (2, "pass", "2 passes"), (2, "index", "2 indexes"),
                      (1, "entry", "1 entry"), (2, "entry", "2 entries"), (2, "key", "2 keys"), (2, "month", "2 months"),
                      (2, "training sequence", "2 training sequences")):
    assert counted(n, noun) == want, (counted(n, noun), want)
ranges = [counted_range(*pair, "key") for pair in ((1, 1), (0, 1), (2, 2), (1, 3))]
assert ranges == ["1 key", "0 to 1 key", "2 keys", "1 to 3 keys"], ranges
