"""The coordinator's memory is bounded and drops what was used longest ago."""

from planner.cache import PartCache


def test_what_was_used_longest_ago_is_dropped_at_the_bound():
    cache = PartCache(max_nbytes=10)
    cache.remember({b"a": b"1234", b"b": b"5678"})
    assert cache.find(b"a") == b"1234"
    cache.remember({b"c": b"90"})
    assert cache.find(b"b") == b"5678"  # 10 bytes are within the bound
    assert cache.find(b"a") == b"1234"
    cache.remember({b"d": b"!"})
    assert cache.find(b"c") is None
    assert cache.find(b"a") == b"1234"
    assert cache.find(b"b") == b"5678"
    assert cache.find(b"d") == b"!"


def test_a_part_beyond_the_bound_is_not_kept():
    cache = PartCache(max_nbytes=10)
    cache.remember({b"a": b"12345678901"})
    assert cache.find(b"a") is None
    cache.remember({b"b": b"1234567890"})
    assert cache.find(b"b") == b"1234567890"
