"""The engine: requests in, tokens out. `step` runs the model; the rest is bookkeeping."""

import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from msa_kernels import Batch, is_supported

from .cache import PAGE_TOKENS, PagePool, make_layer_caches, pages_for
from .config import MSA_ATTENTION, ModelConfig
from .media import FeatureCache, Medium, PromptMedia
from .model import Model
from .sampling import SamplingParams, sample
from .scheduler import Chunk, Request, Scheduler, State
from .vision import VisionTower
from .weights import load_weights

GREEDY = SamplingParams()


class Engine:
    """Serves one model from one thread."""

    def __init__(
        self,
        model: Model,
        *,
        tower: VisionTower | None = None,
        cache_tokens: int = 16_384,
        max_step_tokens: int = 512,
        max_running: int = 64,
        feature_bytes: int = 256 << 20,
    ) -> None:
        """Allocates the cache.

        Args:
            model: with its weights on the device to run on.
            tower: of the same checkpoint, for prompts with images or clips; None: text alone.
            cache_tokens: size of the cache, rounded up to pages of 128 tokens.
            max_step_tokens: most tokens of one step; a longer prompt is computed in chunks.
            max_running: most requests that share the steps; others wait.
            feature_bytes: the tower's outputs that are kept for media that may come again.

        Raises:
            ValueError: the library has no kernel for the model's dtype on its device, which the
                first step would find out.
        """
        operators = ["write_cache", "paged_decode"]
        if MSA_ATTENTION in model.config.layer_types:
            operators += ["select_blocks", "sparse_prefill", "sparse_decode"]
        for operator in operators:
            supported, reason = is_supported(operator, model.device, model.dtype)
            if not supported:
                raise ValueError(f"model: {reason}")
        self.model = model
        self.tower = tower
        self.features = FeatureCache(feature_bytes)
        self.config = model.config
        self.pool = PagePool(pages_for(cache_tokens))
        self.scheduler = Scheduler(
            self.pool,
            max_step_tokens=max_step_tokens,
            max_running=min(max_running, max_step_tokens),
        )
        self.caches = make_layer_caches(
            self.config, self.pool.num_pages, dtype=model.dtype, device=str(model.device)
        )
        self.num_steps = 0
        self._num_requests = 0

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        *,
        dtype: torch.dtype | None = None,
        device: str = "cpu",
        vision: bool = False,
        **options,
    ) -> "Engine":
        """Loads a checkpoint.

        Args:
            folder: of the checkpoint.
            dtype: of weights and cache; None keeps the checkpoint's.
            device: to run on.
            vision: whether the vision tower is loaded too, which needs transformers.
            options: see `__init__`.
        """
        config = ModelConfig.from_folder(folder)
        model = Model(config, load_weights(folder, config, dtype=dtype, device=device))
        tower = None
        if vision:
            tower = VisionTower.from_folder(folder, dtype=dtype, device=device)
        return cls(model, tower=tower, **options)

    def add_request(
        self,
        prompt: Sequence[int],
        *,
        media: Sequence[Medium] = (),
        max_new_tokens: int = 64,
        sampling: SamplingParams = GREEDY,
        stop_ids: Sequence[int] = (),
        ignore_eos: bool = False,
    ) -> Request:
        """Queues a prompt; the result fills up as `step` is called.

        Args:
            prompt: token ids, at least one; as many placeholders as the media have rows.
            media: images and clips, each with the places of its rows in the prompt.
            max_new_tokens: most tokens to generate, at least 1.
            sampling: how tokens are picked.
            stop_ids: tokens that end the answer, besides the checkpoint's own.
            ignore_eos: let the checkpoint's own stop tokens pass.

        Raises:
            ValueError: an empty prompt, a token outside the vocabulary, or a request that neither
                the model's positions nor the cache could ever hold; media that do not fit the
                prompt or the tower. No other request is touched.
        """
        prompt = [int(token) for token in prompt]
        if not prompt:
            raise ValueError("prompt must hold at least one token, got none")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        vocabulary = self.config.vocab_size
        outside = next((token for token in prompt if not 0 <= token < vocabulary), None)
        if outside is not None:
            raise ValueError(f"prompt must hold token ids 0 to {vocabulary - 1}, got {outside}")
        if len(prompt) + max_new_tokens > self.config.max_positions:
            raise ValueError(
                f"prompt and max_new_tokens must be at most {self.config.max_positions} tokens "
                f"(max_position_embeddings), got {len(prompt)} + {max_new_tokens}"
            )
        self._check_media(media)
        eos = frozenset() if ignore_eos else self.config.eos_token_ids
        request = Request(
            order=self._num_requests,
            prompt=prompt,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
            stop_ids=eos | frozenset(stop_ids),
            media=PromptMedia(media, len(prompt)),
        )
        self.scheduler.add(request)
        self._num_requests += 1
        return request

    def _check_media(self, media: Sequence[Medium]) -> None:
        if media and self.tower is None:
            raise ValueError("media: this engine has no vision tower, got images or clips")
        for index, medium in enumerate(media):
            frames, gh, gw = medium.grid
            config = self.tower.config
            if min(medium.grid) < 1 or gh % config.merge or gw % config.merge:
                raise ValueError(
                    f"media[{index}]: grid must be positive, its sides multiples of "
                    f"{config.merge}, got {medium.grid}"
                )
            rows = frames * gh * gw
            shapes = [[rows, config.row_width]]
            if frames == 1:
                shapes.append([rows, config.frame_width])
            if list(medium.patches.shape) not in shapes:
                raise ValueError(
                    f"media[{index}]: patches must be {' or '.join(map(str, shapes))} for the grid "
                    f"{medium.grid}, got {list(medium.patches.shape)}"
                )
            if medium.tokens != rows // config.merge**2:
                raise ValueError(
                    f"media[{index}]: spans must hold {rows // config.merge**2} tokens for the "
                    f"grid {medium.grid}, got {medium.tokens}"
                )

    @property
    def has_work(self) -> bool:
        """Whether some request is not finished."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    def step(self) -> list[Request]:
        """Runs the model once, as the scheduler says; returns the requests that got a token."""
        chunks = self.scheduler.schedule()
        if not chunks:
            return []
        logits = self._run(chunks)
        self.num_steps += 1
        given = []
        for chunk in chunks:
            request, token = chunk.request, None
            if chunk.stop == len(request.tokens):  # its last row knows the whole request
                index = len(request.generated)
                token = sample(logits[len(given)], request.sampling, request.seed, index)
                given.append(request)
            self.scheduler.advance(chunk, token)
        return given

    def abort(self, request: Request) -> None:
        """Ends a request where it stands and frees its pages; a finished one stays as it is."""
        self.scheduler.finish(request, "abort")

    def stream(self, prompt: Sequence[int], **options) -> Iterator[int]:
        """Yields the answer's tokens as they come. Options: see `add_request`.

        Other requests in the engine move on with it. Closing the iterator early aborts its request.
        """
        request = self.add_request(prompt, **options)
        return self._follow(request)

    def _follow(self, request: Request) -> Iterator[int]:
        try:
            for index in range(request.max_new_tokens):
                while len(request.generated) <= index:
                    if request.state is State.FINISHED:
                        return
                    self.step()
                yield request.generated[index]
        finally:
            self.abort(request)

    def generate(self, prompts: Sequence[Sequence[int]], **options) -> list[Request]:
        """Serves prompts together until all are done. Options, for all of them: see `add_request`.

        If one of the prompts is refused, none is served.
        """
        requests: list[Request] = []
        try:
            for prompt in prompts:
                requests.append(self.add_request(prompt, **options))
            while any(request.state is not State.FINISHED for request in requests):
                self.step()
        except BaseException:
            for request in requests:
                self.abort(request)
            raise
        return requests

    def blocks_of(self, request: Request) -> tuple[int, int]:
        """(visible, attended) blocks of the newest computed token, per KV head of an MSA layer."""
        # The newest token itself has not been computed yet, the one before it has.
        visible = pages_for(max(1, len(request.tokens) - 1))
        return visible, min(visible, self.config.topk_blocks)

    def _run(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Logits [N, vocabulary] float32, a row for each chunk with its request's last token."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        cu_seqlens = [0]
        logit_rows = []
        media_rows: list[int] = []
        media_embeddings: list[torch.Tensor] = []
        for chunk in chunks:
            request = chunk.request
            pieces = request.media.pieces(chunk.start, chunk.stop)
            for piece in pieces:
                row = len(tokens) + piece.position - chunk.start
                media_rows += range(row, row + piece.count)
                features = self._features_of(request, piece.medium)
                media_embeddings.append(features[piece.row : piece.row + piece.count])
            for piece in pieces:
                if request.media.ends[piece.medium] <= chunk.stop:
                    request.features.pop(piece.medium, None)
            tokens += request.tokens[chunk.start : chunk.stop]
            positions += range(chunk.start, chunk.stop)
            slots += [
                request.pages[position // PAGE_TOKENS] * PAGE_TOKENS + position % PAGE_TOKENS
                for position in range(chunk.start, chunk.stop)
            ]
            cu_seqlens.append(len(tokens))
            if chunk.stop == len(request.tokens):
                logit_rows.append(len(tokens) - 1)

        num_decode = sum(chunk.count == 1 for chunk in chunks)  # they stand first
        longest = max(chunk.stop for chunk in chunks)
        width = pages_for(longest)
        table = [[*c.request.pages[:width], *[-1] * (width - len(c.request.pages))] for c in chunks]
        batch = Batch(
            block_table=self._tensor(table, torch.int32),
            cu_seqlens_q=self._tensor(cu_seqlens, torch.int32),
            seq_lens=self._tensor([chunk.stop for chunk in chunks], torch.int32),
            slot_mapping=self._tensor(slots, torch.int64),
            num_decode_requests=num_decode,
            num_decode_tokens=num_decode,
            max_seqlen_q=max(chunk.count for chunk in chunks),
            max_seqlen_k=longest,
        )
        return self.model.forward(
            self._tensor(tokens, torch.int64),
            self._tensor(positions, torch.int64),
            batch,
            self.caches,
            self._tensor(logit_rows, torch.int64),
            self._tensor(media_rows, torch.int64) if media_rows else None,
            torch.cat(media_embeddings) if media_rows else None,
        )

    def _features_of(self, request: Request, index: int) -> torch.Tensor:
        """The tower's output for a medium, [its tokens, hidden].

        A request holds it until its last row is used: it may be needed for many steps, in which the
        cache may give it up.
        """
        if index not in request.features:
            medium = request.media.media[index]
            request.features[index] = self.features.get(
                medium.key, lambda: self.tower.encode(medium.patches, medium.grid)
            )
        return request.features[index]

    def _tensor(self, values: Sequence, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.model.device)
