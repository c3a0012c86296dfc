"""One attempt at a job, stage by stage, to a recorded end. Must not know Celery, nor how a lease is kept.

    preflight --> pull --> calibrate, align, fit, validate, report --> publish
                           (the converting child)

A stage leaves its output in the workspace under a hash of its inputs, so another attempt goes on after the last
finished one. The owner's token stays in this process; the child that reads the model's files never sees it.
"""

import errno
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvalign.config import BUILTIN_DATASET, ConversionConfig, is_local_dataset
from kvalign.errors import Canceled, DatasetInvalid, DiskFull, KvalignError, QualityGate, TimeLimit
from worker.artifact_files import files_to_publish, report_files
from worker.database import AWAY, insist
from worker.hub import Hub, Published, SourceInfo
from worker.jobs import JobError, JobResult, Progress, Stage
from worker.journal import Journal
from worker.leases import Lease, LeaseLost
from worker.logs import bound
from worker.messages import ChildSpec, ProgressMessage, StageDoneMessage, Summary
from worker.preflight import preflight
from worker.process import Confinement, machine_memory_bytes
from worker.runner import Listener, Runner, Stalled
from worker.settings import WorkerSettings
from worker.tracing import mark_failed, stage_happened, stage_span
from worker.watch import Watch, WorkerStopping
from worker.workspace import Workspace, Workspaces, stage_key

CHILD_STAGES = (Stage.CALIBRATE, Stage.ALIGN, Stage.FIT, Stage.VALIDATE, Stage.REPORT)
MEMORY_SHARE = 0.75  # of the machine, for all converting children together

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tools:
    """What attempts work with, alike for all jobs of a worker.

    hub           the Hub as the owner of a token sees it
    memory_bytes  what a converting child may hold
    """

    hub: Callable[[str], Hub]
    runner: Runner
    workspaces: Workspaces
    memory_bytes: int

    @classmethod
    def of(cls, settings: WorkerSettings, concurrency: int) -> "Tools":
        """Jobs that run at once share the machine's memory and cores evenly."""
        workspaces = Workspaces(settings.data_dir)
        confinement = Confinement(
            memory_bytes=settings.child_memory_bytes or int(MEMORY_SHARE * machine_memory_bytes() / concurrency),
            file_bytes=settings.child_file_bytes,
            threads=max(1, (os.cpu_count() or 1) // concurrency),
            stall_s=settings.child_stall_s,
        )
        runner = Runner([sys.executable, "-P", "-m", "worker.child"], confinement, workspaces.cache)
        return cls(partial(Hub, settings.hub_endpoint), runner, workspaces, confinement.memory_bytes)


def run_attempt(lease: Lease, watch: Watch, tools: Tools) -> None:
    """Run a claimed job to its end and record it, whatever happens.

    When the lease is lost, or is to be given up, nothing is recorded: the sweeper counts the loss once it has run out.
    """
    try:
        with tools.workspaces.open(lease.job.id, watch.check, patience_s=lease.lease_s) as workspace:
            attempt = _Attempt(lease, watch, tools, workspace)
            ending = attempt.run()
            _record(lease, ending)
            attempt.clean_up(ending)
    except (LeaseLost, Stalled) as lost:
        _log.warning("job %s is given up, for another attempt to go on with: %s", lease.job.id, lost)
    except AWAY as error:
        _log.warning("job %s has an end that the database did not take: %s", lease.job.id, error.orig)
    except KvalignError as reason:  # to stop waiting for the workspace, or there can be none
        _record(lease, reason)


def _record(lease: Lease, ending: JobResult | KvalignError) -> None:
    if isinstance(ending, JobResult):
        insist(lambda: lease.succeed(ending), lease.lease_s)
    elif isinstance(ending, Canceled):
        insist(lease.cancel, lease.lease_s)
    elif isinstance(ending, WorkerStopping):
        insist(lease.hand_back, lease.lease_s)
    else:
        insist(lambda: lease.fail(JobError.of(ending)), lease.lease_s)
    if isinstance(ending, JobResult):
        _log.info("attempt succeeded")
    else:
        mark_failed(type(ending).__name__)
        _log.info("attempt ends with %s: %s", type(ending).__name__, ending)


class _Attempt:
    """The stages of one attempt, and what they share."""

    def __init__(self, lease: Lease, watch: Watch, tools: Tools, workspace: Workspace) -> None:
        self._lease = lease
        self._job = lease.job
        self._config = lease.job.config
        self._watch = watch
        self._tools = tools
        self._workspace = workspace
        self._journal = Journal(lease)

    def run(self) -> JobResult | KvalignError:
        """The result, or why there is none. Raises LeaseLost and Stalled alone."""
        try:
            return self._stages()
        except LeaseLost:
            raise
        except AWAY as error:  # it was waited for as long as the lease: whoever holds it next knows how the job stands
            raise LeaseLost("The database did not answer until the lease ran out.") from error
        except Stalled as stalled:
            self._journal.log(stalled.message)
            raise
        except KvalignError as error:
            return error
        except Exception as error:  # the edge of an attempt: whatever it was, the job must end
            return _explained(error)
        finally:
            self._journal.flush()

    def clean_up(self, ending: JobResult | KvalignError) -> None:
        """Keep for another attempt what it can go on with, and no more."""
        if isinstance(ending, JobResult | Canceled):
            self._workspace.remove()
        elif not isinstance(ending, WorkerStopping):
            self._workspace.release()

    def _stages(self) -> JobResult:
        source = self._preflight()
        inputs = self._pull(source)
        artifact, summary = self._convert(source, inputs)
        self._keep_report(artifact)
        published = self._publish(source, inputs.model, artifact)
        return JobResult(published.repo, published.commit, published.url, summary.ratio, summary.kl_mean, summary.top1)

    def _preflight(self) -> SourceInfo:
        with self._stage(Stage.PREFLIGHT):
            hub, begun = self._hub(), self._target_begun()
            checked = self._watch.during(
                lambda: preflight(
                    hub,
                    self._pinned(),
                    self._tools.workspaces.free_bytes(self._job.id),
                    self._tools.memory_bytes,
                    job_id=self._job.id,
                    target_created=begun,
                )
            )
            source, estimate = checked.passed()
            self._workspace.reserve(estimate.disk_bytes)
            return source

    def _pull(self, source: SourceInfo) -> "_Inputs":
        """Fetch the model and the texts that it is fitted to and judged on."""
        datasets = (self._config.calibration.dataset, self._config.validation.dataset)
        key = stage_key(source.repo, source.commit, datasets)
        folder = self._workspace.folder("pull", key)
        if (noted := self._workspace.finished("pull", key)) is not None:
            self._journal.stage_kept(Stage.PULL)
            return _Inputs.of(folder, noted)
        with self._stage(Stage.PULL):
            hub = self._hub()
            inputs = _Inputs(
                model=self._fetched_model(hub, source, folder / "model"),
                calibration=self._fetched_text(hub, datasets[0], folder / "calibration"),
                validation=self._fetched_text(hub, datasets[1], folder / "validation"),
            )
            self._workspace.finish("pull", key, inputs.note(folder))
        return inputs

    def _convert(self, source: SourceInfo, inputs: "_Inputs") -> tuple[Path, Summary]:
        """Let the child do the stages that read the model's files."""
        settings = self._config.model_dump(mode="json", include={"codec", "calibration", "validation"})
        key = stage_key(source.repo, source.commit, settings)
        folder = self._workspace.folder("convert", key)
        artifact = folder / "artifact"
        if (noted := self._workspace.finished("convert", key)) is not None:
            for stage in CHILD_STAGES:
                self._journal.stage_kept(stage)
            return artifact, Summary.model_validate(noted)
        try:
            summary = self._tools.runner.run(
                self._spec(source, inputs, folder), self._home(), self._watch.check, self._listener()
            )
        except QualityGate:
            self._keep_report(artifact)
            raise
        self._workspace.finish("convert", key, summary.model_dump())
        return artifact, summary

    def _publish(self, source: SourceInfo, model: Path, artifact: Path) -> Published:
        """Put it on the Hub, once: what an earlier attempt published already is found there."""
        files = files_to_publish(self._config.target.layout, model, artifact)
        hub, begun = self._hub(), self._target_begun()
        with self._stage(Stage.PUBLISH):
            try:
                return self._watch.during(
                    lambda: hub.publish(
                        self._config.target,
                        source,
                        files,
                        job_id=self._job.id,
                        message=f"Convert {source.repo} with kvalign",
                        on_bytes=self._on_bytes(Stage.PUBLISH),
                        before_create=lambda: insist(self._lease.begin_target, self._lease.lease_s),
                        before_commit=self._watch.confirm,
                        created=begun,
                    )
                )
            except (Canceled, TimeLimit):
                if published := self._settled():
                    return published
                raise

    def _settled(self) -> Published | None:
        """After a publish() that may still hang: nothing of it stays on the Hub, or it has happened and counts."""
        hub, begun = self._hub(), self._target_begun()
        return self._watch.after_all(lambda: hub.settle(self._config.target, job_id=self._job.id, created=begun))

    @contextmanager
    def _stage(self, stage: Stage) -> Iterator[None]:
        """Tell of a stage, and time it; one that raises has not finished."""
        with bound(stage=stage.value), stage_span(stage):
            self._journal.stage_started(stage)
            began_at = time.monotonic()
            yield
            self._journal.stage_finished(stage, time.monotonic() - began_at)

    def _hub(self) -> Hub:
        return self._tools.hub(insist(self._lease.token, self._lease.lease_s))

    def _target_begun(self) -> bool:
        return insist(self._lease.target_begun, self._lease.lease_s)

    def _pinned(self) -> ConversionConfig:
        """The settings with the commit that the source's revision named when the job was submitted."""
        if not self._job.source_commit:
            return self._config
        source = self._config.source.model_copy(update={"revision": self._job.source_commit})
        return self._config.model_copy(update={"source": source})

    def _fetched_model(self, hub: Hub, source: SourceInfo, folder: Path) -> Path:
        folder.mkdir(exist_ok=True)
        self._watch.during(lambda: hub.download(source, folder, self._on_bytes(Stage.PULL)))
        return folder

    def _fetched_text(self, hub: Hub, dataset: str, folder: Path) -> Path | None:
        """A dataset's text file; None for the builtin text. A path of this machine is nobody's to name."""
        if dataset == BUILTIN_DATASET:
            return None
        if is_local_dataset(dataset):
            raise DatasetInvalid(f"'{dataset[:200]}' is not a dataset of the Hub.", "Name one as owner/name.")
        folder.mkdir(exist_ok=True)
        on_bytes = self._on_bytes(Stage.PULL)
        return self._watch.during(lambda: hub.download_dataset(dataset, "main", folder, on_bytes))

    def _on_bytes(self, stage: Stage) -> Callable[[int, int], None]:
        def note(done: int, total: int) -> None:
            self._watch.recall()
            self._journal.progress(Progress(stage, done, total, "bytes"))

        return note

    def _home(self) -> Path:
        home = self._workspace.root / "home"
        home.mkdir(exist_ok=True)
        return home

    def _spec(self, source: SourceInfo, inputs: "_Inputs", folder: Path) -> ChildSpec:
        return ChildSpec(
            parent_pid=os.getpid(),
            source_dir=str(inputs.model),
            out_dir=str(folder / "artifact"),
            work_dir=str(folder / "work"),
            config=self._config.model_dump(mode="json", exclude={"labels", "webhook"}),
            source_commit=source.commit,
            calibration_path=str(inputs.calibration) if inputs.calibration else None,
            validation_path=str(inputs.validation) if inputs.validation else None,
        )

    def _listener(self) -> Listener:
        """Writes down what the child says. A stage begins with its first progress."""
        current: Stage | None = None

        def hear(message: ProgressMessage | StageDoneMessage) -> None:
            nonlocal current
            if message.stage != current:
                current = message.stage
                self._journal.stage_started(current)
            if isinstance(message, StageDoneMessage):
                self._journal.stage_finished(message.stage, message.seconds)
                stage_happened(message.stage, message.seconds)
            else:
                self._journal.progress(Progress(message.stage, message.done, message.total, message.unit))

        return Listener(on_message=hear, on_log=self._journal.log)

    def _keep_report(self, artifact: Path) -> None:
        """Store the report beyond the workspace, whether it says that the codec is good or not."""
        for name, path in report_files(artifact).items():
            content = path.read_bytes()
            insist(partial(self._lease.save_report_file, name, content), self._lease.lease_s)


@dataclass(frozen=True)
class _Inputs:
    """What was pulled. None as a text stands for the builtin one."""

    model: Path
    calibration: Path | None
    validation: Path | None

    def note(self, folder: Path) -> dict[str, str | None]:
        return {
            name: str(path.relative_to(folder)) if path else None
            for name, path in (("calibration", self.calibration), ("validation", self.validation))
        }

    @classmethod
    def of(cls, folder: Path, noted: Mapping[str, str | None]) -> "_Inputs":
        calibration, validation = noted["calibration"], noted["validation"]
        return cls(
            folder / "model",
            folder / calibration if calibration else None,
            folder / validation if validation else None,
        )


def _explained(error: Exception) -> KvalignError:
    """An error of ours for one that nobody foresaw; its details are for the operator's log alone."""
    if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return DiskFull("The worker's disk is full.", "Retry when other jobs have ended; finished stages are kept.")
    _log.exception("an attempt failed unexpectedly")
    return KvalignError(f"The worker failed with {type(error).__name__}.", "Retry the job.")
