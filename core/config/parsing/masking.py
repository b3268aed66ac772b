"""Secrets in what is shown, written to logs or uploaded: *** takes their place."""

from __future__ import annotations

import re

MASK = "***"
_SECRET = re.compile("KEY|TOKEN|SECRET|PASS|AUTH|CRED", re.IGNORECASE)
"""In the name of an environment variable: its value is not shown."""
_SECRET_KEY = re.compile("(key|token|secret|pass|password|passwd|auth|cred|credentials?)$")
"""At the end of a configuration key in lower case: max_tokens_per_mb is no secret."""
_COLUMN_KEY = re.compile(
    "(prompt|query|question|problem|instruction|input|system|messages?|conversations?|response|answer|output|target|"
    "solution|label|truth|chosen|rejected|choices|images?|videos?|tools?|text|data|source|task|id|reward|reward_fn)_key$"
)
"""Other systems name the columns of a data set by such keys."""
_USER_OF_URL = re.compile(r"(?P<scheme>\b[A-Za-z][\w+.-]*://)[^/@\s'\"]*@")


def is_secret(name: str) -> bool:
    """Return whether the value of the environment variable `name` is masked."""
    return bool(_SECRET.search(name))


def masked_urls(text: str) -> str:
    """Return the text with *** for user and password of the URLs in it."""
    return _USER_OF_URL.sub(rf"\g<scheme>{MASK}@", text)


def masked_override(word: str) -> str:
    """Return an override a.b.c=value, or another word of a command line, without the secrets in it."""
    key, equals, value = word.partition("=")
    name = key.strip().rpartition(".")[2]
    of_envs = key.strip().startswith("external_configs") and is_secret(name if ".envs." in key else value)
    of_key = _SECRET_KEY.search(name) and not _COLUMN_KEY.search(name)
    if equals and (of_envs or of_key or (name.isupper() and is_secret(name))):
        return f"{key}={MASK}"
    return masked_urls(word)
