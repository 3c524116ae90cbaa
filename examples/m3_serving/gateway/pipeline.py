"""From a request's media to items ready for the worker: the one entry point of this part."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from .errors import InvalidParameter, TooManyItems
from .job_spec import make_job
from .pool import DecodePool
from .protocols import (
    Decoded,
    Fetched,
    Hold,
    MediaFetcher,
    MediaItem,
    ModelFamily,
    PreparedItem,
    hold_nothing,
)
from .tasks import gather_or_cancel


def content_key(digest: str, job: dict[str, Any], decoded: Decoded) -> str:
    """Names a medium's tensors: equal keys, equal rows.

    Bytes alone would not do: the same clip at another fps or size has other rows, and so has the
    same image after an update of a decoder. Limits are left out, they refuse but never change.

    Args:
        digest: SHA-256 of the bytes, hex.
        job: what was asked.
        decoded: what came of it.

    Returns:
        SHA-256, hex.
    """
    parts = {
        "bytes": digest,
        "job": {name: value for name, value in job.items() if name != "limits"},
        "indices": decoded.indices,
        "processor": decoded.processor,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class MediaPipeline:
    """Fetches and decodes the media of one family's requests."""

    def __init__(self, family: ModelFamily, fetcher: MediaFetcher, pool: DecodePool) -> None:
        """Fetcher and pool may be shared with other pipelines."""
        self._family, self._fetcher, self._pool = family, fetcher, pool

    async def prepare(
        self, items: Sequence[MediaItem], hold: Hold = hold_nothing
    ) -> list[PreparedItem]:
        """All media of a request, in order; placeholders are left to the expander.

        Options and counts are judged before anything is fetched. An item that occurs twice with the
        same options is fetched and decoded once, and counted twice. `hold` is told of bytes
        fetched and of patches made.

        Raises:
            GatewayError: of the first item that fails; work on the others is stopped.
        """
        self._check_counts(items)
        jobs = [self._job(item) for item in items]
        fetched = await self._fetcher.fetch_all(items, self._family.limits, hold)
        keys = [
            (medium.digest, json.dumps(job, sort_keys=True))
            for medium, job in zip(fetched, jobs, strict=True)
        ]
        work: dict[tuple[str, str], tuple[MediaItem, dict[str, Any], Fetched]] = {}
        for key, *one in zip(keys, items, jobs, fetched, strict=True):
            work.setdefault(key, tuple(one))
        results = await gather_or_cancel(self._decode(*one, hold) for one in work.values())
        prepared = dict(zip(work, results, strict=True))
        return [prepared[key] for key in keys]

    def _check_counts(self, items: Sequence[MediaItem]) -> None:
        limits = self._family.limits
        for modality, limit in (("image", limits.max_images), ("video", limits.max_videos)):
            count = sum(item.modality == modality for item in items)
            if count > limit:
                raise TooManyItems(f"a request may have {limit} {modality}s, got {count}")

    def _job(self, item: MediaItem) -> dict[str, Any]:
        with item.blamed():
            sampler = None
            if item.modality == "video":
                sampler = self._family.sampler(item.options)
            elif item.options.fps is not None:
                raise InvalidParameter("fps is for clips, not for images", param="fps")
            sizing = self._family.sizing(item.modality, item.options)
        return make_job(item.modality, self._family.geometry, sizing, sampler, self._family.limits)

    async def _decode(
        self, item: MediaItem, job: dict[str, Any], medium: Fetched, hold: Hold
    ) -> PreparedItem:
        with item.blamed():
            decoded = await self._pool.run(job, medium.data)
            hold(decoded.patches.nbytes)
        return PreparedItem(
            modality=job["modality"],
            content_key=content_key(medium.digest, job, decoded),
            patches=decoded.patches,
            grid=decoded.grid,
            tokens=len(decoded.patches) // self._family.geometry.merge**2,
            timestamps=decoded.timestamps,
        )
