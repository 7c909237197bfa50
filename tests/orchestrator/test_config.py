"""The configuration: what is refused, with which words, and what composes. Ids such as f26 refer to the reported-bug cases."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.algorithm import token_weights
from orchestrator.compose import CONF_DIR, changed, load
from orchestrator.config import Config, ConfigError

ROOT = Path(__file__).resolve().parents[2]


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(overrides)
    return str(caught.value)


def presets(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF_DIR / group).glob("*.yaml"))


def own_advantage(rewards: Any, groups: Any) -> Any:
    return rewards


class TestKeys:
    @pytest.mark.parametrize(
        ("override", "suggestion"),
        [
            ("learner.rank=2", "learner.ranks"),
            ("leraner.ranks=2", "learner"),
            ("rollout.weights.bucket_mb=2", "rollout.weights.bucket_mib"),
            ("data.train.mine.pth=x", "data.train.mine.path"),
            ("reward.functions.mine.wieght=1", "reward.functions.mine.weight"),
            ("eval.checker.pat=x", "eval.checker.path"),
        ],
    )
    @pytest.mark.parametrize("plus", ["", "+", "++"])
    def test_f26_a_misspelt_key_is_refused_with_the_right_one(self, override: str, suggestion: str, plus: str) -> None:
        message = refused(plus + override)
        assert message.startswith(f"{override.partition('=')[0].removesuffix('.ranks')}: there is no such key")
        assert f"did you mean {suggestion}?" in message

    def test_f26_no_key_of_the_schema_needs_a_plus(self) -> None:
        assert "Either remove + prefix: 'learner.ranks=1'" in refused("+learner.ranks=1")
        assert load(["++learner.ranks=2"]).learner.ranks == 2

    def test_hydras_own_settings_are_none_of_ours(self) -> None:
        assert "hydra: there is no such key" in refused("hydra.run.dir=x")

    def test_names_of_the_users_own_need_no_plus(self) -> None:
        config = load(
            [
                "data.train.mine.path=rows.jsonl",
                "data.train.mine.limit=5",
                "+data.eval.held_out.generator=module.rows",
                "reward.functions.mine.path=module.reward",
                "reward.functions.mine.weight=2",
                "algorithm.loss_options.dual_clip=3",
                "model.chat_template_kwargs.enable_thinking=false",
                "rollout.engine_options.compilation.level=0",
            ]
        )
        assert config.data.train["mine"].path == "rows.jsonl"
        assert config.data.train["mine"].limit == 5
        assert config.data.train["mine"].split == "train"
        assert config.data.eval["held_out"].generator == "module.rows"
        assert config.reward.functions["mine"].weight == 2.0
        assert config.algorithm.loss_options["dual_clip"] == 3
        assert config.algorithm.loss_options["clip_low"] == 0.2
        assert config.model.chat_template_kwargs == {"enable_thinking": False}
        assert config.rollout.engine_options == {"compilation": {"level": 0}}

    def test_a_whole_mapping_replaces_what_was_there(self) -> None:
        config = load(["data.eval={}", "data.train={mine: {path: rows.jsonl}}", "data.train.more.path=more.jsonl"])
        assert config.data.eval == {}
        assert list(config.data.train) == ["mine", "more"]

    def test_f26_a_node_given_at_once_is_each_of_its_keys(self) -> None:
        config = load(["data={train: {mine: {path: 'a=b.jsonl', limit: 2}}, seed: 3}", "staleness={max: 2}"])
        assert (config.data.train["mine"].path, config.data.train["mine"].limit) == ("a=b.jsonl", 2)
        assert (config.data.seed, config.staleness.max, config.staleness.on_late) == (3, 2, "wait")
        assert (
            refused("run={nme: a}")
            == "run.nme: there is no such key; did you mean run.name? (docs/config.md lists every key)"
        )
        assert "data.train.mine.pth: there is no such key" in refused(
            "data={train: {mine: {pth: a}}}", "data.train.mine.pth=a"
        )

    @pytest.mark.parametrize(
        ("override", "words"),
        [
            ("run={name: a},{name: b}", "would be a sweep"),
            ("data={seed: 1},{seed: 2}", "would be a sweep"),
            ("run={batches: range(1,3)}", "run={batches: range(1,3)}: a sweep can't stand inside a value"),
            ("run={name: glob(*)}", "run={name: glob(*)}: a sweep can't stand inside a value"),
            ("data.train.mine={path: a, reward: [choice(a,b)]}", "would be a sweep"),
        ],
    )
    def test_f26_a_sweep_is_refused_wherever_it_stands(self, override: str, words: str) -> None:
        assert words in refused(override)
        with pytest.raises(ConfigError, match=re.escape(override)):
            changed(load([]), [override])

    def test_an_error_that_no_override_explains_is_raised(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*arguments: Any, **named: Any) -> None:
            raise AssertionError("of all things")

        monkeypatch.setattr("orchestrator.compose.compose", broken)
        with pytest.raises(AssertionError, match="of all things"):
            load(["run.batches=3"])

    def test_f26_what_is_no_override_is_refused_by_name(self) -> None:
        assert refused("=1") == ": there is no such key (docs/config.md lists every key)"
        assert refused("algorithm=null").startswith("algorithm=null: a config group is chosen by name")
        assert refused("sampling.pass_rate_band.0=0.3").startswith(
            "sampling.pass_rate_band.0=0.3: there is no list yet"
        )

    def test_a_checker_where_the_data_brings_none(self) -> None:
        config = load(["data=files", "reward=custom", "eval.checker.path=module.check"])
        assert config.eval.checker is not None
        assert config.eval.checker.path == "module.check"
        assert load(["eval.checker=null"]).eval.checker is None
        watch = load(["reward.watch.checker={path: module.check, options: {strict: true}}"]).reward.watch
        assert watch.checker is not None
        assert (watch.checker.path, watch.checker.options) == ("module.check", {"strict": True})

    def test_wrong_types_name_the_key(self) -> None:
        for override in (
            "learner.ranks=two",
            "learner.ranks=1.5",
            "learner.learning_rate=[1,2]",
            "data.train.a.limit=x",
        ):
            assert override.partition("=")[0] in refused(override)
        assert "reward.functions.mine.path" in refused("reward.functions.mine.weight=2")

    def test_every_key_has_a_reader(self) -> None:
        """A key that no module reads as an attribute would be an option without effect."""
        packages = ("orchestrator", "learner", "reward_workers", "rollout_workers")
        texts = [
            p.read_text()
            for package in packages
            for p in (ROOT / package).rglob("*.py")
            if p.name not in ("config.py", "checks.py")
        ]
        source = "\n".join(texts)
        # Read by checks alone: sampling from a truncated distribution is refused.
        checked_only = {"rollout.top_p", "rollout.top_k", "rollout.min_p"}
        unread = [key for key in leaves(Config) if not re.search(rf"\.{key.rsplit('.')[-1]}\b", source)]
        assert set(unread) <= checked_only


def leaves(kind: Any, prefix: str = "") -> Iterator[str]:
    for item in dataclasses.fields(kind):
        hint = get_type_hints(kind)[item.name]
        below = [t for t in (hint, *get_args(hint)) if dataclasses.is_dataclass(t)]
        if below:
            yield from leaves(below[0], f"{prefix}{item.name}." + ("NAME." if get_origin(hint) is dict else ""))
        else:
            yield f"{prefix}{item.name}"


class TestValues:
    @pytest.mark.parametrize("spelling", ["1e-6", "'1e-6'", '"1e-6"', "1.0e-6", "0.000001", ".000001", "1E-6"])
    def test_f27_a_rate_is_a_float_in_every_spelling(self, spelling: str) -> None:
        rate = load([f"learner.learning_rate={spelling}"]).learner.learning_rate
        assert isinstance(rate, float)
        assert rate == 1e-6

    @pytest.mark.parametrize(("lora_rank", "rate"), [(0, 1e-6), (1, 1e-5), (64, 1e-5)])
    def test_a_rate_of_null_is_a_figure_once_loaded(self, lora_rank: int, rate: float) -> None:
        overrides = ["experiment=tiny", "learner.learning_rate=null", f"model.lora.rank={lora_rank}"]
        config = load(overrides)
        assert config.learner.learning_rate == rate
        assert changed(config, ["learner.learning_rate=2e-4"]).learner.learning_rate == 2e-4

    @given(st.floats(min_value=1e-12, max_value=1.0))
    @settings(max_examples=10, deadline=None)
    def test_f27_any_rate_survives(self, rate: float) -> None:
        assert load([f"learner.learning_rate={rate!r}"]).learner.learning_rate == rate

    @pytest.mark.parametrize("key", ["run.name", "sampling.filter_on", "algorithm.correction", "model.path"])
    @pytest.mark.parametrize("word", ["None", "none"])
    def test_f28_none_is_not_a_name(self, key: str, word: str) -> None:
        assert refused(f"{key}={word}") == f"{key}={word}: write {key}=null for no value"

    @pytest.mark.parametrize(
        "key",
        [
            "data.train.mine.path",
            "data.train.arithmetic.system_prompt",
            "data.train.arithmetic.options.split",
            "reward.functions.correct.path",
            "model.chat_template_kwargs.tools",
            "rollout.engine_options.quantization",
        ],
    )
    def test_f28_none_is_nothing_in_mappings_either(self, key: str) -> None:
        assert refused(f"{key}=None") == f"{key}=None: write {key}=null for no value"

    def test_f28_in_lists_and_where_it_is_no_text(self) -> None:
        assert "data.train.arithmetic.reward.0=None" in refused("data.train.arithmetic.reward=[None]")
        for key in ("data.epochs", "eval.checker", "data.train.arithmetic.limit"):
            assert f"write {key}=null for no value" in refused(f"{key}=None")
        # Of options a user may mean it.
        assert load(["rollout.engine_options.load_format=none"]).rollout.engine_options == {"load_format": "none"}

    def test_f28_null_is_nothing(self) -> None:
        assert load(["run.name=null", "rollout.kv_cache_mib=null"]).run.name is None
        assert "model.path" in refused("model.path=null")

    def test_f25_a_value_with_an_equals_sign(self) -> None:
        path = "out/epoch=9-step=8"
        for key in ("model.path", "data.train.mine.path"):
            message = refused(f"{key}={path}")
            assert f"{key}={path}: a value with '=' needs quotes for Hydra" in message
            assert "'key=\"a=b\"'" in message
        assert load([f'model.path="{path}"']).model.path == path
        assert load(["model.path=out/epoch\\=9"]).model.path == "out/epoch=9"
        assert load([f'data.train.mine.path="{path}"']).data.train["mine"].path == path
        for override in ("run.dir=~/runs", "data.train.mine.path=/rows/{a}.jsonl"):
            assert f"{override}: a value with such signs needs quotes" in refused(override)
        assert load(['run.dir="~/runs"']).run.dir == str(Path.home() / "runs")
        config = load(['replay.run="~/a"', 'simulate={output: "~/b", from_run: "~/c"}'])
        folders = (config.replay.run, config.simulate.output, config.simulate.from_run)
        assert folders == tuple(str(Path.home() / name) for name in "abc")
        # Our own checkpoints lie below run.name.
        assert "run.name" in refused('run.name="a=b"')

    def test_f29_lists(self) -> None:
        assert load(["data.train.arithmetic.reward=[correct]"]).data.train["arithmetic"].reward == ["correct"]
        for override in ("data.train.arithmetic.reward=a,b", "learner.ranks=1,2", "algorithm.loss=ppo_clip,gspo"):
            message = refused(override)
            assert override in message
            assert "A list is written key=[1,2]" in message or "a list is written key=[a,b]" in message
        twice = ("data.train.arithmetic.reward=[a,b]", "data.train.arithmetic.reward.0=c")
        assert twice[1] in refused(*twice)  # a list is given as a whole

    @pytest.mark.parametrize(
        ("override", "words"),
        [
            ("model.dtype=float16", "expected one of bfloat16, float32"),
            ("learner.zero_stage=4", "expected one of 0, 1, 2, 3"),
            ("placement.mode=both", "expected one of split, shared"),
            ("checkpoint.resume=yes", "expected one of never, auto, must"),
            ("sampling.on_starved=wait", "expected one of shrink, stop, error"),
            ("logging.level=loud", "expected one of DEBUG"),
            ("run.batches=0", "expected at least 1"),
            ("data.epochs=0", "expected at least 1"),
            ("rollout.threads=0", "expected at least 1"),
            ("staleness.max=-1", "expected at least 0"),
            ("sampling.filter_tolerance=-1", "expected at least 0"),
            ("sampling.window_batches=nan", "expected at least 0"),
            ("eval.temperature=-0.1", "expected at least 0"),
            ("run.watchdog_s=0", "expected more than 0"),
            ("reward.timeout_s=900", "run.watchdog_s=900.0 must be longer than reward.timeout_s=900.0"),
            ("reward.timeout_s=-1", "expected more than 0"),
            ("sampling.min_scored_fraction=0", "expected more than 0"),
            ("sampling.min_scored_fraction=1.5", "expected at most 1"),
            ("reward.max_error_ratio=2", "expected at most 1"),
            ("rollout.temperature=0", "must be above 0"),
            ("rollout.temperature=0.009", "expected 0.01 to 2"),  # vLLM would take 0.01
            ("rollout.temperature=2.1", "expected 0.01 to 2"),  # vLLM would refuse every request
            ("eval.temperature=0.009", "expected 0.01 to 2"),
            ("eval.temperature=2.1", "expected 0.01 to 2"),
            ("rollout.engine_options.seed=0", "it comes from run.seed"),  # f12: all engines would draw alike
            ("rollout.engine_options.dtype=float16", "it comes from model.dtype"),
            ("rollout.engine_options.enable_lora=true", "it comes from model.lora.rank and rollout.weights.transport"),
            ("rollout.engine_options.enable_sleep_mode=false", "it comes from placement.mode"),
            ("rollout.engine_options.max_model_len=99", "it comes from rollout.max_prompt_tokens"),
            ("rollout.engine_options.logprobs_mode=raw_logprobs", "it is fixed"),
            ("rollout.top_p=0.9", "full distribution"),
            ("rollout.top_k=50", "full distribution"),
            ("rollout.min_p=0.1", "full distribution"),
            ("sampling.answers_per_group=1", "a group of one teaches nothing"),
            ("algorithm.updates_per_batch=9", "at most as many updates as groups"),
            ("reward.primary=nobody", "expected one of correct"),
            ("sampling.filter_on=nobody", "expected one of correct"),
            ("sampling.pass_rate_band=[0.8,0.2]", "expected [low, high] with low <= high"),
            ("sampling.pass_rate_band=[0.5]", "expected [low, high] with low <= high"),
            ("sampling.early_stop.after_s=0", "expected more than 0"),
            ("sampling.early_stop.after_s=600", "shorter than rollout.answer_timeout_s=600"),
            ("sampling.early_stop.control_share=1.1", "expected at most 1"),
            ("staleness.adaptive=true", "set staleness.max to 1 or more"),
            ("eval.checker={path: a.b, gate: true}", "a checker stands alone"),
            ("reward.watch.checker={path: a.b, needs: c}", "a checker stands alone"),
            ("reward.watch.share=1.5", "expected at most 1"),
            ("reward.watch.window_batches=0", "expected at least 1"),
            ("reward.watch.max_gap=0", "expected more than 0"),
            ("reward.watch.on_gap=fail", "expected one of warn, stop"),
            ("staleness.min_ess=1.5", "expected at most 1"),
            ("run.name=a/b", "use letters, digits"),
            ("run.name=..", "use letters, digits"),
        ],
    )
    def test_values_that_can_not_be(self, override: str, words: str) -> None:
        message = refused(override)
        assert override.partition("=")[0] in message
        assert words in message

    def test_a_group_of_one_where_groups_do_not_matter(self) -> None:
        own = f"{__name__}.own_advantage"
        assert load(["sampling.answers_per_group=1", f"algorithm.advantage={own}"]).algorithm.advantage == own


class TestAlgorithm:
    def test_d27_dual_clip_below_one(self) -> None:
        message = refused("algorithm.loss_options.dual_clip=0.9")
        assert message.startswith("algorithm.loss_options: dual_clip must be > 1, got 0.9")

    @pytest.mark.parametrize(
        ("overrides", "words"),
        [
            (["algorithm.loss=ppo"], "algorithm.loss=ppo: expected one of cispo"),
            (["algorithm.loss=no_such_module.loss"], "algorithm.loss=no_such_module.loss"),
            (["algorithm.advantage=gae"], "algorithm.advantage=gae"),
            (["algorithm.loss_options.clip_lo=0.1"], "unexpected keyword argument 'clip_lo'"),
            (["algorithm.advantage_options.scale=0.1"], "algorithm.advantage_options"),
            (["algorithm.aggregation=mean"], "algorithm.aggregation"),
            (["algorithm.kl_coefficient=0.1", "algorithm.kl_estimator=k9"], "algorithm.kl_estimator=k9"),
            (["algorithm=gspo", "sampling.groups_per_batch=8", "algorithm.aggregation=token_mean"], "is defined with"),
            (["algorithm.correction=tis"], "set algorithm.proximal=recompute"),
            (
                ["learner.zero_stage=0", "model.dtype=bfloat16"],
                "would add gradients up in bfloat16; expected 1, 2 or 3",
            ),
            (["learner.reference=elsewhere"], "learner.reference=elsewhere: expected one of ranks, offload, own"),
            (["learner.reference=own", "learner.reference_ranks=0"], "learner.reference_ranks=0: expected at least 1"),
            (["learner.reference=own", "model.lora.rank=8"], "a LoRA policy is its own reference"),
            (["rollout.weights.transport=lora", "model.lora.rank=0"], "model.lora.rank=0 is full fine-tuning"),
            (["rollout.weights.transport=lora", "model.lora.rank=513"], "vLLM serves adapters up to rank 512"),
        ],
    )
    def test_refused_before_anything_starts(self, overrides: list[str], words: str) -> None:
        assert words in refused(*overrides)


class TestPresets:
    @pytest.mark.parametrize("experiment", presets("experiment"))
    def test_experiments_compose(self, experiment: str) -> None:
        load([f"experiment={experiment}"])

    @pytest.mark.parametrize("algorithm", presets("algorithm"))
    def test_algorithms_compose(self, algorithm: str) -> None:
        config = load([f"algorithm={algorithm}"])
        if algorithm == "dr_grpo":
            assert config.algorithm.aggregation_options == {"max_tokens": config.rollout.max_response_tokens}
        if algorithm == "clip_cov":  # whose authors clip the ratio at 0 and 2 only
            assert config.algorithm.loss_options == {"clip_low": 1.0, "clip_high": 1.0}
        if config.algorithm.loss == "reinforce":  # the logprob of the answer: no token less for standing in a long one
            assert len(set(token_weights(config.algorithm, [1, 10, 100], [0, 0, 1]))) == 1

    def test_the_other_groups_compose(self) -> None:
        for group in ("data", "learner", "model", "placement", "reward", "rollout"):
            for name in presets(group):
                load([f"{group}={name}"])

    def test_an_unknown_preset_is_refused_with_the_known_ones(self) -> None:
        message = refused("experiment=nope")
        assert all(name in message for name in ("nope", *presets("experiment")))
