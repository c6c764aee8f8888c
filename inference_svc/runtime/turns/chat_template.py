"""A model's chat template: what it writes around messages, and which messages it takes.

Tried out when the service starts. A session's tokens only grow, so the template is applied
incrementally: what new messages add is the template of (dummy turn, new messages) less the template
of the dummy turn, with the same arguments.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inference_svc.core.errors import InvalidTurnError
from inference_svc.core.template_arguments import Arguments

DUMMY_QUESTION = "ping 7f3a"
DUMMY_ANSWER = "pong 9c1e"
OTHER_QUESTION = "what 5b20"  # begins with another token than DUMMY_QUESTION
NO_ROLE = "zebra 3d7c"  # a role that no template knows
DUMMY_NAME = "heron 8e2f"  # of who says a message
MAX_ROLES = 256  # words of a template, that are tried as roles
ALWAYS_TRIED = ("system", "user", "assistant", "tool")
_WORDS = re.compile(r"""(["'])([A-Za-z_][\w-]{0,31})\1""")
Message = Mapping[str, Any]  # as templates take it: role, content, calls of tools
TALKERS = frozenset({"user", "assistant"})  # roles that end what leads a conversation
NAMED = TALKERS | {"system"}  # whose messages may say who says them


@dataclass(frozen=True)
class Frames:
    """What the template writes around answers.

    Attributes:
        base: the dummy turn, as the template writes it where more follows.
        closings: the texts it writes after an answer, end-of-turn token included: where more
            follows, and where nothing does, if that is another.
        arguments: all that it has been given.
    """

    base: str
    closings: tuple[str, ...]
    arguments: Arguments


class ChatTemplate:
    """See the module docstring.

    Args:
        tokenizer: the model's tokenizer.
        usual: the arguments of whoever names none.

    Attributes:
        source: the template's text; "" if there is none.
        frames: with the usual arguments; set by `try_out`.
        roles: the roles that messages may have; set by `find_roles`.
        named_roles: those of the talkers, and the system's, whose names are written; likewise.
    """

    def __init__(self, tokenizer: Any, usual: Arguments) -> None:
        self._tokenizer = tokenizer
        self.usual = usual
        has_any = bool(getattr(tokenizer, "chat_template", None))
        self.source: str = tokenizer.get_chat_template() if has_any else ""

    def try_out(self) -> str:
        """Find out how the template is applied; return why it cannot be, "" if it can."""
        if not self.source:
            return "the model has no chat template"
        try:
            self.frames = self.frames_of(self.usual)
            self.added([message("user", DUMMY_QUESTION)])
        except InvalidTurnError as error:
            return error.message
        return ""

    def frames_of(self, arguments: Arguments) -> Frames:
        """Find out what the template writes around answers, with some arguments.

        Raises:
            InvalidTurnError: it does not write a turn, or not its answer.
        """
        question = message("user", DUMMY_QUESTION)
        base = last = self.render(dummy_turn(), is_prompt=False, arguments=arguments)
        turns = [*dummy_turn(), question]
        followed = self.render(turns, is_prompt=True, arguments=arguments)
        if not followed.startswith(last):  # some write a last message in another way
            asked = self.render(turns, is_prompt=False, arguments=arguments)
            prompt = followed[len(asked) :]
            base = self.render(dummy_turn(), is_prompt=True, arguments=arguments)
            base = base.removesuffix(prompt)
            base = written_in(followed, base) or base
        if DUMMY_ANSWER not in base:
            raise InvalidTurnError(
                "the chat template does not repeat answers", "send text or token ids"
            )
        closings = (found.rpartition(DUMMY_ANSWER)[2] for found in (base, last))
        return Frames(base, tuple(dict.fromkeys(closings)), arguments)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] = (),
        *,
        is_prompt: bool,
        arguments: Arguments | None = None,
    ) -> str:
        """Return messages as the template writes them, with or without the prompt for an answer.

        Args:
            messages: what is said.
            tools: those that the model is told of.
            is_prompt: whether an answer is to follow.
            arguments: all of the template's; None: the usual ones.

        Raises:
            InvalidTurnError: the template does not take them.
        """
        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=is_prompt,
                **(self.usual if arguments is None else arguments),
            )
        except Exception as error:  # a template is a program of the model's author
            raise InvalidTurnError(
                f"the chat template refuses these messages ({' '.join(str(error).split()):.120})",
                "send the roles, the order and the arguments that the model expects",
            ) from error
        return text

    def added(
        self,
        messages: Sequence[Message],
        answer: Sequence[Message] = (),
        *,
        frames: Frames | None = None,
        is_prompt: bool = True,
    ) -> str:
        """Return the text that messages after an answer add, with the prompt for the next one.

        Args:
            messages: what is new.
            answer: an answer that they can follow; () if they can follow any.
            frames: around answers, with the arguments that are to be used; None: as usual.
            is_prompt: whether an answer is to follow.

        Raises:
            InvalidTurnError: the template does not take them, or not after an answer.
        """
        frames = frames or self.frames
        before = [dummy_turn()[0], *answer] if answer else dummy_turn()
        text = self.render([*before, *messages], is_prompt=is_prompt, arguments=frames.arguments)
        base = frames.base
        if answer:
            alone = self.render(before, is_prompt=False, arguments=frames.arguments)
            base = written_in(text, alone)
        elif not text.startswith(base):  # some write the day, and it is another one by now
            base = self.frames_of(frames.arguments).base
        if not base or not text.startswith(base):
            raise InvalidTurnError(
                "the chat template rewrites earlier messages when these are added",
                "send other roles, or text or token ids",
            )
        return text[len(base) :]

    def check_roles(self, messages: Sequence[Message]) -> None:
        """Raise InvalidTurnError unless the template knows the roles of all messages.

        A role is written into the prompt as it is: an unknown one could forge structure.
        """
        for one in messages:
            is_result = "tool_call_id" in one  # whatever the template knows, it can be written
            if one["role"] not in self.roles and not is_result:
                raise InvalidTurnError(
                    f"role {one['role'][:40]!r} is none that the chat template knows",
                    f"send one of {', '.join(self.roles)}",
                )

    # -------------------------------------------------------------------------------------- roles

    def find_roles(self, num_control: Callable[[str], int]) -> None:
        """Set `roles`, those that the template treats as it treats no other, and `named_roles`.

        A template that writes any role's name where it stands knows the usual ones, if they give
        as many control tokens as "user" does. The roles of the dummy turn it always knows.

        Args:
            num_control: counts control tokens in a rendered text.
        """
        words = dict.fromkeys([*ALWAYS_TRIED, *(found[1] for found in _WORDS.findall(self.source))])
        others = [self._tried(NO_ROLE, number) for number in range(len(_CONVERSATIONS))]
        self.roles: tuple[str, ...] = tuple(
            role for role in list(words)[:MAX_ROLES] if self._knows(role, others, num_control)
        )
        self.named_roles = frozenset(
            role
            for role in self.roles
            if role in NAMED
            and any(
                self._tried(role, number, DUMMY_NAME) != self._tried(role, number)
                for number in range(len(_CONVERSATIONS))
            )
        )

    def _knows(self, role: str, others: list[str], num_control: Callable[[str], int]) -> bool:
        for number, other in enumerate(others):
            text = self._tried(role, number)
            if DUMMY_QUESTION not in text:
                continue
            if role in {"user", "assistant"}:
                return True
            if text.casefold() != other.casefold().replace(NO_ROLE, role):
                return True
            if NO_ROLE in other.casefold() and role in ALWAYS_TRIED:
                return num_control(text) == num_control(self._tried("user", number) or text)
        return False

    def _tried(self, role: str, number: int, name: str = "") -> str:
        """Render a conversation with one message of a role; "" if it is refused."""
        one = {**message(role, DUMMY_QUESTION), **({"name": name} if name else {})}
        try:
            return self.render(_CONVERSATIONS[number](one), is_prompt=False)
        except InvalidTurnError:
            return ""

    def surroundings(self) -> Iterator[tuple[str, str]]:
        """Yield what it writes before and after a message's text, and its name, for each role."""
        for role in self.roles:
            name = DUMMY_NAME if role in self.named_roles else ""
            for number in range(len(_CONVERSATIONS)):
                text = self._tried(role, number, name)
                for said in (DUMMY_QUESTION, name):
                    before, found, after = text.partition(said) if said else ("", "", "")
                    if found:
                        yield before, after


def common_prefix(first: Sequence[object], *others: Sequence[object]) -> int:
    """Return how many leading tokens, or characters, all of them share."""
    length = 0
    for tokens in zip(first, *others, strict=False):
        if len(set(tokens)) > 1:
            break
        length += 1
    return length


def written_in(text: str, alone: str) -> str:
    """Return the beginning of a text that is what some messages alone are; "" if none is.

    Templates may write something before the last answer, an empty thought, that they leave out
    where more follows.
    """
    same = common_prefix(text, alone)
    for kept in range(same, len(alone)):
        if text.startswith(alone[kept:], same):
            return text[: same + len(alone) - kept]
    return alone if same == len(alone) else ""


def message(role: str, content: str) -> Message:
    """Make a message as templates take it."""
    return {"role": role, "content": content}


def dummy_turn() -> list[Message]:
    """Make a question and its answer."""
    return [message("user", OTHER_QUESTION), message("assistant", DUMMY_ANSWER)]


# Conversations with one message of a role: alone, before a question, after one, after an answer.
_CONVERSATIONS: tuple[Callable[[Message], list[Message]], ...] = (
    lambda one: [one],
    lambda one: [one, message("user", OTHER_QUESTION)],
    lambda one: [message("user", OTHER_QUESTION), one],
    lambda one: [*dummy_turn(), one],
)
