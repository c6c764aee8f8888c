"""Builds the service around an engine, and applies changed settings; nothing runs yet."""

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

from inference_svc.assembly import EngineParts, Model, assemble_engine
from inference_svc.config import InferenceSettings
from inference_svc.core.edits import edit_policy
from inference_svc.core.errors import UnsupportedModelError
from inference_svc.core.rates.rates import DRAM, LoadChooser, LoadPolicy
from inference_svc.core.session_turns import SessionTurns
from inference_svc.core.submission import ModelTraits
from inference_svc.core.template_arguments import Arguments
from inference_svc.core.tenant_limits import TenantLimits
from inference_svc.runtime.compute.grammars import Grammars
from inference_svc.runtime.turns.chat_text import TurnText
from inference_svc.runtime.turns.embeddings import Embedder
from inference_svc.runtime.turns.kept_edits import EditKeeper
from inference_svc.runtime.turns.misses import MissExplainer
from inference_svc.runtime.turns.transcript import TranscriptStore
from inference_svc.runtime.turns.turn import Turn
from inference_svc.runtime.turns.turn_prompt import PromptMaker, TurnLimits
from inference_svc.runtime.turns.turn_report import TurnReport
from inference_svc.runtime.turns.turn_runner import TurnRunner
from inference_svc.runtime.turns.turns import Turns
from inference_svc.runtime.worker_thread import WorkerThread
from inference_svc.service.gateway import Gateway
from inference_svc.service.submissions import turn_defaults
from shared.access.clients import StreamCounts
from shared.config.reload import LiveSettings
from shared.config.settings import warn_of_overridden
from shared.pb.inference.v1 import inference_pb2
from shared.process.log import configure_logging
from shared.types.load_choice import IDLE
from shared.version import __version__


@dataclass(frozen=True)
class ServiceParts:
    """The parts of a service, which the server runs."""

    engine_parts: EngineParts
    limits: TenantLimits
    transcripts: TranscriptStore
    turns: Turns
    gateway: Gateway
    embedder: Embedder
    text_thread: WorkerThread
    grammars: Grammars
    edits: EditKeeper

    def follow(self, live: LiveSettings[InferenceSettings]) -> None:
        """Check and apply the settings that each reload changes (`config.LIVE_KEYS`)."""
        live.checks.append(self._check)
        live.on_change.append(self._apply)
        live.on_change.append(lambda _: warn_of_overridden(live.loaded))

    def _check(self, settings: InferenceSettings) -> None:
        """Check settings against the model.

        Raises:
            UnsupportedModelError: the model does not support the compression policy.
        """
        turn_defaults(settings, self.gateway.defaults.model)

    def _apply(self, settings: InferenceSettings) -> None:
        """Apply settings; turns under way keep the values with which they were submitted."""
        configure_logging(settings.log.level, json=settings.log.json_lines)
        gateway, engine_parts = self.gateway, self.engine_parts
        gateway.defaults = turn_defaults(settings, gateway.defaults.model)
        gateway.streams.most = settings.limits.max_streams_per_client
        self.limits.set_bounds(*settings.tenant_bounds(), time.monotonic_ns())
        engine_parts.histograms.name_tenants(settings.tenants)
        engine_parts.engine.scheduler.queue.weights = settings.scheduler.tenant_weights
        engine_parts.loads.policy = LoadPolicy(settings.cache.load_policy)
        self.edits.policy = edit_policy(settings.reuse.edits)

    def close(self) -> None:
        """End the threads, each after the call that it runs."""
        self.engine_parts.close()
        self.text_thread.close()
        self.grammars.close()


@dataclass(frozen=True)
class _TextParts:
    """The parts that make prompts and grammars from text.

    Attributes:
        text: encodes inputs.
        thread: the thread that encodes.
        limits: the limits of every turn.
        prompts: makes the turns' prompts.
        grammars: compiles the grammars of answers.
    """

    text: TurnText
    thread: WorkerThread
    limits: TurnLimits
    prompts: PromptMaker
    grammars: Grammars


def assemble_service(
    settings: InferenceSettings, model: Model, transcripts: TranscriptStore
) -> ServiceParts:
    """Build all parts of the service, and connect them.

    Args:
        settings: the settings in effect.
        model: the model, loaded and calibrated.
        transcripts: the open store of transcripts.

    Raises:
        UnsupportedModelError: the model does not support the settings.
    """
    # First, so that settings are refused before the engine reserves memory.
    defaults = turn_defaults(settings, _traits(model))
    engine_parts = assemble_engine(settings, model)
    texts = _make_text_parts(settings, model, engine_parts.window_tokens)
    text, grammars = texts.text, texts.grammars
    report = TurnReport(engine_parts.histograms)
    misses = MissExplainer(transcripts, text, texts.thread)
    numbers = count(1)
    edits = _make_edit_keeper(settings, model, engine_parts, transcripts, texts, numbers)
    runner = TurnRunner(
        engine=engine_parts.engine,
        transcripts=transcripts,
        prompts=texts.prompts,
        grammars=grammars,
        tokenizer=model.loaded.tokenizer,
        limits=texts.limits,
        counters=engine_parts.counters,
        report=report,
        numbers=numbers,
        misses=misses,
        edits=edits,
    )
    retry_after_s = engine_parts.engine.scheduler.estimates.retry_after_s
    limits = TenantLimits(*settings.tenant_bounds(), turn_s=retry_after_s)
    turns = _make_turns(settings, engine_parts, transcripts, runner.answer, limits, report)
    embedder = _make_embedder(model, engine_parts, texts.prompts, turns, limits, numbers)
    gateway = Gateway(
        turns=turns,
        model=model.loaded.fingerprint,
        describe=_make_describe(settings, model, engine_parts, text),
        defaults=defaults,
        streams=StreamCounts(settings.limits.max_streams_per_client),
        counters=engine_parts.counters,
        report=report,
        prompts=texts.prompts,
        text=text,
        embedder=embedder,
        misses=misses,
        can_bind_calls=lambda: bool(text.tool_format.closings) and not grammars.problem,
    )
    return ServiceParts(
        engine_parts=engine_parts,
        limits=limits,
        transcripts=transcripts,
        turns=turns,
        gateway=gateway,
        embedder=embedder,
        text_thread=texts.thread,
        grammars=grammars,
        edits=edits,
    )


def _traits(model: Model) -> ModelTraits:
    """Return the properties of a model on which the defaults of turns depend."""
    return ModelTraits(
        attention_mode=model.calibration.mode,
        sink_tokens=model.sink_tokens,
        keeps_truncated=model.calibration.positions == "decoupled",
    )


def _make_text_parts(settings: InferenceSettings, model: Model, window_tokens: int) -> _TextParts:
    """Make the parts that encode turns.

    Raises:
        UnsupportedModelError: see `make_turn_text`.
    """
    loaded, overflow = model.loaded, settings.overflow
    text = make_turn_text(loaded.tokenizer, loaded.eos_ids, settings.model.chat_template_kwargs)
    thread = WorkerThread("text")
    limits = TurnLimits(
        window_tokens=window_tokens,
        vocab_size=loaded.vocab_size,
        eos_ids=loaded.eos_ids,
        reserve_tokens=overflow.reserve_tokens,
        compress_tokens=settings.compression.min_tokens,
        mark_tokens=settings.cache.mark_tokens,
        has_states=bool(model.calibration.layout.state_bytes),
    )
    has_tokenizer = loaded.tokenizer is not None
    prompts = PromptMaker(text, thread, limits, has_tokenizer=has_tokenizer)
    grammars = Grammars(loaded.tokenizer, loaded.vocab_size, loaded.eos_ids)
    return _TextParts(text, thread, limits, prompts, grammars)


def _make_edit_keeper(
    settings: InferenceSettings,
    model: Model,
    engine_parts: EngineParts,
    transcripts: TranscriptStore,
    texts: _TextParts,
    numbers: Iterator[int],
) -> EditKeeper:
    """Make the keeper of KV behind edits, which keeps runs whose loading pays."""
    loads, chooser = engine_parts.loads, LoadChooser(engine_parts.rates)
    return EditKeeper(
        graft=engine_parts.engine.graft,
        store=engine_parts.store,
        transcripts=transcripts,
        text_thread=texts.thread,
        numbers=numbers,
        pays=lambda start, end: chooser.should_load(loads.policy, DRAM, start, end, IDLE),
        policy=edit_policy(settings.reuse.edits),
        least_tokens=model.calibration.layout.block_tokens,
    )


def _make_turns(
    settings: InferenceSettings,
    engine_parts: EngineParts,
    transcripts: TranscriptStore,
    answer_turn: Callable[[Turn], Awaitable[None]],
    limits: TenantLimits,
    report: TurnReport,
) -> Turns:
    """Make the registry of turns."""
    return Turns(
        answer_turn=answer_turn,
        transcripts=transcripts,
        engine=engine_parts.engine,
        session_turns=SessionTurns(
            max_turns=settings.scheduler.max_turns,
            max_turns_per_session=settings.scheduler.max_turns_per_session,
            retry_after_s=engine_parts.engine.scheduler.estimates.retry_after_s,
            is_leaving=lambda turn: turn.is_cancelled,
        ),
        limits=limits,
        counters=engine_parts.counters,
        report=report,
    )


def _make_embedder(
    model: Model,
    engine_parts: EngineParts,
    prompts: PromptMaker,
    turns: Turns,
    limits: TenantLimits,
    numbers: Iterator[int],
) -> Embedder:
    """Make the embedder; it says why, if the model makes no embeddings."""
    return Embedder(
        engine=engine_parts.engine,
        prompts=prompts,
        check_limits=turns.check_limits,
        limits=limits,
        counters=engine_parts.counters,
        numbers=numbers,
        window_tokens=engine_parts.window_tokens,
        size=int(model.loaded.model.config.get_text_config().hidden_size),
        pooling=model.pooling,
        problem=model.pooling_problem,
    )


def make_turn_text(tokenizer: Any | None, eos_ids: frozenset[int], usual: Arguments) -> TurnText:
    """Make the encoder of turns, and try the model's chat template out.

    Args:
        tokenizer: the model's tokenizer; None: it has none.
        eos_ids: ids of the tokens that end an answer.
        usual: the operator's arguments of the chat template.

    Raises:
        UnsupportedModelError: the chat template fails with these arguments, but not without them.
    """
    text = TurnText(tokenizer, eos_ids, usual)
    text.try_out()
    if usual and text.chat_problem:
        without = TurnText(tokenizer, eos_ids)
        without.try_out()
        if not without.chat_problem:
            raise UnsupportedModelError(
                "with these model.chat_template_kwargs chats are not possible: "
                f"{text.chat_problem}",
                "correct these arguments, or leave them out",
            )
    return text


def _make_describe(
    settings: InferenceSettings, model: Model, parts: EngineParts, text: TurnText
) -> Callable[[], inference_pb2.Model]:
    """Return a function that describes the model and the engine's state at that moment."""
    loaded, layout, calibration = model.loaded, model.calibration.layout, model.calibration
    start_s = time.monotonic()
    fixed = inference_pb2.Model(
        name=loaded.name,
        fingerprint=loaded.fingerprint,
        architecture=loaded.architecture,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(loaded.device),
        context_window=parts.window_tokens,
        window_bound=parts.window_bound,
        vocab_size=loaded.vocab_size,
        has_chat_template=not text.chat_problem,
        mode=settings.cache.mode,
        attention_mode=calibration.mode,
        positions=calibration.positions,
        kv_bytes_per_token=layout.token_bytes,
        block_tokens=layout.block_tokens,
        num_layers=len(layout.layers),
        version=__version__,
    )

    def gauges() -> Mapping[str, float]:
        return {
            "uptime_s": time.monotonic() - start_s,
            **parts.engine.gauges(),
            **parts.rates.as_dict(),
            **parts.histograms.as_gauges(),
        }

    def describe() -> inference_pb2.Model:
        now = inference_pb2.Model(
            kvd_state=parts.store.state,
            running_turns=parts.engine.scheduler.num_running,
            waiting_turns=len(parts.engine.scheduler.queue),
            counters=parts.counters.snapshot(),
            gauges=gauges(),
        )
        now.MergeFrom(fixed)
        return now

    return describe
