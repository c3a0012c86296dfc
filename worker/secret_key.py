"""The keys that stored tokens are encrypted with. Knows neither where they come from nor what they protect."""

from cryptography.fernet import Fernet, MultiFernet


def cipher_of(secret_key: str) -> MultiFernet:
    """One Fernet key, or several with commas between: the first encrypts, all of them decrypt. Raises ValueError.

    So a key is changed without losing what the old one encrypted; docs/operations.md has the steps.
    """
    return MultiFernet([Fernet(key.strip()) for key in secret_key.split(",")])
