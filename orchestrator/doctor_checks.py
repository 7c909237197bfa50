"""What `headway doctor` concludes from what it measured: one pure function per check.

Contract: a check gets plain data and returns a `Check`, a verdict with the figures it rests on, its limit, and what to do
where it fails. None starts anything, asks anybody or raises for bad data: bad data is what they look for.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from orchestrator.memory import Memory
from orchestrator.placement import Placement
from orchestrator.replay import Replay
from rollout_workers.trajectory import Message, Trajectory

# Nats, mean over the sampled tokens of |engine's - learner's logprob|. Two right implementations came to 5e-6 in float32 and
# to 0.035 in bfloat16 (135M parameters); one token off, or another temperature, is tenths of a nat.
MAX_LOGPROB_GAP = {"float32": 1e-3, "bfloat16": 0.1}
MAX_TOKEN_GAP = {"float32": 1e-2, "bfloat16": math.inf}  # of a single token
SHIFT_FACTOR = 3.0  # how much larger the gap must be when the logprobs are compared with a neighbour's
MAX_TEMPERATURE_ERROR = 0.05  # relative
TEMPERATURES = tuple(2 ** (k / 4) for k in range(-4, 5))  # at which the learner is asked, times the configured one
# By which a token's logprob moves because other weights are rounded otherwise; over an answer it adds up as a random walk.
MOVE_NOISE_NATS = {"float32": 1e-4, "bfloat16": 0.05}
# Nats, largest of any token, between the logprobs before a state was saved and after it was loaded.
MAX_RESTORED_GAP = {"float32": 1e-6, "bfloat16": 1e-6}
NAMED = 3  # faults that are told


class Verdict(enum.StrEnum):
    PASS = "pass"
    FAIL = "FAIL"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Check:
    """`measured` and `limit` are for a person, `figures` for a program; `advice` is what to do where it fails."""

    name: str
    verdict: Verdict
    measured: str
    limit: str = ""
    advice: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return self.verdict is Verdict.PASS


def skipped(name: str, why: str) -> Check:
    return Check(name, Verdict.SKIPPED, why)


def failed(name: str, error: BaseException, advice: str) -> Check:
    """Of a part that could not do what it was asked."""
    cause = getattr(error, "cause", None) or error  # Ray's errors hold the whole remote traceback in their text
    return Check(name, Verdict.FAIL, f"{type(cause).__name__}: {cause}", advice=advice)


def _verdict(passed: bool) -> Verdict:
    return Verdict.PASS if passed else Verdict.FAIL


class Template(Protocol):
    """What the mask check needs of a `rollout_workers.chat.ChatTemplate`."""

    tokenizer: Any

    @property
    def eos_ids(self) -> Sequence[int]: ...

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]: ...


def masks(trajectories: Sequence[Trajectory], chat: Template, *, max_response_tokens: int, max_tokens: int) -> Check:
    """The prompt is what the chat template writes, the mask covers what was sampled and nothing else, and an answer ends with
    an end-of-sequence token unless a limit cut it off."""
    faults: list[str] = []
    ended = 0
    for t in trajectories:
        ended += t.finish_reason == "stop"
        fault = _mask_fault(t, chat, max_response_tokens, max_tokens)
        if fault:
            faults.append(f"{t.group_id}[{t.index}]: {fault}")
    measured = f"{len(trajectories) - len(faults)} of {len(trajectories)} answers, {ended} of them ended by themselves"
    if faults:
        measured += "; " + "; ".join(faults[:NAMED])
    return Check(
        "masks",
        _verdict(not faults and bool(trajectories)),
        measured,
        "all answers",
        "The loss would be on tokens that the policy did not write. Look at the model's chat template and at "
        "model.chat_template_kwargs, and at the eos_token_id of its generation_config.json.",
        {"answers": len(trajectories), "faults": len(faults), "ended": ended},
    )


def _mask_fault(t: Trajectory, chat: Template, max_response_tokens: int, max_tokens: int) -> str:
    prompt = chat.prompt_ids(t.prompt_messages)
    start = len(prompt)
    if t.token_ids[:start].tolist() != list(prompt):
        return "the first tokens are not the prompt's, as the chat template writes it"
    if t.response_mask[:start].any():
        return f"{int(t.response_mask[:start].sum())} tokens of the prompt are marked as sampled"
    if not t.response_mask[start:].all() and t.turns == 1:
        return f"{int((~t.response_mask[start:]).sum())} tokens after the prompt are not marked as sampled"
    sampled = t.token_ids[t.response_mask]
    if not len(sampled):
        return "no token is marked as sampled"
    if chat.tokenizer.decode(sampled, skip_special_tokens=True) != t.completion and t.turns == 1:
        return "the sampled tokens do not spell the answer's text"
    if not np.isfinite(t.behaviour_logprobs[t.response_mask]).all():
        return "a sampled token has no logprob"
    ends = np.isin(sampled, list(chat.eos_ids))
    if ends[:-1].any():
        return "an end-of-sequence token stands in the middle of the answer"
    if t.finish_reason == "stop" and not ends[-1]:
        return f"it stopped by itself, but not with an end-of-sequence token ({', '.join(map(str, chat.eos_ids))})"
    if t.finish_reason == "length" and len(sampled) < max_response_tokens and len(t.token_ids) < max_tokens:
        return f"it was cut off after {len(sampled)} tokens, before any limit"
    return ""


def logprobs(
    behaviour: Sequence[np.ndarray],
    learner: Sequence[np.ndarray],
    *,
    dtype: str,
    max_gap: float | None = None,
    name: str = "logprobs",
) -> Check:
    """The engine's logprobs of what it sampled against the learner's, float32 [sampled tokens] of each answer."""
    if not behaviour:
        return skipped(name, "there is no answer")
    gap = np.concatenate(learner).astype(np.float64) - np.concatenate(behaviour)
    mean, largest, ratio = np.abs(gap).mean(), np.abs(gap).max(), np.exp(np.clip(gap, -20, 20)).mean()
    limit, most = (MAX_LOGPROB_GAP[dtype] if max_gap is None else max_gap), MAX_TOKEN_GAP[dtype]
    return Check(
        name,
        _verdict(bool(mean <= limit and largest <= most)),  # so put, it refuses NaN too
        f"mean gap {mean:.2g} nats over {len(gap)} tokens, largest {largest:.2g}, mean ratio {ratio:.4f}",
        f"mean {limit:g}" + (f", largest {most:g}" if math.isfinite(most) else ""),
        "Engine and learner disagree about what the policy is. See the checks shift and temperature; then compare model.dtype "
        "with rollout.engine_options (quantization, kv_cache_dtype, logits processors). If only bfloat16's noise is larger "
        "here, set doctor.max_logprob_gap.",
        {"mean": float(mean), "largest": float(largest), "ratio": float(ratio)},
    )


def shift(behaviour: Sequence[np.ndarray], learner: Sequence[np.ndarray]) -> Check:
    """The engine's logprobs fit the learner's of the same token, and of no neighbour."""
    long = [(engine, own) for engine, own in zip(behaviour, learner, strict=True) if len(engine) > 1]
    if not long:
        return skipped("shift", "no answer has two tokens")
    gaps = {
        "0": np.abs(np.concatenate([engine - own for engine, own in long])).mean(),
        "+1": np.abs(np.concatenate([engine[:-1] - own[1:] for engine, own in long])).mean(),
        "-1": np.abs(np.concatenate([engine[1:] - own[:-1] for engine, own in long])).mean(),
    }
    best = min(gaps, key=lambda shifted: gaps[shifted])
    passed = bool(min(gaps["+1"], gaps["-1"]) >= SHIFT_FACTOR * gaps["0"])
    fit = "" if best == "0" else f": they fit at {best}"
    return Check(
        "shift",
        _verdict(passed),
        ", ".join(f"at {shifted} {gap:.2g} nats" for shifted, gap in gaps.items()) + fit,
        f"a neighbour's gap at least {SHIFT_FACTOR:g} times the own",
        "The engine's logprobs belong to the token before or after: look at what reports them (an engine of another version, "
        "a logits processor).",
        {f"gap{shifted}": float(gap) for shifted, gap in gaps.items()},
    )


def temperature(
    behaviour: Sequence[np.ndarray], learner: Mapping[float, Sequence[np.ndarray]], *, configured: float
) -> Check:
    """`learner` are its logprobs of the same tokens by temperature, several of them around the configured one."""
    fitted = fitted_temperature(np.concatenate(behaviour), {t: np.concatenate(v) for t, v in learner.items()})
    error = abs(fitted / configured - 1)
    return Check(
        "temperature",
        _verdict(bool(error <= MAX_TEMPERATURE_ERROR)),
        f"the engine's logprobs fit temperature {fitted:.3f}",
        f"{configured:g} within {MAX_TEMPERATURE_ERROR:.0%}",
        "The engine samples at another temperature than the learner computes with (rollout.temperature): look for a "
        "generation config or engine option that changes it.",
        {"fitted": fitted, "configured": configured},
    )


def fitted_temperature(behaviour: np.ndarray, learner: Mapping[float, np.ndarray]) -> float:
    """The temperature, within those given, at which the learner's logprobs fit `behaviour` best in mean square.

    Between two temperatures a token's logprob is taken to be linear in the temperature's logarithm.
    """
    known = [(math.log(t), learner[t]) for t in sorted(learner)]
    best, least = math.nan, math.inf
    for (low, below), (high, above) in itertools.pairwise(known):
        slope, missing = above - below, behaviour - below
        share = float(np.clip(np.dot(missing, slope) / max(np.dot(slope, slope), 1e-30), 0, 1))
        error = float(np.square(missing - share * slope).mean())
        if error < least:
            best, least = math.exp(low + share * (high - low)), error
    return best


def rewards(
    values: Sequence[Sequence[float | None]],
    statuses: Sequence[str],
    *,
    min_scored_fraction: float,
    must_differ: bool,
    tolerance: float,
    golds: Sequence[tuple[str, float | None, float | None]] = (),
) -> Check:
    """`values` are the rewards of each group's answers, `statuses` those of the answers that were learned from.

    `golds` are prompts with the rewards of a right answer and of an empty one.
    """
    every = [value for group in values for value in group]
    scored = [value for value in every if value is not None]
    if not every:
        return skipped("rewards", "no group was judged")
    known = [[value for value in group if value is not None] for group in values]
    differing = sum(bool(group) and max(group) - min(group) > tolerance for group in known)
    share = len(scored) / len(every)
    counts = ", ".join(f"{count} {status}" for status, count in Counter(statuses).most_common())
    spread = f"mean {np.mean(scored):.3g}, {min(scored):.3g} to {max(scored):.3g}" if scored else "none"
    unpaid = [
        (prompt, right, empty)
        for prompt, right, empty in golds
        if right is None or (empty is not None and right <= empty)
    ]
    told = f"; a right answer is worth more than none for {len(golds) - len(unpaid)} of {len(golds)} prompts"
    named = ", ".join(f"{prompt}: {right} and {empty}" for prompt, right, empty in unpaid[:NAMED])
    return Check(
        "rewards",
        _verdict(share >= min_scored_fraction and (differing > 0 or not must_differ) and not unpaid),
        f"{len(scored)} of {len(every)} answers have one ({spread}), {differing} of {len(values)} groups differ; {counts}"
        + (told if golds else "")
        + (f", not for {named}" if unpaid else ""),
        f"{min_scored_fraction:.0%} scored" + (", one group that differs" if must_differ else ""),
        "Without rewards that differ within a group there is nothing to learn: headway check-rewards tries the reward functions "
        "on right and wrong answers, headway profile-difficulty finds the prompts that are neither too easy nor too hard.",
        {"scored": share, "differing": differing, "groups": len(values), "unpaid_golds": len(unpaid)},
    )


def versions(trajectories: Sequence[Trajectory], version: int, probe_gap: float | None) -> Check:
    """Answers asked for after the publish of `version` were written by it, token by token."""
    tokens: Counter[int] = Counter()
    for t in trajectories:
        for span in t.version_spans:
            tokens[span.version] += span.end - span.start
    unaccounted = sum(t.response_length for t in trajectories) - sum(tokens.values())
    others = sum(count for written_by, count in tokens.items() if written_by != version) + unaccounted
    found = ", ".join(f"{count} tokens of version {written_by}" for written_by, count in sorted(tokens.items()))
    if probe_gap is not None:
        found += f"; probe gap {probe_gap:.2g} nats"
    return Check(
        "versions",
        _verdict(others == 0 and bool(tokens)),
        found or "no tokens",
        f"all of version {version}",
        "Engines went on with older weights after they acknowledged new ones: staleness would be wrong. See the log of the "
        "rollout actors.",
        {"tokens": sum(tokens.values()), "of_other_versions": others},
    )


def replayed(replay: Replay) -> Check:
    """A step that was computed again from the journal, with a forward pass of the weights that it began with."""
    loss, advantages = replay["actor/loss"], replay["advantage of each answer"]
    differing = ", ".join(f"{f.name} by {f.difference:.2g}" for f in replay.differing)
    gap = replay["learner logprobs"].difference or 0.0
    if loss.difference is None:
        return Check("replay", Verdict.FAIL, f"the loss could not be compared: {loss.note}", advice=_REPLAY_ADVICE)
    return Check(
        "replay",
        _verdict(not differing),
        f"loss {loss.recorded:.7g} and again {loss.replayed:.7g}, logprobs apart by {gap:.2g} nats"
        + (f"; differing: {differing}" if differing else f", {len(replay.figures)} figures alike"),
        f"loss within {loss.limit:.2g}",
        _REPLAY_ADVICE,
        {"loss_difference": loss.difference, "advantage_difference": advantages.difference or 0.0, "logprob_gap": gap},
    )


_REPLAY_ADVICE = (
    "The same step gives another loss the second time. Something depends on chance or on order: a dropout that is left on, a "
    "reward or loss function of your own that keeps a state."
)


def direction(
    up: tuple[float, float], down: tuple[float, float], *, dtype: str, tokens: int, joint: bool = False
) -> Check:
    """The logprob of a whole answer before and after updates with advantage +1 for it alone, and of one with -1.

    `tokens` is the longer one's length. In `joint` updates of both, answers that have tokens in common move each other: only
    the difference is certain.
    """
    rise, fall = up[1] - up[0], down[1] - down[0]
    least = MOVE_NOISE_NATS[dtype] * math.sqrt(tokens)
    return Check(
        "direction",
        _verdict(rise - fall >= 2 * least if joint else rise >= least and fall <= -least),
        f"advantage +1 moved an answer's logprob by {rise:+.3g} nats, advantage -1 another's by {fall:+.3g}",
        f"{2 * least:.2g} apart" if joint else f"at least +{least:.2g} and -{least:.2g}",
        "Updates push the wrong way, or not at all: look at the sign of a loss of your own (algorithm.loss), at "
        "algorithm.loss_options, and whether anything is trainable (model.lora.targets).",
        {"rise": rise, "fall": fall},
    )


def restored(before: Sequence[np.ndarray], after: Sequence[np.ndarray], *, dtype: str) -> Check:
    """The learner's logprobs of fixed texts when its state was saved, and after updates once it was loaded again."""
    gap = float(np.abs(np.concatenate(after) - np.concatenate(before)).max())
    limit = MAX_RESTORED_GAP[dtype]
    return Check(
        "checkpoint",
        _verdict(gap <= limit),
        f"loaded after other updates, logprobs are off by at most {gap:.2g} nats",
        f"{limit:g}",
        "A resumed run would not go on from where it was: look at the files under the state folder of the doctor, and at "
        "DeepSpeed's messages in the logs of the learner ranks.",
        {"gap": gap},
    )


def resources(
    placement: Placement, there: Mapping[str, float], *, weights_bytes: int, through_object_store: bool
) -> Check:
    """What the actors reserve, of what Ray says is `there`, and room for one version of the weights on its way."""
    store = int(there.get("object_store_memory", 0))
    asked = f"{placement.rollouts} engine(s) with {_bundle(placement.rollout_bundle)}, "
    asked += f"{placement.learners} learner rank(s) with {_bundle(placement.learner_bundle)}"
    asked += f", {placement.references} reference actor(s)" if placement.references else ""
    return Check(
        "resources",
        _verdict(store >= weights_bytes or not through_object_store),
        f"{asked}; weights of {_gib(weights_bytes)}, an object store of {_gib(store)}",
        f"{there.get('CPU', 0):g} CPU, {there.get('GPU', 0):g} GPU in the cluster; the weights fit the object store",
        "Weights travel through Ray's object store: give it more shared memory (ray start --object-store-memory; of a container, "
        "docker run --shm-size).",
        {"weights_bytes": weights_bytes, "object_store_bytes": store},
    )


def _bundle(bundle: Mapping[str, float]) -> str:
    return " and ".join(f"{count:g} {kind}" for kind, count in bundle.items())


MEMORY_ADVICE = (
    "Lower learner.max_tokens_per_microbatch or learner.logprob_chunk_tokens, set learner.gradient_checkpointing=true or "
    "learner.offload=true, or raise learner.zero_stage and learner.ranks."
)


def memory(peak_bytes: int, device_bytes: int, estimate: Memory, *, tokens: int, longest: int) -> Check:
    """An update was made on micro-batches of `tokens` and answers of `longest` with their prompt: what it took of a rank."""
    return Check(
        "memory",
        _verdict(peak_bytes <= device_bytes),
        f"a learner rank's peak is {_gib(peak_bytes)}, with micro-batches of {tokens} tokens and answers of {longest} with their "
        f"prompt; estimated were {_gib(round(estimate.total))}",
        f"{_gib(device_bytes)}, the device",
        MEMORY_ADVICE,
        {"peak_bytes": peak_bytes, "device_bytes": device_bytes, "estimated_bytes": estimate.total},
    )


def disk(state_bytes: int, model_bytes: int, keep: int, free_bytes: int) -> Check:
    """Room for the checkpoints that are kept, one that is being written, and the final model."""
    needed = (keep + 1) * state_bytes + model_bytes
    return Check(
        "disk",
        _verdict(needed <= free_bytes),
        f"a checkpoint takes {_gib(state_bytes)}; {_gib(free_bytes)} are free",
        f"{_gib(needed)}: {keep} + 1 checkpoints and the model",
        "The run would end at a checkpoint: free space, point run.dir elsewhere, or lower checkpoint.keep.",
        {"needed_bytes": needed, "free_bytes": free_bytes},
    )


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
