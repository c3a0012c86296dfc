"""Traces by OpenTelemetry, of API and worker alike: nothing unless OTEL_EXPORTER_OTLP_ENDPOINT is set.

The row carries a request's traceparent to each attempt, since messages carry ids alone. Spans name jobs and stages,
never a token, a tenant or a message of an error.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvalign.errors import ConfigInvalid
from worker.jobs import Job, Stage

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_TRACEPARENT = "traceparent"

_w3c = TraceContextTextMapPropagator()


def configure_tracing(role: str) -> None:
    """Send this process's spans, and those of its forks, to where the OTEL_* variables say; else do nothing.

    role  "api" or "worker", for the service's name
    Raises ConfigInvalid when that is asked for and the SDK is not installed.
    """
    if not any(os.environ.get(name) for name in _ENDPOINTS) or os.environ.get("OTEL_SDK_DISABLED") == "true":
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ConfigInvalid(
            "OTEL_EXPORTER_OTLP_ENDPOINT is set, and OpenTelemetry's SDK is not installed.",
            "Run pip install 'kvalign[otel]', or unset the variable.",
        ) from None
    named = os.environ.get("OTEL_SERVICE_NAME") or f"kvalign-{role}"
    resource = Resource.create({"service.name": named, "service.version": version("kvalign")})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)


def current_traceparent() -> str:
    """Where the request at hand stands in its trace; empty when it is in none."""
    carrier: dict[str, str] = {}
    _w3c.inject(carrier)
    return carrier.get(_TRACEPARENT, "")


@contextmanager
def attempt_span(job: Job) -> Iterator[None]:
    """One attempt, as a part of the trace of the request that queued its job; handed over at its end."""
    try:
        parent = _w3c.extract({_TRACEPARENT: job.origin.traceparent})
        with _tracer().start_as_current_span(
            "job attempt",
            parent,
            SpanKind.CONSUMER,
            {"kvalign.job_id": job.id, "kvalign.attempt": job.attempts},
            record_exception=False,
            set_status_on_exception=False,
        ):
            yield
    finally:
        hand_over()


@contextmanager
def stage_span(stage: Stage) -> Iterator[None]:
    """A stage that this process does itself."""
    with _tracer().start_as_current_span(
        f"stage {stage}", record_exception=False, set_status_on_exception=False
    ) as span:
        try:
            yield
        except BaseException as error:
            _mark(span, type(error).__name__)
            raise


def stage_happened(stage: Stage, seconds: float) -> None:
    """A stage that the converting child has just finished."""
    ended_ns = time.time_ns()
    span = _tracer().start_span(f"stage {stage}", start_time=ended_ns - int(seconds * 1e9))
    span.end(ended_ns)


def mark_failed(kind: str) -> None:
    """The attempt at hand has ended with an error of this kind."""
    _mark(trace.get_current_span(), kind)


def _mark(span: Span, kind: str) -> None:
    span.set_attribute("error.type", kind)
    span.set_status(StatusCode.ERROR)


def _tracer() -> trace.Tracer:
    return trace.get_tracer("kvalign")


def hand_over() -> None:
    """Send what waits now, for a process that ends without a last word."""
    flush = getattr(trace.get_tracer_provider(), "force_flush", None)
    if flush is not None:
        flush()
