"""Language models: the protocol, the messages, and the adapters."""
