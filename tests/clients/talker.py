"""Talks with a client library as docs/clients.md sets it up. Run by the library's Python.

talker.py NAME of TALKS

On stdin is a line of JSON with the page's code, `{"code": …}`, then one for each question:
`{"question": …, "streamed": …}`; on stdout a line for each answer: its text, the prompt's cached
tokens, and the pieces that it came in. Every request has the whole conversation.
"""

import json
import sys
import uuid
from functools import partial
from typing import NamedTuple

MODEL = "smollm2"
MAX_TOKENS = 12
IN_STREAMS = {"include_usage": True}


class Answer(NamedTuple):
    text: str
    cached_tokens: int
    pieces: int


def openai(names, messages, *, streamed):
    options = {"model": MODEL, "messages": messages, "max_tokens": MAX_TOKENS}
    create = names["client"].chat.completions.create
    if streamed:
        chunks = list(create(**options, stream=True, stream_options=IN_STREAMS))
        return _of_chunks(chunks, chunks[-1].usage)
    whole = create(**options)
    return _of_completion(whole, whole.usage)


def anthropic(names, messages, *, streamed):
    system, *rest = messages
    options = {"model": MODEL, "max_tokens": MAX_TOKENS, "messages": rest}
    options["system"] = system["content"]
    if streamed:
        with names["client"].messages.stream(**options) as stream:
            pieces = list(stream.text_stream)
            whole = stream.get_final_message()
    else:
        whole = names["client"].messages.create(**options)
        pieces = [block.text for block in whole.content]
    return Answer("".join(pieces), whole.usage.cache_read_input_tokens or 0, len(pieces))


def langchain(names, messages, *, streamed, responses=False):
    llm = names["llm"].model_copy(update={"use_responses_api": responses})
    llm = llm.bind(max_tokens=MAX_TOKENS)
    if streamed:
        chunks = list(llm.stream(messages))
        whole = chunks[0]
        for chunk in chunks[1:]:
            whole += chunk
    else:
        whole = llm.invoke(messages)
        chunks = [whole]
    cached = whole.usage_metadata["input_token_details"].get("cache_read", 0)
    return Answer(whole.text, cached, sum(1 for chunk in chunks if chunk.text))


def litellm(names, messages, *, streamed):
    complete = names["litellm"].completion
    options = {**names["settings"], "messages": messages, "max_tokens": MAX_TOKENS}
    if streamed:
        chunks = list(complete(**options, stream=True, stream_options=IN_STREAMS))
        usage = next(one.usage for one in reversed(chunks) if getattr(one, "usage", None))
        return _of_chunks(chunks, usage)
    whole = complete(**options)
    return _of_completion(whole, whole.usage)


def llama_index(names, messages, *, streamed):
    from llama_index.core.llms import ChatMessage

    said = [ChatMessage(**message) for message in messages]
    options = {"max_tokens": MAX_TOKENS}
    if streamed:
        chunks = list(names["llm"].stream_chat(said, **options))
        text = "".join(chunk.delta or "" for chunk in chunks)
        pieces = sum(1 for chunk in chunks if chunk.delta)
        return Answer(text, _num_cached(chunks[-1].raw.usage), pieces)
    whole = names["llm"].chat(said, **options)
    return Answer(whole.message.content, _num_cached(whole.raw.usage), 1)


def _of_completion(whole, usage):
    return Answer(whole.choices[0].message.content, _num_cached(usage), 1)


def _of_chunks(chunks, usage):
    pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    return Answer("".join(pieces), _num_cached(usage), sum(map(bool, pieces)))


def _num_cached(usage):
    return usage.prompt_tokens_details.cached_tokens or 0


TALKS = {
    "openai": openai,
    "anthropic": anthropic,
    "LangChain": langchain,
    "LangChain, responses": partial(langchain, responses=True),
    "LiteLLM": litellm,
    "LlamaIndex": llama_index,
}


def main(name):
    names = {}
    exec(compile(json.loads(sys.stdin.readline())["code"], "docs/clients.md", "exec"), names)  # noqa: S102  # the page's
    opening = f"This is {uuid.uuid4().hex}. " + "Much is kept. " * 30  # a new conversation
    messages = [{"role": "system", "content": opening}]
    for line in sys.stdin:
        asked = json.loads(line)
        messages.append({"role": "user", "content": asked["question"]})
        answer = TALKS[name](names, messages, streamed=asked["streamed"])
        messages.append({"role": "assistant", "content": answer.text})
        print(json.dumps(answer._asdict()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
