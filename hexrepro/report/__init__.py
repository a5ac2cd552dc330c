"""From times to numbers (`metrics`), from numbers to intervals (`intervals`), to tables and figures."""
