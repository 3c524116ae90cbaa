"""What families have in common: how they cut frames, and what this server takes from a request."""

from ..protocols import MediaLimits, PatchGeometry

PATCHES_14 = PatchGeometry(patch=14, merge=2, temporal=2)
"""Patches of 14 pixels, two frames deep."""


def server_limits(*, max_images: int, max_videos: int) -> MediaLimits:
    """The counts are a family's own; bytes, pixels and frames protect the server, whoever asks."""
    return MediaLimits(
        max_images=max_images,
        max_videos=max_videos,
        image_bytes=30_000_000,
        video_bytes=50_000_000,
        video_url_bytes=250_000_000,
        request_bytes=500_000_000,
        image_pixels=64_000_000,
        frame_pixels=8192 * 4320,
        source_frames=200_000,
        video_pixels=301_056_000,
    )
