"""Chat form of the corpus: a template, and the rules that turn documents into conversations.

    <|user|>What is 12 plus 45?<|end|><|assistant|>12 plus 45 is 57.<|end|><|endoftext|>

Dialogues become conversations as they are. Questions with answers, titled stories, equations,
small functions and lines of arithmetic are recast as what a user would ask and what the text answers.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator

USER, ASSISTANT, END = "<|user|>", "<|assistant|>", "<|end|>"

TEMPLATE = """\
{%- set ns = namespace(system='') -%}
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}
{%- set ns.system = message['content'] + '\\n\\n' -%}
{%- elif message['role'] == 'user' -%}
{{- '<|user|>' + ns.system + message['content'] + '<|end|>' -}}
{%- set ns.system = '' -%}
{%- elif message['role'] == 'assistant' -%}
{{- '<|assistant|>' + message['content'] + '<|end|>' -}}
{%- else -%}
{{- raise_exception('role must be system, user or assistant, not ' + message['role']) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}
{%- endif -%}
"""

Turn = tuple[str, str]
"""What the user says, what the assistant answers."""

_DIALOGUE = re.compile(r"^User: (.*?)\nAssistant: (.*?)(?=\n+User: |\Z)", re.S | re.M)
_QUESTION = re.compile(r"^Question: (.*?)\nAnswer: (.*?)(?=\n\n|\nQuestion: |\Z)", re.S | re.M)
_TITLE = re.compile(r"\ATitle: (.*)\n\n")
_EQUATION = re.compile(r"\A(Solve for \w: [^\n]*)\n(.*)\Z", re.S)
_FUNCTION = re.compile(r"\A(Write a Python function .*?)\n\n(.*)\Z", re.S)
_SUM = re.compile(r"\A(-?\d+ [-+x/] \d+) = (-?\d+)\Z")
_SUM_QUESTIONS = ("What is {}?", "{} = ?", "{}", "How much is {}?", "Calculate {}.")
_STORY_REQUESTS = (
    "Tell me a story.",
    "Please tell me a story.",
    "Write a short story.",
    "Can you tell me a story?",
)
_SUMS_AT_ONCE = 4


def render(turns: Iterable[Turn]) -> str:
    """A conversation as the model reads it; what `TEMPLATE` gives for the same messages."""
    return "".join(f"{USER}{asked}{END}{ASSISTANT}{answered}{END}" for asked, answered in turns)


def conversations(kind: str, document: str) -> Iterator[list[Turn]]:
    """The conversations that one document of a kind gives; none where it holds no exchange.

    Deterministic: a document always gives the same conversations.
    """
    if kind == "dialog":
        yield from _dialogue(document)
    elif kind == "story":
        yield from _story(document)
    elif kind == "math":
        yield from _maths(document)
    elif kind == "encyc" and (pairs := _pairs(_QUESTION, document)):
        yield pairs


def _pairs(pattern: re.Pattern[str], document: str) -> list[Turn]:
    return [(match[1].strip(), match[2].strip()) for match in pattern.finditer(document)]


def _dialogue(document: str) -> Iterator[list[Turn]]:
    """Exchanges parted by a blank line are unrelated; an answer that is only a bar was lost at the source."""
    for block in re.split(r"\n\n(?=User: )", document):
        turns = _pairs(_DIALOGUE, block)
        if turns and all(answered != "|" for _, answered in turns):
            yield turns


def _story(document: str) -> Iterator[list[Turn]]:
    """A request for the story, then its questions; and the first question asked about the quoted text."""
    questions = _pairs(_QUESTION, document)
    title = _TITLE.match(document)
    body = document[title.end() if title else 0 :].split("\n\nQuestion: ")[0].strip()
    request = random.Random(document).choice(_STORY_REQUESTS)
    if title:
        request = f"Tell me a story about {title[1].replace('The ', 'the ')}."
    yield [(request, body), *questions]
    if questions:
        (asked, answered), *others = questions
        yield [(f"{body}\n\n{asked}", answered), *others]


def _maths(document: str) -> Iterator[list[Turn]]:
    if pairs := _pairs(_QUESTION, document):
        yield pairs
        return
    if function := _FUNCTION.match(document):
        yield [(function[1], function[2])]
        return
    equations = [_EQUATION.match(block) for block in document.split("\n\n")]
    if turns := [(found[1], found[2]) for found in equations if found]:
        yield turns
        return
    yield from _sums(document)


def _sums(document: str) -> Iterator[list[Turn]]:
    """Lines of arithmetic, a few to a conversation, each asked in one of several ways."""
    draw = random.Random(document)
    sums = [match for line in document.splitlines() if (match := _SUM.match(line))]
    turns = [(draw.choice(_SUM_QUESTIONS).format(found[1]), f"{found[1]} = {found[2]}") for found in sums]
    for start in range(0, len(turns), _SUMS_AT_ONCE):
        yield turns[start : start + _SUMS_AT_ONCE]
