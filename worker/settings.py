"""Settings of a worker, from KVALIGN_* environment variables; frozen, and checked before anything starts."""

from pathlib import Path
from typing import Any, Self

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from kvalign.errors import ConfigInvalid
from worker.secret_key import cipher_of

_GIB = 2**30


class WorkerSettings(BaseSettings):
    """Everything a worker can be told.

    secret_key            what tokens are encrypted with; several with commas between, the first of which encrypts
    lease_s               seconds of silence after which a job is given to another worker
    sweep_s               seconds between two looks for lost jobs
    max_attempts          how many workers one job may lose before it fails
    job_time_limit_s      the longest an attempt may take
    child_memory_bytes    the most a converting process may hold; 0 = three quarters of the machine's memory
    child_file_bytes      the largest single file it may write
    child_stall_s         how long it may neither compute nor say anything; then its job is given to another attempt
    alive_per_tenant      jobs one account may have queued and running together
    running_per_tenant    jobs of one account that may run at once
    failed_kept_s         how long a failed job's files stay for a retry to go on with
    jobs_kept_days        how long ended jobs, with reports and events, and audit entries are kept; 0 = for ever
    task_events           whether workers tell Celery's monitors, such as Flower, of messages; those hold job ids alone
    """

    model_config = SettingsConfigDict(env_prefix="KVALIGN_", frozen=True, extra="ignore")

    data_dir: Path = Path("~/.local/share/kvalign")
    database_url: str = Field(default="", repr=False)  # it may hold a password, and so may the next
    redis_url: str = Field(default="redis://127.0.0.1:6379/0", repr=False)
    secret_key: SecretStr
    hub_endpoint: str = "https://huggingface.co"

    lease_s: float = Field(default=30.0, ge=1)
    heartbeat_s: float = Field(default=5.0, gt=0)
    sweep_s: float = Field(default=5.0, gt=0)
    max_attempts: int = Field(default=3, ge=1)
    job_time_limit_s: float = Field(default=24 * 3600.0, gt=0)
    child_memory_bytes: int = Field(default=0, ge=0)
    child_file_bytes: int = Field(default=64 * _GIB, ge=1)
    child_stall_s: float = Field(default=300.0, gt=0)
    alive_per_tenant: int = Field(default=20, ge=1)
    running_per_tenant: int = Field(default=2, ge=1)
    failed_kept_s: float = Field(default=24 * 3600.0, ge=0)
    jobs_kept_days: float = Field(default=90.0, ge=0, le=36_500)
    task_events: bool = False

    @classmethod
    def load(cls, **given: Any) -> Self:
        """Read the environment. Raises ConfigInvalid that names each variable, never its value."""
        try:
            return cls(**given)
        except ValidationError as error:
            raise ConfigInvalid(_describe(error), "Correct the environment and start again.") from None

    @field_validator("data_dir")
    @classmethod
    def _absolute(cls, folder: Path) -> Path:
        return folder.expanduser().absolute()

    @field_validator("redis_url")
    @classmethod
    def _redis(cls, url: str) -> str:
        if not url.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("must begin with redis://, rediss:// or unix://")
        return url

    @field_validator("hub_endpoint")
    @classmethod
    def _http(cls, url: str) -> str:
        if not url.startswith(("https://", "http://")):
            raise ValueError("must begin with https:// or http://")
        return url.rstrip("/")

    @field_validator("secret_key")
    @classmethod
    def _fernet(cls, key: SecretStr) -> SecretStr:
        try:
            cipher_of(key.get_secret_value())
        except ValueError:
            raise ValueError(
                "must be 32 bytes in URL-safe base64, as Fernet.generate_key() makes them, or several, by commas"
            ) from None
        return key

    @model_validator(mode="after")
    def _leases_outlive_heartbeats(self) -> Self:
        if self.lease_s < 3 * self.heartbeat_s:
            raise ValueError("KVALIGN_LEASE_S must be at least three times KVALIGN_HEARTBEAT_S")
        return self

    @property
    def database(self) -> str:
        """The database URL; a SQLite file in data_dir unless another one is given."""
        return self.database_url or f"sqlite:///{self.data_dir / 'kvalign.db'}"


def _describe(error: ValidationError) -> str:
    lines = []
    for item in error.errors(include_url=False, include_context=False, include_input=False):
        name = "".join(f"KVALIGN_{str(part).upper()}: " for part in item["loc"][:1])
        message = item["msg"].removeprefix("Value error, ")
        lines.append(name + ("is not set" if item["type"] == "missing" else message))
    return "; ".join(lines) + "."
