"""A scheduler and its bookkeeping without a device: no page leaks, none is shared wrongly, and every text ends."""

from __future__ import annotations

import bisect

import numpy as np
import pytest

from jaxscale.infer.engine import FirstCome, Pages, Request, Text
from jaxscale.infer.sampling import Sampling


class Simulated:
    """An engine whose device is a table of what every place of every page holds: the tokens up to there."""

    def __init__(self, cache, seed, ahead=4):
        self.cache, self.scheduler, self.random = cache, FirstCome(ahead), np.random.default_rng(seed)
        self.queue, self.running, self.held, self.ended, self.steps = [], [], {}, 0, 0

    def step(self):
        batch = self.scheduler.step(tuple(self.queue), tuple(self.running), self.cache, float(self.steps))
        everyone = self.queue + self.running
        self.queue = sorted((t for t in everyone if not t.running), key=lambda t: t.number)
        self.running = sorted((t for t in everyone if t.running), key=lambda t: t.number)
        self.cache.check(self.running)
        assert batch.parts, "a step without a text"
        for lane in range(self.cache.lanes):
            assert sum(n for t, n in batch.parts if t.lane == lane) <= self.cache.budget
        self.steps += 1
        for text, n in batch.parts:
            self.write(text, n)
        for text, n in batch.parts:
            self.read(text)
            if text.behind == 0:
                assert batch.ahead == 1 or n == 1
                self.choose(text)
                for _ in range(batch.ahead - 1):
                    if text.running:
                        self.write(text, 1)
                        self.choose(text)
            if text.running:
                self.cache.learn(text)
        self.cache.check(self.running)

    def write(self, text, n):
        for at in range(text.kept, text.kept + n):
            page = text.pages[at // self.cache.page]
            assert at // self.cache.page % self.cache.pieces == page // (self.cache.pages // self.cache.pieces)
            self.held[text.lane, page, at % self.cache.page] = tuple(text.tokens[: at + 1])
        text.kept += n

    def read(self, text):
        """What it would attend to is its own."""
        for at in range(text.kept):
            place = text.lane, text.pages[at // self.cache.page], at % self.cache.page
            assert self.held[place] == tuple(text.tokens[: at + 1])

    def choose(self, text):
        text.tokens.append(int(self.random.integers(3)))
        if text.left == 0 or self.random.random() < 0.05:
            self.end(text)

    def end(self, text):
        if text.running:
            self.cache.learn(text)
            self.cache.release(text)
            self.running.remove(text)
        else:
            self.queue.remove(text)
        self.ended += 1


@pytest.mark.parametrize("seed", range(12))
def test_random_traces_leak_no_page_and_end(seed):
    random = np.random.default_rng(seed)
    lanes, pieces, page = (int(random.choice(x)) for x in ((1, 2), (1, 2, 3), (1, 2, 5)))
    rows, longest = int(random.integers(1, 6)), 30
    entries = -(-longest // page)
    each = -(-entries // pieces)
    pages = int(random.integers(each, each * rows + 1)) * pieces
    cache = Pages(lanes, rows, page, pages, pieces=pieces, budget=int(random.integers(rows, 20)))
    there = Simulated(cache, seed)
    made = 0
    while made < 60 or there.queue or there.running:
        for _ in range(int(random.poisson(0.7)) if made < 60 else 0):
            prompt = random.integers(0, 2, random.integers(1, 20)).tolist()  # of few tokens, so that many begin alike
            text = Text(Request(tuple(prompt), Sampling(max_tokens=int(random.integers(1, 11)))), made)
            bisect.insort(there.queue, text, key=lambda t: t.number)
            made += 1
        everyone = there.queue + there.running
        if everyone and random.random() < 0.1:
            there.end(everyone[int(random.integers(len(everyone)))])
        if there.queue or there.running:
            there.step()
        assert there.steps < 5000
    assert there.ended == made
    assert cache.count().used == 0


def texts(*prompts, tokens=4):
    return [Text(Request(tuple(p), Sampling(max_tokens=tokens), i), i) for i, p in enumerate(prompts)]


def test_texts_that_begin_alike_have_the_same_pages_and_those_of_an_ended_one_are_found():
    cache = Pages(1, 3, 4, 12)
    first, second, third = texts(range(10), [*range(8), 20, 21], [*range(4), 30])
    assert cache.admit(first)
    assert cache.soon(second) and not cache.soon(texts([9, *range(8)])[0])
    first.kept = 10
    cache.learn(first)
    assert cache.admit(second) and second.pages[:2] == first.pages[:2] and second.kept == 8
    assert second.pages[2] != first.pages[2]
    kept = first.pages[0]
    cache.release(first)
    cache.release(second)
    assert cache.count() == (0, 12, 2)
    assert cache.admit(third) and third.pages[0] == kept and third.kept == 4


def test_a_prompt_that_is_there_wholly_still_has_its_last_token_computed():
    cache = Pages(1, 2, 4, 8)
    first, second = texts(range(8), range(8))
    cache.admit(first)
    first.kept = 8
    cache.learn(first)
    cache.admit(second)
    assert second.kept == 4 and second.pages[0] == first.pages[0] and second.pages[1] != first.pages[1]


def test_the_longest_unused_page_is_taken_first_and_of_a_text_its_end():
    cache = Pages(1, 4, 4, 4)
    old, new = texts(range(8), range(40, 48))
    for text in (old, new):
        cache.admit(text)
        text.kept = 8
        cache.learn(text)
    beginning = old.pages[0]
    cache.release(old)
    cache.release(new)
    (other,) = texts(range(60, 64))
    cache.admit(other)  # takes the end of the older one
    cache.release(other)
    (again,) = texts(range(8))
    cache.admit(again)
    assert again.pages[0] == beginning and again.kept == 4


def test_a_long_prompt_stops_nobody_who_is_being_continued():
    cache = Pages(1, 3, 4, 60, budget=8)
    short, long = texts(range(3), range(50, 90), tokens=30)
    there = Simulated(cache, 0, ahead=1)
    there.random = np.random.default_rng(5)
    there.queue = [short]
    there.step()
    there.queue.append(long)
    while long.behind > 1 and short.running:
        before = len(short.tokens)
        there.step()
        assert len(short.tokens) == before + 1


def test_the_one_that_came_last_goes_when_pages_run_out():
    cache = Pages(1, 2, 4, 4)
    first, last = texts(range(8), range(20, 26), tokens=8)
    there = Simulated(cache, 0, ahead=1)
    there.choose = lambda text: text.tokens.append(1)
    there.queue = [first, last]
    for _ in range(3):
        there.step()
    assert first.running and not last.running and there.queue == [last]
