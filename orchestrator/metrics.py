"""Every metric name, once, with its meaning, and the functions that compute groups of metrics.

Contract: a name that `CATALOGUE` does not hold can't be recorded, so `docs/metrics.md` (made from it by
`scripts/make_docs.py`) is complete. The x-axis of every metric is `policy_version`, the number of publishes
when the record was written: a batch's metrics carry the version that the batch led to (1 for the first
batch), an evaluation's the version it evaluated (0 before the first update).

A metric that could not be measured is absent from its record. Means are over the finite values: one NaN
does not poison the rest.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rollout_workers.trajectory import RewardResult, Status


@dataclass(frozen=True)
class Metric:
    """One name, or a family of names.

    `<placeholder>` stands for one part of the path, at the end of a name for all that is left of it. `unit`
    is `share` for a number from 0 to 1 and `1` for another number without unit.
    """

    name: str
    meaning: str
    unit: str


# What a record carries beside its metrics. `orchestrator.sinks.Recorder` writes them.
BOOKKEEPING = (
    Metric("policy_version", "number of publishes when the record was written; the x-axis", "versions"),
    Metric("time", "when the record was written, since 1970-01-01 UTC", "s"),
    Metric("lineage", "which start of this run wrote the record: 0, and one more at each resume", "1"),
)

CATALOGUE = (
    Metric("optimizer_step", "optimizer updates since the run began (a batch may make several)", "steps"),
    # The batch.
    Metric(
        "batch/groups",
        "groups in the batch; fewer than sampling.groups_per_batch when it was shrunk",
        "groups",
    ),
    Metric("batch/answers", "answers in the batch's loss", "answers"),
    Metric("batch/trained_tokens", "sampled tokens in the batch's loss", "tokens"),
    Metric("batch/model_tokens", "tokens through the learner's model, prompts and padding included", "tokens"),
    Metric("batch/trained_response_length", "mean length of the answers in the batch's loss", "tokens"),
    # Rewards.
    Metric("reward/mean", "mean total reward of the scored answers", "reward"),
    Metric("reward/std", "population standard deviation of the total reward over the scored answers", "reward"),
    Metric(
        "reward/<component>/mean",
        "mean of one reward function's unweighted value, where it gave one",
        "reward",
    ),
    Metric("reward/<component>/std", "population standard deviation of the same values", "reward"),
    Metric("reward/unscored_ratio", "answers that no reward function judges (all returned None)", "share"),
    Metric(
        "reward/errored_ratio",
        "answers whose verifier failed; they have no reward, which is not a 0",
        "share",
    ),
    Metric("reward/timed_out_ratio", "answers whose verifier ran out of time; they have no reward", "share"),
    Metric(
        "reward/unparseable_answer_ratio",
        "answers whose data row holds a gold answer that can't be read",
        "share",
    ),
    Metric(
        "reward_metric/<component>/weighted",
        "mean of what one of several reward functions adds to the total: weight times value, 0 behind a gate not passed",
        "reward",
    ),
    Metric("reward_metric/<component>/passed", "answers that passed a gate, of those that it judged", "share"),
    Metric("reward_metric/<metric>", "mean of a number that a reward function reported beside its value", "1"),
    # The independent checker.
    Metric("watch/reward", "mean unweighted value of the primary reward function", "reward"),
    Metric("watch/checker", "mean verdict of the checker", "reward"),
    Metric("watch/gap", "watch/reward - watch/checker", "reward"),
    Metric(
        "watch/gap_growth",
        "mean gap over the last reward.watch.window_batches batches - that over the first ones; reward.watch.max_gap is the limit",
        "reward",
    ),
    Metric("watch/gap_growth_error", "standard error of the growth, over groups; the alarm takes 3 of them", "reward"),
    Metric(
        "watch/agreement",
        "pairs of one group's answers that the checker tells apart and the reward orders alike; a tie of the reward counts half",
        "share",
    ),
    Metric("watch/answers", "answers with both values", "answers"),
    Metric(
        "watch/unscored_ratio",
        "answers with a reward and without a verdict of the checker: it failed, gave none, or was too slow to be asked",
        "share",
    ),
    # Groups.
    Metric("group/dispatched", "groups sent to the rollout workers", "groups"),
    Metric("group/scored", "groups whose answers were generated and judged", "groups"),
    Metric("group/trained", "groups consumed by the loss", "groups"),
    Metric(
        "group/filtered",
        "groups set aside because their rewards do not differ; each is replaced by one",
        "groups",
    ),
    Metric(
        "group/failed",
        "groups with too few scored answers after all retries (sampling.min_scored_fraction)",
        "groups",
    ),
    Metric(
        "group/stale",
        "groups set aside because fewer than two answers were fresh enough to train on",
        "groups",
    ),
    Metric(
        "group/zero_variance_ratio",
        "scored groups whose sampling.filter_on values are equal within the tolerance, filtered or not",
        "share",
    ),
    Metric(
        "group/all_right",
        "scored groups without variance whose answers are right (filter_on above 0.5)",
        "groups",
    ),
    Metric("group/all_wrong", "scored groups without variance whose answers are wrong", "groups"),
    Metric("group/out_of_band", "groups filtered because of sampling.pass_rate_band", "groups"),
    Metric("group/not_kept", "groups filtered because sampling.keep said so", "groups"),
    # Data.
    Metric(
        "data/epoch", "passes over data.train so far, skipped prompts included: 1.5 is halfway through the second", "1"
    ),
    Metric("data/skipped", "prompts that sampling.difficulty.sampler did not draw in their epoch", "prompts"),
    Metric("data/known_prompts", "prompts that had a judged group, and so have a remembered pass rate", "prompts"),
    Metric("data/pass_rate_mean", "mean remembered pass rate of the known prompts", "share"),
    Metric("data/all_right_ratio", "known prompts with a remembered pass rate of 0.95 or more", "share"),
    Metric("data/all_wrong_ratio", "known prompts with a remembered pass rate of 0.05 or less", "share"),
    Metric("data/between_ratio", "known prompts with a pass rate between these", "share"),
    # The queue.
    Metric("queue/generating", "groups with answers still being written", "groups"),
    Metric("queue/scoring", "groups being judged", "groups"),
    Metric("queue/parked", "groups whose generation was interrupted and will go on", "groups"),
    Metric("queue/ready", "groups that wait for a batch", "groups"),
    Metric("queue/training", "groups of batches whose new version is not acknowledged yet", "groups"),
    # Staleness.
    Metric("staleness/stale_ratio", "trained answers with staleness above 0", "share"),
    Metric("staleness/stale_token_ratio", "trained tokens whose own version is older than the learner's", "share"),
    Metric("staleness/mean", "mean staleness of the trained answers", "versions"),
    Metric("staleness/max", "largest staleness of a trained answer", "versions"),
    Metric(
        "staleness/in_flight_mean",
        "mean over the trained answers of newest minus oldest version among their own tokens",
        "versions",
    ),
    Metric(
        "staleness/in_queue_mean",
        "mean over the trained answers of the learner's version minus the newest version among their tokens",
        "versions",
    ),
    Metric(
        "staleness/left_out",
        "answers over staleness.max: out of the loss, still in their group's baseline",
        "answers",
    ),
    Metric("staleness/left_out_length_mean", "mean length of those answers", "tokens"),
    Metric("staleness/share/<n>", "trained answers with a staleness of n versions: the batch's histogram", "share"),
    Metric(
        "staleness/bound",
        "versions that generation could run ahead: staleness.max, or less where staleness.adaptive tightened it",
        "versions",
    ),
    # Early stop.
    Metric("early_stop/stopped", "groups stopped because their answers in time were all equal", "groups"),
    Metric("early_stop/discarded_tokens", "tokens of their unfinished answers so far, thrown away", "tokens"),
    Metric(
        "early_stop/saved_tokens",
        "tokens they would still have written, if they are like the controls (sampling.early_stop.control_share)",
        "tokens",
    ),
    Metric(
        "early_stop/lost_useful_ratio",
        "controls that were worth training on in the end: the share of stopped groups that stopping lost",
        "share",
    ),
    # The policy update.
    Metric("actor/loss", "loss that was minimised, summed over micro-batches and ranks, mean over updates", "1"),
    Metric("actor/entropy", "mean entropy of the policy's next-token distribution at the trained tokens", "nats"),
    Metric(
        "actor/ppo_kl",
        "mean of old_logprobs - logprobs over the trained tokens: how far the updates moved the policy",
        "nats",
    ),
    Metric(
        "actor/kl_ref",
        "mean KL to the reference policy by algorithm.kl_estimator over the trained tokens",
        "nats",
    ),
    Metric("actor/kl_coefficient", "coefficient of the KL term in this batch's loss or rewards", "1"),
    Metric("actor/entropy_coefficient", "coefficient of the entropy bonus in this batch's loss", "1"),
    Metric("actor/clip_ratio", "trained tokens whose gradient was removed by the loss's clipping", "share"),
    Metric("actor/masked_ratio", "trained tokens that algorithm.correction took out of the loss: weight 0", "share"),
    Metric("actor/selected_ratio", "trained tokens that algorithm.selection treats apart", "share"),
    Metric("actor/correction_mean", "mean weight of the trained tokens by algorithm.correction", "1"),
    Metric("actor/grad_norm", "global gradient norm before clipping, mean over the batch's updates", "1"),
    Metric("actor/skipped_updates", "updates left out because their gradient was not finite", "updates"),
    Metric("actor/lr", "learning rate of the batch's last update", "1"),
    Metric("actor/staleness_<n>/clip_ratio", "actor/clip_ratio of the tokens of staleness n", "share"),
    Metric("actor/staleness_<n>/masked_ratio", "actor/masked_ratio of the tokens of staleness n", "share"),
    # Engine against learner.
    Metric("mismatch/kl", "KL(behaviour || learner): mean of r - 1 - ln r, never negative", "nats"),
    Metric("mismatch/kl_k1", "the same by the mean of -ln r, which is noisier: it may be negative", "nats"),
    Metric("mismatch/m2", "second moment: mean of (ln r)^2", "1"),
    Metric("mismatch/ess", "effective sample size of the token ratios r: (sum r)^2 / (n * sum r^2)", "share"),
    Metric("mismatch/ratio_mean", "mean of r over the trained tokens; 1 where engine and learner agree", "1"),
    Metric("mismatch/ratio_max", "largest r of a trained token", "1"),
    Metric("mismatch/logprob_gap_max", "largest |ln r| of a trained token, at most 20", "nats"),
    Metric("mismatch/probability_gap_max", "largest difference of a trained token's two probabilities", "share"),
    Metric("mismatch/missing_ratio", "trained tokens without a logprob from the engine; their r counts as 1", "share"),
    Metric("mismatch/staleness_<n>/tokens", "trained tokens of staleness n", "tokens"),
    Metric("mismatch/staleness_<n>/kl", "mismatch/kl of these tokens", "nats"),
    Metric("mismatch/staleness_<n>/ess", "mismatch/ess of these tokens, as a share of them", "share"),
    Metric("mismatch/staleness_<n>/ratio_mean", "mismatch/ratio_mean of these tokens", "1"),
    Metric("mismatch/staleness_<n>/ratio_max", "mismatch/ratio_max of these tokens", "1"),
    # Answers.
    Metric("response_length/mean", "mean number of sampled tokens of an answer", "tokens"),
    Metric("response_length/max", "largest number of sampled tokens of an answer", "tokens"),
    Metric("response_length/truncated_ratio", "answers that the engine stopped at the length limit", "share"),
    # Bias.
    Metric(
        "bias/trained_to_dispatched_length",
        "mean answer length of trained and filtered groups / mean answer length of all scored groups",
        "1",
    ),
    Metric(
        "bias/trained_to_dispatched_pass_rate",
        "mean filter_on value of trained and filtered groups / the same over all scored groups",
        "1",
    ),
    # Weights.
    Metric("weights/pause_s", "longest time that one rollout actor wrote nothing because of the publish", "s"),
    Metric("weights/total_s", "from the start of the publish to the last acknowledgement", "s"),
    Metric("weights/sent_mib", "size of the tensors that were sent, once", "MiB"),
    Metric(
        "weights/probe_gap",
        "largest over rollout actors of: mean over a fixed text's tokens of "
        "|change of the engine's logprob - change of the learner's| since the version before",
        "nats",
    ),
    Metric("weights/probe_learner_change", "mean |change of the learner's logprob| on the same text", "nats"),
    # Time.
    Metric("time_s/batch", "from one version's acknowledgement to the next's", "s"),
    Metric("time_s/collect", "the loop waited for a batch: what generation and scoring did not hide", "s"),
    Metric(
        "time_s/late",
        "of time_s/collect: a batch was held back for unfinished groups that would be too old after it (staleness.on_late)",
        "s",
    ),
    Metric("time_s/park", "the engines were cleared for a learner that shares their devices", "s"),
    Metric("time_s/learn", "the learner's forward, backward and optimizer updates, data transfer included", "s"),
    Metric("time_s/publish", "the new weights went to every rollout actor", "s"),
    Metric("time_s/eval", "held-out evaluation", "s"),
    Metric("time_s/checkpoint", "the loop was held up by a checkpoint", "s"),
    Metric(
        "time_s/generate",
        "mean over the batch's groups, dispatch to last answer (overlaps other groups)",
        "s",
    ),
    Metric(
        "time_s/score",
        "mean over the batch's groups, last answer to last verdict (overlaps other groups)",
        "s",
    ),
    # Speed.
    Metric("perf/generated_tokens_per_s", "sampled tokens of all finished answers / time_s/batch", "tokens/s"),
    Metric("perf/trained_tokens_per_s", "batch/trained_tokens / time_s/batch", "tokens/s"),
    Metric("perf/answers_per_s", "all finished answers / time_s/batch", "answers/s"),
    Metric("perf/learner_peak_memory_gib", "largest memory that a learner rank has used so far", "GiB"),
    Metric("perf/learner_busy_ratio", "time_s/learn / time_s/batch", "share"),
    # Rollout workers.
    Metric("rollout/retries", "answers asked for again because their generation failed", "answers"),
    Metric("rollout/parked", "answers interrupted, to go on later with the tokens they had", "answers"),
    Metric("rollout/<replica>/answers", "answers that one rollout actor finished", "answers"),
    Metric(
        "rollout/<replica>/generated_tokens_per_s",
        "sampled tokens of those answers / time_s/batch",
        "tokens/s",
    ),
    Metric("rollout/<replica>/restarts", "restarts of the actor since this process started", "1"),
    # Evaluation.
    Metric("eval/pass_at_1", "eval/<set>/pass_at_1 of the first set in data.eval; absent without verdicts", "share"),
    Metric("eval/pass_at_1_low", "lower end of its 95% interval; likewise", "share"),
    Metric("eval/pass_at_1_high", "upper end of its 95% interval; likewise", "share"),
    Metric(
        "eval/<set>/pass_at_1",
        "mean over prompts of the share of right answers (eval.pass_threshold); absent without verdicts",
        "share",
    ),
    Metric(
        "eval/<set>/pass_at_1_low",
        "lower end of the 95% Wilson score interval, n = number of prompts; likewise",
        "share",
    ),
    Metric("eval/<set>/pass_at_1_high", "upper end of the same interval; likewise", "share"),
    Metric(
        "eval/<set>/pass_at_k",
        "prompts with a right answer among k = eval.answers_per_prompt answers; absent without verdicts",
        "share",
    ),
    Metric(
        "eval/<set>/maj_at_k",
        "prompts whose most frequent answer among the k is right; absent without verdicts",
        "share",
    ),
    Metric("eval/<set>/prompts", "prompts evaluated", "prompts"),
    Metric("eval/<set>/unscored_ratio", "answers without a verdict; they count in no other figure", "share"),
    Metric("eval/<set>/response_length_mean", "mean length of the answers", "tokens"),
    Metric("eval/<set>/truncated_ratio", "answers that the engine stopped at the length limit", "share"),
)

# What holds for all names that begin alike; opens the section in docs/metrics.md.
SECTIONS = {
    "batch": "The batch as it was trained on.",
    "reward": "Over the answers of ALL groups judged since the record before, kept and set aside alike: "
    "filtering does not flatter the numbers. Shares are of these answers.",
    "reward_metric": "Over the same answers as the reward metrics.",
    "watch": "Is the reward being gamed? Over the answers of a share of the groups (reward.watch.share), kept and set aside alike, "
    "whose verdict came since the record before, unless said otherwise.",
    "group": "Counts since the record before.",
    "data": "A prompt's pass rate is the mean of its group's sampling.filter_on values, held to 0 to 1, averaged over its "
    "groups with sampling.difficulty.memory as the newest one's weight. `data/skipped` counts since the record before, the others "
    "are as the record was written.",
    "queue": "How many groups were in each state when the batch was taken.",
    "early_stop": "Over the time since this process started, but for `stopped`, which is since the record before.",
    "staleness": "Staleness of an answer = version the learner is about to improve - oldest version among "
    "its sampled tokens, as the engine reported them.",
    "actor": "Over the tokens in the loss of all ranks, mean over the batch's optimizer updates unless said otherwise. "
    "Staleness n of a token = version that the batch improves - version that wrote the token; what is staler than "
    "staleness.max counts there.",
    "mismatch": "How far the learner's logprobs are from those that the engine reported: r = exp(learner logprob - behaviour "
    "logprob), over the trained tokens, each counted once. The learner's logprob is that of the first forward pass over the "
    "token, before the first update of the batch; with algorithm.updates_per_batch above 1 the passes of later updates come "
    "after the earlier ones, except with algorithm.proximal=recompute, where all are of before. At staleness 0 the mismatch is "
    "numerical difference alone. Staleness n is that of a token, as in `actor`.",
    "response_length": "Over the same answers as the reward metrics; prompt and tool tokens are not counted.",
    "bias": "Is what is consumed like what was asked for? Over all groups since this process started; 1 when "
    "nothing scored is waiting and nothing was set aside as stale.",
    "weights": "One publish.",
    "time_s": "Wall-clock time per batch; collect, learn, publish, eval, checkpoint are phases of the loop.",
    "perf": "Since the record before.",
    "rollout": "Since the record before unless said otherwise; `<replica>` counts from 0.",
    "eval": "Held-out evaluation of exactly the version in `policy_version`.",
}


class UnknownMetricError(ValueError):
    """A name that the catalogue does not hold."""


@functools.cache
def find(name: str) -> Metric:
    """The catalogue's entry for a name. Raises UnknownMetricError, with near names, for none."""
    for metric, pattern in _patterns():
        if pattern.fullmatch(name):
            return metric
    near = difflib.get_close_matches(name, [metric.name for metric in CATALOGUE], n=3)
    hint = f"; near: {', '.join(near)}" if near else ""
    raise UnknownMetricError(f"metric {name!r} is not in orchestrator.metrics.CATALOGUE{hint}")


@functools.cache
def _patterns() -> tuple[tuple[Metric, re.Pattern[str]], ...]:
    def pattern(name: str) -> re.Pattern[str]:
        escaped = re.sub(r"<\w+>$", ".+", name)
        return re.compile(re.sub(r"<\w+>", "[^/]+", escaped), re.DOTALL)

    return tuple((metric, pattern(metric.name)) for metric in CATALOGUE)


@dataclass(frozen=True)
class Summary:
    """Of the finite values among many: how many, their mean, population standard deviation and largest."""

    count: int
    mean: float
    std: float
    max: float


def summarise(values: Iterable[float | None]) -> Summary | None:
    """Leaves out None, NaN and infinities; returns None where nothing is left."""
    finite = [float(value) for value in values if value is not None and math.isfinite(value)]
    if not finite:
        return None
    mean = statistics.fmean(finite)
    return Summary(len(finite), mean, math.sqrt(statistics.fmean((v - mean) ** 2 for v in finite)), max(finite))


def reward_metrics(results: Sequence[RewardResult]) -> dict[str, float]:
    """`reward/*` and `reward_metric/*` over verdicts of all judged answers, kept or not; empty for none."""
    if not results:
        return {}
    out: dict[str, float] = {}

    def add(name: str, values: Iterable[float | None]) -> None:
        if (summary := summarise(values)) is not None:
            out[f"{name}/mean"], out[f"{name}/std"] = summary.mean, summary.std

    add("reward", (result.value for result in results))
    for component in sorted({name for result in results for name in result.components}):
        add(f"reward/{component}", (result.components.get(component) for result in results))
    for status in (Status.UNSCORED, Status.ERRORED, Status.TIMED_OUT, Status.UNPARSEABLE_ANSWER):
        out[f"reward/{status.value}_ratio"] = sum(r.status is status for r in results) / len(results)
    for name in sorted({name for result in results for name in result.metrics}):
        if (summary := summarise(result.metrics.get(name) for result in results)) is not None:
            out[f"reward_metric/{name}"] = summary.mean
    return out


def length_metrics(lengths: Sequence[int], truncated: Sequence[bool]) -> dict[str, float]:
    """`response_length/*` from each answer's sampled tokens and whether the limit cut it. Empty for none.

    Raises ValueError if the two are not equally many.
    """
    if len(lengths) != len(truncated):
        raise ValueError(f"{len(lengths)} lengths and {len(truncated)} truncated flags must be equally many")
    if (summary := summarise(lengths)) is None:
        return {}
    return {
        "response_length/mean": summary.mean,
        "response_length/max": summary.max,
        "response_length/truncated_ratio": sum(truncated) / len(truncated),
    }


@dataclass(frozen=True)
class Population:
    """Running sums over answers: how many, their sampled tokens, their filter_on values (the pass rate)."""

    answers: int = 0
    tokens: int = 0
    passed: float = 0.0

    def __add__(self, other: Population) -> Population:
        return Population(self.answers + other.answers, self.tokens + other.tokens, self.passed + other.passed)


def bias_metrics(consumed: Population, scored: Population) -> dict[str, float]:
    """`bias/*`, from the answers of trained and filtered groups and those of all scored groups.

    A ratio that would divide by zero is left out.
    """
    out: dict[str, float] = {}
    if consumed.answers and scored.tokens:
        out["bias/trained_to_dispatched_length"] = (consumed.tokens / consumed.answers) / (
            scored.tokens / scored.answers
        )
    if consumed.answers and scored.passed:
        out["bias/trained_to_dispatched_pass_rate"] = (consumed.passed / consumed.answers) / (
            scored.passed / scored.answers
        )
    return out
