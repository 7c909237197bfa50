"""Chat messages to ids: no doubled special tokens, the user's arguments, every id that ends an answer."""

import logging
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import GenerationConfig, PreTrainedTokenizerFast

from rollout_workers.chat import ChatTemplate

WORDS = ["<unk>", "<bos>", "<end>", "<think>", "user", "assistant", "hello", "there"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "{{ message['role'] + ' ' + message['content'] + ' <end>' }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}{% if enable_thinking %} <think>{% endif %}"
)
HELLO = [{"role": "user", "content": "hello there"}]


def tokenizer(**options: str | None) -> PreTrainedTokenizerFast:
    """One token a word. It puts <bos> before every text it encodes, as many models' tokenizers do."""
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", bos_token="<bos>", **{"eos_token": "<end>", **options}
    )
    made.chat_template = TEMPLATE
    return made


def words_of(ids: list[int]) -> list[str]:
    return [WORDS[index] for index in ids]


def test_case_e07_special_tokens_come_once() -> None:
    plain = tokenizer()
    ids = ChatTemplate(plain).prompt_ids(HELLO)
    assert words_of(ids) == ["<bos>", "user", "hello", "there", "<end>", "assistant"]
    # What went wrong in the reported case: the templated text tokenised like any other text.
    text = plain.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
    assert words_of(plain(text)["input_ids"])[:3] == ["<bos>", "<bos>", "user"]


def test_arguments_reach_the_template() -> None:
    thinking = ChatTemplate(tokenizer(), {"enable_thinking": True}).prompt_ids(HELLO)
    silent = ChatTemplate(tokenizer(), {"enable_thinking": False}).prompt_ids(HELLO)
    assert words_of(thinking)[-2:] == ["assistant", "<think>"]
    assert words_of(silent)[-1] == "assistant"


def test_an_argument_that_the_template_never_reads_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        ChatTemplate(tokenizer(), {"enable_thinking": False, "enabel_thinking": False})
    assert "enabel_thinking" in caplog.text
    assert "enable_thinking;" not in caplog.text


@pytest.mark.parametrize(
    "arguments",
    [
        {"tokenize": False},
        {"add_generation_prompt": False},
        {"return_dict": True},
        {"truncation": True, "max_length": 2},  # it would cut prompts, and nothing would tell
        {"padding": "max_length"},
        {"return_tensors": "pt"},
        {"continue_final_message": True},
        {"tokenizer_kwargs": {"truncation": True}},
        {"conversation": []},
        {"messages": []},
    ],
)
def test_arguments_of_our_own_can_not_be_set(arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"chat_template_kwargs: {', '.join(arguments)} can't be set"):
        ChatTemplate(tokenizer(), arguments)


def test_another_template_may_be_given(caplog: pytest.LogCaptureFixture) -> None:
    plain = tokenizer()
    plain.chat_template = None
    with caplog.at_level(logging.WARNING):
        template = ChatTemplate(plain, {"chat_template": "hello {{ more }}", "more": "there"})
    assert words_of(template.prompt_ids(HELLO)) == ["hello", "there"]
    assert caplog.text == ""


def test_a_refused_role_is_named() -> None:
    with pytest.raises(ValueError, match="refuses messages with roles robot: no robots"):
        ChatTemplate(tokenizer()).prompt_ids([{"role": "robot", "content": "hello"}])


@pytest.mark.parametrize("content", [None, 7, {}, "half a character: \ud83d"])
def test_what_the_template_fails_on_is_named(content: object) -> None:
    with pytest.raises(ValueError, match="refuses messages with roles user"):
        ChatTemplate(tokenizer()).prompt_ids([{"role": "user", "content": content}])


def test_what_the_template_is_told_may_be_what_it_fails_on() -> None:
    plain = tokenizer()
    plain.chat_template = "{{ 'a' + extra }}"
    with pytest.raises(ValueError, match=r"with roles user and model\.chat_template_kwargs extra: "):
        ChatTemplate(plain, {"extra": 7}).prompt_ids(HELLO)


def test_a_tokenizer_without_template_is_refused() -> None:
    plain = tokenizer()
    plain.chat_template = None
    with pytest.raises(ValueError, match="has no chat template"):
        ChatTemplate(plain)


@pytest.mark.parametrize(
    ("config", "ids"),
    [
        (None, (2,)),
        (GenerationConfig(eos_token_id=2), (2,)),
        (GenerationConfig(eos_token_id=[0, 2, 3]), (2, 0, 3)),
    ],
)
def test_eos_ids_are_the_tokenizers_and_the_generation_configs(
    config: GenerationConfig | None, ids: tuple[int, ...]
) -> None:
    assert ChatTemplate(tokenizer(), generation_config=config).eos_ids == ids


def test_a_model_whose_answers_never_end_is_refused() -> None:
    with pytest.raises(ValueError, match="names an eos token"):
        ChatTemplate(tokenizer(eos_token=None))


def test_from_a_folder_with_and_without_generation_config(tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert ChatTemplate.from_pretrained(tmp_path).eos_ids == (2,)
    GenerationConfig(eos_token_id=[2, 3]).save_pretrained(tmp_path)
    template = ChatTemplate.from_pretrained(tmp_path, {"enable_thinking": True})
    assert template.eos_ids == (2, 3)
    assert words_of(template.prompt_ids(HELLO))[-1] == "<think>"
