"""A model's chat template: the text that it writes around messages, and the roles that it takes.

It is tried out when the service starts. A session's tokens only grow, so the template is applied
incrementally: the text that new messages add is template(dummy turn + new messages) without its
beginning, template(dummy turn), both with the same arguments.
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
DUMMY_NAME = "heron 8e2f"  # name of a message's author
MAX_ROLES = 256  # most words of a template that are tried as roles
ALWAYS_TRIED = ("system", "user", "assistant", "tool")
_WORDS = re.compile(r"""(["'])([A-Za-z_][\w-]{0,31})\1""")
Message = Mapping[str, Any]  # as templates take it: role, content, tool calls
TALKERS = frozenset({"user", "assistant"})  # roles of the first message behind the system message
NAMED = TALKERS | {"system"}  # roles whose messages may have an author's name


@dataclass(frozen=True)
class Frames:
    """The texts that the template writes around answers.

    Attributes:
        base: the dummy turn, as the template writes it when messages follow.
        closings: the texts that it writes after an answer, end-of-turn token included: when
            messages follow, and, if that differs, when none do.
        arguments: all arguments that the template got.
    """

    base: str
    closings: tuple[str, ...]
    arguments: Arguments


class ChatTemplate:
    """A model's chat template, applied incrementally.

    Args:
        tokenizer: the model's tokenizer.
        usual: the operator's arguments, for turns that name no others.

    Attributes:
        source: the template's text; "" if there is none.
        frames: the texts around answers with the usual arguments; set by `try_out`.
        roles: the roles that messages may have; set by `find_roles`.
        named_roles: the roles of NAMED of which the template writes authors' names; set by
            `find_roles`.
    """

    def __init__(self, tokenizer: Any, usual: Arguments) -> None:
        self._tokenizer = tokenizer
        self.usual = usual
        has_any = bool(getattr(tokenizer, "chat_template", None))
        self.source: str = tokenizer.get_chat_template() if has_any else ""

    def try_out(self) -> str:
        """Try the template out; return why it cannot be applied, "" if it can."""
        if not self.source:
            return "the model has no chat template"
        try:
            self.frames = self.frames_of(self.usual)
            self.added([message("user", DUMMY_QUESTION)])
        except InvalidTurnError as error:
            return error.message
        return ""

    def frames_of(self, arguments: Arguments) -> Frames:
        """Find the texts that the template writes around answers, given some arguments.

        Raises:
            InvalidTurnError: it does not take a turn, or does not repeat its answer.
        """
        question = message("user", DUMMY_QUESTION)
        base = last = self.render(dummy_turn(), is_prompt=False, arguments=arguments)
        turns = [*dummy_turn(), question]
        followed = self.render(turns, is_prompt=True, arguments=arguments)
        if not followed.startswith(last):  # some templates write a last message differently
            unprompted = self.render(turns, is_prompt=False, arguments=arguments)
            prompt = followed[len(unprompted) :]
            base = self.render(dummy_turn(), is_prompt=True, arguments=arguments)
            base = base.removesuffix(prompt)
            base = written_in(followed, base) or base
        if DUMMY_ANSWER not in base:
            raise InvalidTurnError(
                "the chat template leaves out earlier answers", "send text or token ids"
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
            messages: the messages.
            tools: the tools that the model may call.
            is_prompt: whether to write the prompt for an answer behind them.
            arguments: all of the template's arguments; None: the usual ones.

        Raises:
            InvalidTurnError: the template refuses the messages.
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
            messages: the new messages.
            answer: an answer that they can follow; (): they can follow any.
            frames: the texts around answers, with the arguments to use; None: the usual ones.
            is_prompt: whether to write the prompt for an answer behind them.

        Raises:
            InvalidTurnError: the template refuses the messages, or refuses them after an answer.
        """
        frames = frames or self.frames
        before = [dummy_turn()[0], *answer] if answer else dummy_turn()
        text = self.render([*before, *messages], is_prompt=is_prompt, arguments=frames.arguments)
        base = frames.base
        if answer:
            alone = self.render(before, is_prompt=False, arguments=frames.arguments)
            base = written_in(text, alone)
        elif not text.startswith(base):  # some templates write the date, which may have changed
            base = self.frames_of(frames.arguments).base
        if not base or not text.startswith(base):
            raise InvalidTurnError(
                "the chat template rewrites earlier messages when these are added",
                "send other roles, or text or token ids",
            )
        return text[len(base) :]

    def check_roles(self, messages: Sequence[Message]) -> None:
        """Check that the template knows the roles of all messages.

        A role is written into the prompt as it is: an unknown one could forge structure.

        Raises:
            InvalidTurnError: it does not know one.
        """
        for message in messages:
            is_result = "tool_call_id" in message  # can always be written, if need be as text
            if message["role"] not in self.roles and not is_result:
                raise InvalidTurnError(
                    f"the chat template does not know the role {message['role'][:40]!r}",
                    f"send one of {', '.join(self.roles)}",
                )

    # -------------------------------------------------------------------------------------- roles

    def find_roles(self, num_control: Callable[[str], int]) -> None:
        """Set `roles`, those that the template treats differently from others, and `named_roles`.

        A template that writes the name of every role unchanged knows the usual roles, if they yield
        as many control tokens as "user" does. It always knows the roles of the dummy turn.

        Args:
            num_control: counts control tokens in a rendered text.
        """
        words = dict.fromkeys([*ALWAYS_TRIED, *(found[1] for found in _WORDS.findall(self.source))])
        others = [self._try_role(NO_ROLE, number) for number in range(len(_CONVERSATIONS))]
        self.roles: tuple[str, ...] = tuple(
            role for role in list(words)[:MAX_ROLES] if self._knows(role, others, num_control)
        )
        self.named_roles = frozenset(
            role
            for role in self.roles
            if role in NAMED
            and any(
                self._try_role(role, number, DUMMY_NAME) != self._try_role(role, number)
                for number in range(len(_CONVERSATIONS))
            )
        )

    def _knows(self, role: str, others: list[str], num_control: Callable[[str], int]) -> bool:
        """Whether the template treats a role differently from NO_ROLE, rendered in `others`."""
        for number, other in enumerate(others):
            text = self._try_role(role, number)
            if DUMMY_QUESTION not in text:
                continue
            if role in {"user", "assistant"}:
                return True
            if text.casefold() != other.casefold().replace(NO_ROLE, role):
                return True
            if NO_ROLE in other.casefold() and role in ALWAYS_TRIED:
                return num_control(text) == num_control(self._try_role("user", number) or text)
        return False

    def _try_role(self, role: str, number: int, name: str = "") -> str:
        """Render a test conversation with one message of a role; "" if the template refuses it."""
        one = {**message(role, DUMMY_QUESTION), **({"name": name} if name else {})}
        try:
            return self.render(_CONVERSATIONS[number](one), is_prompt=False)
        except InvalidTurnError:
            return ""

    def surroundings(self) -> Iterator[tuple[str, str]]:
        """Yield the texts before and after each role's text, and before and after its name."""
        for role in self.roles:
            name = DUMMY_NAME if role in self.named_roles else ""
            for number in range(len(_CONVERSATIONS)):
                text = self._try_role(role, number, name)
                for part in (DUMMY_QUESTION, name):
                    before, found, after = text.partition(part) if part else ("", "", "")
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
    """Return the beginning of a text that some messages alone make up; "" if none does.

    Before the last answer of a conversation templates may write a text, such as an empty thought,
    that they leave out when messages follow. So `alone` may have a part that `text` lacks.

    Args:
        text: the messages and others behind them, rendered.
        alone: the messages alone, rendered.
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


# Test conversations with one message of a role: alone, before or after a question, after an answer.
_CONVERSATIONS: tuple[Callable[[Message], list[Message]], ...] = (
    lambda tried: [tried],
    lambda tried: [tried, message("user", OTHER_QUESTION)],
    lambda tried: [message("user", OTHER_QUESTION), tried],
    lambda tried: [*dummy_turn(), tried],
)
