"""A scheduler and its pages without a device: no page leaks, none is shared wrongly, and every sequence ends."""

from __future__ import annotations

import bisect

import numpy as np
import pytest

from jaxscale.infer.engine import FirstCome, Pages, Request, SequenceState
from jaxscale.infer.sampling import Sampling


class Simulated:
    """An engine whose device is a table: for every position of every page, the tokens up to there."""

    def __init__(self, cache, seed, ahead=4):
        self.cache, self.scheduler, self.random = cache, FirstCome(ahead), np.random.default_rng(seed)
        self.queue, self.running, self.held, self.ended, self.steps = [], [], {}, 0, 0

    def step(self):
        batch = self.scheduler.step(tuple(self.queue), tuple(self.running), self.cache, float(self.steps))
        everyone = self.queue + self.running
        self.queue = sorted((t for t in everyone if not t.running), key=lambda t: t.number)
        self.running = sorted((t for t in everyone if t.running), key=lambda t: t.number)
        self.cache.check(self.running)
        assert batch.parts, "a step without a sequence"
        for shard in range(self.cache.shards):
            assert sum(n for t, n in batch.parts if t.shard == shard) <= self.cache.budget
        self.steps += 1
        for sequence, n in batch.parts:
            self.write(sequence, n)
        for sequence, n in batch.parts:
            self.read(sequence)
            if sequence.uncached == 0:
                assert batch.ahead == 1 or n == 1
                self.choose(sequence)
                for _ in range(batch.ahead - 1):
                    if sequence.running:
                        self.write(sequence, 1)
                        self.choose(sequence)
            if sequence.running:
                self.cache.record(sequence)
        self.cache.check(self.running)

    def write(self, sequence, n):
        for at in range(sequence.cached, sequence.cached + n):
            page = sequence.pages[at // self.cache.page]
            assert at // self.cache.page % self.cache.devices == page // (self.cache.pages // self.cache.devices)
            self.held[sequence.shard, page, at % self.cache.page] = tuple(sequence.tokens[: at + 1])
        sequence.cached += n

    def read(self, sequence):
        """Check that the pages hold the sequence's own tokens."""
        for at in range(sequence.cached):
            place = sequence.shard, sequence.pages[at // self.cache.page], at % self.cache.page
            assert self.held[place] == tuple(sequence.tokens[: at + 1])

    def choose(self, sequence):
        sequence.tokens.append(int(self.random.integers(3)))
        if sequence.remaining == 0 or self.random.random() < 0.05:
            self.end(sequence)

    def end(self, sequence):
        if sequence.running:
            self.cache.record(sequence)
            self.cache.release(sequence)
            self.running.remove(sequence)
        else:
            self.queue.remove(sequence)
        self.ended += 1


@pytest.mark.parametrize("seed", range(12))
def test_random_traces_leak_no_page_and_end(seed):
    random = np.random.default_rng(seed)
    shards, devices, page = (int(random.choice(x)) for x in ((1, 2), (1, 2, 3), (1, 2, 5)))
    slots, longest = int(random.integers(1, 6)), 30
    entries = -(-longest // page)
    each = -(-entries // devices)
    pages = int(random.integers(each, each * slots + 1)) * devices
    cache = Pages(shards, slots, page, pages, devices=devices, budget=int(random.integers(slots, 20)))
    engine = Simulated(cache, seed)
    made = 0
    while made < 60 or engine.queue or engine.running:
        for _ in range(int(random.poisson(0.7)) if made < 60 else 0):
            prompt = random.integers(0, 2, random.integers(1, 20)).tolist()  # two ids, so that many prompts begin alike
            sequence = SequenceState(Request(tuple(prompt), Sampling(max_tokens=int(random.integers(1, 11)))), made)
            bisect.insort(engine.queue, sequence, key=lambda t: t.number)
            made += 1
        everyone = engine.queue + engine.running
        if everyone and random.random() < 0.1:
            engine.end(everyone[int(random.integers(len(everyone)))])
        if engine.queue or engine.running:
            engine.step()
        assert engine.steps < 5000
    assert engine.ended == made
    assert cache.count().used == 0


def sequences(*prompts, tokens=4):
    return [SequenceState(Request(tuple(p), Sampling(max_tokens=tokens), i), i) for i, p in enumerate(prompts)]


def test_sequences_that_begin_alike_share_pages_also_those_of_an_ended_one():
    cache = Pages(1, 3, 4, 12)
    first, second, third = sequences(range(10), [*range(8), 20, 21], [*range(4), 30])
    assert cache.admit(first)
    assert cache.prefix_coming(second) and not cache.prefix_coming(sequences([9, *range(8)])[0])
    first.cached = 10
    cache.record(first)
    assert cache.admit(second) and second.pages[:2] == first.pages[:2] and second.cached == 8
    assert second.pages[2] != first.pages[2]
    shared = first.pages[0]
    cache.release(first)
    cache.release(second)
    assert cache.count() == (0, 12, 2)
    assert cache.admit(third) and third.pages[0] == shared and third.cached == 4


def test_the_last_token_of_a_wholly_cached_prompt_is_computed():
    cache = Pages(1, 2, 4, 8)
    first, second = sequences(range(8), range(8))
    cache.admit(first)
    first.cached = 8
    cache.record(first)
    cache.admit(second)
    assert second.cached == 4 and second.pages[0] == first.pages[0] and second.pages[1] != first.pages[1]


def test_the_least_recently_used_page_is_evicted_first_and_of_a_sequence_its_end():
    cache = Pages(1, 4, 4, 4)
    old, new = sequences(range(8), range(40, 48))
    for sequence in (old, new):
        cache.admit(sequence)
        sequence.cached = 8
        cache.record(sequence)
    beginning = old.pages[0]
    cache.release(old)
    cache.release(new)
    (other,) = sequences(range(60, 64))
    cache.admit(other)  # takes the end of the older one
    cache.release(other)
    (again,) = sequences(range(8))
    cache.admit(again)
    assert again.pages[0] == beginning and again.cached == 4


def test_a_long_prompt_stops_no_decoding_sequence():
    cache = Pages(1, 3, 4, 60, budget=8)
    short, long = sequences(range(3), range(50, 90), tokens=30)
    engine = Simulated(cache, 0, ahead=1)
    engine.random = np.random.default_rng(5)
    engine.queue = [short]
    engine.step()
    engine.queue.append(long)
    while long.uncached > 1 and short.running:
        before = len(short.tokens)
        engine.step()
        assert len(short.tokens) == before + 1


def test_the_sequence_that_came_last_is_preempted_when_pages_run_out():
    cache = Pages(1, 2, 4, 4)
    first, last = sequences(range(8), range(20, 26), tokens=8)
    engine = Simulated(cache, 0, ahead=1)
    engine.choose = lambda sequence: sequence.tokens.append(1)
    engine.queue = [first, last]
    for _ in range(3):
        engine.step()
    assert first.running and not last.running and engine.queue == [last]
