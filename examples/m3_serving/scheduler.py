"""Continuous batching: which tokens of which requests the next step computes.

Every step has a budget of tokens. Requests that only need their next token (decode) come first, one
token each; what is left goes to prompts, in chunks, oldest request first. So a long prompt never
stops the others' answers.

A request gets the pages of all its known tokens when it starts, and one more each 128 tokens after
that. When no page is left, the youngest running request gives up all of its own and returns to the
queue with the tokens it has (preemption); started again, it computes them anew, mostly from pages
that are still cached. The oldest request can take every page in this way, and `add` refuses what
would not fit even then, so each request gets done.
"""

import time
from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor

from .cache import PAGE_TOKENS, CacheFull, PagePool, page_key, pages_for
from .media import NO_MEDIA, PromptMedia
from .sampling import SamplingParams


class State(Enum):
    """Where a request is: in the queue, in the batch, or done."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass
class Statistics:
    """One request's numbers; times in `time.perf_counter()` seconds, None until then."""

    arrived: float = field(default_factory=time.perf_counter)
    started: float | None = None
    first_token: float | None = None
    finished: float | None = None
    cached_tokens: int = 0
    """prompt tokens found in the cache at the first start"""
    computed_tokens: int = 0
    """tokens the model was run on for it, those computed again after a preemption included"""
    preemptions: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        """seconds, from arrival"""
        return None if self.first_token is None else self.first_token - self.arrived

    def tokens_per_second(self, generated: int) -> float | None:
        """Tokens generated a second from start to finish, prefill included; None before the end."""
        if self.started is None or self.finished is None or self.finished == self.started:
            return None
        return generated / (self.finished - self.started)


@dataclass(eq=False)
class Request:
    """A prompt and the answer so far. Written by engine and scheduler only."""

    order: int
    """order of arrival, also its name in messages"""
    prompt: list[int]
    max_new_tokens: int
    sampling: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    media: PromptMedia = NO_MEDIA
    tokens: list[int] = field(default_factory=list)
    """prompt and answer"""
    state: State = State.WAITING
    finish_reason: str | None = None
    """`stop` (a stop token, which is the answer's last), `length`, or `abort`"""
    pages: list[int] = field(default_factory=list)
    """page of each block of 128 tokens"""
    num_computed: int = 0
    """leading tokens whose keys and values are in the pages"""
    num_published: int = 0
    """leading pages that were offered for reuse"""
    page_keys: list[bytes] = field(default_factory=list)
    features: dict[int, Tensor] = field(default_factory=dict)
    """tower's output of the media that are computed in part, by their index"""
    statistics: Statistics = field(default_factory=Statistics)

    def __post_init__(self) -> None:
        """The tokens known at first are the prompt."""
        self.tokens = list(self.prompt)

    @property
    def generated(self) -> list[int]:
        """The answer so far, token ids."""
        return self.tokens[len(self.prompt) :]

    @property
    def num_remaining(self) -> int:
        """known tokens that are not computed; 1 means decode"""
        return len(self.tokens) - self.num_computed

    def key_of_page(self, page_index: int) -> bytes:
        """Key of a page whose 128 tokens are all known."""
        while len(self.page_keys) <= page_index:
            start = len(self.page_keys) * PAGE_TOKENS
            stop = start + PAGE_TOKENS
            previous = self.page_keys[-1] if self.page_keys else b""
            media = self.media.names(start, stop)
            self.page_keys.append(page_key(previous, self.tokens[start:stop], media))
        return self.page_keys[page_index]


@dataclass(frozen=True)
class Chunk:
    """Tokens start .. start + count - 1 of a request, to be computed in one step."""

    request: Request
    start: int
    count: int

    @property
    def stop(self) -> int:
        """start + count"""
        return self.start + self.count


class Scheduler:
    """Owns the queue and the running requests: `schedule`, run the model, `advance` each chunk."""

    def __init__(self, pool: PagePool, *, max_step_tokens: int, max_running: int) -> None:
        """A budget in tokens a step, and the most requests that share a step."""
        if not 1 <= max_running <= max_step_tokens:
            raise ValueError(
                f"max_running must be 1 to max_step_tokens {max_step_tokens}, since each running "
                f"request may need a token in every step, got {max_running}"
            )
        self.pool = pool
        self.max_step_tokens = max_step_tokens
        self.max_running = max_running
        self.waiting: list[Request] = []  # by order of arrival, as is `running`
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        """Queues a request; ValueError if it would not fit into the cache even alone."""
        # The last token of an answer is never computed, so it needs no slot.
        needed = pages_for(len(request.prompt) + request.max_new_tokens - 1)
        if needed > self.pool.num_pages:
            raise ValueError(
                f"prompt and max_new_tokens must fit into the cache of {self.pool.num_pages} pages "
                f"of {PAGE_TOKENS} tokens, got {len(request.prompt)} + {request.max_new_tokens} "
                f"tokens = {needed} pages"
            )
        self.waiting.append(request)

    def schedule(self) -> list[Chunk]:
        """The next step's tokens, single tokens first; empty only if there is nothing to do."""
        self._grow_or_preempt()
        chunks = [Chunk(r, r.num_computed, 1) for r in self.running if r.num_remaining == 1]
        prompts = [r for r in self.running if r.num_remaining > 1]
        budget = self.max_step_tokens - len(chunks)
        while budget > 0:
            request = prompts.pop(0) if prompts else self._start_next()
            if request is None:
                break
            chunks.append(Chunk(request, request.num_computed, min(request.num_remaining, budget)))
            budget -= chunks[-1].count
        # A prompt's last or only missing token is a decode step too: what counts is the shape.
        return sorted(chunks, key=lambda chunk: chunk.count > 1)

    def advance(self, chunk: Chunk, token: int | None) -> None:
        """Records a computed chunk, and the token sampled from its last row, if any."""
        request = chunk.request
        request.num_computed = chunk.stop
        request.statistics.computed_tokens += chunk.count
        while request.num_published < request.num_computed // PAGE_TOKENS:
            index = request.num_published
            self.pool.publish(request.pages[index], request.key_of_page(index))
            request.num_published += 1
        if token is None:
            return
        request.tokens.append(token)
        request.statistics.first_token = request.statistics.first_token or time.perf_counter()
        if token in request.stop_ids:
            self.finish(request, "stop")
        elif len(request.generated) == request.max_new_tokens:
            self.finish(request, "length")

    def finish(self, request: Request, reason: str) -> None:
        """Ends a waiting or running request and gives its pages back."""
        if request.state is State.FINISHED:
            return
        (self.waiting if request.state is State.WAITING else self.running).remove(request)
        self.pool.release(request.pages)
        request.pages = []
        request.features.clear()
        request.state, request.finish_reason = State.FINISHED, reason
        request.statistics.finished = time.perf_counter()

    def _start_next(self) -> Request | None:
        """Starts the oldest waiting request; None if it, and all behind it, have to wait."""
        if not self.waiting or len(self.running) == self.max_running:
            return None
        request = self.waiting[0]
        # The last known token is always computed, since its logits give the next one.
        reusable = (len(request.tokens) - 1) // PAGE_TOKENS
        pages = self.pool.take_cached([request.key_of_page(i) for i in range(reusable)])
        num_cached = len(pages)
        try:
            pages += self.pool.allocate(pages_for(len(request.tokens)) - num_cached)
        except CacheFull:
            self.pool.release(pages)
            return None
        del self.waiting[0]
        self.running.append(request)
        request.state, request.pages = State.RUNNING, pages
        request.num_published, request.num_computed = num_cached, num_cached * PAGE_TOKENS
        if request.statistics.started is None:
            request.statistics.started = time.perf_counter()
            request.statistics.cached_tokens = request.num_computed
        return request

    def _grow_or_preempt(self) -> None:
        """Gives each running request the page its newest token needs, oldest request first."""
        for request in list(self.running):
            while request.state is State.RUNNING and len(request.pages) < pages_for(
                len(request.tokens)
            ):
                try:
                    request.pages += self.pool.allocate(1)
                except CacheFull:
                    self._preempt(self.running[-1])  # may be the request itself

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.pool.release(request.pages)
        request.pages, request.num_computed = [], 0
        request.features.clear()
        request.state = State.WAITING
        request.statistics.preemptions += 1
        self.waiting.insert(0, request)  # whatever waits is younger than whatever was running
