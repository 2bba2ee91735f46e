"""Checks of what users give a press."""


def require_type(name: str, value: object, kind: type) -> None:
    """Raise `TypeError` unless `value` is of `kind`; a class given for its instance is pointed out."""
    if not isinstance(value, kind):
        hint = f"; write {value.__name__}()" if isinstance(value, type) and issubclass(value, kind) else ""
        raise TypeError(f"`{name}` must be a {kind.__name__}, got {value!r}{hint}")
