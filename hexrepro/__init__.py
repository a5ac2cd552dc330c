"""hexrepro: a reproduction of HexGen-Flow, which schedules chains of LLM calls on mixed GPU clusters."""

__version__ = "0.1.0"
