"""The objects of OpenAI's API as this server writes them."""

import json
from dataclasses import dataclass
from typing import Any

from ..protocols import PreparedItem


@dataclass(frozen=True)
class PromptCounts:
    """A prompt's tokens."""

    total: int
    image: int
    """of them, those that stand for images"""
    video: int
    """of them, those that stand for clips"""

    @classmethod
    def of(cls, token_ids: list[int], items: list[PreparedItem]) -> "PromptCounts":
        """Counts an expanded prompt."""
        tokens = {"image": 0, "video": 0}
        for item in items:
            tokens[item.modality] += item.tokens
        return cls(len(token_ids), tokens["image"], tokens["video"])


@dataclass(frozen=True)
class Head:
    """What all objects of one answer have in common."""

    id: str
    created: int
    """seconds since 1970"""
    model: str


def usage(prompt: PromptCounts, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """The `usage` object."""
    return {
        "prompt_tokens": prompt.total,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt.total + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": cached_tokens,
            "image_tokens": prompt.image,
            "video_tokens": prompt.video,
        },
    }


def completion(head: Head, text: str, reason: str, counts: dict[str, Any]) -> dict[str, Any]:
    """The answer in one piece."""
    message = {"role": "assistant", "content": text, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}
    return {
        "id": head.id,
        "object": "chat.completion",
        "created": head.created,
        "model": head.model,
        "choices": [choice],
        "usage": counts,
    }


def chunk(head: Head, delta: dict[str, str], reason: str | None = None) -> dict[str, Any]:
    """A piece of the answer."""
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
    return {
        "id": head.id,
        "object": "chat.completion.chunk",
        "created": head.created,
        "model": head.model,
        "choices": [choice],
    }


def model(name: str, created: int, context_tokens: int) -> dict[str, Any]:
    """An entry of /v1/models."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "local",
        "max_model_len": context_tokens,
    }


def event(value: dict[str, Any] | str) -> bytes:
    """A server-sent event."""
    text = value if isinstance(value, str) else to_json(value)
    return f"data: {text}\n\n".encode()


def to_json(value: dict[str, Any]) -> str:
    """Compact; characters as they are."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
