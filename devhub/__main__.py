"""`python -m devhub` is `kvalign devhub`, without anything of kvalign."""

from devhub.cli import devhub

devhub()
