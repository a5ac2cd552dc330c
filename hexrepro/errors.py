"""The one exception that hexrepro raises for a user's mistake."""


class InputError(ValueError):
    """A user's mistake (a file, a config, an argument). The message is one line that says what would be
    right."""
