"""The system's keyring (Keychain, Credential Locker, Secret Service), through the optional package `keyring`."""

from __future__ import annotations

from openrl.errors import SettingsError

SERVICE = "openrl"


def usable() -> str | None:
    """The name of the system's keyring, or None if there is none that keeps keys encrypted."""
    try:
        import keyring
    except ImportError:
        return None
    backend = keyring.get_keyring()
    return None if backend.priority < 1 else backend.name


def get(name: str) -> str | None:
    """The key of a remote, None if the keyring has none. Raises SettingsError."""
    try:
        import keyring
        import keyring.errors
    except ImportError:
        raise SettingsError(
            "the key is in the system keyring, but the package `keyring` is not installed.",
            'Install it with: pip install "openrl[remote]"',
        ) from None
    try:
        return keyring.get_password(SERVICE, name)
    except keyring.errors.KeyringError as error:
        raise SettingsError(f"the system keyring cannot be read: {error}.", "Unlock it and try again.") from error


def put(name: str, key: str) -> None:
    """Store a key. Raises SettingsError."""
    import keyring
    import keyring.errors

    try:
        keyring.set_password(SERVICE, name, key)
    except keyring.errors.KeyringError as error:
        raise SettingsError(f"the system keyring does not take the key: {error}.") from error


def forget(name: str) -> None:
    """Remove a key, if it is there and can be."""
    try:
        import keyring
        import keyring.errors
    except ImportError:
        return
    try:
        keyring.delete_password(SERVICE, name)
    except keyring.errors.KeyringError:
        return
