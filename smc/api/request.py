"""A request: a prompt, how it is decoded, and the id of its answer."""

from __future__ import annotations

from dataclasses import dataclass, field

from smc.api.sampling_params import SamplingParams

MAX_PRIORITY = 1_000_000
"""Either sign."""


@dataclass(frozen=True)
class Request:
    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    cache_salt: str = ""
    """Prompts share cached keys and values only with prompts of the same salt."""
    waited: float = 0.0
    """Seconds between its arrival and its submission."""
    negative_prompt: tuple[int, ...] | None = None
    """Prompt that a guided request is steered away from; None: the token that begins texts."""
    priority: int = 0
    """Requests of a lower number are admitted first; those of one number in order of submission."""

    @property
    def negative_size(self) -> int:
        """Tokens of the negative prompt; 0: it is not guided."""
        return 0 if not self.params.guided else 1 if self.negative_prompt is None else len(self.negative_prompt)


def check_priority(priority: int) -> None:
    """Raises ValueError."""
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise ValueError(f"priority={priority}; allowed: {-MAX_PRIORITY} to {MAX_PRIORITY}, the lowest is first")


def check_guidance(params: SamplingParams, has_negative: bool) -> None:
    """Refuse a negative prompt that has no effect. Raises ValueError."""
    if has_negative and not params.guided:
        raise ValueError(
            "negative_prompt has no effect with guidance_scale=1; give a guidance_scale above 1, or leave it out"
        )
