"""Finding the final answer in what a model wrote.

Contract. Pure, linear in the length of the text, and independent of the right answer: there is one final answer or none.
- Only what follows the last closed thinking block counts. A thought that is not finished has no answer.
- The strongest mark decides, and of several equal ones the last: a box; the content of `<answer>`; `#### 7` and
  `the answer is 7`; then, where marks are not required, a lone expression or the last number of the closing sentence.
- A box or an answer tag that is begun last and not finished is a text that was cut off: there is no answer.
- Answers that stand side by side are one list, not several tries: `\\boxed{1} \\boxed{2}` states 1 and 2.
- A question, or a sentence of the prompt, states nothing.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from reward_workers.math_notation import word_set
from reward_workers.math_words import number_in_words

MAX_STATEMENT = 4_000  # characters of a stated answer that are looked at
MAX_SENTENCE = 300  # characters of an answer that is a sentence
MAX_STATEMENTS = 20  # the last ones, of which those side by side are a list


@dataclass(frozen=True)
class Answer:
    """`text` is None when there is no answer, and `source` says why; otherwise where it was found: `box`, `tag`, `####`,
    `stated`, `whole`, `sentence`.
    """

    text: str | None
    source: str

    @property
    def is_prose(self) -> bool:
        """Whether it was cut out of running text, so that its last mark may be the sentence's."""
        return self.source not in ("box", "tag")


_THOUGHT = re.compile(r"<(/?)(?:think|thinking|thought|reasoning)>|(◁)(/?)think▷", re.IGNORECASE)
_SPECIAL = re.compile(r"<\|[A-Za-z0-9_]{1,40}\|>|</s>|<eos>|<end_of_turn>")
_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_BRACES = re.compile(r"\\{1,2}(?:boxed|fbox|framebox)(?![A-Za-z])|\\[{}\\]|[{}]")
_OPENING = re.compile(r"\s*\{")
_UNBRACED = re.compile(r"\s*([^\s$,;\\{}]+)")
_BEGUN_BOX = re.compile(r"\\(?:b(?:o(?:x(?:e(?:d)?)?)?)?|f(?:b(?:o(?:x)?)?)?)\s*$")
_BETWEEN = re.compile(
    r"(?:[\s,;.&$*()\[\]|/]|\\[()\[\],;:!\\ ]|\\q?quad"
    r"|\\text ?\{ ?(?:and|or) ?\}|\b(?:and|or|maybe|perhaps|possibly|either|also)\b)*"
)
_NAME = re.compile(r"\b[A-Za-z](?:_\{?\w\}?)? ?= ?$")  # of what the next box holds
_EMPHASIS = re.compile(
    r"(?<![\w)}])(?:\*\*|__)|(?:\*\*|__)(?![\w({\\])|(?<!`)`+\w{0,20}\n|`|</?(?:b|i|u|em|strong|code)>"
)
_ITALIC = re.compile(r"(?<![\w\\}$)])_([^_\n$]{1,60})_(?![\w{])")
_BULLET = re.compile(r"[-•]\s+(?=[\d$\\(])")
_STATED = re.compile(
    r"答案(?:是|为|應該是|应该是)?\s*[:：]?\s*|\b(?:answers?|results?|option|choice)(?:\s+(?:to|of|for)\s[^.:\n]{1,80}?)?"
    r"(?:\s+(?:is|are|was|would\s+be|will\s+be|must\s+be|equals|choice\s+is|option\s+is)(?:\s*:)?|\s*[:=]|\s*$)"
    r"(?:\s+(?:therefore|thus|hence|simply|just|clearly|indeed|then|now|definitely|exactly|approximately|about|roughly|around|option|choice))*[\s,]*",
    re.IGNORECASE | re.MULTILINE,
)
_STATED_ABROAD = re.compile(
    r"\b(?:respuesta|resposta|risposta|réponse|antwort|antwoord|odpowiedź|cevap"
    r"|ответ|відповідь)(?:\s+(?:final|finale|correcta|correta|corretta|correcte))?(?:\s+(?:es|é|è|est|ist|lautet|is|to)\b\s*:?|\s*[:=–—])\s*"
    r"|(?:答え|解答|正解|정답|답)\s*(?:は|은|는|[:：])\s*|(?:الجواب|الإجابة|उत्तर)\s*(?:هو|هي|है)?\s*:?\s*",
    re.IGNORECASE,
)
_COUNTED_ABROAD = re.compile(  # what is counted, with none of the words that deny or bound a number
    r"([-−]?\d+(?:[.,]\d+)*)\s?(?:[個个개명人本枚円元원회분]|(?!не(?!дел)|ни|ні|или|либо|около|ошиб|миним|максим|прим|прибл)[а-яё]{2,})\.?",
    re.IGNORECASE,
)
_COPULA = re.compile(
    r"\s*(?:です|である|となります|입니다|이다|है)[\s.]*$"
)  # at the end of a statement in some languages
_HASHES = re.compile(r"^[^\S\n]*.*?####(?!#)[^\S\n]*", re.MULTILINE)
_HEADING = re.compile(
    r"\W*(?:explanation|solution|conclusion|steps?|notes?|verification|check|reasoning|summary|analysis)\b",
    re.IGNORECASE,
)
_STATEMENT = re.compile(
    r"(?:\\\([^\n]*?\\\)|\$[^$\n]*\$|\\begin\{(\w+)\}.*?\\end\{\1\}|[^.!?\n]|[.](?=[^\s*_`\"')\]]|$(?!\n))|[!?](?=\S))*",
    re.DOTALL,
)
_DISPLAY = re.compile(r"\s*(?:\$\$(.*?)\$\$|\\\[(.*?)\\\])", re.DOTALL)
_DIGRESSION = re.compile(
    r",?\s+\b(?:because|since|as|so|thus|hence|therefore|which|but|after|given|according|due)\b|,\s+(?!(?:and|or|maybe|perhaps|possibly|either)\b)[a-z]{3,}"
    r"|[:;]\s+(?=[A-Za-z]{2,}\s)|\s+\((?=[A-Za-z]{3,})|\s+[-–—]\s+[A-Za-z]{2,}"
)
_EMPTY_COMMENT = re.compile(r"[\s,;:(.–—-]*(?:altogether|in total|in all|overall|done)?[\s).!]*", re.IGNORECASE)
_REASON = re.compile(r"\s+\((?:since|because|as|from|where)\b.*$")
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|\n\s*")
_NUMBER = re.compile(
    r"(?:(?:^|(?<=\bis )|(?<== )|(?<=: ))(?:[Mm]inus|[Nn]egative) )?(?:(?<![\w.)\]}])[-−–])?(?:[$€£]\s?)?(?<![A-Za-z\d_.])"
    r"(?:\d+(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:\s*/\s*\d+(?!\d))?(?:\s?(?:%|°|\\%))?"
    r"|(?<![\w.)\]}])-?\.\d+(?![\d.])"
)
_COUNT = re.compile(
    r"(?:[A-Za-z']+ ){1,8}?(?:is|are|has|have|was|were|gets?|costs?|equals|takes?|needs?|earns?|pays?|makes?)"
    r"(?: exactly)? (\$?\d[\d,]*(?:\.\d+)?%?)(?: [A-Za-z]+){0,6}\.?"
)
_DOUBT = word_set(
    "not no never neither nor least most more less fewer than or between if maybe perhaps possibly about almost nearly "
    "around approximately roughly except without wrong"
)
_DENIED = re.compile(  # before a value that a sentence denies
    r"(?:\b(?:not|never|no|nicht|keine?|pas|não)|n't|n’t|\bне|不是)(?: (?:equal(?: to)?|be|have|es|é))?[\s*(]*$",
    re.IGNORECASE,
)
_ENDED = re.compile(r"[\s.!*_)$\\]*")
_CONTRASTED = re.compile(
    r"[\s$*)%°]*(?:[A-Za-z]+)?(?:,\s+(?:and )?|\s+and |\s*\()" + _DENIED.pattern, re.IGNORECASE
)  # `43, not 42`
_MATH = re.compile(r"\$\$(.*?)\$\$|\$([^$\n]+)\$|\\\((.*?)\\\)|\\\[(.*?)\\\]", re.DOTALL)
_PROSE = word_set(
    "is are was were be so thus get gets gives have has had total we it the therefore hence then do not know cannot sorry"
)
_ANNOUNCED = re.compile(
    r"[A-Za-z]{3,} .*\d|.*\?$", re.DOTALL
)  # no lone expression: words that lead to one, or a question
_CHOICE = re.compile(
    r"(?:^|\b(?:[Ss]o|[Tt]hus|[Hh]ence|[Tt]herefore),?\s+(?:only\s+)?)\(?([A-Z])\)?\s+(?:is|must\s+be)\s+(?:the\s+)?(?:correct|right|best)\b|"
    r"\b(?:[Oo]ption|[Cc]hoice|[Cc]hoose|[Pp]ick|[Ss]elect|[Gg]o(?:ing)?\s+with|[Aa]nswer)\s+\(?([A-Z])\)?(?![\w'])|\(([A-Z])\)|^([A-Z])(?:$|\s+(?:because|since)\b)"
)


def find_answer(
    completion: str, *, prompt: str = "", require_mark: bool = False, opened_thinking: bool = False
) -> Answer:
    """The final answer of a completion. `prompt` is the question, whose sentences are no answers; `opened_thinking` says
    that the completion begins inside a thinking block that the prompt opened.
    """
    thought, finished = _after_thinking(completion, opened_thinking)
    if not finished:
        return Answer(None, "an unfinished thought")
    text = _SPECIAL.sub("", thought).replace("。", ". ").rstrip()
    tags = list(_TAG.finditer(text))
    tagged = ""
    if tags:
        if not tags[-1][1]:
            return Answer(None, "an unfinished answer tag")
        tagged = _tagged(text, tags)
    if _BEGUN_BOX.search(text[-12:]):
        return Answer(None, "an unfinished box")
    boxed = _boxed(tagged or text)
    if boxed is not None:
        return boxed
    if tagged:
        return Answer(_counted(tagged), "tag")
    text = _ITALIC.sub(r"\1", _EMPHASIS.sub("", text)).strip()
    stated = _stated(text)
    if stated is not None:
        return stated
    if require_mark:
        return Answer(None, "no marked answer")
    return _closing(text, prompt)


def choice_in(text: str) -> str | None:
    """The one letter that a closing sentence names as its choice, else None."""
    letters = {letter for groups in _CHOICE.findall(text.strip(" .*_`")) for letter in groups if letter}
    return letters.pop() if len(letters) == 1 else None


def _after_thinking(text: str, opened: bool) -> tuple[str, bool]:
    """What follows the last closed thinking block, and whether no block is open."""
    end, is_open = 0, opened
    for match in _THOUGHT.finditer(text):
        closes = bool(match[1] or match[3])
        is_open = not closes
        if closes:
            end = match.end()
    return text[end:], not is_open


def _tagged(text: str, tags: list[re.Match[str]]) -> str:
    """The content of the last answer tag, or of the last ones that stand side by side, as a list."""
    contents: list[str] = []
    start = len(text)
    for opening, closing in reversed(list(itertools.pairwise(tags))):
        if opening[1] or not closing[1]:
            continue
        if contents and not _BETWEEN.fullmatch(text[closing.end() : start][:200]):
            break
        contents.append(text[opening.end() : closing.start()].strip())
        start = opening.start()
    return _listed(contents[::-1])


def _counted(text: str) -> str:
    """The number of a sentence that says how many there are, `She has 42 apples.`; any other text as it is."""
    if len(text) > MAX_SENTENCE:
        return text
    sentence = re.sub(r"\s+", " ", re.sub(r"\\text ?\{([^{}]*)\}", r" \1 ", text)).strip()
    match = _COUNT.fullmatch(sentence)
    return match[1] if match and not _DOUBT & set(re.findall(r"[a-z]+", sentence.lower())) else text


def _listed(parts: list[str]) -> str:
    """The parts as a list, what is written again left out: `$18` and `18` are one."""
    found = {re.sub(r"\\?\$|[\s*]", "", part).rstrip("."): part for part in reversed(parts)}
    return ", ".join(reversed(found.values()))


def _boxed(text: str) -> Answer | None:
    """The last outermost box, or the last ones side by side as a list; None if there is none."""
    stack: list[int] = []  # for each open brace: where the box that it belongs to begins, or -1
    boxes: list[tuple[int, int, int]] = []  # outermost: start, start of the content, end
    awaiting = -1  # the start of a box whose brace comes next
    last_opened = last_closed = -1
    depth_boxes = 0
    contents: list[int] = []
    for match in _BRACES.finditer(text):
        token = match[0]
        if token[0] == "\\" and len(token) > 2:
            last_opened = match.start()
            if _OPENING.match(text, match.end()):
                awaiting = match.start()
                continue
            bare = _UNBRACED.match(text, match.end())
            if bare:
                last_closed = match.start()
                if not depth_boxes:
                    boxes.append((match.start(), bare.start(1), bare.end(1)))
        elif token == "{":
            stack.append(awaiting)
            if awaiting >= 0:
                depth_boxes += 1
                contents.append(match.end())
            awaiting = -1
        elif token == "}" and stack:
            start = stack.pop()
            if start >= 0:
                depth_boxes -= 1
                content = contents.pop()
                last_closed = max(last_closed, start)
                while boxes and boxes[-1][0] > start:
                    boxes.pop()
                boxes.append((start, content, match.start()))
    if last_opened < 0:
        return None
    if last_opened > last_closed:
        return Answer(None, "an unfinished box")
    parts: list[str] = []
    before = len(text)
    for start, content, end in reversed(boxes):
        if parts and not _BETWEEN.fullmatch(_NAME.sub("", text[min(end + 1, before) : before][:200])):
            break
        parts.append(text[content:end].strip())
        before = start
    answer = _listed(parts[::-1])
    return Answer(_counted(answer), "box") if answer else Answer(None, "an empty box")


def _stated(text: str) -> Answer | None:
    """What follows the last `####` or `the answer is`; several in a row are a list."""
    abroad = list(_STATED_ABROAD.finditer(text))
    if abroad and not _value_abroad(_statement(text, abroad[-1].end(), "stated")[0]):
        abroad = []  # a sentence, as any other
    marks = sorted(
        [(m.end(), m.start(), "####") for m in _HASHES.finditer(text)]
        + [(m.end(), m.start(), "stated") for m in _STATED.finditer(text)]
        + [(m.end(), m.start(), "abroad") for m in abroad]
    )
    parts: list[str] = []
    source = ""
    before = len(text)
    for end, start, kind in reversed(marks[-MAX_STATEMENTS:]):
        statement, stop = _statement(text, end, kind)
        if kind == "abroad":
            kind, statement = "stated", _value_abroad(statement)
        if not statement:
            continue
        if parts and stop > before:
            before = start  # `#### The answer is 7` states it once
            continue
        if parts and _words_between(text[stop:before]):
            break
        source = source or kind
        parts.append(statement)
        before = start
    return Answer(_listed(parts[::-1]), source) if parts else None


def _value_abroad(statement: str) -> str:
    """What a statement in another language says if it is a value, without what is counted; empty for a sentence."""
    if counted := _COUNTED_ABROAD.fullmatch(statement):
        return counted[1]
    words = re.findall(r"[^\W\d_]{2,}", re.sub(r"\\[A-Za-z]+", " ", _MATH.sub(" ", statement)))
    return statement if len(words) <= 1 else ""


def _words_between(text: str) -> bool:
    """Whether there is more than the frame of the next statement: `The final`, `Or maybe the correct`."""
    frame = {
        "the",
        "final",
        "correct",
        "so",
        "or",
        "and",
        "maybe",
        "perhaps",
        "possibly",
        "my",
        "alternatively",
        "also",
    }
    return len(text) > 200 or bool(set(re.findall(r"\w+", text.casefold())) - frame)


def _statement(text: str, start: int, kind: str) -> tuple[str, int]:
    """The statement that begins at a position, without the digression after it, and where it ends."""
    display = _DISPLAY.match(text, start)
    if display:
        return (display[1] or display[2] or "").strip(), display.end()
    window = text[start : start + MAX_STATEMENT]
    if kind == "####":
        line = window.partition("\n")[0]
        return "" if _HEADING.match(line) else line.strip(), start + len(line)
    skipped = len(window) - len(window.lstrip(" \n\t:*#>-" if window.lstrip(" \t:*")[:1] == "\n" else " \t:*"))
    bullet = _BULLET.match(window, skipped)
    if bullet and "\n" in text[:start][len(text[:start].rstrip()) :]:  # on a line of its own it is no minus
        skipped = bullet.end()
    match = _STATEMENT.match(window, skipped)
    statement = match[0] if match else ""
    end = start + skipped + len(statement)
    if window[skipped + len(statement) : skipped + len(statement) + 1] == "?":
        return "", end
    following = window[skipped + len(statement) : skipped + len(statement) + 1]
    if following == "!":  # a factorial, or the end of the sentence: the caller tries both
        statement += "!"
    return _without_digression(_COPULA.sub("", statement)), end


def _without_digression(statement: str) -> str:
    """The statement up to where it goes on to explain itself, outside of formulas."""
    formulas = [match.span() for match in _MATH.finditer(statement)]
    for match in _DIGRESSION.finditer(statement):
        if not any(start <= match.start() < end for start, end in formulas):
            return statement[: match.start()].strip()
    return statement.strip()


def _without_comment(text: str) -> str:
    """`72, altogether.` without what says nothing."""
    bare = _without_digression(text)
    rest = text[len(bare) :]
    number = number_in_words(rest.strip(" ,;:().–—-"))
    same = number is not None and not number[1] and str(number[0]) == bare.strip("$")
    return bare if re.match(r"[-−$\\(.]?\d", text) and (same or _EMPTY_COMMENT.fullmatch(rest)) else text


def _closing(text: str, prompt: str) -> Answer:
    """A lone expression, or the last number or formula of the last sentence that has one."""
    if text and "\n" not in text and len(text) <= MAX_STATEMENT:
        plain = re.sub(r"\\text\w*\s*\{([^{}]*)\}", r" \1 ", text)
        words = re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}", re.sub(r"\\begin\{\w+\}|\\end\{\w+\}", "", plain))
        if len(words) <= 5 and not _PROSE & {word.lower() for word in words} and not _ANNOUNCED.match(text):
            return Answer(_without_comment(_REASON.sub("", text)), "whole")
    asked = _squeezed(prompt)
    tail = text[-MAX_STATEMENT:]
    end = len(tail)
    starts = [0, *(m.end() for m in _SENTENCE_END.finditer(tail) if m.end() < len(tail))]
    for index in reversed(range(len(starts))):
        start = starts[index]
        alone = _has_only_values(tail[start:end])
        while alone and index and _has_only_values(tail[starts[index - 1] : start]):
            index -= 1  # values line by line are one list
            start = starts[index]
        sentence, end = tail[start:end].strip(), start
        if not sentence or (
            not any(c.isdigit() for c in sentence) and not _MATH.search(sentence) and not choice_in(sentence)
        ):
            continue
        if sentence.endswith("?"):
            return Answer(None, "a question")
        if asked and len(sentence.split()) > 2 and _squeezed(sentence) in asked:
            return Answer(None, "a sentence of the prompt")
        found = _last_value(sentence)
        return Answer(found, "sentence") if found else Answer(None, "no answer")
    return Answer(None, "no answer")


def _has_only_values(sentence: str) -> bool:
    rest = _NUMBER.sub("", _MATH.sub("", sentence))
    return rest != sentence and _BETWEEN.fullmatch(rest) is not None


def _last_value(sentence: str) -> str | None:
    """The last formula or number of a sentence that it does not deny; those side by side are a list."""
    formulas = [(m.start(), m.end(), next(g for g in m.groups() if g is not None)) for m in _MATH.finditer(sentence)]
    numbers = [
        (m.start(), m.end(), m[0])
        for m in _NUMBER.finditer(sentence)
        if not any(s <= m.start() < e for s, e, _ in formulas)
    ]
    values = sorted(formulas + numbers)
    last = _side_by_side(sentence, values)
    if not last:
        return choice_in(sentence)
    if _DENIED.search(sentence, 0, last[0][0]):
        values = values[: -len(last)]
        contrasted = values and _CONTRASTED.fullmatch(sentence[values[-1][1] : last[0][0]])
        if not contrasted or not _ENDED.fullmatch(sentence, last[-1][1]):
            return None
        last = _side_by_side(sentence, values)
        if _DENIED.search(sentence, 0, last[0][0]):
            return None
    parts = [value.strip() for _, _, value in last]
    if len(parts) == 1:
        return parts[0].rpartition("=")[2].strip() if last[0] in formulas and parts[0].count("=") > 1 else parts[0]
    return _listed(parts)


def _side_by_side(sentence: str, values: list[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """The last of some values, with those before it that stand beside it."""
    first = len(values)
    while first and (first == len(values) or _BETWEEN.fullmatch(sentence[values[first - 1][1] : values[first][0]])):
        first -= 1
    return values[first:]


def _squeezed(text: str) -> str:
    return re.sub(r"[\s*_`$\\]+", "", text).casefold().rstrip(".")
