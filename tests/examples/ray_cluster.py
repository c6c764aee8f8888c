"""Two pairs behind Ray Serve: a cluster on this machine only, with examples/ray's config."""

import asyncio
import contextlib
import os
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import ray
import yaml
from aiohttp import ClientSession
from openai import AsyncOpenAI
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from inference_svc.client import InferenceClient
from shared.routing.hash_ring import HashRing
from tests.examples.balanced_pairs import free_ports
from tests.examples.pairs import Pair
from tests.examples.talks import Talk
from tests.kvd_polling import eventually

CONFIG = Path(__file__).parents[2] / "examples" / "ray" / "serve.yaml"
NUM_PAIRS = 2
STARTS = 2  # on a busy machine Ray may give its own parts too little time
ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "inference_svc.ray_serve.proxies.http_middlewares",
}
SETTINGS = """
[openai]
listen = "unix:{place}/openai.sock"
temperature = 0
"""
NO_KEY = "nobody asks for it"  # at a Unix socket


class RayCluster:
    """The pairs, the cluster before them, and its clients.

    Args:

    model_dir: of the model that all serve.

    directory: short, for the socket paths.

    num_pairs: how many there are.

    store: directory of an object store that all pairs have; None: they share nothing.
    """

    def __init__(
        self,
        model_dir: Path,
        directory: Path,
        num_pairs: int = NUM_PAIRS,
        store: Path | None = None,
    ) -> None:
        self.http, self.grpc = free_ports(2)
        self.pairs: dict[str, Pair] = {}
        for number in range(1, num_pairs + 1):
            place = directory / f"pair{number}"
            place.mkdir()
            settings = place / "inference-svc.toml"
            settings.write_text(SETTINGS.format(place=place))
            flags = ["--config", str(settings)]
            self.pairs[place.name] = Pair(place.name, model_dir, place, flags, store)
        self.directory = directory
        self._ray_directory = Path(tempfile.mkdtemp(prefix="ray-"))
        self.config = self._here(yaml.safe_load(CONFIG.read_text(encoding="utf-8")))
        self._environ_before: dict[str, str | None] = {}
        self._nodes: Cluster | None = None

    def _here(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the shipped file with this test's ports and sockets, and one server."""
        config["http_options"] |= {"host": "127.0.0.1", "port": self.http}
        config["grpc_options"] |= {"port": self.grpc}
        (application,) = config["applications"]
        (deployment,) = application["deployments"]
        (service,) = application["args"]["services"]
        assert service.keys() == {"socket", "http"}
        application["args"]["services"] = [self.service_of(name) for name in self.pairs]
        deployment["num_replicas"] = len(self.pairs)
        return config

    def service_of(self, name: str) -> dict[str, str]:
        """Return the config's name of a pair's service."""
        place = self.directory / name
        return {"socket": f"unix:{place}/inference.sock", "http": f"unix:{place}/openai.sock"}

    async def start(self) -> None:
        """Start all; return when Ray sends turns to each pair."""
        await asyncio.gather(*(pair.start() for pair in self.pairs.values()))
        self._environ_before = {name: os.environ.get(name) for name in ENVIRONMENT}
        os.environ.update(ENVIRONMENT)
        for attempt in range(1, STARTS + 1):
            try:
                self._start_ray()
                break
            except Exception:
                self._stop_ray()
                if attempt == STARTS:
                    raise
        options = {name: self.config[name] for name in ("http_options", "grpc_options")}
        serve.start(proxy_location=self.config["proxy_location"], **options)
        await self.deploy(self.config)

    def _start_ray(self) -> None:
        """Start two nodes, both on this machine; the first has room for one replica."""
        self._nodes = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 1,
                "resources": {"inference_svc": 1},
                "include_dashboard": False,
                "temp_dir": str(self._ray_directory),
            },
        )
        self._nodes.add_node(num_cpus=1, resources={"inference_svc": 2 * len(self.pairs) - 1})
        ray.init(address=self._nodes.address, log_to_driver=False)

    async def deploy(self, config: dict[str, Any]) -> None:
        """Run `serve deploy` with a config; raise RuntimeError if it fails."""
        client = _get_global_client()
        schema = ServeDeploySchema(**config)
        await asyncio.to_thread(partial(client.deploy_apps, schema, _blocking=True))

    async def stop(self) -> None:
        """Stop all."""
        self._stop_ray()
        for name, value in self._environ_before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        await asyncio.gather(*(pair.stop() for pair in self.pairs.values()))
        shutil.rmtree(self._ray_directory, ignore_errors=True)

    def _stop_ray(self) -> None:
        with contextlib.suppress(Exception):  # there may be nothing to stop
            serve.shutdown()
        ray.shutdown()
        if self._nodes is not None:
            self._nodes.shutdown()
            self._nodes = None

    async def mend(self) -> None:
        """Restart what has ended; return when Ray sends turns to each pair."""
        ended = [pair for pair in self.pairs.values() if not pair.is_running]
        await asyncio.gather(*(pair.start_service() for pair in ended))
        for pair in ended:
            await self.until_taking(pair.name)

    async def take_out(self, name: str) -> None:
        """Stop a service; its kvd stays."""
        self.pairs[name].terminate()
        assert await self.pairs[name].ended() == 0

    async def bring_back(self, name: str) -> None:
        """Restart a service; return when it gets turns."""
        await self.pairs[name].start_service()
        await self.until_taking(name)

    async def until_taking(self, name: str) -> None:
        """Return when a pair gets turns; each try is of a new session."""
        tries = 0

        async def answered() -> str:
            nonlocal tries
            tries += 1
            talk = Talk(self.session_of(name, f"mended-{name}-{id(talks)}-{tries}"))
            talks.append(talk)
            before = await self._finished()
            async with self.openai() as client:
                await talk.say(client, 1)
            after = await self._finished()
            return next(pair for pair in after if after[pair] != before[pair])

        talks: list[Talk] = []
        await eventually(answered, wanted=name)

    async def _finished(self) -> dict[str, int]:
        """Return each running pair's number of answered turns; all know a shared session."""
        running = [pair for pair in self.pairs.values() if pair.is_running]
        return {pair.name: await pair.counter("turns_finished") for pair in running}

    def session_of(self, pair: str, beginning: str) -> str:
        """Return a name that belongs to a pair on the hash ring."""
        names = {name: f"{os.uname().nodename}:{self._socket(name)}" for name in self.pairs}
        ring = HashRing(names.values())
        tried = (f"{beginning}-{number}" for number in range(1000))
        return next(name for name in tried if next(ring.owners(name)) == names[pair])

    def _socket(self, name: str) -> str:
        return self.service_of(name)["socket"].removeprefix("unix:")

    # -------------------------------------------------------------------------- the clients' side

    def openai(self) -> AsyncOpenAI:
        """Return the official client, without retries."""
        url = f"http://127.0.0.1:{self.http}/v1"
        return AsyncOpenAI(api_key=NO_KEY, base_url=url, max_retries=0)

    def plain_http(self) -> ClientSession:
        """Return a client of paths and bytes."""
        return ClientSession(f"http://127.0.0.1:{self.http}")

    def grpc_client(self) -> InferenceClient:
        """Return our client of gRPC."""
        return InferenceClient(f"127.0.0.1:{self.grpc}")
