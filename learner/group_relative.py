"""Which advantage estimators only compare the answers of a group. Apart from them, because importing it costs nothing."""

from __future__ import annotations

# Functions of learner.advantages. They need at least two answers, and learn nothing from equal ones.
GROUP_RELATIVE: frozenset[str] = frozenset(
    {"dr_grpo", "gdpo", "grpo", "lite_ppo", "maxrl", "opo", "reinforce_pp_baseline", "rloo"}
)
