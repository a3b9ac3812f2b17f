"""Keys in the order of their use, beside a plain list."""

from __future__ import annotations

import random

import pytest

from loraplex.engine.kv.blocks import UseOrder


@pytest.mark.parametrize("seed", range(40))
def test_it_is_a_list_and_a_walk_meets_what_was_not_touched(seed: int) -> None:
    rng = random.Random(seed)
    order, plain = UseOrder[int](range(3)), [0, 1, 2]
    wanted, met, added = list[int](), list[int](), set[int]()
    for number in range(3, 400):
        match rng.randrange(7):
            case 0:
                order.add(number)
                plain.append(number)
            case 1:
                order.add_oldest(number)
                plain.insert(0, number)
                # It may still be met: as the least recently used one it is behind all others.
                wanted.append(number)
                added.add(number)
            case 2 if plain:
                key = rng.choice(plain)
                order.use(key)
                plain.remove(key)
                plain.append(key)
                wanted = [each for each in wanted if each != key]
            case 3 if plain:
                key = rng.choice(plain)
                order.remove(key)
                plain.remove(key)
                wanted = [each for each in wanted if each != key]
            case 4 if plain:
                key = order.pop_oldest()
                assert key == plain.pop(0)
                wanted = [each for each in wanted if each != key]
            case 5 if rng.random() < 0.2:
                order.begin_walk()
                wanted, met, added = plain[::-1], [], set()
            case _:
                key_met = order.walk()
                if key_met is not None:
                    met.append(key_met)
                    assert key_met == wanted.pop(0)
                else:
                    assert added.issuperset(wanted)
                    wanted.clear()
        assert [*order] == plain
        assert len(order) == len(plain)
        assert (number in order) == (number in plain)
    assert len({*met}) == len(met)


def test_errors_and_the_bound_of_lists() -> None:
    order = UseOrder[int]()
    for call in (order.oldest, order.pop_oldest, lambda: order.remove(1), lambda: order.use(1)):
        with pytest.raises(KeyError):
            call()
    for number in range(100):
        order.add(number)
        order.begin_walk()
        assert order.walk() == number
    assert len(order._lists) < 12
    assert [*order] == [*range(100)]
