"""Prompts: what a row must be, stable ids, the long-prompt check, and the resumable frontier."""

import copy
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.config import DataConfig, SourceConfig
from orchestrator.difficulty import DifficultySampler, PassRates
from orchestrator.prompts import (
    MAX_SKIPS,
    Prompt,
    PromptSource,
    PromptStream,
    load_source,
    load_sources,
    refuse_long_prompts,
    require_batch,
)
from orchestrator.sources import DataError, Rows
from rollout_workers.trajectory import Message


def source_of(
    tmp_path: Path, rows: Sequence[Any], name: str = "mine", kind: str = "train", **config: Any
) -> PromptSource:
    path = tmp_path / f"{name}.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return load_source(name, SourceConfig(path=str(path), **config), kind)


def numbered(count: int, name: str = "mine", weight: float = 1.0) -> PromptSource:
    """A source of `count` prompts without a file."""
    rows = [{"id": number, "prompt": f"Say {number}."} for number in range(count)]
    return PromptSource(
        name=name,
        key=f"data.train.{name}",
        config=SourceConfig(weight=weight),
        rows=Rows(count, rows.__getitem__, lambda index: f"row {index}"),
        ids=tuple(f"{name}:{number}" for number in range(count)),
        columns=frozenset({"id"}),
    )


def drain(stream: PromptStream, count: int | None = None) -> list[Prompt]:
    prompts: list[Prompt] = []
    while count is None or len(prompts) < count:
        prompt = stream.next()
        if prompt is None:
            break
        prompts.append(prompt)
    return prompts


def ids(prompts: Sequence[Prompt]) -> list[str]:
    return [prompt.prompt_id for prompt in prompts]


# What a row becomes


def test_text_becomes_one_user_message_with_the_source_system_prompt(tmp_path: Path) -> None:
    source = source_of(tmp_path, [{"prompt": "Say 7.", "answer": "7"}], system_prompt="Be brief.")
    (prompt,) = source
    assert prompt.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Say 7."},
    )
    assert (prompt.text, prompt.columns, prompt.reward) == ("Say 7.", {"answer": "7"}, None)
    assert source.columns == {"answer"}


def test_messages_are_kept_and_their_system_prompt_wins(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be long."}, {"role": "user", "content": "Say 7."}]
    row = {"chat": messages, "prompt": "a column like any other"}
    (prompt,) = source_of(tmp_path, [row], system_prompt="Be brief.", prompt_column="chat")
    assert prompt.messages == tuple(messages)
    assert prompt.text is None
    assert prompt.columns == {"prompt": "a column like any other"}


def test_a_row_names_its_reward_set_before_its_source_does(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "reward": "style"}, {"prompt": "b", "reward": ["math", "style"]}, {"prompt": "c"}]
    source = source_of(tmp_path, rows, reward=["math"])
    assert [prompt.reward for prompt in source] == [("style",), ("math", "style"), ("math",)]
    assert source.columns == frozenset()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "a"}, r"has no prompt \(column prompt\); its columns are question"),
        ({"prompt": None}, r"has no prompt"),
        ({"prompt": 7}, r"prompt: expected text or a list of messages, found int"),
        ({"prompt": {"role": "user"}}, r"prompt: expected text or a list of messages, found dict"),
        ({"prompt": ["a"]}, r"prompt\[0\]: expected a message with role and content, found str"),
        ({"prompt": [{"content": "a"}]}, r"prompt\[0\]: expected text as role, found None"),
        ({"prompt": [{"role": "user"}]}, r"prompt\[0\]: expected text as content, found None"),
        ({"prompt": [{"role": "user", "content": ["a"]}]}, r"expected text as content, found \['a'\]"),
        ({"prompt": "  "}, r"prompt: is empty"),
        ({"prompt": []}, r"prompt: is empty"),
        (
            {"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "7"}]},
            r"ends with an assistant message",
        ),
        ({"prompt": "a\ud83d"}, r"prompt: holds half a character \('\\ud83d' at 1\)"),
        ({"prompt": [{"role": "user", "content": "\ud83d"}]}, r"prompt\[0\]\.content: holds half a character"),
        ({"prompt": "a", "id": "\ud83d"}, r"column id: holds half a character"),
        ({"prompt": "a", "id": 1.5}, r"column id: expected text or a whole number, found 1\.5"),
        ({"prompt": "a", "reward": 1}, r"column reward: expected names of reward functions, found 1"),
        ({"prompt": "a", "id": "first"}, r"has the id 'first' of .*mine\.jsonl:1; ids must differ"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=rf"data\.eval\.mine: .*mine\.jsonl:2: .*{message}"):
        source_of(tmp_path, [{"prompt": "good", "id": "first"}, row], kind="eval")


def test_a_bad_parquet_row_is_named_by_its_number(tmp_path: Path) -> None:
    path = str(tmp_path / "rows.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", None]}), path)
    with pytest.raises(DataError, match=r"rows\.parquet row 1: has no prompt"):
        load_source("mine", SourceConfig(path=path), "train")


@pytest.mark.parametrize(("name", "weight"), [("a:b", 1.0), ("a", 0.0), ("a", math.nan), ("a", math.inf)])
def test_names_and_weights_that_would_not_work_are_refused(name: str, weight: float) -> None:
    with pytest.raises(DataError, match=f"data.train.{name}"):
        load_sources({name: SourceConfig(generator="orchestrator.tasks.synthetic", weight=weight)}, "train")


def test_a_source_that_nothing_would_judge_is_refused() -> None:
    with pytest.raises(DataError, match=r"^data\.train\.a\.reward=\[\]: nothing would judge its rows"):
        load_sources({"a": SourceConfig(generator="orchestrator.tasks.synthetic", reward=[])}, "train")


def numpy_ids() -> Iterator[dict[str, Any]]:
    for number in np.arange(3):
        yield {"prompt": "a", "id": number}


def test_ids_of_a_generator_may_be_numpys() -> None:
    assert load_source("a", SourceConfig(generator=f"{__name__}.numpy_ids"), "train").ids == ("a:0", "a:1", "a:2")


# Ids


def test_ids_are_the_rows_own_or_a_hash_of_content_never_the_position(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "id": 12}, {"prompt": "b"}, {"prompt": "b"}, {"prompt": "b", "answer": "1"}]
    before = source_of(tmp_path, rows).ids
    after = source_of(tmp_path, [{"prompt": "new"}, *reversed(rows)]).ids
    assert before[0] == "mine:12"
    assert before[2] == f"{before[1]}-2"
    assert len(set(before)) == 4
    assert set(before) == set(after[1:])


def test_ids_are_the_same_from_jsonl_and_parquet(tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": "a", "name": "ann"}], "answer": "1"},
        {"prompt": [{"role": "user", "content": "b"}]},
    ]
    path = str(tmp_path / "rows.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    parquet = load_source("mine", SourceConfig(path=path), "train")
    jsonl = source_of(tmp_path, rows)
    assert parquet.ids == jsonl.ids
    assert [prompt.messages for prompt in parquet] == [prompt.messages for prompt in jsonl]


# Checks before the first step


class Characters:
    """Stands in for a chat template: a token for each character."""

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        if any(message["role"] == "robot" for message in messages):
            raise ValueError("no robots")
        return [ord(character) for message in messages for character in message["content"]]


def test_case_e17_long_prompts_are_refused_at_load_with_count_and_lines(tmp_path: Path) -> None:
    rows = [
        {"prompt": "x" * 3353},
        {"prompt": "x" * 2560},
        *({"prompt": "x" * 2561, "id": i} for i in range(7)),
    ]
    source = source_of(tmp_path, rows)
    with pytest.raises(DataError) as error:
        refuse_long_prompts(source, Characters(), 2560)
    message = str(error.value)
    assert "data.train.mine: 8 of 9 prompts are longer than rollout.max_prompt_tokens=2560" in message
    assert "the longest has 3353 tokens" in message
    assert f"mine.jsonl:1 ({source.ids[0]}, 3353 tokens)" in message
    assert "mine.jsonl:3 (mine:0, 2561 tokens)" in message
    assert "mine.jsonl:8" not in message  # only the first few
    assert refuse_long_prompts(source, Characters(), 3353) == 3353


def test_messages_that_the_template_refuses_are_named(tmp_path: Path) -> None:
    source = source_of(tmp_path, [{"prompt": "a"}, {"prompt": [{"role": "robot", "content": "a"}]}])
    with pytest.raises(DataError, match=r"data\.train\.mine: .*mine\.jsonl:2: no robots"):
        refuse_long_prompts(source, Characters(), 10)


def test_case_f08_fewer_prompts_than_a_batch_is_an_error_naming_both() -> None:
    require_batch([numbered(1000, "a"), numbered(24, "b")], 1024)
    with pytest.raises(DataError, match=r"groups_per_batch=1024: data\.train has only 128 prompts"):
        require_batch([numbered(128)], 1024)


def test_no_source_and_no_epoch_are_refused() -> None:
    with pytest.raises(DataError, match="no source of prompts"):
        PromptStream([])
    with pytest.raises(DataError, match=r"data\.epochs=0"):
        PromptStream([numbered(1)], epochs=0)


# Order


def test_each_epoch_has_every_prompt_once_in_an_order_of_its_own() -> None:
    stream = PromptStream.from_config([numbered(50)], DataConfig(epochs=2))
    prompts = drain(stream)
    first, second = prompts[:50], prompts[50:]
    assert stream.exhausted
    assert {prompt.epoch for prompt in first} == {0}
    assert {prompt.epoch for prompt in second} == {1}
    assert sorted(ids(first)) == sorted(ids(second)) == sorted(numbered(50).ids)
    assert ids(first) != ids(second)
    assert ids(first) != list(numbered(50).ids)


def test_without_shuffling_prompts_come_as_the_rows_stand() -> None:
    assert ids(drain(PromptStream([numbered(5)], shuffle=False, epochs=2))) == list(numbered(5).ids) * 2


def test_case_f35_the_order_depends_on_data_seed_and_on_nothing_else() -> None:
    orders = [ids(drain(PromptStream([numbered(40)], seed=seed), 80)) for seed in (0, 0, 1)]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]


def test_moved_rows_keep_the_order(tmp_path: Path) -> None:
    rows = [{"prompt": str(number)} for number in range(20)]
    orders = [
        ids(drain(PromptStream([source_of(tmp_path, order)], epochs=1))) for order in (rows, list(reversed(rows)))
    ]
    assert orders[0] == orders[1]


@given(weights=st.lists(st.floats(0.1, 10), min_size=1, max_size=4), draws=st.integers(1, 200))
@settings(max_examples=30, deadline=None)
def test_sources_take_turns_in_proportion_to_their_weights(weights: list[float], draws: int) -> None:
    sources = [numbered(7, f"s{i}", weight) for i, weight in enumerate(weights)]
    counts = Counter(prompt.source for prompt in drain(PromptStream(sources), draws))
    for source in sources:
        share = draws * source.config.weight / sum(weights)
        assert abs(counts[source.name] - share) < len(weights)


def test_with_epochs_a_small_source_drops_out_and_the_others_go_on() -> None:
    prompts = drain(PromptStream([numbered(3, "small"), numbered(9, "large", weight=1.5)], epochs=2))
    counts = Counter(prompt.prompt_id for prompt in prompts)
    assert set(counts.values()) == {2}
    assert len(counts) == 12
    assert prompts[-1].source == "large"


# The frontier


def test_offered_again_comes_before_new_prompts_and_only_while_in_flight() -> None:
    stream = PromptStream([numbered(4)], epochs=1)
    first, second = drain(stream, 2)
    stream.offer_again(second.prompt_id, second.epoch)
    with pytest.raises(ValueError, match="waits to be handed out again"):
        stream.done(second.prompt_id, second.epoch)
    assert stream.next() == second
    stream.done(second.prompt_id, second.epoch)
    with pytest.raises(ValueError, match=f"{second.prompt_id} of epoch 0 is not outstanding"):
        stream.done(second.prompt_id, second.epoch)
    assert stream.outstanding == 1
    assert len(drain(stream)) == 2
    assert stream.exhausted
    stream.offer_again(first.prompt_id, first.epoch)
    assert not stream.exhausted
    assert stream.next() == first


def test_the_state_is_json_and_bounded_by_what_is_outstanding() -> None:
    stream = PromptStream([numbered(5000)])
    for prompt in drain(stream, 3000)[:-8]:
        stream.done(prompt.prompt_id, prompt.epoch)
    text = json.dumps(stream.state())
    assert len(text) < 1000
    assert len(json.loads(text)["outstanding"]) == 8


def test_case_f04_resume_at_an_epoch_boundary_runs_the_next_epoch() -> None:
    before = PromptStream([numbered(60)], epochs=2)
    for prompt in drain(before, 60):
        before.done(prompt.prompt_id, prompt.epoch)
    after = PromptStream([numbered(60)], epochs=2)
    after.restore(json.loads(json.dumps(before.state())))
    assert not after.exhausted
    remaining = drain(after)
    assert len(remaining) == 60
    assert {prompt.epoch for prompt in remaining} == {1}


def test_a_finished_run_may_be_given_more_epochs() -> None:
    before = PromptStream([numbered(5)], epochs=1)
    for prompt in drain(before):
        before.done(prompt.prompt_id, prompt.epoch)
    after = PromptStream([numbered(5)], epochs=3)
    after.restore(before.state())
    assert len(drain(after)) == 10


def test_case_f06_nothing_is_drawn_before_the_restore() -> None:
    before = PromptStream([numbered(1000)])
    order = ids(drain(PromptStream([numbered(1000)]), 501))
    for prompt in drain(before, 500):
        before.done(prompt.prompt_id, prompt.epoch)
    after = PromptStream([numbered(1000)])
    after.restore(before.state())
    assert ids(drain(after, 1)) == order[500:]
    with pytest.raises(RuntimeError, match="restored before the first prompt is drawn"):
        after.restore(before.state())


@pytest.mark.parametrize(
    ("sources", "options", "message"),
    [
        ([numbered(4)], {"seed": 1}, r"data\.seed=1: the checkpoint was taken with 0"),
        ([numbered(4)], {"shuffle": False}, r"data\.shuffle=False: the checkpoint was taken with True"),
        ([numbered(5)], {}, r"data\.train\.mine: the data changed .* 4 rows, now 5"),
        (
            [numbered(4, weight=2.0)],
            {},
            r"data\.train\.mine\.weight=2\.0: the checkpoint was taken with 1\.0",
        ),
        ([numbered(4, "other")], {}, r"has the sources other, the checkpoint mine"),
    ],
)
def test_other_data_or_another_seed_is_refused(
    sources: list[PromptSource], options: dict[str, Any], message: str
) -> None:
    state = PromptStream([numbered(4)]).state()
    with pytest.raises(DataError, match=message):
        PromptStream(sources, **options).restore(state)


def test_changed_content_is_refused(tmp_path: Path) -> None:
    state = PromptStream([source_of(tmp_path, [{"prompt": "a"}, {"prompt": "b"}])]).state()
    changed = source_of(tmp_path, [{"prompt": "a"}, {"prompt": "c"}])
    with pytest.raises(DataError, match="the data changed since the checkpoint"):
        PromptStream([changed]).restore(state)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_history_of_kills_consumes_every_prompt_exactly_once_an_epoch(data: st.DataObject) -> None:
    """Random dispatches, completions, second offers, checkpoints and kills. What was done after the last
    checkpoint is lost
    with the kill, as a run's updates are; what remains must be a partition of the epochs."""
    epochs = data.draw(st.integers(1, 3))
    sources = [
        numbered(data.draw(st.integers(1, 6)), name, weight=data.draw(st.sampled_from([0.5, 1.0, 3.0])))
        for name in ("a", "b")[: data.draw(st.integers(1, 2))]
    ]
    stream = PromptStream(sources, epochs=epochs)
    in_flight: list[tuple[str, int]] = []
    done: list[tuple[str, int]] = []
    saved = (json.dumps(stream.state()), list(done))
    for action in data.draw(st.lists(st.sampled_from("nnnnddoskk"), max_size=60)):
        if action == "n" and (prompt := stream.next()):
            in_flight.append((prompt.prompt_id, prompt.epoch))
        elif action in "do" and in_flight:
            key = in_flight.pop(data.draw(st.integers(0, len(in_flight) - 1)))
            if action == "d":
                stream.done(*key)
                done.append(key)
            else:
                stream.offer_again(*key)
        elif action == "s":
            saved = (json.dumps(stream.state()), list(done))
        elif action == "k":
            state = json.loads(saved[0])
            stream = PromptStream(sources, epochs=epochs)
            stream.restore(state)
            in_flight, done = [], list(saved[1])
            handed_out = drain(stream, len(state["outstanding"]))
            assert [[prompt.prompt_id, prompt.epoch] for prompt in handed_out] == state["outstanding"]
            in_flight = [(prompt.prompt_id, prompt.epoch) for prompt in handed_out]
    in_flight += [(prompt.prompt_id, prompt.epoch) for prompt in drain(stream)]
    for key in in_flight:
        stream.done(*key)
        done.append(key)
    assert stream.outstanding == 0
    assert Counter(done) == Counter(
        (prompt_id, epoch) for source in sources for prompt_id in source.ids for epoch in range(epochs)
    )


# The sampler


class Asked:
    """A sampler that notes whom it was asked about; by default it draws everything."""

    def __init__(self, draws: Callable[[str, int], bool] = lambda prompt_id, epoch: True) -> None:
        self.draws = draws
        self.about: list[tuple[str, int]] = []
        self.skipped: list[tuple[str, int]] = []

    def __call__(self, prompt_id: str, epoch: int) -> bool:
        self.about.append((prompt_id, epoch))
        drawn = self.draws(prompt_id, epoch)
        if not drawn:
            self.skipped.append((prompt_id, epoch))
        return drawn


def test_a_skipped_prompt_is_over_for_the_epoch_and_counted() -> None:
    sampler = Asked(lambda prompt_id, epoch: epoch == 1 or prompt_id != "mine:2")
    stream = PromptStream([numbered(4)], shuffle=False, epochs=2, sampler=sampler)
    prompts = drain(stream)
    assert [(prompt.prompt_id, prompt.epoch) for prompt in prompts] == [
        *((f"mine:{number}", 0) for number in (0, 1, 3)),
        *((f"mine:{number}", 1) for number in range(4)),
    ]
    assert stream.outstanding == 7
    assert sampler.skipped == [("mine:2", 0)]
    with pytest.raises(ValueError, match="not outstanding"):
        stream.done("mine:2", 0)
    assert stream.metrics() == {"data/epoch": 2.0, "data/skipped": 1}
    assert stream.metrics() == {"data/epoch": 2.0, "data/skipped": 0}  # since the last call


def test_a_sampler_that_draws_everything_changes_nothing() -> None:
    sources = [numbered(7, "a", 2.0), numbered(5, "b")]
    plain, sampled = PromptStream(sources, epochs=3), PromptStream(sources, epochs=3, sampler=Asked())
    assert drain(plain) == drain(sampled)
    assert plain.state() == sampled.state()


def test_a_prompt_offered_again_is_not_decided_anew() -> None:
    rates = PassRates(1.0)
    stream = PromptStream([numbered(3)], epochs=1, sampler=Asked(lambda prompt_id, epoch: len(rates) == 0))
    prompt = stream.next()
    assert prompt is not None
    rates.observe(prompt.prompt_id, 0, [0.0])
    stream.offer_again(prompt.prompt_id, prompt.epoch)
    assert stream.next() == prompt
    assert stream.next() is None  # the others are skipped
    assert stream.exhausted


def test_the_decision_is_taken_at_the_draw() -> None:
    worth = {f"mine:{number}": True for number in range(3)}
    stream = PromptStream([numbered(3)], shuffle=False, sampler=lambda prompt_id, epoch: worth[prompt_id])
    assert ids(drain(stream, 1)) == ["mine:0"]
    worth["mine:1"] = False
    assert ids(drain(stream, 2)) == ["mine:2", "mine:0"]


def test_the_rest_of_the_last_epoch_may_be_skipped() -> None:
    stream = PromptStream([numbered(500)], epochs=2, sampler=lambda prompt_id, epoch: epoch == 0)
    assert len(drain(stream)) == 500
    assert stream.exhausted
    assert stream.metrics() == {"data/epoch": 2.0, "data/skipped": 500}
    assert stream.next() is None


@pytest.mark.parametrize("sizes", [(1,), (3, 40), (5000,)])
def test_endless_data_that_nobody_wants_is_still_handed_out_after_a_bounded_search(sizes: tuple[int, ...]) -> None:
    sampler = Asked(lambda prompt_id, epoch: False)
    stream = PromptStream([numbered(size, f"s{size}") for size in sizes], sampler=sampler)
    for draw in range(1, 4):
        assert stream.next() is not None
        assert len(sampler.about) == draw * MAX_SKIPS
    assert stream.metrics()["data/skipped"] == 3 * MAX_SKIPS


def test_endless_data_with_every_prompt_at_the_floor_goes_on() -> None:
    """The floor is the chance of a retest: each prompt comes about every tenth epoch, by a hash, not in a body."""
    rates = PassRates(0.5)
    rates.restore({"prompts": {f"mine:{number}": [0.0, 50, 0] for number in range(200)}})
    sampler = DifficultySampler(rates, seed=1, answers_per_group=8, retest_share=0.1)
    stream = PromptStream([numbered(200)], sampler=sampler)
    counts = Counter(ids(drain(stream, 2000)))
    assert stream.metrics()["data/epoch"] == pytest.approx(100, rel=0.05)
    assert len(counts) == 200
    assert max(counts.values()) < 30


def test_a_source_that_is_skipped_leaves_its_turns_to_the_others() -> None:
    """Its epochs pass at the pace of its weight: it is not searched through for something to hand out."""
    sampler = Asked(lambda prompt_id, epoch: not prompt_id.startswith("solved") or prompt_id.endswith("0"))
    stream = PromptStream([numbered(10, "solved", 3.0), numbered(10, "open", 1.0)], sampler=sampler)
    counts = Counter(prompt.source for prompt in drain(stream, 130))
    assert counts == {"open": 100, "solved": 30}
    asked = Counter(prompt_id.partition(":")[0] for prompt_id, _ in sampler.about)
    assert asked["solved"] / asked["open"] == pytest.approx(3, rel=0.02)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_history_of_kills_with_a_sampler_uses_each_prompt_up_once_an_epoch(data: st.DataObject) -> None:
    """Random draws, judged groups, second offers, checkpoints and kills. After a kill, memory and frontier are those of
    the last checkpoint, and what was skipped or done since is undone."""
    epochs = data.draw(st.integers(1, 4))
    sources = [
        numbered(data.draw(st.integers(1, 6)), name, weight=data.draw(st.sampled_from([0.5, 1.0, 3.0])))
        for name in ("a", "b", "c")[: data.draw(st.integers(1, 3))]
    ]
    share = data.draw(st.sampled_from([0.01, 0.3, 0.8]))
    outcomes = st.sampled_from([0.0, 0.0, 1.0, 1.0, 0.5, None])  # pass rates of judged groups

    def start() -> tuple[PromptStream, PassRates, Asked]:
        rates = PassRates(0.5)
        asked = Asked(DifficultySampler(rates, seed=3, answers_per_group=2, retest_share=share))
        return PromptStream(sources, seed=3, epochs=epochs, sampler=asked), rates, asked

    def resume(saved: dict[str, Any]) -> tuple[PromptStream, PassRates, Asked]:
        state = json.loads(saved["state"])
        stream, rates, asked = start()
        rates.restore(state["rates"])
        stream.restore(state["prompts"])
        asked.about, asked.skipped = list(saved["about"]), list(saved["skipped"])
        return stream, rates, asked

    def save() -> dict[str, Any]:
        state = json.dumps({"prompts": stream.state(), "rates": rates.state()})
        return {"state": state, "done": list(done), "about": list(asked.about), "skipped": list(asked.skipped)}

    def draw() -> bool:
        unasked = every - Counter(asked.about)
        prompt = stream.next()
        if prompt is None:
            assert not any(asked.draws(*key) for key in unasked)  # it starves only when no prompt could be drawn
            return False
        assert (prompt.prompt_id, prompt.epoch) not in in_flight
        in_flight.append((prompt.prompt_id, prompt.epoch))
        return True

    every = Counter((prompt_id, epoch) for source in sources for prompt_id in source.ids for epoch in range(epochs))
    stream, rates, asked = start()
    in_flight: list[tuple[str, int]] = []
    done: list[tuple[str, int]] = []
    saved = save()
    for action in data.draw(st.lists(st.sampled_from("nnnnddddosk"), max_size=80)):
        if action == "n":
            draw()
        elif action in "do" and in_flight:
            key = in_flight.pop(data.draw(st.integers(0, len(in_flight) - 1)))
            rates.observe(*key, [data.draw(outcomes)])
            if action == "d":
                stream.done(*key)
                done.append(key)
            else:
                stream.offer_again(*key)
        elif action == "s":
            saved = save()
            # The same draws follow from the same state, in the process that goes on and in one that takes over.
            goes_on, (takes_over, _, asked_there) = copy.deepcopy((stream, asked)), resume(saved)
            drain(goes_on[0])
            drain(takes_over)
            assert asked_there.about == goes_on[1].about
            assert asked_there.skipped == goes_on[1].skipped
        elif action == "k":
            stream, rates, asked = resume(saved)
            in_flight, done = [], list(saved["done"])
            outstanding = json.loads(saved["state"])["prompts"]["outstanding"]
            for key in outstanding:  # handed out first, whatever is remembered of them by now
                assert draw()
                assert list(in_flight[-1]) == key
    while draw():
        pass
    for key in in_flight:
        stream.done(*key)
        done.append(key)
    assert stream.outstanding == 0
    assert stream.exhausted
    assert Counter(done) + Counter(asked.skipped) == every
    assert Counter(asked.about) == every  # asked once each
    assert stream.metrics() == {"data/epoch": epochs, "data/skipped": len(asked.skipped)}
