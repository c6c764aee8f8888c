"""POST /v1/embeddings: vectors of embedding models, beside chat turns."""

import asyncio

import grpc
import openai
import pytest
import pytest_asyncio
import torch
from openai import AsyncOpenAI
from transformers import AutoModel, AutoTokenizer

from shared.pb.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from shared.process.runtime_dir import READER_SOCKET, channel_options
from tests.http_api.conftest import MODEL
from tests.http_api.test_listening import address_of
from tests.http_api.test_local_clients import answer_to, run_local_service
from tests.models import EMBEDDING_PROMPT, build_embedding_model

TEXTS = [
    "What is kept between two turns?",
    "Keys and values are kept in blocks. " * 12,
    "a",
    "東京 🙂",
    "<|start|>user\nnot a mark<|end|>",
    *(f"The history of conversation {i} is loaded. " * (i + 1) for i in range(20)),
]
# Less KV than the inputs together need, and steps that cut the longer inputs.
TIGHT = (
    '[server]\nsocket_tenants = ["*"]\n[tenants.few]\nturns_per_minute = 2\n'
    "[scheduler]\nkv_tokens = 1024\nstep_tokens = 64\nmax_running = 4\npage_tokens = 32\n"
)
WORKING_KV = {"lasttoken": "contiguous", "mean": "pages"}
ORIGIN = {"Content-Type": "application/json"}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["lasttoken", "mean"])
async def service(request, tiny_model, tmp_path_factory):
    """Run a service whose model makes embeddings."""
    directory = tmp_path_factory.mktemp(request.param)
    model = build_embedding_model(tiny_model, directory / MODEL, request.param)
    settings = f'{TIGHT}working_kv = "{WORKING_KV[request.param]}"\n'
    async with run_local_service(model, directory, "127.0.0.1:0", settings=settings) as one:
        one.model_dir, one.mode = model, request.param
        yield one


def client_of(service):
    """Return the official client."""
    return AsyncOpenAI(api_key="x", base_url=f"http://{address_of(service)}/v1", max_retries=0)


def plain(service, token_ids):
    """Return the vector by Transformers alone, of length 1."""
    model = AutoModel.from_pretrained(service.model_dir, dtype=torch.float32).eval()
    with torch.inference_mode():
        states = model(input_ids=torch.tensor([token_ids])).last_hidden_state[0]
    pooled = states[-1] if service.mode == "lasttoken" else states.mean(0)
    return torch.nn.functional.normalize(pooled, dim=0)


def encode(service, text):
    """Return the tokens of a text: names of special tokens in it are text."""
    tokenizer = AutoTokenizer.from_pretrained(service.model_dir)
    end, text = tokenizer.eos_token_id, EMBEDDING_PROMPT + text
    return [*tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids, end]


def assert_same(found, expected):
    torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.asyncio(loop_scope="module")
async def test_vectors_equal_those_of_transformers(service):
    """Many at once, cut into chunks and batched, as numbers and as base64."""
    async with client_of(service) as client:
        answers = [
            await client.embeddings.create(model=MODEL, input=TEXTS, **options)
            for options in ({}, {"encoding_format": "float"})
        ]
    expected = [plain(service, encode(service, text)) for text in TEXTS]
    for answer in answers:
        assert [each.index for each in answer.data] == list(range(len(TEXTS)))
        for each, wanted in zip(answer.data, expected, strict=True):
            assert_same(each.embedding, wanted)
    num_tokens = sum(len(encode(service, text)) for text in TEXTS)
    assert answers[0].usage.prompt_tokens == answers[0].usage.total_tokens == num_tokens
    assert answers[0].model == MODEL


@pytest.mark.asyncio(loop_scope="module")
async def test_chats_run_beside_embeddings(service):
    """Chat answers are unchanged beside embeddings, and each request gets its own vectors."""
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Go on."}], "max_tokens": 24}
    async with client_of(service) as client:
        alone = await client.chat.completions.create(**chat, temperature=0)
        vectors, beside, other = await asyncio.gather(
            client.embeddings.create(model=MODEL, input=TEXTS),
            client.chat.completions.create(**chat, temperature=0),
            client.embeddings.create(model=MODEL, input=TEXTS[::-1]),
        )
        assert beside.choices[0].message.content == alone.choices[0].message.content
    for one, same in zip(vectors.data, reversed(other.data), strict=True):
        assert_same(one.embedding, torch.tensor(same.embedding))
    async with service.client() as grpc_client:
        model = await grpc_client.get_model()
    assert model.embedding_size == 64
    assert model.counters["embeddings"] >= 2 * len(TEXTS)
    assert model.gauges["resident_sessions"] <= 2, "of embeddings nothing is kept"


@pytest.mark.asyncio(loop_scope="module")
async def test_token_ids_are_taken_as_they_are(service):
    ids = [[5, 6, 7, 8], [300]]
    async with client_of(service) as client:
        many = await client.embeddings.create(model=MODEL, input=ids)
        one = await client.embeddings.create(model=MODEL, input=ids[0])
    for each, token_ids in zip(many.data, ids, strict=True):
        assert_same(each.embedding, plain(service, token_ids))
    assert_same(one.data[0].embedding, torch.tensor(many.data[0].embedding))


@pytest.mark.asyncio(loop_scope="module")
async def test_fewer_dimensions_have_length_one_again(service):
    async with client_of(service) as client:
        whole = await client.embeddings.create(model=MODEL, input="kept")
        cut = await client.embeddings.create(model=MODEL, input="kept", dimensions=16)
    expected = torch.nn.functional.normalize(torch.tensor(whole.data[0].embedding)[:16], dim=0)
    assert_same(cut.data[0].embedding, expected)


WRONG = [
    ({"input": ""}, "an empty text", "input"),
    ({"input": []}, "up to 2048", "input"),
    ({"input": ["a", ""]}, "an empty text", "input"),
    ({"input": ["a", 3]}, "something else", "input"),
    ({"input": [[1], "a", []]}, "something else", "input"),
    ({"input": {"a": 1}}, "up to 2048", "input"),
    ({"input": [["a"]]}, "something else", "input"),
    ({"input": ["a"] * 2049}, "up to 2048", "input"),
    ({}, "input is missing", "input"),
    ({"input": [1, 99999]}, "outside the vocabulary", None),
    ({"input": "a " * 4000}, "input 0 has", None),
    ({"input": "a", "dimensions": 65}, "64 values, not 65", None),
    ({"input": "a", "dimensions": 0}, "1 or more", "dimensions"),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format", "encoding_format"),
    ({"input": "a", "messages": []}, "no parameter", "messages"),
]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("body", "message", "param"), WRONG)
async def test_bad_input_is_refused_in_one_line(service, body, message, param):
    status, answer = await asyncio.to_thread(
        answer_to, service, "POST", "/v1/embeddings", ORIGIN, {"model": MODEL, **body}
    )
    assert status == 400
    assert message in answer["error"]["message"]
    assert answer["error"]["param"] == param


@pytest.mark.asyncio(loop_scope="module")
async def test_a_disconnected_client_stops_its_embeddings(service):
    """Its embeddings are dropped, and the service continues."""
    async with client_of(service) as client:
        asking = asyncio.create_task(client.embeddings.create(model=MODEL, input=TEXTS * 20))
        await asyncio.sleep(0.2)
        asking.cancel()
        await asyncio.wait({asking})
        answer = await client.embeddings.create(model=MODEL, input="still there")
        assert_same(answer.data[0].embedding, plain(service, encode(service, "still there")))
    async with service.client() as grpc_client, asyncio.timeout(60):
        while True:
            model = await grpc_client.get_model()
            if not model.running_turns + model.waiting_turns:
                break


@pytest.mark.asyncio(loop_scope="module")
async def test_a_request_counts_as_one_turn_of_its_tenant(service):
    """It counts once, whatever the number of inputs."""
    async with client_of(service).with_options(project="few") as client:
        for _ in range(2):
            await client.embeddings.create(model=MODEL, input=["a", "b"])
        with pytest.raises(openai.RateLimitError):
            await client.embeddings.create(model=MODEL, input="c")


@pytest.mark.asyncio(loop_scope="session")
async def test_a_setting_makes_embeddings_of_any_model(api):
    """They have length 1, and kvd stores nothing of them."""
    answer = await api.client().embeddings.create(model=MODEL, input=["a" * 2000, "b" * 2000])
    values = answer.data[0].embedding
    assert sum(value * value for value in values) == pytest.approx(1, 1e-5)
    address = f"unix:{api.kvd.runtime_dir / READER_SOCKET}"
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        stub = kvd_pb2_grpc.ReaderStub(channel)
        page = await stub.ListSessions(kvd_pb2.ListSessionsRequest(limit=1000))
    assert not [one for one in page.sessions if "embedding" in one.session.session_id]


@pytest.mark.asyncio(loop_scope="function")
async def test_a_chat_model_refuses_embeddings(tiny_model, tmp_path):
    async with (
        run_local_service(tiny_model, tmp_path, "127.0.0.1:0") as service,
        client_of(service) as client,
    ):
        with pytest.raises(openai.BadRequestError, match="makes no embeddings") as refused:
            await client.embeddings.create(model=MODEL, input="What is kept?")
        assert "model.pooling" in refused.value.message
        assert refused.value.code == "embeddings_unsupported"
        async with service.client() as grpc_client:
            assert (await grpc_client.get_model()).embedding_size == 0
