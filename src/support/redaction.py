"""What looks like a secret: names and contents of files, values in texts, and words of commands."""

import re
from collections.abc import Sequence
from fnmatch import translate
from pathlib import Path, PurePath

SECRET_FILES = (
    *(
        ".env",
        ".env.*",
        "*.pem",
        "*.key",
        "*.p12",
        "*.pfx",
        ".netrc",
        "_netrc",
        "id_rsa*",
        "id_ed25519*",
        "id_ecdsa*",
        "credentials*",
    ),
    *(
        ".git-credentials",
        ".pypirc",
        ".npmrc",
        "kaggle.json",
        "*.env",
        ".envrc",
        ".htpasswd",
        "service_account*.json",
        "*.keytab",
    ),
    *("key.*", "keys.*", "*[_-]key", "*[_-]key.txt", "*[_-]key.json", "*[_-]keys.json", "*api[_-]key*", "authkey*"),
)
"""Names of files that are likely to contain secrets: their content is never recorded."""
_FILE_WORDS = {"secret", "secrets", "token", "password", "passwords", "passwd", "apikey", "credential", "credentials"}
"""Files with such a word in their name are likely secrets (wandb_token.txt, secrets.yaml), not modules (token.py)."""
_SECRET_MODULES = {"secret.py", "secrets.py", "credentials.py", "password.py", "passwords.py"}
_SECRET_FOLDERS = {".ssh", ".aws", ".gnupg", ".kube", ".docker", "secrets", ".secrets", "credentials"}
_IS_SECRET_FILE = re.compile("|".join(map(translate, SECRET_FILES)))
_PRIVATE_KEY = b"PRIVATE KEY-----"
_ACCESS_TOKEN = re.compile(
    rb"\b(hf_[A-Za-z0-9]{34}|gh[pousr]_\w{36}|github_pat_\w{22,}|glpat-[\w-]{20}|sk-(proj-|ant-)?[\w-]{40,}|AKIA[0-9A-Z]{16}|xox[abp]-[\w-]{20,})"
)
"""Tokens of Hugging Face, GitHub, GitLab, OpenAI, Anthropic, AWS and Slack."""
_SECRET_OPTIONS = {
    "key",
    "apikey",
    "token",
    "secret",
    "secrets",
    "password",
    "passwd",
    "pwd",
    "credential",
    "credentials",
    "auth",
}
"""Words in the names of options whose values are secrets."""
_IN_ADDRESS = re.compile(r"(\w+://)[^/\s@]+@")
_HIDDEN = "***"
SECRET_VALUE = re.compile(
    r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|npm_|wandb_v\d_|AKIA|ASIA|AIza|xox[abprs]-)[\w-]{8,}"
    r"|\beyJ[\w-]{10,}\.eyJ[\w-]{10,}|-----BEGIN [A-Z ]*PRIVATE KEY-----"
    r"|://[^/\s:@]*:[^/\s@$]+@|https?://[^/\s:@$]{8,}@|\bAccountKey=[^\s;$'\"]"
    r"|\bcurl\b[^|;&]*\s(?:-u|--user)[ =]*[^\s:]+:[^\s$'\"]"
    r"|[?&](?:(?:access_)?token|sig|api_?key|X-Amz-Signature)=[^\s&$'\"]"
    r"|(?i:\bauthorization)['\"]?\s*:\s*['\"]?\w+\s+[^\s$'\"]"
)
"""Values that are likely to be secrets, also within an address or a command."""


def looks_secret(name: str) -> bool:
    """Whether a file with this name is likely to contain secrets."""
    lower = name.lower()
    if _IS_SECRET_FILE.match(lower) and not lower.endswith(".py"):
        return True
    if lower.endswith((".py", ".sh")):
        return lower in _SECRET_MODULES
    return not _FILE_WORDS.isdisjoint(re.split(r"[^a-z0-9]+", lower))


def has_secret_name(name: str) -> bool:
    """Whether the name of a file, or of a folder that it is in, is likely to be of secrets."""
    *folders, last = PurePath(name.lower()).parts
    return looks_secret(last) or not (_SECRET_FOLDERS.isdisjoint(folders) or last.endswith((".py", ".sh")))


def secret_in(path: Path, content: bytes) -> str:
    """What secret the content of a file has; "" if it has none."""
    has_key = path.suffix != ".py" and _PRIVATE_KEY in content
    token = "it contains an access token" if _ACCESS_TOKEN.search(content) else ""
    return "it contains a private key" if has_key else token


def hide_password(address: str) -> str:
    """`address` without its user and password, even if it is malformed."""
    return re.sub(r"(\w+://)?\S*@", rf"\1{_HIDDEN}@", address)


def redact(command: Sequence[str]) -> list[str]:
    """`command` with secrets hidden: `--api_key x`, `--api_key=x`, `WANDB_API_KEY=x`, `https://user:x@host`."""
    shown_words: list[str] = []
    hide_next = False
    for word in command:
        name, equals, _ = word.partition("=")
        if hide_next and not word.startswith("--"):
            shown_words.append(_HIDDEN)
        elif equals and _is_secret(name):
            shown_words.append(f"{name}={_HIDDEN}")
        else:
            shown_word = _IN_ADDRESS.sub(rf"\1{_HIDDEN}@", word)
            shown_words.append(_HIDDEN if SECRET_VALUE.search(shown_word) else shown_word)
        hide_next = word.startswith("-") and not equals and _is_secret(word)
    return shown_words


def _is_secret(name: str) -> bool:
    words = re.split(r"[^a-z0-9]+", name.lower())
    return any(word in _SECRET_OPTIONS for word in words)
