"""What one simulated schedule is like: sizes, policy and fault rates, all drawn from its seed.

Every schedule switches some kinds of trouble off entirely (swarm testing): a bug that needs calm in one place and chaos
in another is found by neither an all-calm nor an all-chaos mix.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from sglang_hisparse.residency import BorderStep, Mirroring, ResidencyLimits, ResidencyMode, ResidencyPolicy


@dataclass(frozen=True, slots=True)
class Options:
    """Sizes in pages unless named otherwise; `p_x` is a probability per iteration or per copy."""

    limits: ResidencyLimits
    policy: ResidencyPolicy
    num_ranks: int
    num_steps: int
    num_requests: int  # that arrive, at most
    max_running: int
    overlap: bool
    radix: bool
    chunk_tokens: int
    num_families: int
    longest_pages: int
    output_pages: int  # longest output
    scratch_pages: int  # longest prefill that may be streamed, 0: none
    short_extend_tokens: int
    has_windows: bool  # a batch may read more than the scratch holds
    ledger: bool  # admission counts what live requests may need at worst; their growth must never be refused then
    p_arrive: float
    p_twin: float  # an equal prompt arrives with it
    p_abort: float
    p_retract: float
    p_flush: float
    p_late: float  # a copy is enqueued at once and acknowledged as enqueued later
    p_unsent: float  # a copy reaches the copy stream later, or
    p_fail: float  # (share of those) never
    p_duplicate: float
    p_lost: float  # a completion that is not seen before the end
    delay_steps: int  # longest delay of a completion
    gpu_ops: int  # stream operations that the GPU executes between two steps, at most
    copy_share: float  # of them, the share that goes to the copy stream

    @classmethod
    def draw(cls, rng: random.Random, border_rng: random.Random) -> Options:
        """`border_rng`: its own, so that schedules without a moving border are what they were without it."""

        def sometimes(high: float, chance: float = 0.5) -> float:
            return rng.random() * high if rng.random() < chance else 0.0

        device = rng.randint(6, 14)
        hot = rng.randint(1, 2)
        page_size = rng.randint(2, 4)
        scratch = rng.randint(device // 2, 3 * device) if rng.random() < 0.5 else 0
        least = border_rng.randint(6, device) if border_rng.random() < 0.6 else device
        longest = max(least - hot, scratch)
        p_late, p_unsent = sometimes(0.7), sometimes(0.7)
        low = rng.choice((0.0, 0.1, 0.3, 0.5))
        logical = max(longest, int(device * rng.uniform(1.0, 3.0)))
        return cls(
            limits=ResidencyLimits(
                num_logical_pages=logical,
                num_device_pages=device,
                num_slots=rng.randint(3, 5),
                max_pages_per_slot=longest + 1,
                hot_pages=hot,
                page_size=page_size,
                tail_pages=rng.choice((1, 2, 2)),
                border=_border(border_rng, device, least, logical),
            ),
            policy=ResidencyPolicy(
                mode=ResidencyMode.ALWAYS_HOST if rng.random() < 0.15 else ResidencyMode.HYBRID,
                mirroring=Mirroring.ON_PRESSURE if rng.random() < 0.25 else Mirroring.EAGER,
                watermark_low=low,
                watermark_high=min(0.9, low + rng.choice((0.0, 0.1, 0.2))),
                mirror_pages_per_step=rng.choice((1, 2, 8)),
                promote_pages_per_step=rng.choice((0, 1, 3)),
                mirror_lag_steps=rng.choice((1, 4, 32)),
            ),
            num_ranks=rng.choice((1, 1, 1, 1, 2, 3)),
            num_steps=rng.randint(6, 14),
            num_requests=rng.randint(2, 5),
            max_running=rng.randint(2, 4),
            overlap=rng.random() < 0.75,
            radix=rng.random() < 0.85,
            chunk_tokens=rng.randint(page_size, 5 * page_size),
            num_families=rng.randint(1, 3),
            longest_pages=longest,
            output_pages=rng.choice((1, 2, 4)),
            scratch_pages=scratch,
            short_extend_tokens=rng.choice((0, 2 * page_size, 6 * page_size)),
            has_windows=border_rng.random() < 0.6,
            # With copies that are not acknowledged at once nobody can promise pages.
            ledger=not (p_late or p_unsent) and rng.random() < 0.8,
            p_arrive=rng.uniform(0.2, 0.9),
            p_twin=sometimes(0.8),
            p_abort=sometimes(0.15),
            p_retract=sometimes(0.15),
            p_flush=sometimes(0.1, 0.3),
            p_late=p_late,
            p_unsent=p_unsent,
            p_fail=sometimes(0.6),
            p_duplicate=sometimes(0.5),
            p_lost=sometimes(0.3),
            delay_steps=rng.choice((0, 1, 4)),
            gpu_ops=rng.choice((2, 6, 20)),
            copy_share=rng.choice((0.1, 0.4, 0.7)),
        )


def _border(rng: random.Random, device: int, least: int, logical: int) -> tuple[BorderStep, ...]:
    """From all device pages to the least, and from some logical pages to all; nothing moves where the two are equal."""
    first = rng.randint(min(6, logical), logical)
    if least == device or first == logical:
        return ()
    num_steps = rng.randint(1, device - least)
    falls = sorted(rng.randint(least, device) for _ in range(num_steps - 1))[::-1]
    rises = sorted(rng.randint(first, logical) for _ in range(num_steps - 1))
    steps = zip((device, *falls, least), (first, *rises, logical), strict=True)
    return tuple(BorderStep(*step) for step in steps)
