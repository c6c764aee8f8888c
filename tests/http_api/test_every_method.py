"""Every method of the official clients, called as by a new user, with the demo's model.

The list of methods comes from the clients themselves: a method that is neither tried here nor part
of another product of its vendor fails the test.
"""

import inspect
from pathlib import Path

import anthropic
import openai
import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from tests.http_api.test_listening import address_of
from tests.http_api.test_local_clients import run_local_service
from tests.http_api.walks import ANTHROPIC_WALK, OPENAI_WALK
from tests.sampled import sampled

pytestmark = pytest.mark.asyncio(loop_scope="module")

DEMO = Path(__file__).parents[2] / "inference_svc" / "demo" / "model"
# Prefixes of methods of other products than a model that answers.
ELSEWHERE = {
    "openai": (
        *("admin.", "audio.", "batches.", "beta.agents.", "beta.assistants.", "beta.chatkit."),
        *("beta.realtime.", "beta.threads.", "containers.", "content_provenance_checks."),
        *("decisions.", "evals.", "files.", "fine_tuning.", "images.", "live.", "moderations."),
        *("realtime.", "safety.", "skills.", "uploads.", "vector_stores.", "videos."),
        *("webhooks.", "models.delete"),
    ),
    "anthropic": (
        *("beta.agents.", "beta.deployment_runs.", "beta.deployments.", "beta.dreams."),
        *("beta.environments.", "beta.files.", "beta.memory_stores.", "beta.messages.batches."),
        *("beta.organization.", "beta.sessions.", "beta.skills.", "beta.tunnels."),
        *("beta.user_profiles.", "beta.vaults.", "files.", "messages.batches.", "organization."),
        *("beta.webhooks.", "skills.", "user_profiles."),
    ),
}
STEPS = {
    vendor: {step.__name__: step for step in walk}
    for vendor, walk in (("openai", OPENAI_WALK), ("anthropic", ANTHROPIC_WALK))
}
# Without a request of their own: they read a vendor's webhooks, or open a web socket.
LOCAL = (".unwrap", ".parse_unverified", ".verify_signature", ".connect")
# These call another method again and again, or read a file from disk first.
HELPERS = ("poll", "wait_for", "upload_file_chunked", "prepare_directory", "for_result", "worker")


def methods_of(client):
    """Return all methods of a client's resources, by name."""

    def walk(at, path):
        for name in sorted(dir(type(at))):
            attribute = inspect.getattr_static(type(at), name)
            if name.startswith(("_", "with_")):
                continue
            if inspect.isfunction(attribute) and path:
                yield ".".join([*path, name]), getattr(at, name)
            elif not inspect.isfunction(attribute):
                child = getattr(at, name)
                if ".resources." in type(child).__module__:
                    yield from walk(child, [*path, name])

    return dict(walk(client, []))


@pytest.mark.parametrize(
    ("vendor", "client", "walk"),
    [("openai", AsyncOpenAI, OPENAI_WALK), ("anthropic", AsyncAnthropic, ANTHROPIC_WALK)],
)
async def test_every_method_is_covered(vendor, client, walk):
    """Each method is tried here or belongs to another product, and every tried one exists."""
    methods = methods_of(client(api_key="any"))
    tried = {name for name in methods if not name.startswith(ELSEWHERE[vendor])}
    named = {name for step in walk for name in step.methods}
    opened = {name for name in tried if name.endswith(LOCAL)}
    assert named == tried - opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def base(tmp_path_factory):
    """Return where the demo's model is served, as by `inference-svc serve --openai`."""
    directory = tmp_path_factory.mktemp("walk")
    settings = '[model]\npooling = "mean"\n'
    async with run_local_service(DEMO, directory, "127.0.0.1:0", settings=settings) as service:
        yield f"http://{address_of(service)}"


@pytest.mark.parametrize("step", sampled(list(STEPS["openai"]), 6, seed=1))
async def test_openai(base, step):
    """Each method works as the vendor documents it."""
    async with AsyncOpenAI(api_key="any", base_url=f"{base}/v1", max_retries=0) as client:
        await STEPS["openai"][step](client, (await client.models.list()).data[0].id)


@pytest.mark.parametrize("step", sampled(list(STEPS["anthropic"]), 3, seed=1))
async def test_anthropic(base, step):
    """Each method works as the vendor documents it."""
    async with AsyncAnthropic(api_key="any", base_url=base, max_retries=0) as client:
        await STEPS["anthropic"][step](client, (await client.models.list()).data[0].id)


def dummies(method):
    """Return arguments for a method's required parameters."""
    found = {}
    for name, parameter in inspect.signature(method).parameters.items():
        is_taken = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is not parameter.empty or is_taken:
            continue
        said = str(parameter.annotation)
        if "FileTypes" in said:
            found[name] = ("a.txt", b"a")
        elif "Iterable" in said or "List" in said or "SequenceNotStr" in said:
            found[name] = []
        elif said.startswith("'int") or said == "int":
            found[name] = 1
        else:
            found[name] = "id-1"
    return found


async def call_method(method):
    """Call a method as its signature demands; await or enter the result where needed."""
    result = method(**dummies(method))
    if hasattr(result, "__aenter__") and not inspect.isawaitable(result):
        async with result as stream:
            return stream
    if inspect.isawaitable(result):
        result = await result
    if hasattr(result, "__aiter__"):
        return [one async for one in result]
    return result


@pytest.mark.parametrize("vendor", ["openai", "anthropic"])
async def test_other_products_are_refused(base, vendor):
    """404 or 405 in the vendor's form, and one line with the alternative."""
    library = openai if vendor == "openai" else anthropic
    errors = (library.NotFoundError, library.APIStatusError)
    path = "/v1" if vendor == "openai" else ""
    options = {"api_key": "any", "base_url": base + path, "max_retries": 0}
    if vendor == "openai":
        options |= {"admin_api_key": "any"}
    client = (AsyncOpenAI if vendor == "openai" else AsyncAnthropic)(**options)
    refused, unsent = {}, []
    async with client:
        for name, method in methods_of(client).items():
            is_local = name.endswith(LOCAL) or any(word in name for word in HELPERS)
            if not name.startswith(ELSEWHERE[vendor]) or is_local:
                continue
            try:
                await call_method(method)
            except errors as error:
                refused[name] = error
            except (LookupError, AttributeError, RuntimeError, TypeError, ValueError):
                unsent.append(name)  # the client itself demands more
            else:
                raise AssertionError(f"{name} was answered")
    assert len(refused) > 150
    assert len(unsent) < 10, unsent
    for name, error in refused.items():
        assert error.status_code in {404, 405}, name
        said = error.body if vendor == "openai" else error.body["error"]
        assert ": " in said["message"], name
        assert "\n" not in said["message"], name
        assert len(said["message"]) < 300, name
