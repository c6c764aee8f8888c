"""POST /tokenize and /detokenize: a text or messages as token ids, and back.

*Source:* vLLM's endpoints of these names, which benchmarks and gateways call.
"""

from typing import Any, Self

from aiohttp import web
from pydantic import Field, model_validator

from inference_svc.core.submission import TextInput, TurnInput
from inference_svc.http_api.api import Api
from inference_svc.http_api.bodies.body import ModelBody, TokenId, WrongMemberError
from inference_svc.http_api.bodies.conversation import TemplateArguments, with_names
from inference_svc.http_api.openai.messages import Messages, check_end
from inference_svc.http_api.openai.tools import ChatTools
from inference_svc.http_api.replies import reply
from inference_svc.service.submissions import chat_input


class TokenizeBody(ModelBody):
    """The body of POST /tokenize: a text, or a chat's messages.

    Attributes:
        prompt: a text at the beginning of a session; None if there are messages.
        messages: a chat's messages; empty if there is a prompt.
        tools: the tools that the model may call, with messages.
        chat_template_kwargs: arguments of the chat template.
        add_generation_prompt: whether the prompt for an answer follows the messages; None means
            true.
        continue_final_message: whether the last message is the beginning of the answer.
        special_tokens: whether names of special tokens in the text are read as these tokens.
        return_token_strs: whether the tokens are returned as texts, too.
    """

    prompt: str | None = None
    messages: Messages = Field(default_factory=list)
    tools: ChatTools = Field(default_factory=list)
    chat_template_kwargs: TemplateArguments = Field(default_factory=dict)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    special_tokens: bool = False
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_members(self) -> Self:
        if (self.prompt is None) == (not self.messages):
            raise WrongMemberError(
                "exactly one of {path} and messages is needed", "send one of them", "prompt"
            )
        if self.continue_final_message and not self.messages:
            raise WrongMemberError(
                "{path} is only possible with messages", "leave it out", "continue_final_message"
            )
        check_end(self.messages, self.add_generation_prompt, continues=self.continue_final_message)
        return self

    @property
    def input(self) -> TurnInput:
        """The text or the messages, as the input of a turn."""
        if self.prompt is not None:
            return TextInput(self.prompt, has_special=self.special_tokens)
        prompt_messages = self.messages[:-1] if self.continue_final_message else self.messages
        return chat_input(
            with_names(each.message for each in prompt_messages),
            tuple(each.tool for each in self.tools),
            self.chat_template_kwargs,
            self.messages[-1].text if self.continue_final_message else "",
            is_prompt=self.add_generation_prompt is not False,
        )


class DetokenizeBody(ModelBody):
    """The body of POST /detokenize."""

    tokens: list[TokenId] = Field(default=None, validate_default=True)


async def tokenize(api: Api, request: web.Request) -> web.Response:
    """Encode a text or messages as a new session would read them."""
    body = await api.read_body(request, TokenizeBody)
    token_ids = await api.gateway.prompts.encode(body.input)
    shown: dict[str, Any] = {
        "count": len(token_ids),
        "max_model_len": api.model.context_window,
        "tokens": token_ids,
    }
    if body.return_token_strs:
        shown["token_strs"] = [
            await api.gateway.prompts.decode([token_id]) for token_id in token_ids
        ]
    return reply(shown)


async def detokenize(api: Api, request: web.Request) -> web.Response:
    """Decode token ids, special tokens included."""
    body = await api.read_body(request, DetokenizeBody)
    return reply({"prompt": await api.gateway.prompts.decode(body.tokens)})
