"""The scheduler against a simulated cache, whose every slot says which tokens it stands for."""

import functools

import hypothesis.strategies as st
import pytest
from hypothesis import event, given, settings

from examples.m3_serving.cache import PAGE_TOKENS, PagePool, pages_for
from examples.m3_serving.sampling import SamplingParams
from examples.m3_serving.scheduler import Request, Scheduler, State


def make_request(order: int, prompt: list[int], max_new_tokens: int, stop_ids=()) -> Request:
    return Request(
        order=order,
        prompt=prompt,
        max_new_tokens=max_new_tokens,
        sampling=SamplingParams(),
        seed=0,
        stop_ids=frozenset(stop_ids),
    )


def add_hash(before: int, token: int) -> int:
    """A number for a sequence of tokens, from that of all but the last."""
    return hash((before, token))


def next_token(sequence_hash: int) -> int:
    """Stands for the model: depends on all tokens before."""
    return sequence_hash % 1000


class Simulation:
    """Runs steps and checks, at each, what the model would read and write."""

    def __init__(self, pages: int, step_tokens: int, running: int) -> None:
        self.pool = PagePool(pages)
        self.scheduler = Scheduler(self.pool, max_step_tokens=step_tokens, max_running=running)
        self.slots: dict[int, int] = {}  # slot: hash of the tokens up to and with the one it holds
        self.started: list[int] = []
        self.hashes: dict[int, list[int]] = {}

    def hash_to(self, request: Request, position: int) -> int:
        """Of the tokens up to and with `position`."""
        hashes = self.hashes.setdefault(request.order, [])
        for token in request.tokens[len(hashes) : position + 1]:
            hashes.append(add_hash(hashes[-1] if hashes else 0, token))
        return hashes[position]

    def slot(self, request: Request, position: int) -> int:
        return request.pages[position // PAGE_TOKENS] * PAGE_TOKENS + position % PAGE_TOKENS

    def step(self) -> list:
        chunks = self.scheduler.schedule()
        counts = [chunk.count for chunk in chunks]
        assert sum(counts) <= self.scheduler.max_step_tokens
        assert len(chunks) <= self.scheduler.max_running
        assert len({id(chunk.request) for chunk in chunks}) == len(chunks)
        assert counts == sorted(counts, key=lambda count: count > 1)  # single tokens first
        for request in self.scheduler.running:  # a running answer never waits for a prompt
            if request.num_remaining == 1:
                assert any(chunk.request is request for chunk in chunks)
        written = set()
        for chunk in chunks:
            request = chunk.request
            assert request.state is State.RUNNING
            assert chunk.start == request.num_computed
            assert chunk.count >= 1
            assert chunk.stop <= len(request.tokens)
            for position in range(chunk.start, chunk.stop):
                slot = self.slot(request, position)
                assert slot not in written  # by two tokens of one step
                written.add(slot)
                self.slots[slot] = self.hash_to(request, position)
        for chunk in chunks:
            request = chunk.request
            for position in range(chunk.stop):  # reused pages and older steps included
                slot = self.slot(request, position)
                assert self.slots[slot] == self.hash_to(request, position)
        orders = {chunk.request.order for chunk in chunks}
        self.started += sorted(orders - set(self.started))
        for chunk in chunks:
            request = chunk.request
            done = chunk.stop == len(request.tokens)
            token = next_token(self.hash_to(request, chunk.stop - 1)) if done else None
            self.scheduler.advance(chunk, token)
        orders = [r.order for r in self.scheduler.running + self.scheduler.waiting]
        assert orders == sorted(orders)
        held = {page for request in self.scheduler.running for page in request.pages}
        assert self.pool.held == len(held)
        return chunks

    def run(self) -> None:
        for _ in range(10_000):
            if not self.step():
                break
        assert not self.scheduler.running
        assert not self.scheduler.waiting
        assert self.pool.held == 0


def expected_answer(prompt: list[int], count: int) -> list[int]:
    sequence_hash, answer = functools.reduce(add_hash, prompt, 0), []
    for _ in range(count):
        answer.append(next_token(sequence_hash))
        sequence_hash = add_hash(sequence_hash, answer[-1])
    return answer


BASE = list(range(400))
requests_strategy = st.lists(
    st.tuples(
        st.integers(0, 3),  # which beginning the prompt shares with others
        st.sampled_from([1, 2, 100, 127, 128, 129, 255, 256, 257, 300]),
        st.sampled_from([1, 2, 30, 130]),
        st.integers(0, 5),  # steps before it arrives
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=150, deadline=None)
@given(
    arrivals=requests_strategy,
    pages=st.integers(4, 9),
    step_tokens=st.sampled_from([2, 16, 100, 128, 1000]),
    running=st.sampled_from([1, 2, 8]),
)
def test_every_request_is_done_right(arrivals, pages, step_tokens, running):
    simulation = Simulation(pages, step_tokens, min(running, step_tokens))
    requests = []
    for order, (family, length, new_tokens, wait) in enumerate(arrivals):
        for _ in range(wait):
            simulation.step()
        prompt = [*BASE[: length // 2], family, *BASE[: length - length // 2 - 1]]
        request = make_request(order, prompt, new_tokens)
        simulation.scheduler.add(request)
        requests.append(request)
    simulation.run()
    for request in requests:
        assert request.state is State.FINISHED
        assert request.finish_reason == "length"
        assert request.generated == expected_answer(request.prompt, request.max_new_tokens)
    assert simulation.started == sorted(simulation.started)
    event(f"preempted: {any(r.statistics.preemptions for r in requests)}")
    event(f"reused: {any(r.statistics.cached_tokens for r in requests)}")


@settings(max_examples=40, deadline=None)
@given(arrivals=requests_strategy, pages=st.integers(4, 6), data=st.data())
def test_aborts_at_any_time_leak_nothing_and_disturb_nobody(arrivals, pages, data):
    simulation = Simulation(pages, 64, 8)
    requests = []
    for order, (family, length, new_tokens, _) in enumerate(arrivals):
        requests.append(make_request(order, [family, *BASE[: length - 1]], new_tokens))
        simulation.scheduler.add(requests[-1])
    doomed = data.draw(st.sets(st.integers(0, len(requests) - 1)))
    for index in doomed:
        for _ in range(data.draw(st.integers(0, 6))):
            simulation.step()
        simulation.scheduler.finish(requests[index], "abort")
    simulation.run()
    for index, request in enumerate(requests):
        answer = expected_answer(request.prompt, request.max_new_tokens)
        if index not in doomed:
            assert request.generated == answer
        assert request.generated == answer[: len(request.generated)]
        assert request.pages == []


def test_running_answers_come_before_prompts_and_the_budget_holds():
    simulation = Simulation(pages=20, step_tokens=32, running=4)
    simulation.scheduler.add(make_request(0, [1, 2], 50))
    simulation.step()
    simulation.scheduler.add(make_request(1, BASE[:100], 3))
    counts = [[(c.request.order, c.count) for c in simulation.step()] for _ in range(4)]
    assert counts == [
        [(0, 1), (1, 31)],
        [(0, 1), (1, 31)],
        [(0, 1), (1, 31)],
        [(0, 1), (1, 7)],
    ]


def test_the_youngest_gives_way_and_comes_back_first():
    simulation = Simulation(pages=3, step_tokens=1000, running=4)
    old, young = make_request(0, [1] * 127, 200), make_request(1, [2] * 250, 3)
    late = make_request(2, [3], 1)
    simulation.scheduler.add(old)
    simulation.scheduler.add(young)
    while not young.statistics.preemptions:
        simulation.step()
        if late not in simulation.scheduler.waiting:
            simulation.scheduler.add(late)
        assert old.statistics.preemptions == 0
    assert simulation.scheduler.waiting == [young, late]
    simulation.run()
    assert old.statistics.preemptions == 0
    assert late.statistics.started >= old.statistics.finished  # it does not overtake


def test_a_request_that_can_never_fit_is_refused_and_one_that_just_fits_is_not():
    simulation = Simulation(pages=2, step_tokens=64, running=4)
    fits = make_request(0, [1] * 200, 57)  # 256 slots: the last token of an answer needs none
    simulation.scheduler.add(fits)
    with pytest.raises(
        ValueError, match=r"cache of 2 pages of 128 tokens, got 200 \+ 58 .* 3 pages"
    ):
        simulation.scheduler.add(make_request(1, [1] * 200, 58))
    simulation.run()
    assert len(fits.generated) == 57


def test_waiting_requests_start_when_pages_come_free():
    simulation = Simulation(pages=2, step_tokens=1000, running=4)
    first, second = make_request(0, [1] * 200, 5), make_request(1, [2] * 200, 5)
    simulation.scheduler.add(first)
    simulation.scheduler.add(second)
    simulation.step()
    assert (first.state, second.state) == (State.RUNNING, State.WAITING)
    simulation.run()
    assert second.statistics.started >= first.statistics.finished
    assert second.statistics.preemptions == 0


def test_the_last_known_token_is_computed_even_if_its_page_is_cached():
    simulation = Simulation(pages=8, step_tokens=1000, running=4)
    for order in range(2):
        request = make_request(order, BASE[:256], 2)
        simulation.scheduler.add(request)
        simulation.run()
    assert request.statistics.cached_tokens == 128
    assert request.statistics.computed_tokens == 128 + 1
    assert pages_for(256) == 2


def test_a_stop_token_ends_the_answer():
    answer = expected_answer([7], 10)
    simulation = Simulation(pages=2, step_tokens=8, running=4)
    request = make_request(0, [7], 10, stop_ids=[answer[3]])
    simulation.scheduler.add(request)
    simulation.run()
    assert request.generated == answer[: answer.index(answer[3]) + 1]
    assert request.finish_reason == "stop"


@pytest.mark.parametrize("running", [0, 9])
def test_a_budget_below_the_number_of_running_requests_is_refused(running: int):
    with pytest.raises(
        ValueError, match=rf"max_running must be 1 to max_step_tokens 8, .* {running}"
    ):
        Scheduler(PagePool(1), max_step_tokens=8, max_running=running)
