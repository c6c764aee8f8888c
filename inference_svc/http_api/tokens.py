"""POST /tokenize and /detokenize: what the model's tokenizer makes of a text, and back.

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
        prompt: a text that begins a session; None: there are messages.
        tools: what the model may call, where there are messages.
        add_generation_prompt: whether messages are followed by the prompt for an answer, as they
            are if the client does not say.
        continue_final_message: whether the last of them is an answer that is gone on with.
        special_tokens: whether names of special tokens in the text are these tokens; else text.
        return_token_strs: whether the tokens are shown as texts, too.
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
    def _agree(self) -> Self:
        if (self.prompt is None) == (not self.messages):
            raise WrongMemberError(
                "either {path} or messages are to be encoded", "send one of them", "prompt"
            )
        if self.continue_final_message and not self.messages:
            raise WrongMemberError(
                "{path} goes with messages", "leave it out", "continue_final_message"
            )
        check_end(self.messages, self.add_generation_prompt, continues=self.continue_final_message)
        return self

    @property
    def input(self) -> TurnInput:
        """The text, or the messages."""
        if self.prompt is not None:
            return TextInput(self.prompt, has_special=self.special_tokens)
        asked = self.messages[:-1] if self.continue_final_message else self.messages
        return chat_input(
            with_names(each.message for each in asked),
            tuple(each.tool for each in self.tools),
            self.chat_template_kwargs,
            self.messages[-1].text if self.continue_final_message else "",
            is_prompt=self.add_generation_prompt is not False,
        )


class DetokenizeBody(ModelBody):
    """The body of POST /detokenize."""

    tokens: list[TokenId] = Field(default=None, validate_default=True)


async def tokenize(api: Api, request: web.Request) -> web.Response:
    """Encode a text or messages as they are read where nothing is known of them."""
    body = await api.decoded(request, TokenizeBody)
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
    """Decode token ids, with those that are special."""
    body = await api.decoded(request, DetokenizeBody)
    return reply({"prompt": await api.gateway.prompts.decode(body.tokens)})
