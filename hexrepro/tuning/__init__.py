"""The search for alpha: offline over whole traces, and online by replaying what has just happened."""
