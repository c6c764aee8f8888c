"""The same as serve.yaml, in Python: for those who put it together with deployments of their own.

serve run app:app
"""

from inference_svc.ray_serve.app import server

SERVICES = [
    {
        "socket": "unix:/run/inference-svc-demo/inference.sock",
        "http": "unix:/run/inference-svc-demo/openai.sock",
    }
]

app = server.options(
    num_replicas=3, ray_actor_options={"num_cpus": 0, "resources": {"inference_svc": 1}}
).bind(SERVICES)
