"""What a process remembers is bounded, and what was used longest ago is dropped."""

from planner.cache import Memory


def sized(values):
    return {digest: (value, len(value)) for digest, value in values.items()}


def test_what_was_used_longest_ago_is_dropped_at_the_bound():
    memory = Memory()
    assert memory.is_empty
    memory.remember(sized({b"a": b"1234", b"b": b"5678"}), 10)
    assert memory.find(b"a") == b"1234"
    memory.remember(sized({b"c": b"90"}), 10)
    assert memory.find(b"b") == b"5678"  # 10 bytes are within the bound
    assert memory.find(b"a") == b"1234"
    memory.remember(sized({b"d": b"!"}), 10)
    assert memory.find(b"c") is None
    assert memory.find(b"a") == b"1234"
    assert memory.find(b"b") == b"5678"
    assert memory.find(b"d") == b"!"
    assert not memory.is_empty


def test_a_value_beyond_the_bound_is_not_kept_and_does_not_displace_others():
    memory = Memory()
    memory.remember(sized({b"b": b"1234567890"}), 10)
    memory.remember(sized({b"a": b"12345678901"}), 10)
    assert memory.find(b"a") is None
    assert memory.find(b"b") == b"1234567890"


def test_a_smaller_bound_holds_from_the_next_save_on():
    memory = Memory()
    memory.remember(sized({b"a": b"1234", b"b": b"5678"}), 10)
    memory.remember({}, 5)
    assert memory.find(b"a") is None
    assert memory.find(b"b") == b"5678"
    memory.remember({}, 0)
    assert memory.is_empty
